"""What a worker is told about itself: arguments, completed from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from aiorlinf.address import WorkerAddress
from aiorlinf.config import JobConfig, load_config
from aiorlinf.errors import UsageError
from aiorlinf.rendezvous.hosts import parse_endpoint
from aiorlinf.rendezvous.torchrun import Torchrun, address_of_rank, torchrun_of

__all__ = ["LAUNCHER_ENV", "TRACE_ENV", "Backend", "ConfigSource", "JoinSettings"]

LAUNCHER_ENV = "AIORLINF_LAUNCHER"
"""The process id of the launcher. What a worker starts in turn has another parent, and is not concerned."""

TRACE_ENV = "AIORLINF_TRACE"
"""A folder into which each worker writes a trace of all its life."""

ConfigSource = JobConfig | Mapping[str, Any] | str | os.PathLike[str] | None
Backend = Literal["auto", "stream", "shm", "gloo", "nccl", "cuda_ipc"]


@dataclass(frozen=True, slots=True)
class JoinSettings:
    """The arguments of `init`, completed from the environment.

    Attributes:
        by_rank: the addresses of all ranks, in order, if ours comes from our rank; None otherwise.
    """

    address: WorkerAddress
    manager: str | None
    token: bytes | None
    backend: str | None
    config: JobConfig | None
    labels: dict[str, str]
    by_rank: tuple[str, ...] | None
    torchrun: Torchrun | None

    @classmethod
    def gather(
        cls,
        address: str | None,
        manager: str | None,
        token: str | bytes | None,
        backend: str | None,
        config: ConfigSource,
        labels: Mapping[str, str] | None,
    ) -> JoinSettings:
        environ = os.environ
        if address is None:
            address = environ.get("AIORLINF_ADDRESS")
        by_rank = None
        if address is None and environ.get("RANK") is not None:
            address, by_rank = address_of_rank(environ)
        if address is None:
            raise UsageError(
                "no address",
                hint="pass one, such as aiorlinf.init('rollout:0'), or set AIORLINF_ADDRESS, or start the script with"
                " `aiorlinf run --workers rollout=2,trainer=1 script.py`",
            )
        if backend is not None and backend not in get_args(Backend):
            raise UsageError(f"backend={backend!r}", hint=f"backend is one of {', '.join(get_args(Backend))}")
        manager = manager or environ.get("AIORLINF_MANAGER") or None
        if manager is not None:
            parse_endpoint(manager)  # before anything else is found missing
        torchrun = torchrun_of(environ) if manager is None else None
        if by_rank is not None and manager is None and torchrun is None and environ.get("WORLD_SIZE", "1") != "1":
            raise UsageError(
                "no manager, and the workers of other ranks could not join one in this process",
                hint="run `aiorlinf manager`, and the workers with the AIORLINF_MANAGER and AIORLINF_TOKEN that it prints, or use torchrun",
            )
        if token is None:
            token = environ.get("AIORLINF_TOKEN") or None
        if isinstance(token, str):
            token = token.encode("utf-8", "surrogateescape")  # the inverse of `Worker.env`
        loaded = None if config is None else load_config(config)
        try:
            own = dict(labels or {})
        except (TypeError, ValueError):
            raise UsageError(f"labels={labels!r}", hint="labels is a table of texts, such as {'rack': 'a'}") from None
        return cls(WorkerAddress(address), manager, token, backend, loaded, own, by_rank, torchrun)
