"""The launcher's side of the guard process (`_guard.py`)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from aiorlinf.errors import AiorlinfError

__all__ = ["Guard", "helper"]


def helper(program: str) -> list[str]:
    """The command of one of the two programs beside this file, which get this process's pid as first argument.

    They run isolated and without site-packages, to start fast and to see nothing of what the workers' environment says to Python;
    unless the interpreter needs that to find its own library.
    """
    isolation = ["-P", "-s"] if "PYTHONHOME" in os.environ else ["-I"]
    return [sys.executable, *isolation, "-S", str(Path(__file__).with_name(program)), str(os.getpid())]


class Guard:
    """A small process that ends the workers' process groups if this process is killed.

    The parent-death signal reaches only the workers themselves, and only on Linux; the guard reaches what they had started.

    Raises:
        AiorlinfError: the process could not be started.
    """

    def __init__(self) -> None:
        try:
            self._popen = subprocess.Popen(
                helper("_guard.py"),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise AiorlinfError(f"no process can be started: {error}", operation="launch") from error
        assert self._popen.stdin is not None
        self._pipe = self._popen.stdin

    def add(self, group: int) -> None:
        """A process group that shall not outlive this process."""
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        """The group has ended; its number may soon belong to somebody else."""
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """End the guard, and leave the groups alone."""
        self._popen.kill()
        self._popen.wait()
        self._pipe.close()

    def _tell(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # somebody killed the guard: the job goes on without
            self._pipe.write(line.encode())
