"""The counters of one worker: those of its links, and of what they share."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from aiorlinf.backends.shm.arena import ArenaStats
from aiorlinf.codec.pool import BufferPoolStats
from aiorlinf.link.link import LinkStats
from aiorlinf.link.past import EndedLinks

if TYPE_CHECKING:
    from aiorlinf.link.table import LinkTable

__all__ = ["WorkerStats", "count_worker"]


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """Counters of one worker.

    Attributes:
        address: ours.
        links: one record per link that is up or being made.
        ended_links: what those have carried that have ended, one record per peer.
        shared_memory: of this worker's sends; None before it has joined.
        buffer_pool: memory that payloads are received into on the stream and gloo.
        compression: what is in use, and what it did for all links together; None if the job does not compress.
    """

    address: str
    links: tuple[LinkStats, ...]
    shared_memory: ArenaStats | None
    buffer_pool: BufferPoolStats
    compression: dict[str, Any] | None
    ended_links: tuple[EndedLinks, ...] = ()

    def __repr__(self) -> str:
        """Short; printed, it says everything."""
        return f"<WorkerStats {str(self).partition(chr(10))[0]}>"

    def __str__(self) -> str:
        lines = [f"{self.address}: {len(self.links)} link{'' if len(self.links) == 1 else 's'}"]
        lines += [f"  {line}" for link in self.links for line in str(link).splitlines()]
        lines += [f"  {ended}" for ended in self.ended_links]
        for name, part in (("shared memory", self.shared_memory), ("buffer pool", self.buffer_pool)):
            if part is not None:
                figures = ((field.name, getattr(part, field.name)) for field in fields(part))
                lines.append(f"  {name}: {', '.join(f'{name} {value}' for name, value in figures)}")
        if self.compression is not None:
            lines.append(f"  compression: {', '.join(f'{name} {_shown(value)}' for name, value in self.compression.items())}")
        return "\n".join(lines)


def count_worker(address: str, table: LinkTable) -> WorkerStats:
    """What the counters say now. Home thread only."""
    return WorkerStats(
        address=address,
        links=tuple(link.stats() for link in table.links()),
        shared_memory=None if table.memory is None else table.memory.stats(),
        buffer_pool=table.pool.stats(),
        compression=None if table.coding is None else table.coding.stats(),
        ended_links=table.carried.all(),
    )


def _shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else f"{value}"
