"""The checks in a process of their own, which is ended when it hangs or dies: what the others have found is printed in any case.

That process runs the first halves, and has the partner (`running`) that runs the second ones; both are of one session, and end together.
What starts them never touches a device, so nothing that a driver does can stop it.
"""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

from scripts.gpuchecks.checks import Check
from scripts.gpuchecks.place import place
from scripts.gpuchecks.running import Outcome, Partner, run_check, spawned

__all__ = ["GRACE_S", "Watched"]

GRACE_S = 20.0
"""So much longer than its limit a check may take before its process is ended: it is expected to end by itself, and to say why."""

_LEAVE_S = 15.0


class Watched:
    """That process. It starts when it is made, and anew after it was ended; `with` ends it.

    Args:
        kind: of the devices.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._process: Any = None
        self._pipe: Connection | None = None
        self._described = ""
        self.start()

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Unless it runs already."""
        if self._process is not None:
            return
        self._process, self._pipe = spawned(_run, self._kind, daemon=False)  # it has a partner, and daemons may not have any
        self._described = ""

    def describe(self, limit: float) -> str:
        """The devices, or why nothing is known of them. Blocks until it is up."""
        self.start()
        if not self._described:
            self._described, _ = self._hear(limit)
        return self._described

    def run(self, check: Check, limit: float, left: float) -> Outcome:
        """Run a check. Blocks.

        Args:
            limit: for the check.
            left: after so many seconds its process is ended, however it does.
        """
        begin = time.perf_counter()
        end = begin + min(limit + GRACE_S, left)
        self.describe(max(0.0, end - begin))
        found: Any = None
        if self._process is not None and self._pipe is not None:
            try:
                self._pipe.send((check, limit))
            except OSError:
                pass  # it has died; that is heard in a moment
            found, heard = self._hear(max(0.0, end - time.perf_counter()))
            if heard:
                return Outcome(*found)
        return Outcome("FAILED", found or self._described, time.perf_counter() - begin)

    def _hear(self, limit: float) -> tuple[Any, bool]:
        """What it says; or what became of it, and False."""
        assert self._pipe is not None
        if not self._pipe.poll(limit):
            self.kill()
            return f"it hangs: its process was ended after {limit:.0f} s", False
        try:
            return self._pipe.recv(), True
        except (EOFError, OSError):
            self._process.join(_LEAVE_S)
            code = self._process.exitcode
            self.kill()
            return f"its process has died: {_told(code)}", False

    def end(self) -> str | None:
        """Let it end by itself. Returns what it had to object to at its end, None if nothing. Blocks."""
        process, pipe = self._process, self._pipe
        if process is None or pipe is None:
            return None
        pipe.close()
        process.join(_LEAVE_S)
        code = process.exitcode
        self.kill()
        return None if code == 0 else f"the process of the checks did not end well: {_told(code)}"

    def kill(self) -> None:
        """At once, and its partner with it."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # both have ended; or it has no session of its own yet, nor a partner
            process.kill()
        process.join()
        assert self._pipe is not None
        self._pipe.close()


def _told(code: int | None) -> str:
    if code is None:
        return "it hangs"
    return f"exit status {code}" if code >= 0 else f"by {signal.Signals(-code).name}"


def _run(kind: str, pipe: Connection) -> None:
    """All of that process."""
    os.setsid()
    with Partner(kind) as partner, place(kind) as where:  # the partner starts meanwhile
        pipe.send(where.describe())
        while True:
            try:
                check, limit = pipe.recv()
            except EOFError:  # nobody wants anything any more
                return
            pipe.send(tuple(run_check(check, kind, where, partner, limit)))
