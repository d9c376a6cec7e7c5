"""What the kernel says of a process."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

__all__ = ["Footprint", "footprint", "is_alive"]

_MEMORY_FILE = "/memfd:aiorlinf (deleted)"


class Footprint(NamedTuple):
    """What a process has at one moment.

    Attributes:
        descriptors: open files, sockets and so on.
        memory_files: those of them that are memory files of aiorlinf.
        mapped: bytes of memory files mapped.
        own: bytes of memory that is its own and there.
        shared: bytes of shared memory that it has touched.
        threads: of the process.
        faults: pages entered so far on touch, without reading from disk.
    """

    descriptors: int
    memory_files: int
    mapped: int
    own: int
    shared: int
    threads: int
    faults: int

    @property
    def resident(self) -> int:
        """All memory that is there, but for files."""
        return self.own + self.shared


def footprint(pid: int) -> Footprint:
    """Look now. Raises OSError when there is no such process any more."""
    folder = Path(f"/proc/{pid}")
    targets = []
    for entry in (folder / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            targets.append(os.readlink(entry))
    mapped = 0
    for line in (folder / "maps").read_text().splitlines():
        if line.endswith(_MEMORY_FILE):
            start, _, end = line.split(maxsplit=1)[0].partition("-")
            mapped += int(end, 16) - int(start, 16)
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    return Footprint(
        descriptors=len(targets),
        memory_files=sum(target.endswith(_MEMORY_FILE) for target in targets),
        mapped=mapped,
        own=_kib(status["RssAnon"]),
        shared=_kib(status["RssShmem"]),
        threads=int(status["Threads"]),
        faults=int((folder / "stat").read_text().rpartition(")")[2].split()[7]),
    )


def _kib(text: str) -> int:
    return int(text.split()[0]) * 1024


def is_alive(pid: int) -> bool:
    """Not ended, or ended and only waiting to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
