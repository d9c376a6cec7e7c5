"""In a notebook: an interrupt reaches a cell that waits."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading

__all__ = ["heed_interrupts"]


def heed_interrupts(loop: asyncio.AbstractEventLoop) -> None:
    """Have signals wake the loop of a notebook's kernel. Does nothing elsewhere; may be called again.

    The kernel interrupts a cell by a callback that its signal handler leaves in the loop. A loop that sleeps until something arrives on a
    socket does not see it, and sleeps on. With any handler of its own, asyncio has the system write each signal into a pipe that the loop
    listens to. This one is for a signal that means nothing, and stays.
    """
    if "ipykernel" not in sys.modules or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGURG) is not signal.SIG_DFL:
        return
    try:
        loop.add_signal_handler(signal.SIGURG, _nothing)
    except (NotImplementedError, RuntimeError):  # a loop without signals: then an interrupt waits for the loop's next turn
        pass


def _nothing() -> None:
    pass
