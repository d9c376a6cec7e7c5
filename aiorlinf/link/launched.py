"""What a worker owes the launcher that started its process: to end in an orderly way when asked, and to say what it waits for."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from aiorlinf.link.diagnosis import dump_on_signal
from aiorlinf.rendezvous.settings import LAUNCHER_ENV

__all__ = ["FLUSH_S", "Terminated", "ending", "heed_launcher"]

FLUSH_S = 1.0
"""What a worker that the launcher ends may take to flush what it has sent: the others end, too, and the launcher does not wait for long."""

_ending = False


class Terminated(SystemExit):
    """The launcher wants the job to end: raised in the main thread, so that `finally` and `with` are left as they should be."""


def heed_launcher() -> None:
    """In a process that the launcher has started, and in its main thread: let SIGTERM raise `Terminated`, once, and SIGUSR1 print what
    all workers of the process wait for. Signals for which the program has a handler of its own stay as they are."""
    if os.environ.get(LAUNCHER_ENV) != str(os.getppid()) or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_sigterm)
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        dump_on_signal(signal.SIGUSR1)


def ending() -> bool:
    """Whether the launcher has asked this process to end."""
    return _ending


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    global _ending
    _ending = True
    signal.signal(number, signal.SIG_DFL)  # the second time means it
    raise Terminated(128 + number)
