"""One FIFO: the items of one key (for one consumer, where a policy balances) and the gets that wait for them. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from aiorlinf.channel.records import Consumer, Delivery, Get, Item

__all__ = ["Lane"]

_CANCELLED_AT_LEAST = 32
"""Cancelled gets are skipped when they are met; when so many lie between others, and half of all, they are taken out."""


class Lane:
    """Items in order of their positions, gets in order of their coming.

    A get that is cancelled gives its item back when others may have got newer ones already. So that each consumer sees items in order, such
    an item first waits for one that has not got a newer one.

    Attributes:
        items: those that anybody can take.
        back: those that came back and wait for a consumer that has got nothing newer, in order.
        newest: position of the newest item that each consumer has got.
        weight, nbytes: of `items` and `back`.
    """

    __slots__ = ("_cancelled", "_line", "back", "items", "nbytes", "newest", "weight")

    def __init__(self) -> None:
        self.items: deque[Item] = deque()
        self.back: list[Item] = []
        self.newest: dict[Consumer, int] = {}
        self.weight: float = 0.0
        self.nbytes: int = 0
        self._line: deque[Get] = deque()
        self._cancelled = 0  # at most so many of the line are

    @property
    def waited_for(self) -> bool:
        """Somebody may stand in line."""
        return bool(self._line)

    @property
    def empty(self) -> bool:
        """Nothing is here, and nobody waits."""
        return not self.items and not self.back and self.first() is None

    def __len__(self) -> int:
        return len(self.items) + len(self.back)

    def all(self) -> list[Item]:
        """All items, in order."""
        return sorted([*self.back, *self.items], key=lambda item: item.seq) if self.back else list(self.items)

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
        if not self.items and not self.back:
            self.weight = 0.0  # no sum of rounding errors
        elif self._line:
            self._line[0].count = 0
            self._line[0].total = 0.0
        return item

    def take_many(self, count: int) -> list[Item]:
        """The oldest items."""
        return [self.take() for _ in range(count)]

    def clear(self) -> list[Item]:
        """Take all items."""
        for item in list(self.back):
            self.offer_to_all(item)
        return self.take_many(len(self.items))

    # ---- items that came back

    def put_back(self, delivery: Delivery, now: float) -> None:
        """These have not been taken after all."""
        consumer = delivery.get.consumer
        if self.newest.get(consumer) == delivery.items[-1].seq:
            self.newest[consumer] = delivery.before
        for item in delivery.items:
            item.back = now
            self.weight += item.weight
            self.nbytes += item.nbytes
            self.back.append(item)
        self.back.sort(key=lambda item: item.seq)

    def for_one(self, get: Get, patience: float, now: float) -> list[Item]:
        """Of what came back, what this one of the line may get: it has got nothing newer, or nobody will come who has not."""
        newest = self.newest
        consumer = get.consumer
        own = newest.get(consumer, 0)
        others = min((before for other, before in newest.items() if other is not consumer), default=self.back[-1].seq)
        return [item for item in self.back if get.nowait or own < item.seq or others >= item.seq or now - item.back >= patience]

    def batch_with(self, get: Get, back: list[Item], *, enough: bool) -> list[Item]:
        """As `fitting`, of these that came back and, if it is this one's turn, of all others; empty: it waits."""
        assert get.target is not None
        items = sorted([*back, *self.items], key=lambda item: item.seq) if self.first() is get else back
        total = 0.0
        for count, item in enumerate(items):
            if count and total + item.weight > get.target:
                return items[:count]
            total += item.weight
            if total >= get.target:
                return items[: count + 1]
        return items if enough else []

    def take_these(self, items: list[Item]) -> None:
        """A batch that `batch_with` has found."""
        back = {item for item in items if item in self.back}
        for item in items:
            if item in back:
                self.take_back(item)
            else:
                self.take()

    def take_back(self, item: Item) -> Item:
        """One that came back."""
        self.back.remove(item)
        self.weight -= item.weight
        self.nbytes -= item.nbytes
        return item

    def offer_to_all(self, item: Item) -> None:
        """One that came back has waited for long enough."""
        self.insert(self.take_back(item))

    def got(self, delivery: Delivery) -> None:
        """A consumer has got these."""
        consumer, seq = delivery.get.consumer, delivery.items[-1].seq
        delivery.before = before = self.newest.get(consumer, 0)
        if seq > before:
            self.newest[consumer] = seq

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

    def served(self, get: Get) -> None:
        """This one leaves the line."""
        if self._line[0] is get:
            self._line.popleft().waiting = False
        else:
            self.leave(get)

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
