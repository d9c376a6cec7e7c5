"""A home for works that are over before they begin, in a thread without a loop: ``wait_all([])`` in synchronous code."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextvars import Context
from typing import Any, NoReturn, TypeVarTuple, cast

from aiorlinf.errors import UsageError
from aiorlinf.work.home import LoopHome

__all__ = ["NoLoop", "Nowhere"]

Ts = TypeVarTuple("Ts")

_log = logging.getLogger("aiorlinf")


class NoLoop:
    """As much of a loop as finished works use. Runs callbacks at once, and nothing that takes time."""

    def is_closed(self) -> bool:
        return False

    def get_debug(self) -> bool:
        return False

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> None:
        if context is None:
            callback(*args)
        else:
            context.run(callback, *args)

    def create_task(self, coro: Any, **_options: Any) -> NoReturn:
        coro.close()
        raise UsageError("there is no event loop here that could run a coroutine", hint="call it from inside a loop")

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        _log.error("%s", context.get("message"), exc_info=context.get("exception"))


class Nowhere(LoopHome):
    """Every thread is its home thread. Only for works that are over."""

    def __init__(self) -> None:
        super().__init__(cast(asyncio.AbstractEventLoop, NoLoop()), name="aiorlinf-nowhere")

    def on_home(self) -> bool:
        return True

    def call(self, fn: Callable[[*Ts], object], *args: *Ts) -> None:
        fn(*args)

    def call_soon(self, fn: Callable[[*Ts], object], *args: *Ts) -> None:
        fn(*args)
