"""What the system says of this process or another, and its limits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["memory_file_at", "memory_file_mappings", "no_more_descriptors", "page_faults", "resident_bytes", "soon"]


def memory_file_mappings(pid: int | str = "self") -> list[tuple[int, int]]:
    """(start, end) of each mapping of a memory file of aiorlinf."""
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if line.endswith("/memfd:aiorlinf (deleted)"):
            start, _, end = line.split()[0].partition("-")
            found.append((int(start, 16), int(end, 16)))
    return found


def memory_file_at(address: int, size: int) -> bool:
    """This memory lies in mappings of memory files of aiorlinf."""
    # The kernel may show one mapping in several lines, or two neighbours as one.
    at = address
    for start, end in sorted(memory_file_mappings()):
        if start <= at < end:
            at = end
    return at >= address + size


def resident_bytes(pid: int | str = "self") -> int:
    """Memory of a process that is there, shared memory that it has touched included."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def page_faults() -> int:
    """How often this process has touched a page that was not entered for it."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@contextlib.contextmanager
def no_more_descriptors() -> Iterator[None]:
    """This process cannot open another file. Those that are open stay open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def soon(condition: Callable[[], bool], *, seconds: float = 20.0) -> None:
    """Wait until it holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        await asyncio.sleep(0.005)
