"""Some workers in this process, as members of one set; on several hosts, as far as they know."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from aiorlinf import Worker, init
from aiorlinf.collective.calls import Members
from tests.system import soon

__all__ = ["Company", "company"]

LIMIT_S = 20.0


class Company:
    """Workers w:0, w:1 and so on, and what each calls."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.config: dict[str, Any] = {}

    @property
    def addresses(self) -> list[str]:
        return [f"w:{rank}" for rank in range(len(self.workers))]

    def __getitem__(self, rank: int) -> Members:
        return self.workers[rank].collective.members(self.addresses)

    def __len__(self) -> int:
        return len(self.workers)

    async def all(self, call: Callable[[int], Any]) -> list[Any]:
        """What each of these works comes to; they are made in the order of the ranks. Raises the first error."""
        works = [call(rank) for rank in range(len(self))]
        return list(await asyncio.wait_for(asyncio.gather(*works), LIMIT_S))

    async def outcomes(self, call: Callable[[int], Any]) -> list[Any]:
        """The same, with errors as results, those of the call itself, too."""
        works = []
        for rank in range(len(self)):
            try:
                works.append(call(rank))
            except Exception as error:  # it is a result
                works.append(_raised(error))
        return list(await asyncio.wait_for(asyncio.gather(*works, return_exceptions=True), LIMIT_S))

    async def check_works(self) -> None:
        """Nothing of what went wrong is left: the next collectives work."""
        for root in range(len(self)):
            assert await self.all(self._broadcast_from(root)) == [("next", root)] * len(self)
        parts = await self.all(lambda rank: self[rank].all_to_all([(rank, other) for other in range(len(self))]))
        assert parts == [[(other, rank) for other in range(len(self))] for rank in range(len(self))]

    def _broadcast_from(self, root: int) -> Callable[[int], Any]:
        return lambda rank: self[rank].broadcast(("next", rank), root)

    async def all_is_free(self) -> None:
        """Nobody holds anything of anybody, and nothing is under way."""
        with contextlib.suppress(AssertionError):
            await soon(lambda: not self._not_free())
        assert not (held := self._not_free()), "\n".join(held)

    def _not_free(self) -> list[str]:
        found = []
        for rank, worker in enumerate(self.workers):
            stats = worker.stats()
            if stats.shared_memory is None or stats.shared_memory.used_bytes:
                found.append(f"w:{rank} uses shared memory: {stats.shared_memory}")
            found += [f"w:{rank} lends or holds: {link}" for link in stats.links if link.shared_bytes_lent or link.shared_bytes_held]
            found += [f"w:{rank} has under way: {operation}" for operation in self[rank]._circle._operations.values()]
        return found


async def _raised(error: Exception) -> None:
    raise error


@contextlib.asynccontextmanager
async def company(
    hosts: Sequence[str], racks: Sequence[str] | None = None, devices: Sequence[str] | None = None, **collective: Any
) -> AsyncIterator[Company]:
    """One worker for each entry: the name of its host, empty for the real one. `devices`: where each one's tensors land."""
    made = Company()
    made.config = {"cluster": {"collective": {"shared_memory": {"segment_bytes": 4 << 20}, **collective}}}
    before = os.environ.get("AIORLINF_HOST_ID")
    async with contextlib.AsyncExitStack() as stack:
        try:
            for rank, host in enumerate(hosts):
                os.environ["AIORLINF_HOST_ID"] = host
                labels = None if racks is None else {"rack": racks[rank]}
                device = None if devices is None else devices[rank]
                worker = init(f"w:{rank}", config=made.config, labels=labels, device=device)
                made.workers.append(await stack.enter_async_context(worker))
        finally:
            if before is None:
                del os.environ["AIORLINF_HOST_ID"]
            else:
                os.environ["AIORLINF_HOST_ID"] = before
        yield made
