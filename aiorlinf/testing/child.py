"""A process that runs one function for a test, and what it tells: both ends of the pipe between the two."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

__all__ = ["Told", "run_child", "say"]


class Told:
    """The test's end.

    Attributes:
        said: what the process has said, oldest first, and nobody has heard.
        outcome: ``("value", value)`` or ``("raised", type name, text, traceback)``; None as long as its function runs.
        ended: nothing more will come.
    """

    def __init__(self, connection: Connection) -> None:
        self.said: deque[Any] = deque()
        self.outcome: tuple[Any, ...] | None = None
        self.ended: bool = False
        self._connection = connection

    @property
    def raised(self) -> bool:
        """Whether its function has raised."""
        return self.outcome is not None and self.outcome[0] == "raised"

    def look(self) -> bool:
        """Take one message of the process, if there is one."""
        try:
            if self._connection.closed or not self._connection.poll():
                return False
            message = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self.ended = True
            return False
        if message[0] == "said":
            self.said.append(message[1])
        else:
            self.outcome = message
        return True


def say(connection: Connection, obj: object) -> None:
    """From the process, while its function runs."""
    connection.send(("said", obj))


def run_child(
    connection: Connection, log: str, env: Mapping[str, str], call: Callable[[], Any], prepare: Callable[[], None] = lambda: None
) -> None:
    """What such a process does: call, and tell of the outcome. It ends with the test's process, whatever happens.

    Args:
        log: file for all that it writes to its standard output and error.
        env: more environment variables.
        prepare: called before anything else, while the process has one thread.
    """
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(env)
    prepare()
    threading.Thread(target=_end_with_parent, name="watch the test", daemon=True).start()
    outcome: tuple[Any, ...]
    try:
        outcome = ("value", call())
    except BaseException as error:  # all of it is reported to the test
        outcome = _raised(error)
    try:
        connection.send(outcome)
    except BrokenPipeError:  # the test has lost its interest
        pass
    except Exception as error:  # the value cannot be pickled
        connection.send(_raised(error))


def _raised(error: BaseException) -> tuple[Any, ...]:
    return "raised", type(error).__name__, str(error), traceback.format_exc()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    ctypes.CDLL(None)._exit(1)
