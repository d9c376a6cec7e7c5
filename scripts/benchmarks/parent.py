"""A process that must not outlive the one that started it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from typing import Final

__all__ = ["die_with_parent"]

PR_SET_PDEATHSIG: Final = 1


def die_with_parent(parent: int) -> None:
    """Ask the kernel to end this process when the process ``parent`` ends, however that comes about (Linux; else a no-op)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit("the process that started this one is gone already")
