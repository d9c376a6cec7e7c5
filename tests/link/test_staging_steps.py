"""Staging, step by step: time on the device stands still until the test lets it pass, and something happens meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from aiorlinf.config import CollectiveConfig
from aiorlinf.errors import AiorlinfError, BackendUnavailable, PeerLost, RemoteError, UsageError
from aiorlinf.link.memory import byte_tensor
from aiorlinf.link.staging import ready_now
from aiorlinf.testing.fake import FakeAccelerator
from aiorlinf.wire.leaves import Device
from aiorlinf.work.base import AsyncWork
from tests.link.stage import Side, StepHome, StepLoop, join

__all__: list[str] = []

VALUES = torch.arange(100, dtype=torch.int32)
FOREVER = 10_000


class Two:
    """Workers a:0 and b:0 and their link, moved by hand; so is the device."""

    def __init__(self) -> None:
        self.loop = StepLoop()
        self.home = StepHome(self.loop)
        config = CollectiveConfig(inline_max_bytes=64, window_bytes=2000, chunk_bytes=500)
        self.a, self.b = Side(self.home, "a:0", "b:0", config), Side(self.home, "b:0", "a:0", config)
        join(self.loop, self.a, self.b)
        self.a.up()
        self.b.up()
        self.closed = False

    def flow(self, rounds: int = 10) -> None:
        """Everything but the device."""
        for _ in range(rounds):
            self.home.run_thread()
            for side in (self.a, self.b):
                side.socket.read(1 << 20)
            self.loop.turn()
            self.loop.to_next_timer()

    def settle(self, fake: FakeAccelerator) -> None:
        """The device, too."""
        fake.drain()
        self.flow()
        fake.drain()
        self.flow()

    def send(self, obj: Any) -> AsyncWork[None]:
        work = self.a.exchange.send(self.a.other, 0, obj, 0, None)
        self.flow()
        return work

    def send_tensor(self, tensor: torch.Tensor) -> AsyncWork[None]:
        work = self.a.exchange.send_tensor(self.a.other, 0, tensor, 0, None)
        self.flow()
        return work

    def recv(self, device: str | None = None) -> AsyncWork[Any]:
        work = self.b.exchange.recv_to(self.b.other, 0, 0, None, device)
        self.flow()
        return work

    def recv_tensor(self, out: torch.Tensor) -> AsyncWork[torch.Tensor]:
        work = self.b.exchange.recv_tensor(self.b.other, 0, out, 0, None)
        self.flow()
        return work

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for side in (self.a, self.b):
            side.link.end(lambda: PeerLost("over"))
        self.flow()
        self.home.close_nowait()
        self.loop.close()
        assert self.loop.problems == []


@pytest.fixture
def fake() -> Iterator[FakeAccelerator]:
    with FakeAccelerator(2, self_moving=False) as fake:
        yield fake
        fake.drain()
        gc.collect()


@pytest.fixture
def two(fake: FakeAccelerator) -> Iterator[Two]:
    two = Two()
    yield two
    two.close()


def holds(fake: FakeAccelerator, tensor: torch.Tensor, values: torch.Tensor = VALUES) -> bool:
    return torch.equal(tensor if tensor.is_cpu else fake.read(tensor), values)


def error_of(work: AsyncWork[Any]) -> BaseException:
    error = work.exception()
    assert error is not None
    return error


def test_a_work_is_done_when_its_events_have_happened(two: Two, fake: FakeAccelerator) -> None:
    sent, got = two.send([fake.late(VALUES, ticks=50)]), two.recv()
    fake.step(49)
    two.flow()
    assert not sent.done()
    fake.step(10)
    two.flow()
    assert not got.done()
    fake.drain()
    two.flow()
    assert sent.done()
    assert holds(fake, got.result()[0])


def test_messages_behind_it_wait_for_their_turn(two: Two, fake: FakeAccelerator) -> None:
    slow = two.send([fake.late(VALUES, ticks=FOREVER)])
    quick = two.send("after it")
    first, second = two.recv(), two.recv()
    assert not first.done()
    two.settle(fake)
    assert holds(fake, first.result()[0])
    assert second.result() == "after it"
    assert slow.done()
    assert quick.done()


def test_a_send_cancelled_while_the_device_is_busy(two: Two, fake: FakeAccelerator) -> None:
    sent, got = two.send([fake.late(VALUES, ticks=FOREVER)]), two.recv()
    sent.cancel()
    two.flow()
    assert sent.cancelled()
    two.send("the next one")
    two.settle(fake)
    assert got.result() == "the next one"
    gc.collect()
    assert fake.memory(0)[0] == fake.memory(0)[1]


def test_a_receive_cancelled_while_it_lands(two: Two, fake: FakeAccelerator) -> None:
    sent = two.send([fake.tensor(VALUES)])
    fake.drain()
    two.flow()
    got = two.recv()
    assert not got.done()
    got.cancel()
    again = two.recv("fake:1")
    two.settle(fake)
    assert holds(fake, again.result()[0])
    assert again.result()[0].device == torch.device("fake", 1)
    assert sent.done()


@pytest.mark.parametrize("source", ["cpu", "fake"])
@pytest.mark.parametrize("moment", ["under way", "there"])
def test_a_tensor_whose_receive_is_cancelled(two: Two, fake: FakeAccelerator, source: str, moment: str) -> None:
    out = fake.late(torch.zeros_like(VALUES), ticks=20)
    got = two.recv_tensor(out)
    sent = two.send_tensor(fake.tensor(VALUES) if source == "fake" else VALUES)
    if moment == "there":
        two.settle(fake)
        assert got.done()
    else:
        fake.step(2)
        two.flow()
        assert not got.done()
    got.cancel()
    two.flow()
    if moment == "there":
        out.zero_()  # it is the caller's again; what was given back is a copy
    into_cpu = torch.zeros_like(VALUES)
    again = two.recv_tensor(into_cpu if moment == "there" else fake.tensor(torch.zeros_like(VALUES), 1))
    two.settle(fake)
    assert holds(fake, again.result())
    assert sent.done()


def test_given_back_to_another_device(two: Two, fake: FakeAccelerator) -> None:
    got = two.recv_tensor(fake.tensor(torch.zeros_like(VALUES)))
    two.send_tensor(fake.tensor(VALUES))
    two.settle(fake)
    got.cancel()
    again = two.recv_tensor(fake.tensor(torch.zeros_like(VALUES), 1))
    two.settle(fake)
    assert holds(fake, again.result())


@pytest.mark.parametrize("call", ["pinned", "copy", "query", "record"])
def test_a_device_that_fails_on_the_way_out(two: Two, fake: FakeAccelerator, call: str) -> None:
    tensor = fake.tensor(VALUES)
    got = two.recv()
    fake.fail_next(call)
    if call == "record":
        with pytest.raises(RuntimeError, match="the test says so"):
            two.send([tensor])
    else:
        sent = two.send([tensor])
        two.settle(fake)
        assert isinstance(error_of(sent), BackendUnavailable)
        assert "the test says so" in str(error_of(sent))
        assert isinstance(error_of(got), RemoteError)
        got = two.recv()
    two.send([tensor])
    two.settle(fake)
    assert holds(fake, got.result()[0])


@pytest.mark.parametrize("call", ["empty", "copy", "query"])
def test_a_device_that_fails_on_the_way_in(two: Two, fake: FakeAccelerator, call: str) -> None:
    sent = two.send([fake.tensor(VALUES)])
    two.settle(fake)
    fake.fail_next(call)
    got = two.recv()
    two.settle(fake)
    assert isinstance(error_of(got), BackendUnavailable)
    assert "the test says so" in str(error_of(got))
    assert sent.done()
    again = two.recv()
    two.send([fake.tensor(VALUES)])
    two.settle(fake)
    assert holds(fake, again.result()[0])


def test_a_sender_hears_that_the_receiver_has_no_room(two: Two, fake: FakeAccelerator) -> None:
    got = two.recv_tensor(fake.tensor(torch.zeros_like(VALUES)))
    sent = two.send_tensor(fake.tensor(VALUES))
    fake.fail_next("copy", torch.OutOfMemoryError("no room"))
    fake.fail_next("copy", torch.OutOfMemoryError("no room"))
    two.settle(fake)
    assert isinstance(error_of(got), AiorlinfError)
    assert isinstance(error_of(sent), AiorlinfError)


def test_the_link_ends_while_the_device_is_busy(two: Two, fake: FakeAccelerator) -> None:
    leaving, got = two.send([fake.late(VALUES, ticks=FOREVER)]), two.recv()
    two.a.link.end(lambda: PeerLost("gone"))
    two.flow()
    assert isinstance(error_of(leaving), PeerLost)
    assert isinstance(error_of(got), PeerLost)
    two.settle(fake)
    gc.collect()
    assert fake.memory(0)[0] == fake.memory(0)[1]


def test_the_link_ends_while_it_lands(two: Two, fake: FakeAccelerator) -> None:
    two.send([fake.tensor(VALUES)])
    two.settle(fake)
    got = two.recv()
    assert not got.done()
    two.a.link.end(lambda: PeerLost("gone"))
    two.flow()
    two.settle(fake)
    assert holds(fake, got.result()[0])  # it was here already


def test_a_write_during_the_send_is_noticed(two: Two, fake: FakeAccelerator) -> None:
    tensor = fake.tensor(VALUES)
    sent, got = two.send([tensor]), two.recv()
    tensor.add_(1)
    assert [fault.text.partition(" on ")[0] for fault in fake.faults]
    fake.faults.clear()
    two.settle(fake)
    assert isinstance(error_of(sent), UsageError)
    assert isinstance(error_of(got), RemoteError)


def test_after_the_send_the_tensor_is_free_to_write(two: Two, fake: FakeAccelerator) -> None:
    tensor = fake.tensor(VALUES)
    sent = two.send([tensor])
    two.settle(fake)
    assert sent.done()
    tensor.zero_()
    got = two.recv()
    two.settle(fake)
    assert holds(fake, got.result()[0])


def test_a_receiver_without_an_accelerator(two: Two, fake: FakeAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = two.send([fake.tensor(VALUES), VALUES])
    two.settle(fake)
    monkeypatch.setattr("aiorlinf.link.staging.accelerator", lambda: None)
    got = two.recv()
    two.flow()
    first, second = got.result()
    assert first.is_cpu
    assert torch.equal(first, VALUES)
    assert torch.equal(second, VALUES)
    assert sent.done()


def test_the_default_device_of_a_worker(two: Two, fake: FakeAccelerator) -> None:
    landing = two.b.link.receiver.delivery.landing
    for device in ("cpu", "fake:1"):
        landing.default = torch.device(device)
        got = two.recv()
        two.send([fake.tensor(VALUES)])
        two.settle(fake)
        assert got.result()[0].device == torch.device(device)
        assert holds(fake, got.result()[0])


def test_a_receive_in_the_order_of_the_stream(two: Two, fake: FakeAccelerator) -> None:
    two.send([fake.tensor(VALUES)])
    fake.drain()
    two.flow()
    mine = fake.new_stream()
    fake.set_stream(mine)
    got = two.b.exchange.recv_to(two.b.other, 0, 0, None, None)
    assert got.wait_stream() is got
    two.flow()
    assert got.done()
    assert mine.queue  # the device has done nothing yet
    tensor = got.result()[0]
    fake.launch("a use in the order of the stream", mine, lambda: None, reads=[tensor], ticks=FOREVER)
    assert holds(fake, tensor)


def test_a_tensor_received_in_the_order_of_the_stream(two: Two, fake: FakeAccelerator) -> None:
    out = fake.late(torch.zeros_like(VALUES))
    got = two.b.exchange.recv_tensor(two.b.other, 0, out, 0, None)
    got.wait_stream()
    two.send_tensor(VALUES)
    two.flow()
    assert got.done()
    assert holds(fake, out)


def test_a_send_in_the_order_of_the_stream(two: Two, fake: FakeAccelerator) -> None:
    tensor = fake.late(VALUES, ticks=50)
    sent = two.a.exchange.send(two.a.other, 0, [tensor], 0, None)
    sent.wait_stream()
    two.flow()
    assert sent.done()
    tensor.zero_()  # on the stream that waits for the copy
    got = two.recv()
    two.settle(fake)
    assert holds(fake, got.result()[0])


def test_what_is_in_cpu_memory_has_no_order(two: Two, fake: FakeAccelerator) -> None:
    sent = two.a.exchange.send(two.a.other, 0, [fake.late(VALUES, ticks=50), VALUES], 0, None)
    sent.wait_stream()
    two.flow()
    assert not sent.done()
    got = two.recv("cpu")
    got.wait_stream()
    two.settle(fake)
    two.settle(fake)
    assert sent.done()
    assert holds(fake, got.result()[0])


# ---- memory that is let go of before the device is through with it


def test_the_worker_is_closed_while_the_device_copies_out(two: Two, fake: FakeAccelerator) -> None:
    sent = two.send([fake.late(VALUES, ticks=FOREVER)])
    two.close()  # nobody but the device has the tensor now
    assert isinstance(error_of(sent), PeerLost)
    del sent
    gc.collect()
    assert fake.memory(0)[0] == fake.memory(0)[1]
    assert fake.faults == []


@pytest.mark.parametrize("target", ["cpu", "fake:1"])
def test_what_is_brought_elsewhere_is_dropped_where_it_was(two: Two, fake: FakeAccelerator, target: str) -> None:
    """Memory of a stream that is none of ours, as that of a pair between devices is."""
    source = byte_tensor(fake.tensor(VALUES))
    arrived: list[torch.Tensor] = []

    def then(tensors: list[torch.Tensor] | None, error: Exception | None) -> None:
        assert tensors is not None, error
        arrived.extend(tensors)

    landing = two.b.link.receiver.delivery.landing
    assert landing.bring([source], [Device.OTHER], torch.device(target), then)
    del source
    gc.collect()
    assert fake.memory(0)[0] == fake.memory(0)[1]
    assert fake.faults == []
    two.settle(fake)
    assert holds(fake, arrived[0].view(torch.int32))


def test_what_is_filled_is_dropped_when_the_worker_is_closed(two: Two, fake: FakeAccelerator) -> None:
    out = fake.tensor(torch.zeros_like(VALUES))
    two.b.link.receiver.delivery.landing.fill(out, byte_tensor(VALUES), ready_now(out), lambda error: None)
    two.close()  # nobody but the device has the tensor now
    del out
    gc.collect()
    assert fake.memory(0)[0] == fake.memory(0)[1]
    assert fake.faults == []


def test_another_stream_uses_what_was_received(two: Two, fake: FakeAccelerator) -> None:
    """One that is current neither at the receive nor when the message comes, but where `wait_stream` is called."""
    two.send([fake.tensor(VALUES)])
    fake.drain()
    two.flow()
    usual, mine = fake.current_stream(0), fake.new_stream()
    got = two.b.exchange.recv_to(two.b.other, 0, 0, None, None)
    fake.set_stream(mine)
    got.wait_stream()
    fake.set_stream(usual)
    two.flow()
    fake.launch("a use of it", mine, lambda: None, reads=[got.result()[0]], ticks=FOREVER)
    del got
    fake.step(20)  # the copy is over, the use is not
    two.flow()
    gc.collect()
    assert fake.memory(0)[0] == fake.memory(0)[1]
    assert fake.faults == []


def test_the_memory_of_another_stream_is_given_back_and_dropped(two: Two, fake: FakeAccelerator) -> None:
    mine = fake.new_stream()
    out = fake.late(torch.zeros_like(VALUES), stream=mine)
    fake.wait(fake.current_stream(0), fake.record(mine))
    got = two.recv_tensor(out)
    two.send_tensor(fake.tensor(VALUES))
    two.settle(fake)
    assert got.done()
    got.cancel()  # it is copied now, for whoever receives next
    del out, got
    gc.collect()
    assert fake.faults == []
    again = two.recv_tensor(fake.tensor(torch.zeros_like(VALUES)))
    two.settle(fake)
    assert holds(fake, again.result())


# ---- without one of the waits


def everything(two: Two, fake: FakeAccelerator) -> bool:
    """A bit of everything that waits for events; whether it came to a good end."""
    good = True
    sent, got = two.send([fake.late(VALUES, ticks=20), fake.late(VALUES, 1, ticks=30)]), two.recv()
    two.settle(fake)
    good &= sent.done() and holds(fake, got.result()[0]) and holds(fake, got.result()[1])
    received = got.result()[0]
    fake.launch("a use of what was received", fake.current_stream(0), lambda: None, reads=[received], ticks=FOREVER)
    del received, got
    gc.collect()
    usual, other = fake.current_stream(0), fake.new_stream()
    fake.set_stream(other)
    out = fake.tensor(torch.zeros_like(VALUES))  # memory of the usual one
    fake.write(out, torch.zeros_like(VALUES), ticks=20)
    into = two.recv_tensor(out)
    fake.set_stream(usual)
    two.send_tensor(fake.late(VALUES, ticks=20))
    two.settle(fake)
    into.cancel()  # nobody has taken the value
    out.zero_()
    again = two.recv_tensor(fake.late(torch.zeros_like(VALUES), 1, ticks=20))
    two.settle(fake)
    return good and holds(fake, again.result())


def run(mutate: Any = None) -> tuple[bool, list[str]]:
    fake = FakeAccelerator(2, self_moving=False)
    if mutate is not None:
        mutate(fake)
    with fake:
        two = Two()
        try:
            good = everything(two, fake)
        except AssertionError:
            good = False
        faults = [fault.text for fault in fake.faults]
        two.close()
        gc.collect()
        fake.drain()
        fake.faults.clear()
    return good, faults


def calls_of(name: str) -> int:
    count = 0

    def counting(fake: FakeAccelerator) -> None:
        original = getattr(fake, name)

        def call(*args: Any) -> Any:
            nonlocal count
            count += 1
            return original(*args)

        setattr(fake, name, call)

    assert run(counting) == (True, [])
    return count


def test_with_all_waits_it_is_good_and_without_any_one_of_them_it_is_not() -> None:
    """Each call of `Runtime.wait` is left out once: two producing streams and another one (`Departure`), the stream that used a buffer
    before it is received into (`Landing.fill`), the one that writes to it after a cancelled receive (`Landing.snapshot`), and the stream
    of one device before the other device reads what it wrote.
    """
    survivors = []
    assert calls_of("wait") == 7
    for skipped in range(7):

        def skipping(fake: FakeAccelerator, skipped: int = skipped) -> None:
            original, left = fake.wait, iter(range(1 << 30))

            def wait(stream: Any, event: Any) -> None:
                if next(left) != skipped:
                    original(stream, event)

            fake.wait = wait  # type: ignore[method-assign]

        if run(skipping) == (True, []):
            survivors.append(skipped)
    assert survivors == []


def test_without_asking_for_the_events_it_is_not_good() -> None:
    def hasty(fake: FakeAccelerator) -> None:
        fake.query = lambda event: True  # type: ignore[method-assign]

    good, faults = run(hasty)
    assert not good or faults


def test_without_holding_what_was_received_for_its_user_it_is_not_good() -> None:
    def forgetful(fake: FakeAccelerator) -> None:
        fake.hold = lambda tensor, stream: None  # type: ignore[method-assign]

    _, faults = run(forgetful)
    assert any("is freed while a use of what was received" in fault for fault in faults)
