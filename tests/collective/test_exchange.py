"""Point-to-point operations: what is an error at the call, what a time limit says, and calls from other threads."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from aiorlinf import init
from aiorlinf.config import CollectiveConfig
from aiorlinf.errors import (
    ClosedError,
    DeadlineExceeded,
    ForkedHandle,
    NonContiguousTensor,
    UnsupportedObject,
    UsageError,
)
from aiorlinf.work.base import AsyncWork
from tests.link.stage import Side, StepHome, StepLoop, join

__all__: list[str] = []


class Two:
    """Workers a:0 and b:0, moved by hand."""

    def __init__(self, **config: Any) -> None:
        self.loop = StepLoop()
        self.home = StepHome(self.loop)
        settings = CollectiveConfig(**{"inline_max_bytes": 100, "window_bytes": 5000, "chunk_bytes": 500, **config})
        self.a, self.b = Side(self.home, "a:0", "b:0", settings), Side(self.home, "b:0", "a:0", settings)
        join(self.loop, self.a, self.b)

    def up(self) -> None:
        self.a.up()
        self.b.up()

    def flow(self, rounds: int = 10) -> None:
        for _ in range(rounds):
            for side in (self.a, self.b):
                if not side.link.usable or side.link.identity is not None:
                    side.socket.read(1 << 20)
            self.loop.turn()

    def send(self, obj: Any, tag: int = 0, timeout: float | None = None) -> AsyncWork[None]:
        return self.a.exchange.send(self.a.other, 0, obj, tag, timeout)

    def send_tensor(self, tensor: torch.Tensor, tag: int = 0, timeout: float | None = None) -> AsyncWork[None]:
        return self.a.exchange.send_tensor(self.a.other, 0, tensor, tag, timeout)

    def recv(self, tag: int = 0, timeout: float | None = None) -> AsyncWork[Any]:
        return self.b.exchange.recv(self.b.other, 0, tag, timeout)

    def recv_tensor(self, out: torch.Tensor, tag: int = 0, timeout: float | None = None) -> AsyncWork[torch.Tensor]:
        return self.b.exchange.recv_tensor(self.b.other, 0, out, tag, timeout)

    def close(self) -> None:
        for side in (self.a, self.b):
            side.link.end(lambda: ClosedError("over"))
        self.loop.turn()
        self.home.close_nowait()
        self.loop.close()
        assert self.loop.problems == []


@pytest.fixture
def two() -> Iterator[Two]:
    """Their link is up."""
    two = Two()
    two.up()
    yield two
    two.close()


# ---- at the call


@pytest.mark.parametrize("tag", [-1, 1 << 32, 1.0, True, "0", None])
def test_what_is_no_tag(two: Two, tag: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: two.send(1, tag),
        lambda: two.recv(tag),
        lambda: two.send_tensor(torch.ones(1), tag),
        lambda: two.recv_tensor(torch.ones(1), tag),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="is not a whole number from 0 to 4294967295"):
            call()


def test_every_whole_number_of_32_bits_is_a_tag(two: Two) -> None:
    for tag in (0, 1, (1 << 32) - 1):
        two.send(tag, tag)
        two.flow()
        assert two.recv(tag).result() == tag


def test_a_closed_worker_refuses(two: Two) -> None:
    two.a.exchange.close()
    two.b.exchange.close()
    calls: list[Callable[[], object]] = [
        lambda: two.send(1),
        lambda: two.send_tensor(torch.ones(1)),
        two.recv,
        lambda: two.recv_tensor(torch.ones(1)),
    ]
    for call in calls:
        with pytest.raises(ClosedError):
            call()


def test_a_handle_from_before_a_fork_refuses(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: real + 1)
    with pytest.raises(ForkedHandle, match=r"a:0 was made before a fork .*aiorlinf\.init"):
        two.send(1)


def test_tensors_that_cannot_go(two: Two) -> None:
    strided = torch.ones(4, 4).t()
    with pytest.raises(NonContiguousTensor, match=r"obj\['a'\]"):
        two.send({"a": strided})
    with pytest.raises(NonContiguousTensor, match="tensor is not contiguous"):
        two.send_tensor(strided)
    with pytest.raises(NonContiguousTensor, match=r"out is not contiguous .*receive into"):
        two.recv_tensor(strided)
    meta = torch.ones(1000, device="meta")
    calls: list[Callable[[], object]] = [lambda: two.send([meta]), lambda: two.send_tensor(meta), lambda: two.recv_tensor(meta)]
    for call in calls:
        with pytest.raises(UnsupportedObject):
            call()
    with pytest.raises(UnsupportedObject, match="lazy conjugate or negative view"):
        two.recv_tensor(torch.ones(3, dtype=torch.complex64).conj())
    no_tensor: Any = [1, 2]
    with pytest.raises(UnsupportedObject, match=r"is a list, not a torch\.Tensor"):
        two.send_tensor(no_tensor)


def test_nothing_is_sent_by_a_call_that_raises(two: Two) -> None:
    with pytest.raises(UnsupportedObject):
        two.send(lambda: 1)
    two.send("after")
    two.flow()
    assert two.recv().result() == "after"


@pytest.mark.parametrize("obj", [torch.ones(300), [torch.ones(100), torch.ones(200)], "x" * 1200, {"a": b"y" * 1100}])
def test_messages_over_the_limit(obj: Any) -> None:
    two = Two(max_message_bytes=1000)
    two.up()
    with pytest.raises(UsageError, match=r"over the limit.*max_message_bytes is 1000"):
        two.send(obj)
    two.send("small enough")
    two.flow()
    assert two.recv().result() == "small enough"
    two.close()


def test_a_tensor_over_the_limit() -> None:
    two = Two(max_message_bytes=1000)
    two.up()
    with pytest.raises(UsageError, match="over the limit"):
        two.send_tensor(torch.ones(300))
    two.close()


def test_a_description_over_the_limit() -> None:
    two = Two(max_manifest_bytes=2000)
    two.up()
    with pytest.raises(UsageError, match="without its tensors and arrays takes"):
        two.send({"text": "x" * 3000, "t": torch.ones(200)})
    two.close()


# ---- time limits


def too_late(work: AsyncWork[Any]) -> DeadlineExceeded:
    """The error it ended with."""
    error = work.exception()
    assert isinstance(error, DeadlineExceeded)
    return error


def expire(two: Two) -> None:
    """Let the time of all timers pass. Works look at the real clock."""
    for _ in range(100):
        if not two.loop.to_next_timer():
            return
        two.loop.turn()


def test_a_limit_while_there_is_no_link() -> None:
    two = Two()
    works = [two.send("x", timeout=0.0), two.recv(timeout=0.0)]
    expire(two)
    for work in works:
        error = too_late(work)
        assert error.step == "connect"
        assert "no connection to" in str(error)
    two.close()


def test_a_limit_while_the_peer_does_not_receive(two: Two) -> None:
    work = two.send(torch.ones(2000), timeout=0.0)
    two.flow(2)
    expire(two)
    error = too_late(work)
    assert (error.step, error.bytes_done, error.bytes_expected) == ("match", 0, 8000)
    assert "b:0 is alive but has posted no matching receive" in str(error)


def test_a_limit_while_the_peer_does_not_send(two: Two) -> None:
    work = two.recv(timeout=0.0)
    expire(two)
    error = too_late(work)
    assert error.step == "match"
    assert "a:0 is alive but has sent nothing that matches" in str(error)
    two.send("later")
    two.flow()
    assert two.recv().result() == "later", "what comes after it goes to the next receive"


def under_way(receiving: AsyncWork[Any]) -> bool:
    """Part of its payload is there."""
    message = receiving._detail.message
    return message is not None and message.content.sink is not None and message.content.sink.done > 0


def test_a_limit_in_the_middle_of_a_transfer(two: Two) -> None:
    receiving = two.recv(timeout=0.02)
    two.send(torch.ones(100_000))
    while not under_way(receiving):
        two.flow(1)
    while not receiving.done():
        expire(two)
    error = too_late(receiving)
    assert error.step == "transfer"
    assert error.bytes_expected == 400_000
    assert error.bytes_done
    again = two.recv()
    for _ in range(2000):
        if again.done():
            break
        two.flow(1)
    assert torch.equal(again.result(), torch.ones(100_000)), "the message goes to the next receive"


def test_a_limit_that_is_kept_leaves_no_timer(two: Two) -> None:
    work = two.recv(timeout=100.0)
    two.send("in time")
    two.flow()
    assert work.result() == "in time"
    while two.loop.to_next_timer():
        assert two.loop.now < 50
        two.loop.turn()


# ---- other threads


def elsewhere(fn: Callable[[], Any]) -> Any:
    """What it returns in another thread."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(fn()))
    thread.start()
    thread.join()
    return results[0]


