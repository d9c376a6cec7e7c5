"""Starting threads and making loops, of which a process can have only so many."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable

from aiorlinf.errors import AiorlinfError

__all__ = ["make_loop", "start_thread"]

_HINT = "`ulimit -u`, or a container's limit on processes, bounds the threads of all of a user's processes; each takes memory, too"


def start_thread(thread: threading.Thread) -> None:
    """Start it.

    Raises:
        AiorlinfError: the system gives no more threads.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise AiorlinfError(f"the thread {thread.name!r} cannot be started: {error}", hint=_HINT) from error


def make_loop(factory: Callable[[], asyncio.AbstractEventLoop]) -> asyncio.AbstractEventLoop:
    """A new event loop.

    Raises:
        AiorlinfError: there are not enough file descriptors for one.
    """
    try:
        # One of asyncio's that cannot be made whole leaves a descriptor and a complaint behind: see first whether there are enough.
        with contextlib.ExitStack() as spare:
            for _ in range(2):
                for sock in socket.socketpair():
                    spare.enter_context(sock)
        return factory()
    except OSError as error:
        raise AiorlinfError(f"no event loop can be made: {error.strerror}", hint="`ulimit -n` bounds the files that are open") from error
