"""Pairs between fake accelerators: as those of NCCL, with the peer found through the store of the rendezvous, and failures on request."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from aiorlinf.testing.fake.accelerator import FakeAccelerator

__all__ = ["FakeMaker", "FakePair"]

Then = Callable[[BaseException | None], None]


class FakeMaker:
    """Meets `backends.device_pairs.PairMaker`.

    Attributes:
        unmakable: why no pair can be made, None if it can.
        made: how many ends were made.
        broken: a transfer fails on this side ("sender", "receiver"), once.
        failures: how many transfers have failed.
    """

    name = "nccl"
    out = "pair out"
    into = "pair in"

    def __init__(self, fake: FakeAccelerator) -> None:
        self.fake = fake
        self.missing: str | None = None
        self.unmakable: str | None = None
        self.broken: str | None = None
        self.made: int = 0
        self.failures = 0
        self.meetings: dict[str, deque[_Half]] = {}
        self.lock: threading.Lock = threading.Lock()

    def problem(self) -> str | None:
        return self.missing

    def make(self, store: Any, rank: int, index: int, timeout: float, watch: Any) -> FakePair:
        if self.unmakable is not None:
            raise RuntimeError(self.unmakable)
        # As NCCL does it: the sender publishes an id, the receiver waits for it.
        if rank == 0:
            with self.lock:
                self.made += 1
                name = f"pair {self.made}"
            store.set("id", name)
        else:
            name = bytes(store.get("id")).decode()
        return FakePair(self, name, rank, index, watch)


class _Half:
    """A transfer that one side has posted."""

    def __init__(self, leaves: list[torch.Tensor], then: Then, stream: Any, watch: Any) -> None:
        self.leaves = leaves
        self.then = then
        self.stream = stream
        self.watch = watch


class FakePair:
    """One end. The transfer runs when both sides have posted it: out on a stream of the one device, then in on one of the other's."""

    def __init__(self, maker: FakeMaker, name: str, rank: int, index: int, watch: Any) -> None:
        self._maker = maker
        self._name = name
        self._rank = rank
        self._stream = maker.fake.side_stream(index, maker.into if rank else maker.out)
        self._watch = watch
        self._retired = False

    def transfer(self, leaves: list[torch.Tensor], then: Then) -> None:
        """See `rendezvous.pairs.PairGroup`. Home thread."""
        maker = self._maker
        if self._retired:
            then(RuntimeError("the pair is closed"))
            return
        if maker.broken == ("receiver" if self._rank else "sender"):
            maker.broken = None
            maker.failures += 1
            then(RuntimeError("the pair breaks because the test says so"))
            return
        mine = _Half(leaves, then, self._stream, self._watch)
        waiting = maker.meetings.setdefault(f"{self._name} {self._rank}", deque())
        waiting.append(mine)
        others = maker.meetings.setdefault(f"{self._name} {1 - self._rank}", deque())
        while waiting and others:
            one, other = waiting.popleft(), others.popleft()
            self._meet(*((other, one) if self._rank else (one, other)))

    def _meet(self, sender: _Half, receiver: _Half) -> None:
        fake = self._maker.fake
        assert [leaf.numel() for leaf in sender.leaves] == [leaf.numel() for leaf in receiver.leaves], "NCCL would never return"
        wires = [fake.pinned(source.numel()) for source in sender.leaves]
        for source, wire in zip(sender.leaves, wires, strict=True):
            fake.copy(wire, source, sender.stream)
        left = fake.record(sender.stream)
        fake.wait(receiver.stream, left)
        for wire, target in zip(wires, receiver.leaves, strict=True):
            fake.copy(target, wire, receiver.stream)
        for half, event in ((sender, left), (receiver, fake.record(receiver.stream))):
            half.watch([(fake, event)], half.then, half.leaves)

    def retire(self) -> None:
        """Transfers that wait for the peer are aborted."""
        self._retired = True
        for half in self._maker.meetings.pop(f"{self._name} {self._rank}", ()):
            half.then(RuntimeError("the pair was aborted"))
