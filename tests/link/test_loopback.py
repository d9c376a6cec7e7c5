"""A link to oneself: the same rules, without a socket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aiorlinf.address import Identity, Incarnation
from aiorlinf.config import CollectiveConfig
from aiorlinf.errors import ClosedError, Mismatch
from aiorlinf.link.link import LinkState
from aiorlinf.link.loopback import Loopback
from aiorlinf.work.base import AsyncWork
from tests.hypothesis_profiles import examples
from tests.link.shapes import INLINE, OBJECTS, TENSORS, WINDOW, Shape
from tests.link.stage import Side, StepHome, StepLoop

__all__: list[str] = []

WHOLE = [shape for shape in OBJECTS if not shape.bomb]


class Alone:
    """A worker that talks to itself."""

    def __init__(self) -> None:
        self.loop = StepLoop()
        self.home = StepHome(self.loop)
        config = CollectiveConfig(inline_max_bytes=INLINE, window_bytes=WINDOW, chunk_bytes=256)
        self.side = Side(self.home, "a:0", "a:0", config)
        self.link = self.side.link
        self.loopback = Loopback(self.loop, self.link)

    def up(self) -> None:
        self.link.up(self.loopback, Identity(self.side.address, Incarnation(1)), WINDOW, None)

    def send(self, shape: Shape, number: int, tag: int = 0) -> AsyncWork[None]:
        obj, _ = shape.build(number)
        operation = self.side.exchange.send if shape.tensor is None else self.side.exchange.send_tensor
        return operation(self.side.other, 0, obj, tag, None)

    def recv(self, shape: Shape, tag: int = 0) -> AsyncWork[Any]:
        if shape.tensor is None:
            return self.side.exchange.recv(self.side.other, 0, tag, None)
        dtype, size = shape.tensor
        return self.side.exchange.recv_tensor(self.side.other, 0, torch.empty(size, dtype=dtype), tag, None)

    def rest(self) -> None:
        """Until nothing happens by itself any more."""
        for _ in range(10_000):
            while self.home.run_thread():
                pass
            if not self.loop.busy() and not self.loop.to_next_timer():
                return
            self.loop.turn()
        raise AssertionError("it does not come to rest")

    def close(self) -> None:
        self.link.end(lambda: ClosedError("over"))
        self.loop.turn()
        self.home.close_nowait()
        self.loop.close()
        assert self.loop.problems == []


@pytest.fixture
def alone() -> Iterator[Alone]:
    """It is up."""
    alone = Alone()
    alone.up()
    yield alone
    alone.close()


def same(value: Any, shape: Shape, number: int) -> bool:
    """It is the object of this number."""
    tensors, others = shape.parts(value)
    expected_tensors, expected_others = shape.parts(shape.build(number)[0])
    return others == expected_others and all(torch.equal(*pair) for pair in zip(tensors, expected_tensors, strict=True))


@pytest.mark.parametrize("receive_first", [False, True])
@pytest.mark.parametrize("shape", [*WHOLE, *TENSORS], ids=str)
def test_everything_comes_back_as_a_copy(alone: Alone, shape: Shape, receive_first: bool) -> None:
    early = alone.recv(shape) if receive_first else None
    sent = alone.send(shape, 7)
    if not receive_first:
        alone.rest()
    work = early or alone.recv(shape)
    alone.rest()
    assert same(work.result(), shape, 7)
    sent.result()


@pytest.mark.parametrize("shape", [TENSORS[0], OBJECTS[3]], ids=str)
def test_a_thousand_payloads_that_wait_for_their_receives(alone: Alone, shape: Shape) -> None:
    sent = [alone.send(shape, number) for number in range(1000)]
    alone.rest()
    received = [alone.recv(shape) for _ in range(1000)]
    alone.rest()
    for number, work in enumerate(received):
        assert same(work.result(), shape, number)
    for done in sent:
        done.result()


steps = st.one_of(
    st.tuples(st.just("send"), st.sampled_from([*WHOLE, *TENSORS]), st.integers(0, 1)),
    st.tuples(st.just("recv"), st.integers(0, 1)),
    st.tuples(st.just("turn")),
    st.tuples(st.just("thread")),
)


@settings(max_examples=examples(100))
@given(st.lists(steps, min_size=10, max_size=40))
def test_any_run(run: list[tuple[Any, ...]]) -> None:
    alone = Alone()
    alone.up()
    sent: list[list[tuple[Shape, int]]] = [[], []]
    received: list[list[AsyncWork[Any]]] = [[], []]
    works: list[AsyncWork[None]] = []
    for number, (name, *args) in enumerate(run):
        if name == "send":
            shape, tag = args
            works.append(alone.send(shape, number, tag))
            sent[tag].append((shape, number))
        elif name == "recv":
            (tag,) = args
            place = len(received[tag])
            if place < len(sent[tag]):
                received[tag].append(alone.recv(sent[tag][place][0], tag))
        elif name == "turn":
            alone.loop.turn()
        else:
            alone.home.run_thread()
    for tag in (0, 1):
        for shape, _ in sent[tag][len(received[tag]) :]:
            received[tag].append(alone.recv(shape, tag))
    alone.rest()
    for tag in (0, 1):
        for (shape, number), work in zip(sent[tag], received[tag], strict=True):
            assert same(work.result(), shape, number)
    for done in works:
        done.result()
    receiver, sender = alone.link.receiver, alone.link.sender
    assert receiver.opened == {}
    assert receiver.window.outstanding == 0
    assert sender.pending == {}
    assert sender._charged == sender._consumed
    alone.close()


def test_a_mismatch_fails_on_both_sides(alone: Alone) -> None:
    sent = alone.send(TENSORS[0], 1)
    received = alone.recv(OBJECTS[0])
    alone.rest()
    assert isinstance(sent.exception(), Mismatch)
    assert isinstance(received.exception(), Mismatch)


def test_sending_first_is_no_lock_out(alone: Alone) -> None:
    first, second = alone.send(TENSORS[0], 1), alone.send(TENSORS[0], 2)
    alone.rest()
    assert first.done()
    assert second.done()
    works = [alone.recv(TENSORS[0]), alone.recv(TENSORS[0])]
    alone.rest()
    for number, work in enumerate(works):
        assert same(work.result(), TENSORS[0], number + 1)


def test_a_goodbye_to_oneself_ends_the_link_and_leaves_what_has_come(alone: Alone) -> None:
    alone.send(OBJECTS[0], 1)
    waiting = alone.recv(OBJECTS[0], tag=5)
    alone.link.say_goodbye()
    alone.rest()
    assert alone.link.state is LinkState.ENDED
    assert waiting.exception() is not None
    kept = alone.recv(OBJECTS[0])
    assert same(kept.result(), OBJECTS[0], 1)


def test_nothing_is_delivered_after_an_abort(alone: Alone) -> None:
    alone.send(OBJECTS[0], 1)
    alone.link.end(lambda: ClosedError("over"))
    alone.rest()
    assert alone.link.receiver.messages == 0
