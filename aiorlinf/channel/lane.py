"""One FIFO: the items of one key (for one consumer, where a policy balances) and the gets that wait for them. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from aiorlinf.channel.records import Get, Item

__all__ = ["Lane"]

_CANCELLED_AT_LEAST = 32
"""Cancelled gets are skipped when they are met; when so many lie between others, and half of all, they are taken out."""


class Lane:
    """Items in order of their positions, gets in order of their coming.

    Attributes:
        items: those that can be taken.
        weight, nbytes: theirs in all.
    """

    __slots__ = ("_cancelled", "_line", "items", "nbytes", "weight")

    def __init__(self) -> None:
        self.items: deque[Item] = deque()
        self.weight = 0.0
        self.nbytes = 0
        self._line: deque[Get] = deque()
        self._cancelled = 0  # at most so many of the line are

    @property
    def empty(self) -> bool:
        """Nothing is here, and nobody waits."""
        return not self.items and self.first() is None

    # ---- items

    def insert(self, item: Item) -> None:
        """Put an item where it belongs: at the end, unless it comes back or its producer was slow."""
        items = self.items
        self.weight += item.weight
        self.nbytes += item.nbytes
        seq = item.seq
        if not items or items[-1].seq < seq:
            items.append(item)
            return
        if seq < items[0].seq:
            items.appendleft(item)
        else:
            at = len(items) - 1
            while items[at - 1].seq > seq:
                at -= 1
            items.insert(at, item)
        if self._line:
            self._line[0].count = 0  # what was counted for a batch is not the head any more
            self._line[0].total = 0.0

    def take(self) -> Item:
        """The oldest item."""
        item = self.items.popleft()
        self.weight -= item.weight
        self.nbytes -= item.nbytes
        if not self.items:
            self.weight = 0.0  # no sum of rounding errors
        elif self._line:
            self._line[0].count = 0
            self._line[0].total = 0.0
        return item

    def take_many(self, count: int) -> list[Item]:
        """The oldest items."""
        return [self.take() for _ in range(count)]

    def clear(self) -> list[Item]:
        """All items."""
        return self.take_many(len(self.items))

    def fitting(self, get: Get, *, enough: bool) -> int:
        """How many items the batch gets, the first of the line; 0: it waits.

        It is whole when it weighs at least its target, or when the next item would make it heavier than that; with `enough`, as soon as
        there is anything. An item that is heavier than the target comes alone.
        """
        items = self.items
        target = get.target
        assert target is not None
        count, total = get.count, get.total
        while count < len(items):
            weight = items[count].weight
            if count and total + weight > target:
                return count
            count += 1
            total += weight
            if total >= target:
                return count
        get.count, get.total = count, total
        return count if enough else 0

    # ---- gets

    def wait(self, get: Get) -> None:
        """Stand in line."""
        get.waiting = True
        get.count = 0
        get.total = 0.0
        self._line.append(get)

    def first(self) -> Get | None:
        """Who is served next."""
        line = self._line
        while line:
            if line[0].waiting:
                return line[0]
            line.popleft()
        return None

    def served(self) -> None:
        """The first of the line leaves it."""
        self._line.popleft().waiting = False

    def leave(self, get: Get) -> None:
        """This one does not want it any more."""
        get.waiting = False
        line = self._line
        while line and not line[-1].waiting:
            line.pop()
        while line and not line[0].waiting:
            line.popleft()
        self._cancelled += 1
        if self._cancelled >= max(_CANCELLED_AT_LEAST, len(line) // 2):
            self._cancelled = 0
            self._line = deque(get for get in line if get.waiting)

    def line(self) -> list[Get]:
        """All who wait, in order."""
        return [get for get in self._line if get.waiting]

    def dismiss(self, gets: Iterable[Get]) -> None:
        """These do not wait any more."""
        for get in gets:
            get.waiting = False
        self._line = deque(get for get in self._line if get.waiting)
        self._cancelled = 0
