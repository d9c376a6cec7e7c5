"""The two halves of a link's shared memory, joined without a link: the test carries what they say, the kernel the descriptors."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import logging
import os
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
import torch

from aiorlinf.backends.shm.arena import Arena, Region
from aiorlinf.backends.shm.descriptors import DescriptorListener, DescriptorReader, DescriptorWriter
from aiorlinf.backends.shm.regions import PAGE
from aiorlinf.errors import WireError
from aiorlinf.link import shared, shared_in
from aiorlinf.link.packing import pack
from aiorlinf.link.placement import PLACE, Placement, packed_size
from aiorlinf.link.shared import SharedOut
from aiorlinf.link.shared_in import SharedIn
from aiorlinf.wire.leaves import Leaf, raw_leaf, tensor_leaf
from aiorlinf.work.home import LoopHome
from tests.system import memory_file_at, memory_file_mappings, no_more_descriptors, soon

SEGMENT = 64 * PAGE
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Iterator[None]:
    """Memory must come back without one. What earlier tests have left goes first."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def warned() -> Iterator[list[str]]:
    """Warnings in the log. A test that means to cause some takes them out."""
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Handler(logging.WARNING)
    logger = logging.getLogger("aiorlinf")
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)
    assert found == []


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that is given up or tried again takes long."""
    monkeypatch.setattr(shared_in, "PASS_SECONDS", 0.1)
    monkeypatch.setattr(shared_in, "_LAST_CHANCE_SECONDS", 0.05)
    monkeypatch.setattr(shared, "_FIRST_PAUSE_SECONDS", 0.1)
    monkeypatch.setattr(shared, "_LONGEST_PAUSE_SECONDS", 0.1)


class Message:
    """What was sent, and what became of it."""

    def __init__(self, sizes: list[int], placement: Placement) -> None:
        self.sizes = sizes
        self.placement = placement
        self.place = memoryview(b"")
        self.answers: list[list[torch.Tensor] | None] = []

    @property
    def tensors(self) -> list[torch.Tensor]:
        (answer,) = self.answers
        assert answer is not None
        return answer


class Line:
    """Both halves. `released` counts the frames, `changes` what the sender says of its state."""

    def __init__(self, home: LoopHome) -> None:
        self.home = home
        self.arena = Arena(home, 16 * SEGMENT, SEGMENT)
        self.arena.on_drop = self._dropped
        self.released = 0
        self.changes: list[str | None] = []
        self.readers: list[DescriptorReader] = []
        self.welcome = True
        self.out = SharedOut(self.arena, self._connect, self.changes.append)
        self.incoming = SharedIn(home, self._release)
        self.listener = DescriptorListener(home.loop, "key", self._attach, self.incoming.cut_off)

    def _connect(self) -> DescriptorWriter:
        return DescriptorWriter(self.listener.name, "key", "a:0", 1)

    def _attach(self, address: str, incarnation: int, reader: DescriptorReader) -> bool:
        self.readers.append(reader)
        return self.welcome and self.incoming.attach(reader)

    def _release(self, body: bytes) -> None:
        self.released += 1
        self.out.on_release(memoryview(body))

    def _dropped(self, number: int) -> None:
        for name in self.out.forget(number):
            self.incoming.drop(name)

    def region(self, size: int) -> Region:
        region = self.arena.take(size) or self.arena.make_now(size)
        assert region is not None
        return region

    def lend(self, *payloads: bytes, region: Region | None = None) -> Message | None:
        """As a send does, up to START, in a region of the test's or a fresh one; None if the peer cannot get the segment."""
        leaves = [raw_leaf(memoryview(payload)) for payload in payloads]
        sizes = [len(payload) for payload in payloads]
        used = region or self.region(packed_size(sizes))
        pack(used.segment.address + used.offset, leaves)
        placement = Placement(used, {})
        message = Message(sizes, placement)
        place = self.out.lend(placement)
        if region is None:
            self.arena.release(used)
        message.place = memoryview(place or b"")
        return message if place is not None else None

    def place(self, message: Message) -> None:
        """START arrives."""
        self.incoming.place(message.sizes, message.place, message.answers.append)

    async def send(self, *payloads: bytes) -> Message:
        """A message that arrives."""
        message = self.lend(*payloads)
        assert message is not None
        self.place(message)
        await soon(lambda: bool(message.answers))
        return message

    def close(self) -> None:
        self.listener.close()
        self.incoming.close()
        self.out.close()
        self.arena.close()


