"""The program of a channel worker: ``python -m aiorlinf.launch.channel_worker``, with the environment of `comm.env(address)`.

It holds channels until the job is over. When is that? It is told by SIGTERM (by a process that embedded the manager), or the manager is
gone and does not come back. In either case it stays as long as somebody is connected to a channel; a second SIGTERM ends it at once.

What it has to say goes to the output of the process that has started it, as long as that one lives. After that it keeps no pipe open, for
whoever reads from it (a shell's ``program | head``, `subprocess.run`) would wait for this process instead of the program.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import stat
import sys
from typing import TYPE_CHECKING, NoReturn

import uvloop

from aiorlinf.errors import RendezvousError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiorlinf.worker import Worker

__all__ = ["End", "main", "run"]

log: logging.Logger = logging.getLogger("aiorlinf.channel")

_LOOK_SECONDS = 1.0
_PATIENCE_SECONDS = 5.0
_PATIENCE_WITH_ITEMS_SECONDS = 60.0
"""A manager may be started anew. With nobody connected, that is how long items wait for it."""


def main() -> int:
    """Run; the exit code."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_main())


def run() -> NoReturn:
    """`main`, and then the end of this process at once: whoever ends the job waits for it, and taking torch apart takes half a second."""
    code = main()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it
            stream.flush()
    os._exit(code)


async def _main() -> int:
    with _uncollected():
        from aiorlinf.worker import init

    end = End()
    letting_go = asyncio.create_task(_let_go_of_pipes_after(os.getppid()), name="watch who has started this")
    try:
        async with init() as comm:
            end.watch(comm)
            await end.event.wait()
    except RendezvousError as error:
        if "registered already" not in error.message:
            raise
        log.debug("somebody else started the same channel worker: %s", error)
    finally:
        end.stop()
        letting_go.cancel()
    return 0


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """What is imported here (torch's objects, some hundred thousand) the garbage collector passes over, now and from then on.

    A tenth of the time that the import takes goes into looking through them; later, each full collection would hold the loop for a tenth
    of a second or two, and find nothing among them.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


async def _let_go_of_pipes_after(parent: int) -> None:
    """Once this process, which is our parent, has ended. Where the system cannot tell of that (before Linux 5.3), never."""
    try:
        watched = os.pidfd_open(parent)
    except ProcessLookupError:  # it has ended
        pass
    except OSError:
        return
    else:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(watched, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(watched)
            os.close(watched)
    _let_go_of_pipes()


def _let_go_of_pipes() -> None:
    """Standard output and error go nowhere from now on, unless they are files or a terminal, for which nobody waits."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        with contextlib.suppress(OSError):  # it was closed from the beginning
            mode = os.fstat(number).st_mode
            if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
                os.dup2(nowhere, number)
    os.close(nowhere)


class End:
    """Decides when it is over.

    Attributes:
        event: set then.

    Args:
        signals: SIGTERM and SIGINT ask for it, too. Main thread only.
    """

    def __init__(self, *, signals: bool = True) -> None:
        self.event: asyncio.Event = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._asked = False
        self._watching: asyncio.Task[None] | None = None
        self._signals = (signal.SIGTERM, signal.SIGINT) if signals else ()
        for number in self._signals:
            self._loop.add_signal_handler(number, self._on_signal)

    def watch(self, comm: Worker) -> None:
        """The worker has joined."""
        self._host = comm.hold_channels(self._on_idle)
        self._watching = self._loop.create_task(self._watch(comm), name="watch the manager")
        self._on_idle()

    def _on_signal(self) -> None:
        if self._asked or self._watching is None:
            self.event.set()
        self._asked = True
        self._on_idle()

    def _on_idle(self) -> None:
        if self._asked and self._watching is not None and not self._host.sessions:
            self.event.set()

    async def _watch(self, comm: Worker) -> None:
        away = 0.0
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if comm.closed:  # the others have given us up
                self.event.set()
            away = away + _LOOK_SECONDS if comm.manager_away and not self._host.sessions else 0.0
            if away >= (_PATIENCE_WITH_ITEMS_SECONDS if self._host.length else _PATIENCE_SECONDS):
                self.event.set()

    def stop(self) -> None:
        """It is over."""
        for number in self._signals:
            self._loop.remove_signal_handler(number)
        if self._watching is not None:
            self._watching.cancel()


if __name__ == "__main__":
    sys.exit(main())
