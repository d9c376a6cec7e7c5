"""A way around the stream whose every step the test decides: when it is ready, when bytes move, what breaks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from aiorlinf.errors import AiorlinfError, BackendUnavailable, ClosedError
from aiorlinf.wire.frames import Via

__all__ = ["STEPS", "LaneEnds", "PlannedLane"]

Then = Callable[[BaseException | None], None]

STEPS = ("ready", "unavailable", "move", "tell sender", "tell receiver", "break sender", "break receiver")
"""What `PlannedLane.step` can be told."""


class _Transfer(NamedTuple):
    leaves: list[torch.Tensor]
    then: Then


class PlannedLane:
    """Both ends of one direction: meets `link.ways.PayloadLane` and `link.payloads.ReceiveLane`.

    Like a pair of Gloo process groups it moves transfers in the order in which each side posted them, and fails all later ones
    of a generation when one has failed.
    """

    via = Via.GLOO

    def __init__(self, threshold: int) -> None:
        self.threshold = threshold
        self._generation = 0
        self._out = 0  # generation that each end can use, 0 for none
        self._in = 0
        self._closed = False
        self._preparing: deque[Callable[[AiorlinfError | None], None]] = deque()
        self._sends: deque[_Transfer] = deque()
        self._receives: deque[_Transfer] = deque()
        self._sent: deque[tuple[Then, BaseException | None]] = deque()
        self._received: deque[tuple[Then, BaseException | None]] = deque()

    # ---- the sender's end

    def ready(self) -> int | None:
        return self._out or None

    def prepare(self, then: Callable[[AiorlinfError | None], None]) -> None:
        if self._closed:
            then(ClosedError("the link is closed"))
        else:
            self._preparing.append(then)

    def send(self, generation: int, leaves: list[torch.Tensor], then: Then) -> None:
        if generation != self._out:
            then(BackendUnavailable("this pair is gone"))
        else:
            self._sends.append(_Transfer(leaves, then))

    def drop_out(self, generation: int, reason: str) -> None:
        if generation == self._out:
            self._break_out(reason)

    def _break_out(self, reason: str) -> None:
        self._out = 0
        while self._sends:
            self._sent.append((self._sends.popleft().then, RuntimeError(reason)))

    # ---- the receiver's end

    def receive(self, generation: int, leaves: list[torch.Tensor], then: Then) -> bool:
        if generation != self._in:
            return False
        self._receives.append(_Transfer(leaves, then))
        return True

    def drop_in(self, generation: int, reason: str) -> None:
        if generation == self._in:
            self._break_in(reason)

    def _break_in(self, reason: str) -> None:
        self._in = 0
        while self._receives:
            self._received.append((self._receives.popleft().then, RuntimeError(reason)))

    # ---- the test's side

    def step(self, name: str) -> bool:
        """Do one of `STEPS`; False if there was nothing to do."""
        if name in ("ready", "unavailable"):
            if not self._preparing:
                return False
            error: AiorlinfError | None = None
            if name == "ready":
                self._break_in("a newer pair is offered")
                self._generation += 1
                self._out = self._in = self._generation
            else:
                error = BackendUnavailable("no such luck")
            preparing, self._preparing = self._preparing, deque()
            for then in preparing:
                then(error)
            return True
        if name == "move":
            return self._move()
        if name in ("tell sender", "tell receiver"):
            told = self._sent if name == "tell sender" else self._received
            if not told:
                return False
            then_told, outcome = told.popleft()
            then_told(outcome)
            return True
        if name == "break sender":
            done = self._out != 0
            self._break_out("the connection of the pair broke")
            return done
        assert name == "break receiver"
        done = self._in != 0
        self._break_in("the connection of the pair broke")
        return done

    def _move(self) -> bool:
        if not self._sends or not self._receives or self._out != self._in:
            return False
        sent, received = self._sends.popleft(), self._receives.popleft()
        sizes = [leaf.numel() for leaf in sent.leaves]
        assert sizes == [leaf.numel() for leaf in received.leaves], "Gloo would end the process"
        for source, target in zip(sent.leaves, received.leaves, strict=True):
            target.copy_(source)
        self._sent.append((sent.then, None))
        self._received.append((received.then, None))
        return True

    def go_on(self) -> bool:
        """Whatever can be done without a failure; False if nothing can."""
        if self._out != self._in:
            # One end is broken: the other notices.
            if self._in:
                self._break_in("the peer closed its end")
            else:
                self._break_out("the peer closed its end")
        done = False
        for name in ("ready", "move", "tell sender", "tell receiver"):
            done |= self.step(name)
        return done

    def end_out(self) -> None:
        """The sender's link has ended."""
        self._closed = True
        self._break_out("the link ended")
        preparing, self._preparing = self._preparing, deque()
        for then in preparing:
            then(ClosedError("the link ended"))

    def end_in(self) -> None:
        """The receiver's link has ended."""
        self._break_in("the link ended")


class LaneEnds:
    """What a link closes at its end, as `rendezvous.pairs.Pairs`."""

    def __init__(self, out: PlannedLane | None, into: PlannedLane | None) -> None:
        self._out = out
        self._into = into

    def on_pair(self, generation: int, flags: int, body: memoryview) -> None:
        raise AssertionError("no PAIR frames here")

    def close(self) -> None:
        if self._out is not None:
            self._out.end_out()
        if self._into is not None:
            self._into.end_in()
