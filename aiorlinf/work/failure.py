"""The error a work ended with, and the promise that somebody hears of it."""

from __future__ import annotations

import logging
import sys
from types import CodeType, TracebackType

from aiorlinf.errors import ClosedError
from aiorlinf.work.sites import describe_site

__all__ = ["Failure"]

_log = logging.getLogger("aiorlinf")


class Failure:
    """One error, shared by the work where it arose and by every later step of its chain.

    Because it is shared, whoever looks at any of them has seen it, and it is logged once, when the last of them is dropped unseen.
    The works themselves have no ``__del__``, so the common, successful ones do not pay for this.
    """

    __slots__ = ("code", "error", "lasti", "operation", "seen", "trace")

    def __init__(self, error: BaseException, operation: str, code: CodeType, lasti: int) -> None:
        self.error: BaseException = error
        self.trace: TracebackType | None = error.__traceback__  # raised again from here each time, so that it does not grow
        self.operation: str = operation
        self.code: CodeType = code
        self.lasti: int = lasti
        self.seen: bool = False

    def __del__(self) -> None:
        if self.seen or sys.is_finalizing():
            return
        error = self.error
        # Closing one's own worker with operations under way is no news to him who did it, and close() says what it did not flush.
        level = logging.DEBUG if isinstance(error, ClosedError) else logging.ERROR
        _log.log(
            level,
            "the error of %s, begun at %s, was never looked at: %s: %s",
            self.operation,
            describe_site(self.code, self.lasti),
            type(error).__name__,
            error,
            # without a traceback it would only repeat the text
            exc_info=None if self.trace is None and error.__cause__ is None else (type(error), error, self.trace),
        )
