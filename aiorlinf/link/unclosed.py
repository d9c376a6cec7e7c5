"""A worker on a loop of the program that nobody closes is told of, as asyncio tells of its transports: by a ResourceWarning.

It comes when the worker is collected, or when the program ends, once, and never after `close` was called. It has nothing of the worker, so
it does not keep it alive. A worker with a loop in a thread of its own may end with the program, and is not told of.
"""

from __future__ import annotations

import os
import warnings
import weakref
from types import CodeType

from aiorlinf.link.launched import ending
from aiorlinf.work.base import AsyncWork
from aiorlinf.work.sites import describe_site

__all__ = ["Unclosed"]


class Unclosed:
    """The promise of one warning.

    Args:
        worker: who is to be closed.
        started: its start, which knows where it was made.
    """

    def __init__(self, worker: object, address: str, started: AsyncWork[None]) -> None:
        self._finalizer = weakref.finalize(worker, _tell, address, started._code, started._lasti, os.getpid())

    def take_back(self) -> None:
        """It is being closed."""
        self._finalizer.detach()


def _tell(address: str, code: CodeType, lasti: int, pid: int) -> None:
    if os.getpid() != pid or ending():  # it is the parent's; or the launcher has told this process to end
        return
    text = (
        f"{address}, made at {describe_site(code, lasti)}, was never closed: use `async with aiorlinf.init(...)`, or `await comm.close()`"
    )
    warnings.warn(text, ResourceWarning, stacklevel=1)
