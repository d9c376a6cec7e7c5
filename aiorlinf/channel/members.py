"""The consumers of one channel, and what a policy sees of all of them at once. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

from aiorlinf.channel.records import Consumer

__all__ = ["Columns", "Consumers"]

_MANY = 48
_FEW = 8


class Columns(NamedTuple):
    """What all consumers have, as arrays, for policies that compare very many of them.

    Attributes:
        work: `Consumer.work_seconds`.
        pending: `Consumer.pending_weight`.
        speed: `Consumer.speed`; where it is not known, the mean of the others, 1 if none is known.
    """

    work: npt.NDArray[np.float64]
    pending: npt.NDArray[np.float64]
    speed: npt.NDArray[np.float64]


class Consumers(Sequence[Consumer]):
    """The consumers of a channel, in the order in which they came."""

    def __init__(self) -> None:
        self._all: list[Consumer] = []
        self._changed: set[int] = set()
        self._columns: Columns | None = None
        self._unknown: set[int] = set()  # rows without a measured speed
        self._speed_sum = 0.0  # of the others

    @overload
    def __getitem__(self, index: int) -> Consumer: ...
    @overload
    def __getitem__(self, index: slice) -> list[Consumer]: ...
    def __getitem__(self, index: int | slice) -> Consumer | list[Consumer]:
        return self._all[index]

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Consumer]:
        return iter(self._all)

    def named(self, name: str) -> Consumer | None:
        """The one of this name."""
        return next((consumer for consumer in self._all if consumer.name == name), None)

    def add(self, consumer: Consumer) -> None:
        """One has come."""
        if self._all:
            consumer.head_start = sum(other.work_seconds for other in self._all) / len(self._all)
        self._all.append(consumer)
        self._renumber()

    def remove(self, consumer: Consumer) -> None:
        """One has gone."""
        self._all.remove(consumer)
        consumer._rows = None
        self._renumber()

    def _renumber(self) -> None:
        for row, consumer in enumerate(self._all):
            consumer.row = row
            consumer._rows = self._changed
        self._columns = None
        self._changed.clear()  # rows as they were; all are looked at anew

    def longest(self) -> Sequence[Consumer]:
        """Those whose queues take longest to work off, in no order; of very many consumers only a few."""
        if len(self._all) < _MANY:
            return self._all
        _, pending, speed = self.columns()
        return [self._all[row] for row in np.argpartition(-pending / speed, _FEW)[:_FEW]]

    def columns(self) -> Columns:
        """See `Columns`. Valid until the next call."""
        columns = self._columns
        if columns is None:
            size = len(self._all)
            columns = self._columns = Columns(np.zeros(size), np.zeros(size), np.ones(size))
            self._unknown = set(range(size))
            self._speed_sum = 0.0
            self._changed.update(range(size))
        if self._changed:
            work, pending, speeds = columns
            for row in self._changed:
                consumer = self._all[row]
                work[row] = consumer.work_seconds
                pending[row] = consumer.pending_weight
                speed = consumer.speed_meter.value
                if speed is not None:
                    self._speed_sum += speed
                    if row in self._unknown:
                        self._unknown.discard(row)
                    else:
                        self._speed_sum -= speeds[row]
                    speeds[row] = speed
            self._changed.clear()
            if self._unknown:
                known = len(self._all) - len(self._unknown)
                speeds[list(self._unknown)] = self._speed_sum / known if known else 1.0
        return columns
