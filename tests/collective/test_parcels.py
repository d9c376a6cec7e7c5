"""Messages that are received, kept and sent on without a look into them: from b:0 through a:0 to c:0, moved by hand."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from aiorlinf import init
from aiorlinf.collective.inbox import ParcelInbox
from aiorlinf.config import CollectiveConfig
from aiorlinf.errors import (
    DeadlineExceeded,
    Mismatch,
    NonContiguousTensor,
    PeerLost,
    RemoteError,
    UnsupportedObject,
    UsageError,
)
from aiorlinf.link.parcel import Parcel, decode_parcel, encode_parcel
from aiorlinf.work.base import AsyncWork
from tests.cases.sameness import assert_same
from tests.collective.three import Three, big, three

__all__ = ["three"]

TAG = 3


class Trap:
    """Unpickling it is noticed."""

    unpickled = 0

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _spring, (self.number,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trap) and other.number == self.number

    __hash__ = None  # type: ignore[assignment]


def _spring(number: int) -> Trap:
    Trap.unpickled += 1
    return Trap(number)


@dataclasses.dataclass
class Step:
    data: torch.Tensor
    reward: float


SHARED = torch.arange(50.0)
OBJECTS: dict[str, Any] = {
    "none": None,
    "plain": {"a": [1, 2.5, "text"], "b": (True, None)},
    "text": "long " * 3000,
    "tensor": torch.randn(3, 4),
    "large tensor": torch.randn(2000),
    "bfloat16": torch.randn(5000).bfloat16(),
    "empty tensor": torch.zeros(0, 3),
    "list": [torch.randn(900), torch.zeros(0), torch.tensor(3.0)],
    "tuple": (torch.randn(10), torch.ones(10) > 0),
    "twice": [SHARED, SHARED],
    "dict": {"x": torch.randn(1500), "y": torch.arange(7)},
    "parameter": torch.nn.Parameter(torch.randn(1000)),
    "dataclass": Step(torch.randn(1200), 0.5),
    "array": np.arange(3000).reshape(30, 100),
    "bytes": bytes(range(256)) * 20,
    "deep": {"steps": [Step(torch.randn(600), 1.0), {"raw": bytearray(b"x" * 3000)}], "name": "deep"},
}


def parcel_of(three: Three, obj: Any, tag: int = TAG) -> Parcel:
    """What b sends, received by a."""
    sent = three.send(three.b, obj, tag)
    work = receive_parcel(three, tag)
    three.settle()
    parcel = work.result()
    sent.result()
    return parcel


def receive_parcel(three: Three, tag: int = TAG) -> AsyncWork[Parcel]:
    return three.to_b.exchange.recv_parcel(three.to_b.other, 0, tag)


def pass_on(three: Three, parcel: Parcel, tag: int = TAG, **options: Any) -> AsyncWork[None]:
    return three.to_c.exchange.send_parcel(three.to_c.other, 0, tag, parcel, **options)


def receive(three: Three, tag: int = TAG, timeout: float | None = None) -> AsyncWork[Any]:
    """Of c, from a."""
    return three.c.exchange.recv(three.c.other, 0, tag, timeout)


# ---- all goes well


@pytest.mark.parametrize("name", OBJECTS)
def test_every_kind_of_object_arrives_as_it_was(three: Three, name: str) -> None:
    obj = OBJECTS[name]
    parcel = parcel_of(three, obj)
    assert parcel.nbytes >= sum(tensor.nbytes for tensor in [obj] if isinstance(tensor, torch.Tensor))
    assert parcel.sender is not None
    assert str(parcel.sender) == "b:0#1"
    sent = pass_on(three, parcel)
    work = receive(three)
    three.settle()
    assert_same(work.result(), obj)
    assert sent.result() is None
    assert parcel.closed


@pytest.mark.parametrize("size", [0, 20_000], ids=["small", "large"])
def test_nothing_is_unpickled_on_the_way(three: Three, size: int) -> None:
    Trap.unpickled = 0
    parcel = parcel_of(three, [Trap(5), torch.zeros(size)])
    sent = pass_on(three, parcel)
    three.settle()
    assert Trap.unpickled == 0
    work = receive(three)
    three.settle()
    assert work.result()[0] == Trap(5)
    assert Trap.unpickled == 1
    sent.result()


def test_many_small_ones_keep_their_order_and_are_over_at_once(three: Three) -> None:
    for number in range(100):
        three.send(three.b, number, TAG)
    works = [receive_parcel(three) for _ in range(100)]
    three.settle()
    assert all(work.done() for work in works)
    three.flow()
    first = pass_on(three, works[0].result())
    got = [receive(three)]
    three.flow()
    first.result()
    for work in works[1:]:
        assert pass_on(three, work.result()).done(), "a stream in flow"
        assert work.result().closed
        three.flow()
        got.append(receive(three))
        three.flow()
    assert [work.result() for work in got] == [*range(100)]


def test_a_chain_of_workers(three: Three) -> None:
    # b -> a -> c -> a -> b, each time as a parcel but the last.
    obj = {"x": torch.randn(3000), "n": 5}
    sent = [pass_on(three, parcel_of(three, obj))]
    at_c = three.c.exchange.recv_parcel(three.c.other, 0, TAG)
    three.settle()
    sent.append(three.c.exchange.send_parcel(three.c.other, 0, TAG, at_c.result()))
    at_a = three.to_c.exchange.recv_parcel(three.to_c.other, 0, TAG)
    three.settle()
    sent.append(three.to_b.exchange.send_parcel(three.to_b.other, 0, TAG, at_a.result()))
    at_b = three.b.exchange.recv(three.b.other, 0, TAG, None)
    three.settle()
    assert_same(at_b.result(), obj)
    assert [work.result() for work in sent] == [None] * 3


def test_a_send_is_done_when_the_message_is_here_though_nobody_takes_it(three: Three) -> None:
    sent = three.send(three.b, torch.ones(100), TAG)
    three.flow()
    sent.result()
    assert not three.to_b.link.receiver.mailbox.wildcards
    assert receive_parcel(three).done()


def test_what_is_taken_makes_room_in_the_window(three: Three) -> None:
    for _ in range(20):
        sent = [three.send(three.b, torch.ones(200), TAG) for _ in range(4)]
        parcels = [receive_parcel(three) for _ in range(4)]
        three.settle()
        assert [work.result() for work in sent] == [None] * 4
        assert all(work.done() for work in parcels)
    assert three.to_b.link.receiver.window.outstanding == 0


# ---- the one and the other kind of receive


@pytest.mark.parametrize("size", [3, 3000])
def test_what_a_parcels_receive_gives_back_another_receives(three: Three, size: int) -> None:
    obj = [torch.randn(size), "text"]
    sent = three.send(three.b, obj, TAG)
    work = receive_parcel(three)
    three.settle()
    assert work.done()
    assert work.cancel(), "nobody had taken it"
    again = receive_parcel(three)
    assert again.cancel()
    got = three.recv(TAG)
    three.flow()
    assert_same(got.result(), obj)
    sent.result()


@pytest.mark.parametrize("size", [3, 3000])
def test_what_another_receive_gives_back_comes_as_a_parcel(three: Three, size: int) -> None:
    obj = [torch.randn(size), "text"]
    three.send(three.b, obj, TAG)
    work = three.recv(TAG)
    three.settle()
    assert work.cancel()
    parcel = receive_parcel(three).result()
    assert_same(three.to_b.exchange.decode_parcel(parcel), obj)


def test_what_cannot_be_put_into_a_parcel_again_fails_its_receive_and_no_other(three: Three) -> None:
    three.send(three.b, Trap(1), TAG)
    work = three.recv(TAG)
    three.flow()
    work._value.__reduce__ = None
    work._value.odd = lambda: None
    work._value.__class__ = Unsendable
    assert work.cancel()
    failed = receive_parcel(three)
    assert isinstance(failed.exception(), UnsupportedObject)
    three.send(three.b, "next", TAG)
    assert receive_parcel(three).done()


class Unsendable(Trap):
    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("no")


def test_a_tensor_of_send_tensor_is_no_parcel(three: Three) -> None:
    sent = three.b.exchange.send_tensor(three.b.other, 0, torch.ones(3), TAG, None)
    work = receive_parcel(three)
    three.settle()
    for each in (sent, work):
        error = each.exception()
        assert isinstance(error, Mismatch)
    three.send(three.b, "next", TAG)
    assert receive_parcel(three).done()


def test_a_parcel_does_not_fit_recv_tensor(three: Three) -> None:
    parcel = parcel_of(three, torch.ones(3))
    sent = pass_on(three, parcel)
    work = three.c.exchange.recv_tensor(three.c.other, 0, torch.zeros(3), TAG, None)
    three.settle()
    assert isinstance(sent.exception(), Mismatch)
    assert isinstance(work.exception(), Mismatch)
    assert not parcel.closed
    assert not parcel.uncertain, "it was refused"


# ---- from anyone


def test_parcels_from_anyone_come_in_the_order_of_their_arrival(three: Three) -> None:
    inbox = ParcelInbox(three.to_b.exchange, 0, TAG)
    for number, side in enumerate([three.b, three.c, three.c, three.b]):
        three.send(side, [number, torch.zeros(number * 10)], TAG)
    three.send(three.b, "another tag", TAG + 1)
    works = [inbox.recv() for _ in range(5)]
    three.settle()
    got = [work.result() for work in works[:4]]
    assert [sender for sender, _ in got] == ["b:0", "c:0", "c:0", "b:0"]
    assert [str(parcel.sender) for _, parcel in got] == ["b:0#1", "c:0#1", "c:0#1", "b:0#1"]
    assert [decode_parcel(parcel)[0] for _, parcel in got] == [0, 1, 2, 3]
    assert not works[4].done()
    assert works[4].cancel()


def test_a_parcel_given_back_to_the_inbox_is_first_again(three: Three) -> None:
    inbox = ParcelInbox(three.to_b.exchange, 0, TAG)
    works = [inbox.recv() for _ in range(2)]
    three.send(three.b, "one", TAG)
    three.send(three.c, "two", TAG)
    assert works[0].cancel()
    sender, parcel = inbox.recv().result()
    assert (sender, decode_parcel(parcel)) == ("b:0", "one")
    assert decode_parcel(works[1].result()[1]) == "two"


def test_contexts_are_apart(three: Three) -> None:
    inbox = ParcelInbox(three.to_b.exchange, 7, TAG)
    work = inbox.recv()
    three.send(three.b, "of context 0", TAG)
    assert not work.done()
    three.b.exchange.send(three.b.other, 7, "of context 7", TAG, None)
    three.flow()
    assert decode_parcel(work.result()[1]) == "of context 7"


# ---- cancelling, at every step


def stepping(three: Three, steps: int) -> None:
    """So many small steps: a little is read by somebody, or the loop turns."""
    sides = (three.to_b, three.to_c, three.b, three.c)
    for number in range(steps):
        if number % 12 == 11:
            three.loop.to_next_timer()
        elif number % 3 == 2:
            three.loop.turn()
        else:
            sides[number % 4].socket.read(700)


@pytest.mark.parametrize("size", [3, 400, 3000], ids=["whole", "waits for the window", "announced"])
def test_a_cancelled_receive_takes_nothing_at_any_step(size: int) -> None:
    for steps in range(0, 320, 8):
        three = Three()
        try:
            first = three.b.exchange.send(three.b.other, 0, torch.full((size,), 1.0), TAG, None)
            second = three.b.exchange.send(three.b.other, 0, torch.full((size,), 2.0), TAG, None)
            work, following = receive_parcel(three), receive_parcel(three)
            stepping(three, steps)
            assert work.cancel()
            again = receive_parcel(three)
            three.settle()
            values = [float(decode_parcel(parcel.result())[0]) for parcel in (following, again)]
            assert sorted(values) == [1.0, 2.0], f"after {steps} steps"
            assert first.result() is second.result() is None
            assert three.to_b.link.receiver.window.outstanding == 0
        finally:
            three.close()


@pytest.mark.parametrize("size", [3, 400, 3000], ids=["whole", "waits for the window", "announced"])
def test_a_cancelled_send_leaves_the_parcel_whole_at_any_step(size: int) -> None:
    outcomes = set()
    for steps in range(0, 320, 8):
        three = Three()
        try:
            value = torch.randn(size)
            parcel = parcel_of(three, value)
            sent, work = pass_on(three, parcel), receive(three)
            stepping(three, steps)
            cancelled = sent.cancel()
            outcomes.add((cancelled, parcel.uncertain))
            assert parcel.closed != cancelled
            if cancelled:
                sent = pass_on(three, parcel)
                assert not parcel.closed
            three.settle()
            if parcel.uncertain and not sent.done():
                other = receive(three)  # the first time it had arrived, too
                three.settle()
                assert torch.equal(other.result(), value)
            assert sent.result() is None
            assert torch.equal(work.result(), value), f"after {steps} steps"
            assert parcel.closed
        finally:
            three.close()
    assert {cancelled for cancelled, _ in outcomes} == {True, False}
    assert (False, True) not in outcomes


# ---- death, at every step


@pytest.mark.parametrize("who", ["producer", "consumer"])
@pytest.mark.parametrize("size", [3, 400, 3000], ids=["whole", "waits for the window", "announced"])
def test_a_death_at_any_step_loses_nothing_that_was_received(who: str, size: int) -> None:
    ends = set()
    for steps in range(0, 320, 8):
        three = Three()
        try:
            value = torch.randn(size)
            if who == "producer":
                sent = three.b.exchange.send(three.b.other, 0, value, TAG, None)
                work = receive_parcel(three)
                stepping(three, steps)
                three.b.link.end(lambda: PeerLost("killed"))
                three.settle()
                error = work.exception()
                ends.add(type(error))
                if error is not None:
                    assert isinstance(error, PeerLost)
                    continue
                sent.exception()
                parcel = work.result()
            else:
                parcel = parcel_of(three, value)
                passed, at_c = pass_on(three, parcel), receive(three)
                stepping(three, steps)
                three.c.link.end(lambda: PeerLost("killed"))
                three.settle()
                error = passed.exception()
                ends.add(type(error))
                at_c.exception()
                assert parcel.closed == (error is None)
                if error is None:
                    continue
                assert isinstance(error, PeerLost)
                if at_c.exception() is None:
                    assert parcel.uncertain, "it was there, and the answer was lost"
            assert torch.equal(decode_parcel(parcel), value)
        finally:
            three.close()
    assert type(None) in ends
    assert ends == {type(None), PeerLost} or size == 3


def test_what_a_dead_producer_had_sent_can_still_be_received_and_passed_on(three: Three) -> None:
    three.send(three.b, torch.ones(50), TAG)
    three.b.link.end(lambda: PeerLost("killed"))
    three.flow()
    sent = pass_on(three, receive_parcel(three).result())
    work = receive(three)
    three.settle()
    assert torch.equal(work.result(), torch.ones(50))
    sent.result()


def test_a_producer_that_fails_in_the_middle_fails_the_receive(three: Three) -> None:
    tensor = big(1)
    sent = three.send(three.b, tensor, TAG)
    work = receive_parcel(three)
    three.loop.turn()
    tensor.add_(1)
    three.settle()
    assert isinstance(sent.exception(), UsageError)
    assert isinstance(work.exception(), RemoteError)


# ---- giving away, keeping


def test_a_parcel_is_sent_once(three: Three) -> None:
    parcel = parcel_of(three, big(1))
    sent = pass_on(three, parcel)
    for keep in (False, True):
        with pytest.raises(UsageError, match="being sent"):
            pass_on(three, parcel, keep=keep)
    with pytest.raises(UsageError, match="being sent"):
        decode_parcel(parcel)
    work = receive(three)
    three.settle()
    assert torch.equal(work.result(), big(1))
    sent.result()
    for keep in (False, True):
        with pytest.raises(UsageError, match="is empty"):
            pass_on(three, parcel, keep=keep)
    with pytest.raises(UsageError, match="is empty"):
        decode_parcel(parcel)


@pytest.mark.parametrize("size", [3, 3000])
def test_a_kept_parcel_can_be_sent_again_and_to_several_at_once(three: Three, size: int) -> None:
    value = torch.randn(size)
    parcel = parcel_of(three, value)
    sent = [pass_on(three, parcel, keep=True) for _ in range(3)]
    if size > 1000:
        with pytest.raises(UsageError, match="being sent"):
            pass_on(three, parcel)
    works = [receive(three) for _ in range(3)]
    three.settle()
    for each in works:
        got = each.result()
        assert torch.equal(got, value)
        got.fill_(-1)
    assert [each.result() for each in sent] == [None] * 3
    assert not parcel.closed
    sent = [pass_on(three, parcel)]
    work = receive(three)
    three.settle()
    assert torch.equal(work.result(), value)
    sent[0].result()
    assert parcel.closed


@pytest.mark.parametrize("size", [3, 3000])
def test_a_send_that_fails_at_its_call_leaves_the_parcel_whole(three: Three, size: int) -> None:
    value = torch.randn(size)
    parcel = parcel_of(three, value)
    with pytest.raises(UsageError, match="tag"):
        pass_on(three, parcel, -1)
    exchange = three.to_c.exchange
    exchange.configure(CollectiveConfig(max_message_bytes=8))
    with pytest.raises(UsageError, match="over the limit"):
        pass_on(three, parcel)
    assert torch.equal(decode_parcel(parcel), value)


def test_a_limit_passes(three: Three) -> None:
    parcel = parcel_of(three, big(1))
    sent = pass_on(three, parcel, timeout=0.001)
    work = three.to_b.exchange.recv_parcel(three.to_b.other, 0, TAG, 0.001)
    three.flow()
    while not work._deadline.passed():
        pass  # a millisecond of the real clock
    three.loop.now += 1
    three.flow()
    for each in (sent, work):
        error = each.exception()
        assert isinstance(error, DeadlineExceeded)
    assert work.operation == "recv_parcel"
    assert not parcel.closed
    sent = pass_on(three, parcel)
    got = receive(three)
    three.settle()
    assert torch.equal(got.result(), big(1))
    sent.result()


def test_memory_is_free_when_the_parcel_is_empty(three: Three) -> None:
    parcel = parcel_of(three, big(1))
    memory = weakref.ref(parcel.memory[0])
    sent, work = pass_on(three, parcel), receive(three)
    three.settle()
    sent.result()
    assert memory() is None
    assert torch.equal(work.result(), big(1))
    other = parcel_of(three, big(2))
    memory = weakref.ref(other.memory[0])
    other.close()
    other.close()
    assert memory() is None
    assert "empty" in repr(other)


def test_a_parcel_that_is_closed_while_it_is_sent_arrives(three: Three) -> None:
    parcel = parcel_of(three, big(1))
    sent = pass_on(three, parcel)
    parcel.close()
    work = receive(three)
    three.settle()
    assert torch.equal(work.result(), big(1))
    sent.result()


# ---- made from an object


@pytest.mark.parametrize("name", OBJECTS)
def test_a_parcel_of_an_object(name: str) -> None:
    obj = OBJECTS[name]
    for inline_max in (0, 1 << 16):
        parcel = encode_parcel(obj, inline_max=inline_max)
        assert_same(decode_parcel(parcel), obj)


def test_a_parcel_has_memory_of_its_own_unless_asked_otherwise() -> None:
    tensor = torch.zeros(100_000)
    own, shown = encode_parcel(tensor), encode_parcel(tensor, copy=False)
    tensor.fill_(1)
    assert float(decode_parcel(own).sum()) == 0
    assert decode_parcel(shown).data_ptr() == tensor.data_ptr()
    read_only = b"x" * 100_000
    assert decode_parcel(encode_parcel(read_only, copy=False)) == read_only


def test_what_cannot_be_sent_cannot_be_put_into_a_parcel() -> None:
    with pytest.raises(NonContiguousTensor):
        encode_parcel(torch.zeros(4, 4).t())
    with pytest.raises(UnsupportedObject):
        encode_parcel({"f": lambda: None})
    with pytest.raises(UnsupportedObject):
        encode_parcel(torch.zeros(3, device="meta"))


def test_a_parcel_that_cannot_be_decoded_stays_whole() -> None:
    parcel = encode_parcel([Trap(3), torch.zeros(100_000)])
    with pytest.raises(UnsupportedObject):
        decode_parcel(parcel, allow_pickle=False)
    assert decode_parcel(parcel)[0] == Trap(3)


# ---- unpacked where it is


@pytest.mark.parametrize("name", OBJECTS)
def test_a_parcel_is_unpacked(three: Three, name: str) -> None:
    parcel = parcel_of(three, OBJECTS[name])
    work = three.to_b.exchange.unpack_parcel(parcel)
    three.settle()
    assert_same(work.result(), OBJECTS[name])
    assert parcel.closed
    with pytest.raises(UsageError, match="is empty"):
        three.to_b.exchange.unpack_parcel(parcel)


def test_a_long_pickle_is_read_in_a_private_thread_and_can_be_cancelled(three: Three, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiorlinf.link.unpacking._HEAVY_BYTES", 100)
    obj = {"numbers": list(range(2000)), "x": torch.randn(1000)}
    parcel = parcel_of(three, obj)
    work = three.to_b.exchange.unpack_parcel(parcel)
    assert not work.done()
    for use in (decode_parcel, three.to_b.exchange.unpack_parcel, lambda parcel: pass_on(three, parcel)):
        with pytest.raises(UsageError, match="being sent"):
            use(parcel)
    assert work.cancel()
    assert not parcel.closed
    again = three.to_b.exchange.unpack_parcel(parcel)
    three.settle()
    assert_same(again.result(), obj)


def test_a_parcel_that_is_closed_while_it_is_unpacked(three: Three, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiorlinf.link.unpacking._HEAVY_BYTES", 100)
    parcel = parcel_of(three, {"numbers": list(range(2000)), "x": torch.randn(1000)})
    work = three.to_b.exchange.unpack_parcel(parcel)
    parcel.close()
    three.settle()
    assert work.result()["numbers"] == list(range(2000))
    assert parcel.closed


def test_a_parcel_that_cannot_be_unpacked_stays_whole(three: Three, monkeypatch: pytest.MonkeyPatch) -> None:
    parcel = parcel_of(three, [Trap(1), torch.zeros(3000)])
    with monkeypatch.context() as patch:
        patch.delattr("tests.collective.test_parcels._spring")
        work = three.to_b.exchange.unpack_parcel(parcel)
        three.settle()
        with pytest.raises(UnsupportedObject, match="cannot be rebuilt here: AttributeError"):
            work.result()
    assert not parcel.closed
    sent, got = pass_on(three, parcel), receive(three)
    three.settle()
    assert got.result()[0] == Trap(1)
    sent.result()


# ---- real workers


@pytest.mark.asyncio
@pytest.mark.parametrize("backend", ["stream", "gloo", "shm"])
async def test_through_a_worker(backend: Any) -> None:
    async with init("a:0", backend=backend) as a, init("b:0", backend=backend) as b, init("c:0", backend=backend) as c:
        for obj in OBJECTS.values():
            sent = b.send(obj, "a:0", tag=TAG)
            parcel = await a._exchange.recv_parcel(b.address, 0, TAG)
            await sent
            passed = a._exchange.send_parcel(c.address, 0, TAG, parcel)
            assert_same(await c.recv("a:0", tag=TAG), obj)
            await passed
        gc.collect()