@pytest_asyncio.fixture
async def line(home: LoopHome) -> AsyncIterator[Line]:
    """Two halves on the loop of the test."""
    made = Line(home)
    yield made
    made.close()


def contents(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


# ---- the usual


@pytest.mark.asyncio
async def test_leaves_arrive_writable_aligned_and_in_the_senders_memory(line: Line) -> None:
    payloads = [os.urandom(size) for size in (1, 64, 0, 1000, 65, 4096)]
    message = await line.send(*payloads)
    assert [contents(tensor) for tensor in message.tensors] == payloads
    for tensor, payload in zip(message.tensors, payloads, strict=True):
        if payload:
            assert tensor.data_ptr() % 64 == 0
            assert memory_file_at(tensor.data_ptr(), tensor.nbytes)
    message.tensors[3].fill_(7)
    region = message.placement.region
    assert region is not None
    assert bytes(region.segment.view(region.offset + 128, 1000)) == b"\7" * 1000
    assert len(memory_file_mappings()) == 2, "one segment, mapped on both sides"


@pytest.mark.asyncio
async def test_tensors_and_buffers_are_copied_as_they_lie(line: Line) -> None:
    tensor = torch.randn(50, 3, dtype=torch.float64)
    leaf = tensor_leaf(tensor)
    assert leaf is not None
    leaves: list[Leaf] = [leaf, raw_leaf(memoryview(b"read-only bytes"))]
    region = line.region(packed_size([leaf.nbytes for leaf in leaves]))
    pack(region.segment.address + region.offset, leaves)
    view = region.segment.view(region.offset, region.size)
    assert bytes(view[: tensor.nbytes]) == tensor.numpy().tobytes()
    assert bytes(view[1216 : 1216 + 15]) == b"read-only bytes"
    line.arena.release(region)


@pytest.mark.asyncio
async def test_a_region_comes_back_once_when_the_last_view_is_gone(line: Line) -> None:
    message = await line.send(bytes(1000), bytes(2000))
    assert line.out.lent_bytes == line.incoming.held_bytes == packed_size([1000, 2000])
    first, second = message.tensors
    message.answers.clear()
    keep: list[Any] = [
        first[10:20],
        second.numpy()[::2],
        memoryview(second.numpy()),  # type: ignore[arg-type]
        torch.from_numpy(first.numpy()),
    ]
    del first, second
    while keep:
        await asyncio.sleep(0.01)
        assert line.released == 0
        keep.pop()
    await soon(lambda: line.released == 1)
    assert line.out.lent_bytes == line.incoming.held_bytes == line.arena.stats().used_bytes == 0


@pytest.mark.asyncio
async def test_the_last_view_may_go_in_any_thread(line: Line) -> None:
    message = await line.send(bytes(1000))
    kept = [message.tensors[0][5:]]
    message.answers.clear()
    thread = threading.Thread(target=kept.clear)
    thread.start()
    thread.join()
    await soon(lambda: line.released == 1)


@pytest.mark.asyncio
async def test_a_region_that_is_handed_over_is_the_peers_alone(line: Line) -> None:
    messages = []
    for number in range(3):
        region = line.region(PAGE)
        region.segment.view(region.offset, PAGE)[:] = number
        place = line.out.hand_over(region)
        assert place is not None
        messages.append(Message([PAGE], Placement(None, {})))
        messages[-1].place = memoryview(place)
        line.place(messages[-1])
    await soon(lambda: all(message.answers for message in messages))
    assert [contents(message.tensors[0]) for message in messages] == [bytes([number]) * PAGE for number in range(3)]
    assert line.out.lent_bytes == line.arena.stats().used_bytes == 3 * PAGE
    for message in messages:
        message.answers.clear()
    await soon(lambda: line.out.lent_bytes == 0)
    assert line.arena.stats().used_bytes == 0


@pytest.mark.asyncio
async def test_what_cannot_be_handed_over_stays_the_callers(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_FIRST_PAUSE_SECONDS", 0.02)
    line.listener.close()
    region = line.region(PAGE)
    assert line.out.hand_over(region) is None
    assert line.out.hand_over(region) is None, "it rests"
    assert (region.holders, line.out.lent_bytes, line.arena.stats().used_bytes) == (1, 0, PAGE)
    line.listener = DescriptorListener(line.home.loop, "key", line._attach)
    await soon(lambda: line.out.usable)
    assert line.out.hand_over(region) is not None
    assert (len(line.changes), line.changes[-1]) == (2, None)
    segment, offset = region.segment, region.offset
    line.out.close()
    assert line.arena.stats().used_bytes == 0
    later = line.region(PAGE)
    assert (later.segment, later.offset) != (segment, offset), "the peer may still look at that"
    assert line.out.hand_over(later) is None
    assert later.holders == 1


@pytest.mark.asyncio
async def test_what_goes_in_one_turn_is_told_together_and_in_bounded_frames(line: Line) -> None:
    kept = [(await line.send(bytes([number]))).answers for number in range(10)]
    kept.clear()
    await soon(lambda: line.out.lent_bytes == 0)
    assert line.released == 1
    message = line.lend(b"x")
    assert message is not None
    for _ in range(9999):
        assert line.out.lend(message.placement)
    for _ in range(10000):
        line.incoming.refuse(message.place, message.sizes)
    await soon(lambda: line.out.lent_bytes == 0)
    assert line.released == 4


@pytest.mark.asyncio
async def test_messages_before_and_after_their_segment_all_arrive(line: Line) -> None:
    messages = [line.lend(bytes([number]) * 5000) for number in range(40)]
    for message in messages:
        assert message is not None
        line.place(message)
    assert all(message is not None and not message.answers for message in messages), "no descriptor can be here yet"
    await soon(lambda: all(message is not None and message.answers for message in messages))
    for number, message in enumerate(messages):
        assert message is not None
        assert contents(message.tensors[0]) == bytes([number]) * 5000
    again = line.lend(b"now it is here")
    assert again is not None
    line.place(again)
    assert contents(again.tensors[0]) == b"now it is here"


@pytest.mark.asyncio
async def test_tensors_that_were_there_already_keep_their_place(line: Line) -> None:
    mine, packed = line.region(100), line.region(64)
    mine.segment.view(mine.offset, 100)[:] = 5
    packed.segment.view(packed.offset, 64)[:] = 6
    placement = Placement(packed, {1: mine})
    message = Message([64, 100, 0], placement)
    message.place = memoryview(line.out.lend(placement) or b"")
    line.place(message)
    await soon(lambda: bool(message.answers))
    assert [contents(tensor) for tensor in message.tensors] == [b"\6" * 64, b"\5" * 100, b""]
    line.arena.release(packed)
    line.arena.release(mine)
    kept = message.tensors[1]
    message.answers.clear()
    await soon(lambda: line.out.lent_bytes == 100)  # each is given back on its own
    assert placement.lent == 1
    del kept
    await soon(lambda: line.out.lent_bytes == 0)


@pytest.mark.asyncio
async def test_a_region_can_be_lent_again_before_it_is_back(line: Line) -> None:
    region = line.region(100)
    back: list[int] = []
    messages = []
    for number in range(2):
        placement = Placement(None, {0: region})
        placement.back = lambda number=number: back.append(number)
        messages.append(Message([100], placement))
        messages[-1].place = memoryview(line.out.lend(placement) or b"")
        line.place(messages[-1])
    await soon(lambda: all(message.answers for message in messages))
    assert line.out.lent_bytes == 200
    messages[0].answers.clear()
    await soon(lambda: back == [0])
    messages[1].answers.clear()
    await soon(lambda: back == [0, 1])
    line.arena.release(region)
    assert line.arena.stats().used_bytes == 0


@pytest.mark.asyncio
async def test_what_nobody_wants_is_given_back_at_once(line: Line) -> None:
    message = line.lend(bytes(100))
    assert message is not None
    line.incoming.refuse(message.place, message.sizes)
    await soon(lambda: line.out.lent_bytes == 0)
    assert line.incoming.held_bytes == 0


# ---- segments come and go


@pytest.mark.asyncio
async def test_a_dropped_segment_is_let_go_and_its_views_stay(line: Line) -> None:
    message = await line.send(b"contents")
    kept = message.tensors[0][2:]
    message.answers.clear()
    region = message.placement.region
    assert region is not None
    region.abandon()
    assert line.arena.stats().segments == 0
    await soon(lambda: len(memory_file_mappings()) == 1)
    assert contents(kept) == b"ntents"
    del kept, region, message
    await soon(lambda: memory_file_mappings() == [])


@pytest.mark.asyncio
async def test_a_segment_that_is_dropped_before_it_came_is_not_kept(line: Line) -> None:
    message = line.lend(bytes(100))
    assert message is not None
    line.incoming.refuse(message.place, message.sizes)
    line.incoming._releases._flush()  # all in one turn of the loop: the descriptor is still in its socket
    assert line.arena.trim() == SEGMENT
    assert len(line.incoming._dropped) == 1
    await soon(lambda: not line.incoming._dropped)
    await soon(lambda: memory_file_mappings() == [])
    assert contents((await line.send(b"the next one")).tensors[0]) == b"the next one"


@pytest.mark.asyncio
async def test_a_lost_descriptor_sends_its_messages_elsewhere_and_comes_again(line: Line, quick: None, warned: list[str]) -> None:
    await line.send(b"the connection is there")
    region = line.region(2 * SEGMENT)
    with no_more_descriptors():
        lost = [line.lend(b"one", region=region), line.lend(b"two", region=region)]
        for message in lost:
            assert message is not None
            line.place(message)
        await soon(lambda: all(message is not None and message.answers for message in lost))
    assert "the limit of open files is reached" in warned[0]
    warned.clear()
    for message in lost:
        assert message is not None
        assert message.answers == [None]
        line.out.lost(message.placement)  # AGAIN
    assert line.changes == ["the peer could not map a memory file"]
    await soon(lambda: line.out.lent_bytes == 0)
    assert not line.out.usable
    assert line.lend(b"not now") is None

    await soon(lambda: line.out.usable)
    found = line.lend(b"three", region=region)
    assert found is not None
    assert line.changes == ["the peer could not map a memory file", None]
    line.place(found)
    await soon(lambda: bool(found.answers))
    assert contents(found.tensors[0]) == b"three"
    line.arena.release(region)


@pytest.mark.asyncio
async def test_a_peer_that_cannot_connect_is_answered(line: Line, quick: None, warned: list[str]) -> None:
    region = line.region(SEGMENT)
    message = line.lend(b"lost", region=region)
    assert message is not None
    with no_more_descriptors():
        line.place(message)
        await soon(lambda: message.answers == [None])
    assert "no connection can be accepted" in warned[0]
    line.out.lost(message.placement)
    await soon(lambda: line.out.usable)
    # Meanwhile the first descriptor has come all the same.
    assert contents((await line.send(b"found")).tensors[0]) == b"found"
    line.arena.release(region)
    warned.clear()


@pytest.mark.asyncio
async def test_a_descriptor_that_never_comes_is_not_waited_for_for_ever(line: Line, quick: None, warned: list[str]) -> None:
    line.welcome = False
    messages = [line.lend(b"lost"), line.lend(b"lost, too")]
    for message in messages:
        assert message is not None
        line.place(message)
    await soon(lambda: all(message is not None and message.answers == [None] for message in messages))
    assert "has not come" in warned[0]
    assert len(warned) == 2
    warned.clear()
    assert messages[0] is not None
    line.out.lost(messages[0].placement)
    await soon(lambda: line.out.lent_bytes == 0)

    # The connection is gone, and that is noticed by the next try; the one after that makes a new one.
    line.welcome = True
    await soon(lambda: line.out.usable)
    assert line.lend(b"no") is None
    await soon(lambda: line.out.usable)
    assert contents((await line.send(b"yes")).tensors[0]) == b"yes"
    assert [bool(change) for change in line.changes] == [True, True, False]


@pytest.mark.asyncio
async def test_after_a_lost_connection_all_segments_are_passed_again(line: Line, quick: None, warned: list[str]) -> None:
    kept = [await line.send(bytes([number]) * SEGMENT) for number in range(3)]
    for reader in line.readers:
        reader.close()
    line.incoming._readers.clear()
    assert line.lend(bytes(SEGMENT)) is None
    assert "Broken pipe" in str(line.changes[0])
    await soon(lambda: line.out.usable)
    assert contents((await line.send(b"again")).tensors[0]) == b"again"
    for number, message in enumerate(kept):
        assert contents(message.tensors[0]) == bytes([number]) * SEGMENT
    assert len(memory_file_mappings()) == 2 * 4


@pytest.mark.asyncio
async def test_troubles_that_follow_each_other_are_tried_again_less_often(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    line.listener.close()
    monkeypatch.setattr(shared, "_FIRST_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(shared, "_LONGEST_PAUSE_SECONDS", 0.1)
    line.out._pause = 0.02
    pauses = []
    for _ in range(5):
        assert line.lend(b"nobody listens") is None
        pauses.append(round(line.out._rests_until - line.home.loop.time(), 3))
        assert line.lend(b"nor now") is None
        await soon(lambda: line.out.usable)
    assert len(line.changes) == 5
    assert [pauses[0] < 0.021, 0.021 < pauses[1] < 0.041, 0.041 < pauses[2] < 0.081, 0.081 < pauses[3] < 0.101, pauses[4] < 0.101] == [
        True
    ] * 5
    line.listener = DescriptorListener(line.home.loop, "key", line._attach)
    await asyncio.sleep(0.25)
    assert line.lend(b"at last") is not None
    line.listener.close()
    line.out._close_writer()
    line.out._names.clear()
    assert line.lend(b"and off again") is None
    assert line.out._pause < 0.021
    line.listener = DescriptorListener(line.home.loop, "key", line._attach)


class Alone:
    """A receiving half whose peer is the test."""

    def __init__(self, home: LoopHome) -> None:
        self.releases: list[bytes] = []
        self.answers: list[list[torch.Tensor] | None] = []
        self.incoming = SharedIn(home, self.releases.append)
        self.listener = DescriptorListener(home.loop, "key", lambda address, incarnation, reader: self.incoming.attach(reader))
        self.writer = DescriptorWriter(self.listener.name, "key", "a:0", 1)

    def pass_file(self, number: int, size: int, *, actual: int | None = None, seals: int = SEALS) -> None:
        fd = os.memfd_create("aiorlinf", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size if actual is None else actual)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        self.writer.send(number, size, fd)
        os.close(fd)

    def place(self, sizes: list[int], packed: tuple[int, int]) -> None:
        self.incoming.place(sizes, memoryview(PLACE.pack(*packed)), self.answers.append)

    def close(self) -> None:
        self.writer.close()
        self.listener.close()
        self.incoming.close()


@pytest_asyncio.fixture
async def alone(home: LoopHome) -> AsyncIterator[Alone]:
    """A receiving half on the loop of the test."""
    made = Alone(home)
    yield made
    made.close()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("file", "complaint"),
    [
        ({"size": PAGE, "seals": 0}, "can be cut short"),
        ({"size": PAGE, "actual": 2 * PAGE}, "8192 bytes instead of 4096"),
        ({"size": 0}, "0 bytes"),
        ({"size": 1 << 43, "actual": PAGE}, "8796093022208 bytes"),
    ],
)
async def test_a_file_that_is_not_as_it_should_be_is_not_used(
    alone: Alone, warned: list[str], file: dict[str, int], complaint: str
) -> None:
    alone.place([100], (1, 0))
    alone.pass_file(1, **file)
    await soon(lambda: alone.answers == [None])
    await soon(lambda: alone.releases == [PLACE.pack(1, 0)])
    assert complaint in warned.pop()
    alone.pass_file(1, PAGE)
    await soon(lambda: 1 in alone.incoming._segments)
    alone.place([100], (1, 0))
    assert alone.answers[1] is not None


@pytest.mark.asyncio
async def test_a_place_outside_its_segment_is_refused(alone: Alone, warned: list[str]) -> None:
    alone.place([PAGE], (1, 64))
    alone.pass_file(1, PAGE)
    await soon(lambda: alone.answers == [None])
    assert "outside its segment" in warned.pop()
    for sizes, place in [([PAGE + 1], (1, 0)), ([1], (1, PAGE)), ([64, PAGE - 65, 1], (1, 64)), ([1], (1, 1 << 62))]:
        with pytest.raises(WireError, match="outside its segment"):
            alone.place(sizes, place)
    with pytest.raises(WireError):
        alone.place([1], (1, 1))
    assert alone.incoming.held_bytes == 0
    assert len(alone.answers) == 1


@pytest.mark.asyncio
async def test_releases_that_make_no_sense_are_refused(line: Line) -> None:
    message = line.lend(b"contents")
    assert message is not None
    (number,) = message.placement.names.values()
    for body in (b"x", PLACE.pack(number, 64), PLACE.pack(number + 1, 0), PLACE.pack(number, 0) * 2):
        with pytest.raises(WireError):
            line.out.on_release(memoryview(body))
    assert line.out.lent_bytes == 0


# ---- ends


@pytest.mark.asyncio
async def test_after_the_receiver_has_ended_its_views_stay(line: Line) -> None:
    message = await line.send(b"contents")
    waiting = line.lend(bytes(4 * SEGMENT))
    assert waiting is not None
    line.place(waiting)
    line.incoming.close()
    kept = message.tensors[0]
    message.answers.clear()
    await asyncio.sleep(0.05)
    assert waiting.answers == []
    assert contents(kept) == b"contents"
    del kept
    await asyncio.sleep(0.02)
    assert line.released == 0
    assert not line.incoming.attach(line.readers[0])


@pytest.mark.asyncio
async def test_after_the_sender_has_ended_nothing_is_written_there(line: Line) -> None:
    message = await line.send(b"contents")
    line.out.close()
    line.incoming.close()
    assert line.out.lent_bytes == 0
    assert line.lend(b"too late") is None
    other = SharedOut(line.arena, line._connect, line.changes.append)
    for _ in range(20):
        region = line.region(SEGMENT // 2)
        region.segment.view(region.offset, region.size)[:] = 9
        assert other.lend(Placement(region, {}))
        line.arena.release(region)
        assert contents(message.tensors[0]) == b"contents"
        other.on_release(memoryview(PLACE.pack(*next(iter(other._lent)))))
    other.close()


@pytest.mark.asyncio
async def test_what_was_received_does_not_keep_the_link(alone: Alone) -> None:
    class Link:
        def release(self, body: bytes) -> None:
            pass

    link = Link()
    gone = weakref.ref(link)
    incoming = SharedIn(alone.incoming._home, link.release)
    alone.pass_file(1, PAGE)
    await soon(lambda: 1 in alone.incoming._segments)
    incoming._segments.update(alone.incoming._segments)
    answers: list[list[torch.Tensor] | None] = []
    incoming.place([100], memoryview(PLACE.pack(1, 0)), answers.append)
    incoming.close()
    del incoming, link
    await asyncio.sleep(0.01)
    assert gone() is None
    assert answers[0] is not None


@pytest.mark.asyncio
async def test_views_that_go_after_the_loop_do_no_harm() -> None:
    kept: list[Any] = []

    def elsewhere() -> None:
        async def run() -> None:
            home = LoopHome(asyncio.get_running_loop(), name="elsewhere")
            line = Line(home)
            kept.append((await line.send(b"contents")).tensors[0])
            line.listener.close()
            line.out.close()
            line.arena.close()
            for reader in line.readers:
                reader.close()
            await home.close()

        asyncio.run(run())

    await asyncio.to_thread(elsewhere)
    assert contents(kept[0]) == b"contents"
    kept.clear()
    await soon(lambda: memory_file_mappings() == [])
