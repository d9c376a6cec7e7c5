"""The fake accelerator: its tensors are torch's, and it objects to what would go wrong on a real device."""

from __future__ import annotations

import gc
import time

import pytest
import torch

from aiorlinf.testing.fake import FakeAccelerator, FakeEvent
from aiorlinf.testing.fake.memory import cpu_alias
from tests.peers import Peer, Pipe, process

__all__: list[str] = []


def texts(fake: FakeAccelerator) -> list[str]:
    """What was wrong, once; the test means to cause it."""
    found, fake.faults[:] = [fault.text for fault in fake.faults], []
    return found


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def test_tensors_are_torchs_own() -> None:
    with FakeAccelerator(2) as fake:
        tensor = fake.tensor(torch.arange(6.0).reshape(2, 3))
        assert type(tensor) is torch.Tensor
        assert (tensor.device, tensor.is_cpu, tensor.is_contiguous(), tensor._version) == (torch.device("fake", 0), False, True, 0)
        assert torch.equal(fake.read(tensor[1]), torch.tensor([3.0, 4.0, 5.0]))
        assert tensor.view(-1).data_ptr() == tensor.data_ptr()
        with pytest.raises(TypeError):
            tensor.numpy()
        assert torch.nn.Parameter(tensor).device == tensor.device
        assert torch.zeros(2, device="fake:1").device == torch.device("fake", 1)


def test_operations_are_done_in_their_turn() -> None:
    with FakeAccelerator(ticks=(5, 5), self_moving=False) as fake:
        tensor = fake.late(torch.ones(3))
        double = tensor * 2
        double.add_(1)
        event = fake.record(fake.current_stream(0))
        assert not fake.query(event)
        fake.step(14)
        assert not fake.query(event)
        fake.step()
        assert fake.query(event)
        assert double.tolist() == [3, 3, 3]
        assert double._version == 1
        assert float(double.sum()) == 9


def test_memory_goes_with_the_last_view() -> None:
    with FakeAccelerator() as fake:
        tensor = fake.tensor(torch.ones(8))
        view = tensor[2:]
        host = fake.pinned(8)[4:]
        assert fake.memory(0)[0] == fake.memory(0)[1] - 32
        assert fake.blocks == 2
        del tensor, host
        gc.collect()
        assert fake.blocks == 1
        del view
        gc.collect()
        assert fake.blocks == 0


def test_a_stream_that_does_not_wait() -> None:
    with FakeAccelerator() as fake:
        side, out = fake.side_stream(0, "test"), fake.pinned(16)
        tensor = fake.late(torch.ones(4))
        event = fake.record(fake.current_stream(0))
        fake.copy(out, as_bytes(tensor), side)
        assert texts(fake) == ["a copy on side stream test of fake:0 reads memory without waiting for a write on default stream of fake:0"]
        fake.wait(side, event)
        fake.copy(out, as_bytes(tensor), side)
        assert texts(fake) == []
        fake.synchronise(side)


def test_to_have_asked_is_to_have_waited() -> None:
    with FakeAccelerator() as fake:
        tensor = fake.late(torch.ones(4))
        event = fake.record(fake.current_stream(0))
        while not fake.query(event):
            pass
        out = fake.pinned(16)
        side = fake.side_stream(0, "test")
        fake.copy(out, as_bytes(tensor), side)
        fake.look(out)
        assert texts(fake) == ["the program looks without knowing that a copy on side stream test of fake:0 is over"]
        fake.synchronise(side)
        fake.look(out)
        assert out.view(torch.float32).tolist() == [1, 1, 1, 1]


def test_a_read_before_the_event_sees_no_values() -> None:
    with FakeAccelerator(self_moving=False) as fake:
        out = fake.pinned(4)
        fake.copy(out, as_bytes(fake.tensor(torch.ones(1))), fake.current_stream(0))
        assert bytes(out.numpy()) == b"\xa5" * 4


def test_writing_what_another_stream_still_reads() -> None:
    with FakeAccelerator() as fake:
        tensor, side = fake.tensor(torch.ones(4)), fake.new_stream()
        out = fake.pinned(16)
        fake.copy(out, as_bytes(tensor), side)
        tensor.fill_(2)
        assert [text.partition(" on ")[0] for text in texts(fake)] == ["aten.fill_.Scalar"]


def test_freeing_what_another_stream_still_uses() -> None:
    with FakeAccelerator() as fake:
        side, out = fake.new_stream(), fake.pinned(16)
        for held in (False, True):
            tensor = fake.tensor(torch.ones(4))
            fake.copy(out, as_bytes(tensor), side)
            if held:
                fake.hold(tensor, side)
            del tensor
            gc.collect()
            assert len(texts(fake)) == (0 if held else 1)


def test_host_memory_must_be_pinned_and_devices_must_fit() -> None:
    with FakeAccelerator(2) as fake:
        tensor = fake.tensor(torch.ones(4))
        fake.copy(torch.empty(16, dtype=torch.uint8), as_bytes(tensor), fake.current_stream(0))
        fake.copy(fake.pinned(16), as_bytes(tensor), fake.current_stream(1))
        assert texts(fake) == [
            "a copy from or to host memory that is not pinned",
            "a copy between other devices on default stream of fake:1",
        ]


