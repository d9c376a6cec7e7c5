"""Handing a large broadcast on: neighbours on one host get to look at our memory, all others get it in pieces, as far as it is here."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from aiorlinf.address import WorkerAddress
from aiorlinf.collective.bulk import Bulk
from aiorlinf.collective.circle import AHEAD, Circle
from aiorlinf.collective.notes import ROOT, Key, Note, Step
from aiorlinf.collective.route import Route, routes_to_list
from aiorlinf.link.placement import Placement

if TYPE_CHECKING:
    from aiorlinf.collective.operation import Operation
    from aiorlinf.link.link import Link
    from aiorlinf.work.base import AsyncWork

__all__ = ["PIECE_BYTES", "Relay", "give_up", "receive_pieces"]

PIECE_BYTES = 4 << 20
"""What is handed on at a time. A chain of `n` hosts takes as long as one transfer and `n - 2` pieces."""

_TRIES = 2
"""Memory is lent again to one who had the memory file in a way that does not do, and no more than that."""


class Relay:
    """What one member does for those whom it hands the object on to. Home thread only.

    Args:
        root, root_life: whose broadcast it is.
        facts: of the object, for everybody.
        body: the same.
    """

    def __init__(
        self,
        operation: Operation,
        root: WorkerAddress,
        root_life: int,
        routes: Sequence[Route],
        facts: dict[str, Any],
        body: bytes | memoryview,
    ) -> None:
        self._operation = operation
        self._circle: Circle = operation.circle
        self._root = root
        self._root_life = root_life
        self._routes = routes
        self._facts = facts
        self._body = body
        self._bulk: Bulk | None = None
        self._lent: dict[WorkerAddress, tuple[Route, Placement]] = {}
        self._tries: dict[WorkerAddress, int] = {}
        self._sending = 0

    @property
    def busy(self) -> bool:
        """Somebody has not got it from us yet."""
        return bool(self._lent) or self._sending > 0

    def pass_small(self) -> None:
        """The whole object is the body."""
        for route in self._routes:
            self.head(route, {})

    @property
    def bulk(self) -> Bulk | None:
        """What is handed on, None before `pass_bulk`."""
        return self._bulk

    def pass_bulk(self, bulk: Bulk) -> None:
        """The object is here, or is coming."""
        self._bulk = bulk
        for route in self._routes:
            self._begin(route)

    def add(self, route: Route) -> None:
        """One more gets it."""
        self._begin(route)

    def answer(self, sender: WorkerAddress, note: Note) -> None:
        """Somebody whom we lent memory to says whether he could use it."""
        route, placement = self._lent.pop(sender, (None, None))
        if route is None or placement is None or note.step != Step.AGAIN:
            return
        link = self._circle.exchange.table.peek(sender)
        if link is not None and link.shared_out is not None:
            link.shared_out.pass_again(placement)
        self._tries[sender] = self._tries.get(sender, 0) + 1
        self._begin(route)

    def _begin(self, route: Route) -> None:
        self._sending += 1
        self._operation.spawn(self._pass(route), f"handing {self._operation.name} on to {route.address}")

    async def _pass(self, route: Route) -> None:
        bulk = self._bulk
        assert bulk is not None
        link = await self._circle.link_to(route.address)
        shared = link.backend == "shm" and bulk.region is not None and not route.below and self._tries.get(route.address, 0) < _TRIES
        if shared:
            await bulk.reached(bulk.total)
            shared = self._lend(link, bulk, route)
        if not shared:
            await self._send_pieces(bulk, route)
        self._sending -= 1
        self._operation.nudge()

    def _lend(self, link: Link, bulk: Bulk, route: Route) -> bool:
        if link.shared_out is None or bulk.region is None:
            return False
        placement = Placement(bulk.region, {})
        place = link.shared_out.lend(placement)
        if place is None:
            return False
        self._lent[route.address] = (route, placement)
        self.head(route, {"place": place.hex()})
        return True

    async def _send_pieces(self, bulk: Bulk, route: Route) -> None:
        circle = self._circle
        slot = circle.take_slot()  # not given back if this fails: something may still be on its way under it
        self.head(route, {"slot": slot, "piece": PIECE_BYTES})
        under_way: deque[AsyncWork[None]] = deque()
        try:
            for start in range(0, bulk.total, PIECE_BYTES):
                end = min(start + PIECE_BYTES, bulk.total)
                await bulk.reached(end)
                under_way.append(circle.exchange.send_tensor(route.address, circle.context, bulk.part(start, end), slot, None))
                if len(under_way) >= AHEAD:
                    await under_way[0]
                    under_way.popleft()
            while under_way:
                await under_way[0]
                under_way.popleft()
        finally:
            give_up(under_way)
        circle.give_slot(slot)

    def head(self, route: Route, facts: dict[str, Any], body: bytes | None = None) -> None:
        """Tell one that the object comes, or is here; with another body than for everybody."""
        operation = self._operation
        key = Key(ROOT, self._root, route.address, route.number)
        lives: dict[str, int] = {self._root: self._root_life, route.address: route.life}
        # Our own key, by which who borrows memory of us can answer; of the root he knows it.
        answer = None if operation.circle.local == self._root else list(operation.keys[self._root])
        everything = {
            **self._facts,
            **facts,
            "op": operation.name,
            "of": self._circle.digest,
            "way": routes_to_list(route.below),
            "answer": answer,
        }
        self._circle.tell(route.address, Note(key, Step.HEAD, lives, everything, self._body if body is None else body))


async def receive_pieces(circle: Circle, sender: WorkerAddress, slot: int, piece: int, bulk: Bulk) -> None:
    """Fill the memory with what the sender hands on. Cancelling stops it; what is on its way at that moment may still be written."""
    under_way: deque[tuple[int, AsyncWork[Any]]] = deque()
    starts = iter(range(0, bulk.total, piece))
    try:
        while True:
            while len(under_way) < AHEAD and (start := next(starts, None)) is not None:
                end = min(start + piece, bulk.total)
                under_way.append((end, circle.exchange.recv_tensor(sender, circle.context, bulk.part(start, end), slot, None)))
            if not under_way:
                return
            end, work = under_way[0]
            await work
            under_way.popleft()
            bulk.advance(end)
    finally:
        give_up([work for _, work in under_way])
        circle.drain(sender, slot, len(under_way))


def give_up(works: Iterable[AsyncWork[Any]]) -> None:
    """Cancel what is still under way; nobody asks how it ended."""
    for work in works:
        if not work.cancel() and work.done() and not work.cancelled():
            work.exception()
