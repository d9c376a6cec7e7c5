"""What torchrun tells its workers, and the store through which they tell each other where the job's manager is.

torchrun's agent keeps a `TCPStore` at ``MASTER_ADDR:MASTER_PORT`` that outlives a restart of the workers; torch's own process groups meet
there, too, under names of their own. Ours hold the job's run id and the number of the restart, so that nobody finds an earlier manager.
"""

from __future__ import annotations

import datetime
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from aiorlinf.errors import RendezvousError, UsageError
from aiorlinf.rendezvous.hosts import is_loopback

__all__ = ["Board", "Torchrun", "address_of_rank", "torchrun_of"]


@dataclass(frozen=True, slots=True)
class Torchrun:
    """What the environment of one worker says.

    Attributes:
        rank, world_size: of all workers of the job.
        local_world_size: of those of this node.
        host, port: MASTER_ADDR and MASTER_PORT.
        run_id: the job's.
        restarts: how often the workers have been started anew.
    """

    rank: int
    world_size: int
    local_world_size: int
    host: str
    port: int
    run_id: str
    restarts: int

    @property
    def job(self) -> str:
        """An id for the job in this round."""
        return f"torchrun-{self.run_id}-{self.restarts}"[:128]

    def where_to_listen(self) -> str:
        """An address of this node that all workers reach: MASTER_ADDR if it is ours, loopback if there is no other node."""
        if self.local_world_size == self.world_size:
            return "127.0.0.1"
        usable = [text for family, text in _resolved(self.host) if not is_loopback(text) and _is_ours(family, text)]
        return usable[0] if usable else "0.0.0.0"  # another node is the master: all that is known is that we can be reached


def torchrun_of(environ: Mapping[str, str]) -> Torchrun | None:
    """None where this is no worker of torchrun, or the only one, or torchrun's agent keeps no store.

    Raises UsageError when a variable has no sense.
    """
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or "RANK" not in environ:
        return None
    found = Torchrun(
        rank=_number(environ, "RANK", 0),
        world_size=_number(environ, "WORLD_SIZE", 1),
        local_world_size=_number(environ, "LOCAL_WORLD_SIZE", 0),
        host=environ.get("MASTER_ADDR", ""),
        port=_number(environ, "MASTER_PORT", 0),
        run_id=environ.get("TORCHELASTIC_RUN_ID", ""),
        restarts=_number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
    )
    return found if found.world_size > 1 and found.host and found.port else None


class Board:
    """Where rank 0 says where the manager is. Every method blocks: call it in a private thread.

    Args:
        timeout: seconds to reach torchrun's store.

    Raises:
        RendezvousError: it cannot be reached.
    """

    def __init__(self, job: Torchrun, timeout: float) -> None:
        import torch.distributed  # heavy, and the command line needs the rest of this file

        self._key = f"aiorlinf/{job.run_id}/{job.restarts}/manager"
        try:
            limit = datetime.timedelta(seconds=max(1.0, timeout))
            distributed: Any = torch.distributed  # whose stubs do not list the stores
            self._store: Any = distributed.TCPStore(job.host, job.port, None, False, limit, wait_for_workers=False)
        except RuntimeError as error:  # torch's own error
            where = f"{job.host}:{job.port}"
            raise RendezvousError(f"torchrun's store cannot be reached: {str(error).splitlines()[0]}", address=where) from error

    def post(self, manager: str, token: bytes | None) -> None:
        """Say where the manager is, and with which token to prove oneself; None: everybody has it in his environment."""
        told = {"manager": manager, "token": None if token is None else token.decode("ascii")}
        self._store.set(self._key, orjson.dumps(told))

    def look(self) -> tuple[str, bytes | None] | None:
        """What rank 0 has said, None if it has said nothing yet."""
        if not self._store.check([self._key]):
            return None
        told = orjson.loads(self._store.get(self._key))
        return told["manager"], None if told["token"] is None else told["token"].encode("ascii")


def address_of_rank(environ: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """The address of this process's RANK, and those of all ranks in order.

    They are ``worker:0``, ``worker:1`` and so on; or, with AIORLINF_WORKERS as ``trainer=1,rollout=2``, ``trainer:0``, ``rollout:0``,
    ``rollout:1``.

    Raises UsageError when a variable has no sense, or when they are not as many as WORLD_SIZE says.
    """
    rank, size = _number(environ, "RANK", 0), _number(environ, "WORLD_SIZE", 0)
    text = environ.get("AIORLINF_WORKERS", "")
    if not text:
        return f"worker:{rank}", tuple(f"worker:{other}" for other in range(max(size, rank + 1)))
    names: list[str] = []
    for part in text.split(","):
        group, equals, count = (piece.strip() for piece in part.partition("="))
        if not (group and equals and count.isascii() and count.isdigit() and len(count) < 7):
            raise UsageError(f"AIORLINF_WORKERS={text!r} in the environment", hint="it is of the form rollout=2,trainer=1")
        names += [f"{group}:{number}" for number in range(int(count))]
    if rank >= len(names) or size not in (0, len(names)):
        raise UsageError(f"AIORLINF_WORKERS={text!r} names {len(names)} workers, but this is rank {rank} of {size}")
    return names[rank], tuple(names)


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"{name}={text!r} in the environment is no number")
    return int(text)


def _resolved(host: str) -> list[tuple[int, str]]:
    try:
        return [(int(found[0]), str(found[4][0])) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []


def _is_ours(family: int, address: str) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
