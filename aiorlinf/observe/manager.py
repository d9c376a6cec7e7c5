"""How commands that look at a running job find its manager and its token."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from aiorlinf.errors import UsageError
from aiorlinf.rendezvous.tls import TLS_VARIABLES, tls_of

if TYPE_CHECKING:
    from aiorlinf.manager.client import ManagerClient

__all__ = ["Access", "connect", "find_access", "jobs_here", "manager_options"]

_LIMIT_S = 10.0
_TAKEN = ("AIORLINF_MANAGER", "AIORLINF_TOKEN", "AIORLINF_ADDRESS", *TLS_VARIABLES.values())

Access = Mapping[str, str]
"""What of the environment of a worker leads to its manager."""


def manager_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--manager`` and ``--pid``."""
    parser.add_argument(
        "--manager",
        metavar="HOST:PORT",
        help="the job's manager (default: AIORLINF_MANAGER, else that of your one job on this machine); its token is AIORLINF_TOKEN",
    )
    parser.add_argument(
        "--pid", type=int, metavar="PID", help="the job of this process of yours: an `aiorlinf run`, or a worker that one has started"
    )


def find_access(manager: str | None, pid: int | None) -> Access:
    """The manager and the token: as said, else from the environment, else from that of a worker on this machine.

    Raises:
        UsageError: nothing leads to a manager, or several do; they are named.
    """
    if pid is not None:
        for each in _family(pid):
            found = _environment(each)
            if "AIORLINF_MANAGER" in found:
                return found
        raise UsageError(
            f"process {pid} is no worker of a job and has started none, or is not yours", hint="name the manager with --manager HOST:PORT"
        )
    own = _taken(os.environ)
    address = manager or own.get("AIORLINF_MANAGER")
    if address is None:
        jobs = jobs_here()
        # Channel workers outlive their job for a while.
        jobs = {address: job for address, job in jobs.items() if not all(who.startswith("channel.") for who in job[1])} or jobs
        if not jobs:
            raise UsageError("no manager", hint="give --manager HOST:PORT, or set AIORLINF_MANAGER, and AIORLINF_TOKEN to the job's token")
        if len(jobs) > 1:
            names = "; ".join(f"{address} ({', '.join(who)})" for address, (_, who) in sorted(jobs.items()))
            raise UsageError(f"several jobs of yours run on this machine: {names}", hint="give --manager HOST:PORT or --pid PID")
        ((access, _),) = jobs.values()
        return access
    if own.get("AIORLINF_TOKEN"):
        return {**own, "AIORLINF_MANAGER": address}
    access, _ = jobs_here().get(address, ({}, []))
    return {**access, **own, "AIORLINF_MANAGER": address}


def jobs_here() -> dict[str, tuple[Access, list[str]]]:
    """Jobs of which this user has workers on this machine, by their managers: how to reach it, and the workers. Linux; else none."""
    found: dict[str, tuple[Access, list[str]]] = {}
    try:
        pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    except OSError:
        return {}
    for pid in sorted(pids):
        access = _environment(pid)
        if "AIORLINF_MANAGER" in access and "AIORLINF_TOKEN" in access and pid != os.getpid():
            workers = found.setdefault(access["AIORLINF_MANAGER"], (access, []))[1]
            address = access.get("AIORLINF_ADDRESS")
            if address and address not in workers:
                workers.append(address)
    return found


def _family(pid: int) -> list[int]:
    """A process, and what it has started, nearest first. Linux; else the process alone."""
    children: dict[int, list[int]] = {}
    try:
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                # the name, in parentheses, may have anything in it; the parent is the second field behind it
                parent = int(Path("/proc", entry, "stat").read_bytes().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry))
    except OSError:
        pass
    found = [pid]
    for each in found:
        found += sorted(children.get(each, ()))
    return found


def _environment(pid: int) -> Access:
    """Of a process of this user; empty if it cannot be seen."""
    folder = Path("/proc", str(pid))
    try:
        if folder.stat().st_uid != os.getuid():
            return {}
        entries = (folder / "environ").read_bytes().decode("utf-8", "surrogateescape").split("\0")
    except OSError:
        return {}
    return _taken(dict(entry.partition("=")[::2] for entry in entries if "=" in entry))


def _taken(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: environment[name] for name in _TAKEN if environment.get(name)}


async def connect(access: Access, job: str | None = None, limit: float = _LIMIT_S) -> ManagerClient:
    """A connection to the manager of that job (None: of whatever job it has), within so many seconds.

    Raises:
        AuthenticationError: no token, or another one than the job's; certificates that do not fit.
        RendezvousError: nobody answers.

    Cancelling closes what was opened.
    """
    from aiorlinf.manager.client import ManagerClient

    token = access.get("AIORLINF_TOKEN", "").encode("utf-8", "surrogateescape")
    return await ManagerClient.connect(access["AIORLINF_MANAGER"], token, job, deadline=limit, tls=tls_of(None, access))
