"""One worker's process and everything in its process group.

Not asyncio's own subprocess support, for three reasons: it depends on the event loop policy that somebody installed (a child
watcher; uvloop's policy has none), it keeps a pipe open that a grandchild holds, and its order of "exited" and "end of output"
cannot be relied upon. What is used is `subprocess.Popen` and the loop's readers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Literal

from aiorlinf.launch.guard import helper
from aiorlinf.launch.result import UNKNOWN_EXIT

__all__ = ["WorkerProcess", "group_alive", "signal_group"]

_READ = 262144
_LEFTOVER = 1 << 20  # bytes: more than a pipe holds
_AFTER_KILL_S = 5.0

Stream = Literal["out", "err"]


class WorkerProcess:
    """A started worker. All methods are to be called on the loop that made it.

    It has a session and so a process group of its own: Ctrl-C in the launcher's terminal does not reach it, and what it starts
    in turn ends with it, unless that made itself a session of its own too.

    Raises:
        OSError: the process could not be started.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], on_output: Callable[[Stream, bytes], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_output = on_output
        self._popen = subprocess.Popen(
            [*helper("_boot.py"), *argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=dict(env),
            start_new_session=True,
        )
        self.pid: int = self._popen.pid
        self._exited: asyncio.Future[int] = self._loop.create_future()
        self._pidfd: int | None = None
        self._reading = False
        self._pipes: dict[Stream, IO[bytes]] = {}
        for name, pipe in (("out", self._popen.stdout), ("err", self._popen.stderr)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._pipes["out" if name == "out" else "err"] = pipe
        self.resume()
        self._watch_exit()

    # --- its end

    async def wait(self) -> int:
        """Its return code (``-N`` for signal N) once it has ended. Cancelling stops the waiting only."""
        return await asyncio.shield(self._exited)

    @property
    def ended(self) -> bool:
        """Whether the process itself (not all of its group) has ended."""
        return self._exited.done()

    def _watch_exit(self) -> None:
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # not Linux, or a sandbox without that call
            threading.Thread(target=self._wait_in_thread, name=f"aiorlinf-wait-{self.pid}", daemon=True).start()
            return
        self._loop.add_reader(self._pidfd, self._on_pidfd)

    def _on_pidfd(self) -> None:
        returncode = self._reap(os.WNOHANG)
        if returncode is None:
            return
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        self._set_exited(returncode)

    def _wait_in_thread(self) -> None:
        returncode = self._reap(0)
        assert returncode is not None  # only WNOHANG comes back with nothing
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._set_exited, returncode)

    def _reap(self, options: int) -> int | None:
        # Not Popen.poll: it makes a 0 of a status that somebody else collected.
        try:
            pid, status = os.waitpid(self.pid, options)
        except ChildProcessError:
            return UNKNOWN_EXIT
        return os.waitstatus_to_exitcode(status) if pid else None

    def _set_exited(self, returncode: int) -> None:
        self._popen.returncode = returncode
        if not self._exited.done():
            self._exited.set_result(returncode)

    # --- its group

    def signal(self, number: int) -> None:
        """Signal all of its group; nothing happens when it is gone."""
        signal_group(self.pid, number)

    def signal_alone(self, number: int) -> None:
        """Signal the process itself, and nothing that it has started."""
        if not self.ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def catches(self, number: int) -> bool:
        """Whether it has a handler for this signal. False where that cannot be seen, as on other systems than Linux."""
        try:
            with open(f"/proc/{self.pid}/status", encoding="ascii", errors="replace") as file:
                caught = next((line for line in file if line.startswith("SigCgt:")), "SigCgt: 0")
        except OSError:
            return False
        return bool(int(caught.split()[1], 16) >> (number - 1) & 1)

    async def end_group(self, grace: float) -> bool:
        """Once the process has ended: end what it left behind. SIGTERM, `grace` seconds, SIGKILL; whether all are gone.

        Cancelling leaves them as they are.
        """
        for number, limit in ((signal.SIGTERM, grace), (signal.SIGKILL, _AFTER_KILL_S)):
            if not group_alive(self.pid):
                return True
            self.signal(number)
            end = self._loop.time() + limit
            pause = 0.01
            while group_alive(self.pid) and self._loop.time() < end:
                await asyncio.sleep(pause)
                pause = min(pause * 2, 0.05)
        return not group_alive(self.pid)

    # --- its output

    def pause(self) -> None:
        """Read no output for now: the worker will block in its writes when the pipe is full."""
        if self._reading:
            self._reading = False
            for pipe in self._pipes.values():
                self._loop.remove_reader(pipe)

    def resume(self) -> None:
        """Read output again."""
        if not self._reading:
            self._reading = True
            for stream, pipe in self._pipes.items():
                self._loop.add_reader(pipe, self._on_readable, stream)

    def _on_readable(self, stream: Stream) -> int:
        pipe = self._pipes[stream]
        try:
            data = os.read(pipe.fileno(), _READ)
        except (BlockingIOError, InterruptedError):
            return 0
        if not data:
            self._close_pipe(stream)
            return 0
        self._on_output(stream, data)
        return len(data)

    def take_output(self) -> None:
        """Take what is in the pipes now. Once the process has ended that is all that it wrote itself."""
        for stream in list(self._pipes):
            taken = 0
            while stream in self._pipes and taken < _LEFTOVER:
                size = self._on_readable(stream)
                if not size:
                    break
                taken += size

    def finish_output(self) -> None:
        """Once the group is gone: take what is still in the pipes, and close them.

        All that its processes wrote is in the pipes by then. A process that left the group may hold them open and write on:
        that is not waited for.
        """
        self.take_output()
        for stream in list(self._pipes):
            self._close_pipe(stream)

    def _close_pipe(self, stream: Stream) -> None:
        pipe = self._pipes.pop(stream, None)
        if pipe is not None:
            self._loop.remove_reader(pipe)
            pipe.close()


def signal_group(group: int, number: int) -> bool:
    """Signal a process group; whether there was anybody to signal."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def group_alive(group: int) -> bool:
    """Whether a process group has a member that still runs. A zombie that its new parent does not collect does not count."""
    if not signal_group(group, 0):
        return False
    try:
        entries = os.listdir("/proc")
    except OSError:
        return True
    if not any(entry.isdigit() for entry in entries):
        return True
    for entry in entries:
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                # After the name in brackets, which may hold anything: state, parent, group.
                state, _, owner = file.read().rpartition(b")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if int(owner) == group and state not in (b"Z", b"X"):
            return True
    return False
