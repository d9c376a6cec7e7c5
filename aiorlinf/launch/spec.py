"""What the user writes on the command line, turned into checked values. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from aiorlinf.address import WorkerAddress
from aiorlinf.errors import UsageError
from aiorlinf.rendezvous.settings import LAUNCHER_ENV

__all__ = ["MAX_WORKERS", "RESERVED_ENV", "check_env", "format_workers", "parse_env", "parse_workers", "worker_addresses"]

MAX_WORKERS = 1024
"""Most workers one launcher starts: a slip of the keyboard shall not become a fork bomb."""

RESERVED_ENV = frozenset({"AIORLINF_ADDRESS", "AIORLINF_MANAGER", "AIORLINF_TOKEN", "AIORLINF_WORKERS", LAUNCHER_ENV})
"""Variables that the launcher sets itself, differently for each job or worker."""

_HINT = "write group=count pairs, such as 'rollout=2,trainer=1'"
_COUNT = re.compile(r"[0-9]{1,9}", re.ASCII)
_ENV_NAME = re.compile(r"[^=\0]+")


def parse_workers(text: str) -> dict[str, int]:
    """Read ``"rollout=2,trainer=1"`` as ``{"rollout": 2, "trainer": 1}``, in the order written.

    Raises:
        UsageError: a pair is malformed, a group comes twice, a count is not at least 1, or the total is above `MAX_WORKERS`.
    """
    counts: dict[str, int] = {}
    for part in text.split(","):
        group, equals, count = (piece.strip() for piece in part.partition("="))
        if not part.strip():
            raise UsageError(f"workers {text!r}: an empty part", hint=_HINT)
        if not equals or not group or not count:
            raise UsageError(f"workers {text!r}: {part.strip()!r} is not a pair", hint=_HINT)
        if group in counts:
            raise UsageError(f"workers {text!r}: group {group!r} comes twice", hint=f"write it once: {group}=<sum of both>")
        if _COUNT.fullmatch(count) is None:
            raise UsageError(f"workers {text!r}: {count!r} is not a count of workers", hint=_HINT)
        counts[group] = int(count)
    _check(counts)
    return counts


def worker_addresses(workers: str | Mapping[str, int] | object) -> list[WorkerAddress]:
    """The addresses of a job, group by group: ``rollout:0, rollout:1, trainer:0``.

    Raises:
        UsageError: see `parse_workers`; the same rules hold for a mapping.
    """
    if isinstance(workers, str):
        counts: Mapping[Any, Any] = parse_workers(workers)
    elif isinstance(workers, Mapping):
        counts = workers
        _check(counts)
    else:
        raise UsageError(f"workers is a {type(workers).__name__}", hint="give 'rollout=2,trainer=1' or {'rollout': 2, 'trainer': 1}")
    return [WorkerAddress(f"{group}:{rank}") for group, count in counts.items() for rank in range(count)]


def format_workers(addresses: Iterable[WorkerAddress]) -> str:
    """The reverse of `worker_addresses`: ``"rollout=2,trainer=1"``."""
    return ",".join(f"{group}={count}" for group, count in Counter(address.group for address in addresses).items())


def _check(counts: Mapping[Any, Any]) -> None:
    if not counts:
        raise UsageError("no workers", hint=_HINT)
    for group, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise UsageError(f"workers: {group!r} has count {count!r}", hint="a count is a whole number of at least 1")
        if not isinstance(group, str):
            raise UsageError(f"workers: {group!r} is not a group name", hint=_HINT)
        try:
            WorkerAddress(f"{group}:0")
        except UsageError:
            raise UsageError(
                f"workers: {group!r} is not a group name",
                hint="a group starts with a letter and holds letters, digits and _ . - / only, 64 at most",
            ) from None
    total = sum(counts.values())
    if total > MAX_WORKERS:
        raise UsageError(f"workers: {total} workers asked for, one launcher starts {MAX_WORKERS} at most")


def parse_env(pairs: Iterable[str]) -> dict[str, str]:
    """Read ``["K=V", ...]`` as a dict; a later pair wins.

    Raises:
        UsageError: no ``=``, no name, or a name of `RESERVED_ENV`.
    """
    env: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"environment {pair!r} has no '='", hint="write NAME=VALUE")
        env[name] = value
    check_env(env)
    return env


def check_env(env: Mapping[Any, Any]) -> None:
    """Refuse what no process can be given, and what the launcher sets itself.

    Raises:
        UsageError: with the name concerned.
    """
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise UsageError(f"environment {name!r}: {value!r}: names and values are text")
        if _ENV_NAME.fullmatch(name) is None or "\0" in value:
            raise UsageError(f"environment {name!r} is not a variable that a process can have", hint="write NAME=VALUE")
        if name in RESERVED_ENV:
            raise UsageError(
                f"environment {name} is set by the launcher for every worker",
                hint="to join a job that runs elsewhere, start the script without the launcher",
            )