def test_a_call_from_another_thread_is_handed_over(two: Two) -> None:
    sent = elsewhere(lambda: two.send("from a thread"))
    received = elsewhere(two.recv)
    assert not received.done()
    two.flow()
    assert received.result() == "from a thread"
    sent.result()


def test_errors_of_arguments_are_raised_in_the_thread_that_calls(two: Two) -> None:
    def call() -> type[BaseException]:
        try:
            two.send(1, -1)
        except UsageError as error:
            return type(error)
        raise AssertionError("no error")

    assert elsewhere(call) is UsageError


@pytest.mark.parametrize("obj", ["small", torch.ones(500)], ids=["small", "large"])
def test_what_is_cancelled_before_it_is_handed_over_is_not_sent(two: Two, obj: Any) -> None:
    work = elsewhere(lambda: two.send(obj))
    assert work.cancel()
    two.send("the next")
    two.flow()
    assert two.recv().result() == "the next"
    received = elsewhere(two.recv)
    assert received.cancel()
    two.send("another")
    two.flow()
    assert two.recv().result() == "another"


# ---- with workers


@pytest.mark.asyncio
async def test_a_budget_of_a_chain_holds_for_what_its_steps_begin() -> None:
    async with init("a:0") as a, init("b:0") as b:
        sent = b.send("go", "a:0")
        chain = a.recv("b:0", timeout=0.2).then(lambda _: a.recv("b:0", tag=7))
        with pytest.raises(DeadlineExceeded):
            await chain
        await sent
        await b.send("later", "a:0", tag=7)
        assert await a.recv("b:0", tag=7) == "later", "the step's own receive had ended, too"


@pytest.mark.asyncio
async def test_a_limit_of_zero_is_over_at_once_and_takes_nothing() -> None:
    async with init("a:0") as a, init("b:0") as b:
        await asyncio.gather(b.send("first", "a:0"), a.recv("b:0"))
        with pytest.raises(DeadlineExceeded):
            await a.recv("b:0", timeout=0.0)
        await b.send("second", "a:0")
        assert await a.recv("b:0", timeout=20) == "second"