def test_shared_memory_and_its_end() -> None:
    with FakeAccelerator() as fake:
        tensor = fake.tensor(torch.arange(4.0))
        shared = fake.export(tensor[1:])
        opened = fake.open(shared, 0)
        assert fake.read(opened.view(torch.float32)).tolist() == [1, 2, 3]
        del tensor
        gc.collect()
        assert texts(fake) == [], "what is open keeps nothing of the owner's, nor hinders him"
        with pytest.raises(RuntimeError):
            fake.open(shared, 0)
        assert texts(fake) == ["memory is opened that was freed meanwhile"]


def test_failures_that_the_test_asks_for() -> None:
    with FakeAccelerator() as fake:
        fake.fail_next("pinned")
        with pytest.raises(RuntimeError, match="the test says so"):
            fake.pinned(4)
        fake.pinned(4)


def test_faults_fail_at_the_end() -> None:
    with pytest.raises(AssertionError, match="not pinned"), FakeAccelerator() as fake:
        fake.copy(torch.empty(4, dtype=torch.uint8), as_bytes(fake.tensor(torch.ones(1))), fake.current_stream(0))
    with pytest.raises(AssertionError, match="wait for each other"), FakeAccelerator(2) as fake:
        one, two = fake.new_stream(), fake.new_stream()
        fake.wait(one, type(fake.record(two))(99, {}))


# ---- between processes


def share(pipe: Pipe, count: int) -> None:
    """The process that has the memory, and does what it is told."""
    with FakeAccelerator(between=True) as fake:
        for number in range(1, count + 1):
            tensor = fake.late(torch.full((1000,), number, dtype=torch.int32), ticks=20_000)  # ten seconds
            shared = fake.export(tensor)
            event, handle = fake.export_event(fake.current_stream(0))
            pipe.say((shared, handle))
            while (told := pipe.hear()) != "next":
                if told == "free it":
                    del tensor
                fake.drain()
                pipe.say("done")
            del event


def told(peer: Peer, what: str) -> None:
    peer.say(what)
    assert peer.wait_hear() == "done"


def copied(fake: FakeAccelerator, opened: torch.Tensor, event: FakeEvent | None) -> torch.Tensor:
    """What lies there, once the event has happened."""
    stream = fake.side_stream(0, "in")
    if event is not None:
        fake.wait(stream, event)
    out = fake.empty(opened.numel(), 0, stream)
    fake.copy(out, opened, stream)
    fake.synchronise(stream)
    return cpu_alias(out).view(torch.int32).clone()


def test_memory_and_events_of_another_process() -> None:
    with process(share, 3) as peer, FakeAccelerator(between=True) as fake:
        for number in range(1, 4):
            shared, handle = peer.wait_hear()
            event, opened = fake.open_event(handle, 0), fake.open(shared, 0)
            assert not copied(fake, opened, None).eq(number).any(), "who does not wait for the event reads too early"
            told(peer, "hurry")
            assert copied(fake, opened, event).eq(number).all()
            told(peer, "free it")
            assert not copied(fake, opened, event).eq(number).any(), "others have the memory now"
            with pytest.raises(RuntimeError, match="no such memory"):
                fake.open(shared, 0)
            assert texts(fake) == ["memory of another process is opened that was freed meanwhile"]
            del opened, event
            assert fake.mappings == 0
            peer.say("next")
            with pytest.raises(RuntimeError, match="no such event"):
                for _ in range(1000):
                    fake.open_event(handle, 0)
                    time.sleep(0.01)
            assert texts(fake) == ["an event of another process is opened that was let go of meanwhile"]
        peer.wait_result()


def test_a_stream_waits_for_another_process() -> None:
    with process(share, 1) as peer, FakeAccelerator(between=True) as fake:
        shared, handle = peer.wait_hear()
        event, opened = fake.open_event(handle, 0), fake.open(shared, 0)
        stream = fake.side_stream(0, "in")
        fake.wait(stream, event)
        out = fake.empty(opened.numel(), 0, stream)
        fake.copy(out, opened, stream)
        for _ in range(50):
            fake.step()
        assert stream.queue
        told(peer, "hurry")
        fake.synchronise(stream)
        assert cpu_alias(out).view(torch.int32).eq(1).all()
        del opened
        peer.say("next")
        peer.wait_result()


def test_what_another_process_has_is_not_closed_while_it_is_read() -> None:
    with process(share, 1) as peer, FakeAccelerator(between=True) as fake:
        shared, _ = peer.wait_hear()
        opened = fake.open(shared, 0)
        stream = fake.side_stream(0, "in")
        out = fake.empty(opened.numel(), 0, stream)
        with fake._lock:  # time stands still
            fake.copy(out, opened, stream)
            del opened
        assert any("is freed while a copy" in text for text in texts(fake))
        peer.say("next")
        peer.wait_result()


def fails(*_: object) -> object:
    raise ValueError("the program's own")


def test_memory_that_goes_in_the_middle_of_an_exception() -> None:
    """What a failing test has in hand: the exception has to come through, and the process has to live."""
    with FakeAccelerator() as fake:
        for _ in range(50):
            with pytest.raises(ValueError, match="the program's own"):
                fails(fake.tensor(torch.ones(3)), fails())
        gc.collect()
        assert fake.memory(0)[0] == fake.memory(0)[1]
        assert fake.blocks == 0
