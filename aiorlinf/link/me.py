"""Who we are, once registered, and what we say about it to a peer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from aiorlinf.address import Identity, WorkerAddress
from aiorlinf.config import JobConfig
from aiorlinf.wire.handshake import Hello

__all__ = ["Self"]


@dataclass(frozen=True, slots=True)
class Self:
    """One worker's own facts.

    Attributes:
        backend: wanted for large payloads: auto, stream, shm or gloo.
        record: where we are, as the manager tells it (`manager.protocol.WorkerRecord`): a peer finds us again without the manager.
        codecs: numbers of the codecs that may arrive here, if the job compresses.
        encrypted: connections with other hosts use TLS.
        shared: what a peer needs for shared memory with us, or why there is none (`link.host_memory`).
        expected: all workers of the job, if it has a closed set.
        began: those that it began with.
    """

    identity: Identity
    job: str
    token: bytes
    host_id: str
    config: JobConfig
    backend: str
    expected: frozenset[str] | None = None
    record: dict[str, Any] | None = None
    encrypted: bool = False
    shared: dict[str, Any] = field(default_factory=dict)
    codecs: tuple[int, ...] = ()
    began: frozenset[str] | None = None

    def hello(self, target: WorkerAddress | None, links: int = 0) -> Hello:
        """For a handshake with `target`, or with whoever comes. `links`: how many links with this life of the peer there were before."""
        return Hello(
            role="link",
            job=self.job,
            address=self.identity.address,
            incarnation=self.identity.incarnation,
            target=target,
            host_id=self.host_id,
            capabilities={
                "window_bytes": self.config.cluster.collective.window_bytes,
                "shm": self.shared,
                "links": links,
                "record": self.record,
                "codecs": list(self.codecs),
                "resumes": True,
            },
        )
