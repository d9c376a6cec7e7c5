"""Device memory of another process that is open here: kept open between messages, for to open an allocation takes milliseconds.

A process's tensors lie in few allocations, which its allocator keeps and uses again and again. So the first message from an allocation
opens it and the later ones find it open. What is open keeps no tensor of the owner's. Nor does it hinder him from giving the allocation
back to the device: he counts how often he does that, each handle carries the count, and what was not named since is closed. So is what was
idle for long, and what is too much. To close may wait for the device, which a loop must not, so that is left to `drop`. Any thread.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from aiorlinf.device.runtime import Runtime, Shared

__all__ = ["IDLE_S", "Openings", "Use"]

_MOST = 64
"""Allocations that are open for one peer."""

IDLE_S = 10.0
"""What nobody used for so long is closed, for what its owner frees comes back to the device only then."""

_LEAST_BYTES = 2 << 20

_Key = tuple[str, bytes]


class _Opening:
    __slots__ = ("doomed", "epoch", "key", "memory", "used", "users")

    def __init__(self, key: _Key, memory: torch.Tensor) -> None:
        self.key = key
        self.memory: torch.Tensor | None = memory
        self.epoch = 0
        self.users = 0
        self.used = 0.0
        self.doomed = False

    def take(self) -> torch.Tensor:
        """Its memory, to be closed: whoever still has the opening in hand, for a moment longer perhaps, does not hold it."""
        memory, self.memory = self.memory, None
        assert memory is not None
        return memory


class Use:
    """One message's, until `end`.

    Attributes:
        tensors: its leaves, as one-dimensional uint8.
    """

    def __init__(self, openings: Openings) -> None:
        self.tensors: list[torch.Tensor] = []
        self._openings = openings
        self._held: list[_Opening] = []

    def end(self) -> None:
        """The copies are over. Any number of times."""
        self.tensors.clear()
        held, self._held = self._held, []
        self._openings._let_go(held)


class Openings:
    """Of one peer.

    Args:
        now: seconds.
        drop: empties a list of what shall be closed, in a thread that may wait.

    Attributes:
        opened: how often something was opened.
        reused: how often a leaf was found in what was open.
    """

    def __init__(self, now: Callable[[], float], drop: Callable[[list[torch.Tensor]], None]) -> None:
        self.opened: int = 0
        self.reused: int = 0
        self._now = now
        self._drop = drop
        self._lock = threading.Lock()
        self._open: dict[_Key, _Opening] = {}  # the last used comes last
        self._epochs: dict[str, int] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._open)

    def has(self, leaves: Sequence[Shared]) -> bool:
        """All of these are in what is open."""
        found = [self._open.get((leaf.uuid, leaf.handle)) for leaf in leaves]
        return all(each is not None and _covers(each, leaf) for each, leaf in zip(found, leaves, strict=True))

    def use(self, runtime: Runtime, leaves: Sequence[Shared], places: Mapping[str, int]) -> Use:
        """Open what is not open yet.

        Args:
            places: by UUID, our index of the devices.

        Raises:
            RuntimeError: something cannot be opened here.
        """
        use = Use(self)
        try:
            for leaf in leaves:
                opening = self._find(leaf) or self._add(leaf, runtime.open(_wider(leaf), places[leaf.uuid]))
                use._held.append(opening)
                assert opening.memory is not None
                use.tensors.append(opening.memory[leaf.at : leaf.at + leaf.nbytes])
        except BaseException:
            use.end()
            raise
        self._close(self._outdated())
        return use

    def sweep(self, idle: float = IDLE_S) -> None:
        """Close what nobody used for so many seconds."""
        with self._lock:
            before = self._now() - idle
            dead = [each for each in self._open.values() if not each.users and each.used <= before]
            memories = self._doom(dead)
        self._close(memories)

    def close(self) -> None:
        """The peer is gone."""
        with self._lock:
            self._closed = True
            memories = self._doom(list(self._open.values()))
        self._close(memories)

    def _find(self, leaf: Shared) -> _Opening | None:
        with self._lock:
            found = self._open.get((leaf.uuid, leaf.handle))
            if found is None or not _covers(found, leaf):
                return None
            self.reused += 1
            return self._touch(found, leaf)

    def _add(self, leaf: Shared, memory: torch.Tensor) -> _Opening:
        with self._lock:
            self.opened += 1
            key = (leaf.uuid, leaf.handle)
            before = self._open.get(key)
            memories = [] if before is None else self._doom([before])
            opening = self._open[key] = _Opening(key, memory)
            opening.doomed = self._closed
            self._touch(opening, leaf)
            if self._closed:
                del self._open[key]
        self._close(memories)
        return opening

    def _touch(self, opening: _Opening, leaf: Shared) -> _Opening:
        opening.users += 1
        opening.used = self._now()
        opening.epoch = max(opening.epoch, leaf.epoch)
        self._epochs[leaf.uuid] = max(self._epochs.get(leaf.uuid, 0), leaf.epoch)
        if opening.key in self._open:
            self._open[opening.key] = self._open.pop(opening.key)
        return opening

    def _outdated(self) -> list[torch.Tensor]:
        with self._lock:
            old = [each for each in self._open.values() if each.epoch < self._epochs[each.key[0]]]
            spare = (each for each in self._open.values() if not each.users and each not in old)
            return self._doom([*old, *itertools.islice(spare, max(0, len(self._open) - len(old) - _MOST))])

    def _doom(self, dead: Sequence[_Opening]) -> list[torch.Tensor]:
        """They are not found any more. Returns what can be closed now; the rest is when nobody uses it any more."""
        for each in dead:
            each.doomed = True
            del self._open[each.key]
        return [each.take() for each in dead if not each.users]

    def _let_go(self, held: Sequence[_Opening]) -> None:
        with self._lock:
            now = self._now()
            memories = []
            for each in held:
                each.users -= 1
                each.used = now
                if each.doomed and not each.users:
                    memories.append(each.take())
        self._close(memories)

    def _close(self, memories: list[torch.Tensor]) -> None:
        if memories:
            self._drop(memories)


def _covers(opening: _Opening, leaf: Shared) -> bool:
    return opening.memory is not None and leaf.at + leaf.nbytes <= opening.memory.numel()


def _wider(leaf: Shared) -> Shared:
    """More of the same allocation, so that the next leaf is likely to lie in it, too. What is beyond its end is not looked at."""
    end = max(leaf.at + leaf.nbytes, _LEAST_BYTES)
    return dataclasses.replace(leaf, at=0, nbytes=1 << (end - 1).bit_length())
