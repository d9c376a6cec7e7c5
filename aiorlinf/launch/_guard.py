"""A process that outlives a killed launcher for a second, to end what its workers had started themselves.

Run by path with ``-I -S``; needs nothing but the standard library. Argument: the launcher's pid. Its stdin is a pipe that only
the launcher holds; lines ``+N`` and ``-N`` name process groups that begin and end. When the pipe ends, or the launcher is no
longer the parent, every group still on the list gets SIGTERM and, within a second, SIGKILL.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

__all__ = ["main"]

_GRACE_S = 1.0


def _watch(parent: int) -> set[int]:
    """The groups on the list at the launcher's end."""
    groups: set[int] = set()
    rest = b""
    while os.getppid() == parent:
        # The look at the parent is for a child that the launcher forked without exec: it keeps the pipe open.
        if not select.select([0], [], [], 1.0)[0]:
            continue
        data = os.read(0, 65536)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"+"):
                groups.add(int(line[1:]))
            elif line.startswith(b"-"):
                groups.discard(int(line[1:]))
    return groups


def _send(groups: set[int], number: int) -> set[int]:
    """Signal the groups; those that are still there."""
    alive = set()
    for group in groups:
        try:
            os.killpg(group, number)
        except (ProcessLookupError, PermissionError):
            continue
        alive.add(group)
    return alive


def main() -> None:
    """Wait for the launcher's end, then end the groups."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    groups = _send(_watch(int(sys.argv[1])), signal.SIGTERM)
    end = time.monotonic() + _GRACE_S
    while groups and time.monotonic() < end:
        time.sleep(0.02)
        groups = _send(groups, 0)
    _send(groups, signal.SIGKILL)


if __name__ == "__main__":
    main()
