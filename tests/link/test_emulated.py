"""Two links over an emulated network, moved by hand: the loop's clock is the network's."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aiorlinf.address import Identity, Incarnation
from aiorlinf.config import CollectiveConfig, NetEmulationConfig, load_config
from aiorlinf.errors import ClosedError, Mismatch, PeerLost
from aiorlinf.link.emulated import EmulatedConnection
from aiorlinf.link.link import LinkState
from aiorlinf.manager.emulation import Booking, Budgets, Route
from aiorlinf.work.base import AsyncWork
from tests.hypothesis_profiles import examples
from tests.link.shapes import INLINE, OBJECTS, TENSORS, WINDOW, Shape
from tests.link.stage import EVERYTHING, Side, StepHome, StepLoop, join

WHOLE = [shape for shape in OBJECTS if not shape.bomb]
CHUNK = 256
RATE = 8_000.0  # bytes per second: three slices are 48 KiB
ANSWER = 0.001


def emulation() -> NetEmulationConfig:
    """One budget each way."""
    group = {"members": "a:*", "bandwidth_mbps": RATE * 8 / 1e6}
    return load_config({"cluster": {"net_emulation": {"bandwidth_groups": [group]}}}).cluster.net_emulation


class Two:
    """Two workers, and what lies between them for each direction; None: nothing is emulated.

    Attributes:
        open: emulated connections that have not ended.
        booked: what was booked, in the order of the answers.
    """

    def __init__(self, there: Route | None, back: Route | None, *, capacity: int = EVERYTHING, window: int = WINDOW) -> None:
        self.loop = StepLoop()
        self.home = StepHome(self.loop)
        config = CollectiveConfig(inline_max_bytes=INLINE, window_bytes=window, chunk_bytes=CHUNK)
        self.sides = [Side(self.home, "a:0", "b:0", config), Side(self.home, "b:0", "a:0", config)]
        join(self.loop, *self.sides, capacity=capacity)
        self.routes = [there, back]
        self.budgets = Budgets(emulation())
        self.booked: list[int] = []
        self.emulated: list[EmulatedConnection | None] = [None, None]
        self.changes = 0

    def up(self) -> None:
        for index, (side, route) in enumerate(zip(self.sides, self.routes, strict=True)):
            if route is None:
                side.up()
                continue
            emulated = EmulatedConnection(self.loop, side.connection, side.link, route, self._book, self.loop.time, self._changed)
            self.emulated[index] = emulated
            side.link.up(emulated, Identity(side.other, Incarnation(1)), side.config.window_bytes, None)
            side.connection.adopt(emulated, b"", 1 << 20)

    def _book(self, route: Route, nbytes: int, done: Callable[[Booking], None]) -> None:
        self.booked.append(nbytes)
        self.loop.call_later(ANSWER, done, self.budgets.book(route.budgets, nbytes, self.loop.time()))

    def _changed(self, _emulated: EmulatedConnection) -> None:
        self.changes += 1

    def send(self, index: int, shape: Shape, number: int, tag: int = 0) -> AsyncWork[None]:
        side = self.sides[index]
        obj, _ = shape.build(number)
        operation = side.exchange.send if shape.tensor is None else side.exchange.send_tensor
        return operation(side.other, 0, obj, tag, None)

    def recv(self, index: int, shape: Shape, tag: int = 0) -> AsyncWork[Any]:
        side = self.sides[index]
        if shape.tensor is None:
            return side.exchange.recv(side.other, 0, tag, None)
        dtype, size = shape.tensor
        return side.exchange.recv_tensor(side.other, 0, torch.empty(size, dtype=dtype), tag, None)

    def move(self) -> bool:
        """What happens without the clock; False if there is nothing."""
        moved = False
        for side in self.sides:
            if side.link.state is not LinkState.CONNECTING and side.socket.readable():
                side.socket.read(1 << 30)
                moved = True
        moved |= self.home.run_thread() or self.loop.busy()
        if moved:
            self.loop.turn()
        return moved

    def rest(self, until: float = float("inf")) -> None:
        """Until nothing happens by itself any more, or until then."""
        for _ in range(20_000):
            if self.move():
                continue
            scheduled: list[Any] = self.loop._scheduled  # type: ignore[attr-defined]
            following = min((handle.when() for handle in scheduled if not handle.cancelled()), default=until)
            if following >= until:
                self.loop.now = max(self.loop.now, until) if until < float("inf") else self.loop.now
                return
            self.loop.to_next_timer()
            self.loop.turn()
        raise AssertionError("it does not come to rest")

    def stand_still(self) -> None:
        """As `rest`, but nobody reads."""
        while self.timers() or self.loop.busy():
            self.loop.to_next_timer()
            self.loop.turn()

    def busy(self) -> bool:
        """Something that the first one sent is still under way."""
        emulated = self.emulated[0]
        return emulated is not None and emulated.busy

    def paused(self) -> bool:
        """The first one cannot write at the moment."""
        emulated = self.emulated[0]
        return emulated is not None and emulated.paused

    def timers(self) -> int:
        scheduled: list[Any] = self.loop._scheduled  # type: ignore[attr-defined]
        return sum(not handle.cancelled() for handle in scheduled)

    def free(self) -> None:
        for side in self.sides:
            side.link.end(lambda: ClosedError("over"))
        self.rest()
        self.home.close_nowait()
        self.loop.close()
        assert self.loop.problems == []


DELAY = Route(0.5, (), None)
NARROW = Route(0.0, (0,), RATE)
BACK = Route(0.25, (1,), RATE)
BOTH = Route(0.5, (0,), RATE)


@pytest.fixture
def make() -> Iterator[Callable[..., Two]]:
    """Makes a pair that is up."""
    made: list[Two] = []

    def build(there: Route | None, back: Route | None = None, **options: Any) -> Two:
        two = Two(there, back, **options)
        made.append(two)
        two.up()
        return two

    yield build
    for two in made:
        two.free()


def same(value: Any, shape: Shape, number: int) -> bool:
    """It is the object of this number."""
    tensors, others = shape.parts(value)
    expected_tensors, expected_others = shape.parts(shape.build(number)[0])
    return others == expected_others and all(torch.equal(*pair) for pair in zip(tensors, expected_tensors, strict=True))


Make = Callable[..., Two]


@pytest.mark.parametrize("shape", [*WHOLE, *TENSORS], ids=str)
def test_everything_arrives_as_it_was_a_delay_later(make: Make, shape: Shape) -> None:
    two = make(DELAY)
    work = two.recv(1, shape)
    sent = two.send(0, shape, 7)
    two.rest(0.499)
    assert not work.done()
    two.rest()
    assert same(work.result(), shape, 7)
    sent.result()
    assert two.loop.now >= 0.5


def test_the_other_direction_is_left_alone(make: Make) -> None:
    two = make(DELAY)
    work = two.recv(0, OBJECTS[0])
    two.send(1, OBJECTS[0], 1)
    two.rest(0.001)
    assert work.done()


def test_a_round_trip_takes_both_delays(make: Make) -> None:
    two = make(DELAY, BACK)
    answer = two.recv(0, OBJECTS[0])
    two.recv(1, OBJECTS[0]).add_done_callback(lambda _: two.send(1, OBJECTS[0], 2))
    two.send(0, OBJECTS[0], 1)
    two.rest(0.74)
    assert not answer.done()
    two.rest()
    assert answer.done()


def test_payload_and_manifest_are_charged_answers_are_not(make: Make) -> None:
    two = make(NARROW, BACK)
    shape = TENSORS[2]
    work = two.recv(1, shape)
    two.send(0, shape, 3)
    two.rest()
    assert same(work.result(), shape, 3)
    payload = 1600
    chunks = -(-payload // CHUNK)
    # OPEN with its header, ids and the tensor's description; each chunk with a header.
    assert 0 < sum(two.booked) - payload - 16 * chunks < 100
    assert two.loop.now >= payload / RATE


def test_a_send_is_done_when_its_bytes_wait_for_the_bandwidth_and_the_tensor_is_free(make: Make) -> None:
    two = make(BOTH, window=1 << 20)
    for index in (1, 0):  # from the second message on a send waits for nobody
        work = two.recv(1, OBJECTS[0])
        two.send(0, OBJECTS[0], index)
        two.rest()
        work.result()
    tensor = torch.full((900,), 5, dtype=torch.int32)
    work = two.recv(1, OBJECTS[3])
    sent = two.sides[0].exchange.send(two.sides[0].other, 0, [tensor], 0, None)
    begun = two.loop.now
    two.rest(begun + 0.1)
    assert sent.done()
    assert not work.done()
    tensor.fill_(6)
    two.rest()
    assert work.result()[0].tolist() == [5] * 900
    assert two.loop.now - begun >= 0.5 + 3600 / RATE


def test_what_has_not_left_is_bounded_and_a_small_message_comes_in_between(make: Make) -> None:
    two = make(NARROW)
    emulated = two.emulated[0]
    assert emulated is not None
    large = torch.zeros(200_000, dtype=torch.uint8)
    work = two.recv(1, TENSORS[0])
    small = two.recv(1, OBJECTS[0], tag=1)
    two.sides[1].exchange.recv(two.sides[1].other, 0, 2, None)
    sent = two.sides[0].exchange.send(two.sides[0].other, 0, large, 2, None)
    two.rest(two.loop.now + 1.0)
    assert two.paused()
    assert not sent.done()
    assert emulated._wire.backlog <= 3 * 16384 + CHUNK + 16
    two.send(0, OBJECTS[0], 4, tag=1)
    two.rest(two.loop.now + 8.0)
    assert small.done()
    assert not sent.done()
    two.rest()
    assert sent.done()
    assert not two.paused()
    work.cancel()


def test_a_message_that_is_cancelled_on_its_way_leaves_its_receive_to_the_next(make: Make) -> None:
    two = make(BOTH)
    work = two.recv(1, OBJECTS[3])
    first = two.send(0, OBJECTS[3], 1)
    two.rest(two.loop.now + 0.2)
    assert first.cancel()
    second = two.send(0, OBJECTS[3], 2)
    two.rest()
    assert same(work.result(), OBJECTS[3], 2)
    second.result()


def test_a_mismatch_is_known_on_both_sides(make: Make) -> None:
    two = make(BOTH, BACK)
    sent, received = two.send(0, TENSORS[0], 1), two.recv(1, OBJECTS[0])
    two.rest()
    assert isinstance(sent.exception(), Mismatch)
    assert isinstance(received.exception(), Mismatch)


def test_sending_first_is_no_lock_out(make: Make) -> None:
    two = make(BOTH, BACK)
    sent = [two.send(0, TENSORS[0], 1), two.send(1, TENSORS[0], 2)]
    two.rest()
    assert all(work.done() for work in sent)
    received = [two.recv(1, TENSORS[0]), two.recv(0, TENSORS[0])]
    two.rest()
    assert [same(work.result(), TENSORS[0], number) for number, work in zip((1, 2), received, strict=True)] == [True, True]


@pytest.mark.parametrize("who", [0, 1])
def test_a_connection_that_breaks_takes_what_is_under_way_with_it(make: Make, who: int) -> None:
    two = make(BOTH)
    tensor = torch.zeros(5000, dtype=torch.int32)
    gone = weakref.ref(tensor)
    works = [two.sides[0].exchange.send(two.sides[0].other, 0, tensor, 0, None), two.recv(1, OBJECTS[0])]
    del tensor
    two.rest(two.loop.now + 0.3)
    emulated = two.emulated[0]
    assert emulated is not None
    assert two.busy()
    two.sides[who].socket.break_down(ConnectionResetError("pulled the plug"))
    two.rest()
    for work in works:
        assert isinstance(work.exception(), PeerLost)
    assert emulated.closed
    assert not two.busy()
    assert two.timers() == 0
    del works, work
    gc.collect()
    assert gone() is None
    emulated.send(b"\0" * 16)  # nobody is there any more
    emulated.send_chunk(1, [memoryview(b"x")], 1)
    assert not two.busy()


def test_a_goodbye_takes_along_what_is_still_under_way(make: Make) -> None:
    two = make(BOTH)
    received = [two.recv(1, OBJECTS[0]), two.recv(1, OBJECTS[0])]
    two.send(0, OBJECTS[0], 1)
    two.rest()
    two.send(0, OBJECTS[0], 2).result()  # done: nothing is waited for
    two.sides[0].link.say_goodbye()
    two.rest()
    assert [same(work.result(), OBJECTS[0], number) for number, work in enumerate(received, 1)] == [True, True]
    assert two.sides[1].link.state is LinkState.ENDED


def test_a_goodbye_keeps_the_order_when_the_socket_is_full(make: Make) -> None:
    two = make(BOTH, capacity=100, window=1 << 20)
    side = two.sides[0]
    received = [two.recv(1, shape) for shape in (OBJECTS[3], OBJECTS[0], OBJECTS[3])]
    for number, shape in enumerate((OBJECTS[3], OBJECTS[0], OBJECTS[3])):
        two.send(0, shape, number)
    two.stand_still()
    assert side.connection.paused
    assert two.busy()
    side.link.end_softly(lambda: ClosedError("over"))
    assert not two.busy()
    two.rest()
    for number, (shape, work) in enumerate(zip((OBJECTS[3], OBJECTS[0], OBJECTS[3]), received, strict=True)):
        assert same(work.result(), shape, number)


def test_what_has_arrived_waits_while_the_socket_is_full(make: Make) -> None:
    two = make(BOTH, capacity=100, window=1 << 20)
    side = two.sides[0]
    two.send(0, OBJECTS[3], 1)
    two.stand_still()
    assert side.connection.paused
    assert two.busy()
    assert two.timers() == 0, "nothing to do until there is room"
    two.rest()
    assert not two.busy()


steps = st.one_of(
    st.tuples(st.just("send"), st.integers(0, 1), st.sampled_from([*WHOLE, *TENSORS]), st.integers(0, 1)),
    st.tuples(st.just("recv"), st.integers(0, 1), st.integers(0, 1)),
    st.tuples(st.just("turn")),
    st.tuples(st.just("time"), st.floats(0.0001, 0.6)),
    st.tuples(st.just("thread")),
    st.tuples(st.just("read"), st.integers(0, 1), st.sampled_from([1, 20, 300, 1 << 20])),
)
routes = st.sampled_from([None, DELAY, NARROW, BOTH])


@settings(max_examples=examples(100))
@given(st.lists(steps, min_size=10, max_size=50), routes, st.sampled_from([None, BACK]), st.sampled_from([64, EVERYTHING]))
def test_any_run(run: list[tuple[Any, ...]], there: Route | None, back: Route | None, capacity: int) -> None:
    """Whatever happens when, all messages of a stream arrive in their order, and nothing is left behind."""
    two = Two(there, back, capacity=capacity)
    two.up()
    sent: dict[tuple[int, int], list[tuple[Shape, int]]] = {(side, tag): [] for side in (0, 1) for tag in (0, 1)}
    received: dict[tuple[int, int], list[AsyncWork[Any]]] = {key: [] for key in sent}
    works: deque[AsyncWork[None]] = deque()
    for number, (name, *args) in enumerate(run):
        if name == "send":
            index, shape, tag = args
            works.append(two.send(index, shape, number, tag))
            sent[index, tag].append((shape, number))
        elif name == "recv":
            index, tag = args
            place = len(received[1 - index, tag])
            if place < len(sent[1 - index, tag]):
                received[1 - index, tag].append(two.recv(index, sent[1 - index, tag][place][0], tag))
        elif name == "turn":
            two.loop.turn()
        elif name == "time":
            two.loop.now += args[0]
            two.loop.turn()
        elif name == "thread":
            two.home.run_thread()
        else:
            index, size = args
            if two.sides[index].socket.readable():
                two.sides[index].socket.read(size)
    for side in two.sides:
        side.socket.capacity = 1 << 30
    for (index, tag), messages in sent.items():
        for shape, _ in messages[len(received[index, tag]) :]:
            received[index, tag].append(two.recv(1 - index, shape, tag))
    two.rest()
    for key, messages in sent.items():
        for (shape, number), work in zip(messages, received[key], strict=True):
            assert same(work.result(), shape, number)
    for done in works:
        done.result()
    for side, emulated in zip(two.sides, two.emulated, strict=True):
        assert side.link.receiver.opened == {}
        assert side.link.receiver.window.outstanding == 0
        assert side.link.sender.pending == {}
        assert side.link.sender._charged == side.link.sender._consumed
        assert emulated is None or not emulated.busy
    two.free()
