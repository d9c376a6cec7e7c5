"""Two processes in network namespaces of their own, joined by a link of a chosen bandwidth (Linux, with the right to do so).

Each process moves its calling thread, and so all threads that it makes later, into a new namespace. One of them makes a veth pair whose
ends the kernel destroys with the namespaces, and these when the processes end, however they end: nothing has a name that could be left.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Final

__all__ = ["INTERFACE", "MEGABIT", "address_of", "enter_namespace", "join", "limit", "run", "sent_bytes", "shaping_problem"]

MEGABIT: Final = 1_000_000
INTERFACE: Final = "bench0"
_CLONE_NEWNET: Final = 0x40000000
_LIMIT_S: Final = 10.0
_SMALLEST_BURST: Final = 32 * 1024
_BURST_S: Final = 0.001
"""What leaves at once after a pause: as little as the kernel's timers allow, for a real link gives nothing away."""

_QUEUE: Final = 8 * 1024 * 1024
"""Bytes; more than a socket keeps under way, so that nothing is dropped."""

_TRIAL: Final = (
    f"ip link add name {INTERFACE} type veth peer name bench1 && tc qdisc add dev {INTERFACE} root tbf rate 1gbit burst 256kb limit 1mb"
)


def shaping_problem(trial: str = _TRIAL) -> str | None:
    """Why there can be no shaped link here, or None. Tries all that it takes, in a process of its own.

    Args:
        trial: the commands that must work in a fresh namespace.
    """
    for command in ("unshare", "ip", "tc"):
        if shutil.which(command) is None:
            return f"there is no `{command}` command"
    tried = subprocess.run(["unshare", "--net", "sh", "-c", trial], capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if tried.returncode == 0:
        return None
    said = tried.stderr.strip().splitlines()
    return f"network namespaces, veth pairs or tc are not permitted here: {said[-1] if said else f'status {tried.returncode}'}"


def address_of(role: int) -> str:
    """Of this half on the link."""
    return f"10.88.0.{role + 1}"


def enter_namespace() -> None:
    """Move this process into a new network namespace. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"unshare: {os.strerror(number)}")
    run("ip link set lo up")


async def join(role: int, other_pid: int, mbps: float) -> None:
    """Make the link (role 0), or wait for it, and shape what this half sends."""
    if role == 0:
        run(f"ip link add name {INTERFACE} type veth peer name {INTERFACE} netns {other_pid}")
    end = time.monotonic() + _LIMIT_S
    while not _interface_is_there():
        if time.monotonic() > end:
            raise TimeoutError(f"{INTERFACE} has not appeared")
        await asyncio.sleep(0.005)
    run(f"ip addr add {address_of(role)}/24 dev {INTERFACE} && ip link set {INTERFACE} up")
    limit(INTERFACE, mbps)


def limit(interface: str, mbps: float) -> None:
    """Shape what leaves an interface of this namespace."""
    burst = max(_SMALLEST_BURST, round(mbps * MEGABIT / 8 * _BURST_S))
    run(f"tc qdisc replace dev {interface} root tbf rate {mbps:g}mbit burst {burst} limit {_QUEUE}")


def sent_bytes() -> int:
    """What this half has put on the link, with all headers."""
    return int(_counters()[INTERFACE][8])


def _interface_is_there() -> bool:
    return INTERFACE in _counters()


def _counters() -> dict[str, list[str]]:
    """The kernel's line of each interface that this thread sees."""
    rows = Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]
    return {name.strip(): rest.split() for name, _, rest in (row.partition(":") for row in rows)}


def run(command: str) -> None:
    """Run a shell command in this thread's namespace. Raises RuntimeError with its words if it fails."""
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{command}: {(done.stderr or done.stdout).strip()}")
