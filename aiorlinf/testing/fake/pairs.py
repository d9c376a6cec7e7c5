"""Pairs between fake accelerators: as those of NCCL, with the peer found through the store of the rendezvous, and failures on request.

As strict as NCCL about order, and more: each direction of a device works on what it was given one after the other, and a transfer moves
only when both of its ends have come to it. Two devices that were given the same transfers in different order stand still for ever.
"""

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
        broken: a transfer fails on this side ("sender", "receiver"), once; "midway": on the sender's, whose device has begun it already.
        failures: how many transfers have failed.
        crowded: how often a device was given a transfer of one pair while it had one of another, in the same direction.
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
        self.crowded = 0
        self.engines: dict[tuple[int, int], deque[_Half]] = {}  # by device and direction
        self.lock: threading.Lock = threading.Lock()

    def problem(self) -> str | None:
        return self.missing

    def describe(self) -> str:
        return "fake pairs"

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

    def move(self) -> None:
        """Let run what both devices have come to."""
        met = True
        while met:
            met = False
            with self.lock:
                heads = {(half.name, rank): engine for (_, rank), engine in self.engines.items() if engine for half in [engine[0]]}
                for (name, rank), engine in heads.items():
                    other = heads.get((name, 1))
                    if not rank and other is not None:
                        self._meet(engine.popleft(), other.popleft())
                        met = True
                        break

    def _meet(self, sender: _Half, receiver: _Half) -> None:
        fake = self.fake
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


class _Half:
    """A transfer that one side has posted."""

    def __init__(self, name: str, leaves: list[torch.Tensor], then: Then, stream: Any, watch: Any) -> None:
        self.name = name
        self.leaves = leaves
        self.then = then
        self.stream = stream
        self.watch = watch


class FakePair:
    """One end. The transfer runs when both sides have come to it: out on a stream of the one device, then in on one of the other's."""

    def __init__(self, maker: FakeMaker, name: str, rank: int, index: int, watch: Any) -> None:
        self._maker = maker
        self._name = name
        self._rank = rank
        self._index = index
        self._stream = maker.fake.side_stream(index, maker.into if rank else maker.out)
        self._watch = watch
        self._retired = False

    def transfer(self, leaves: list[torch.Tensor], then: Then) -> None:
        """See `rendezvous.pairs.PairGroup`. Home thread."""
        maker = self._maker
        if self._retired:
            then(RuntimeError("the pair is closed"))
            return
        if maker.broken == "midway" and not self._rank:
            for leaf in leaves:
                maker.fake.copy(maker.fake.pinned(leaf.numel()), leaf, self._stream)
            maker.broken = "sender"
        if maker.broken == ("receiver" if self._rank else "sender"):
            maker.broken = None
            maker.failures += 1
            then(RuntimeError("the pair breaks because the test says so"))
            return
        with maker.lock:
            engine = maker.engines.setdefault((self._index, self._rank), deque())
            maker.crowded += any(half.name != self._name for half in engine)
            engine.append(_Half(self._name, leaves, then, self._stream, self._watch))
        maker.move()

    def retire(self) -> None:
        """Transfers that wait for the peer are aborted."""
        self._retired = True
        maker = self._maker
        with maker.lock:
            engine = maker.engines.get((self._index, self._rank), deque())
            mine = [half for half in engine if half.name == self._name]
            for half in mine:
                engine.remove(half)
        for half in mine:
            half.then(RuntimeError("the pair was aborted"))
        maker.move()
