"""The processes of channel workers that this process has started.

They belong to the job, not to this process: each has a session of its own and goes on when this process ends. They end when the job does
(`launch.channel_worker`); where this process embeds the job's manager, it tells them, and waits for them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from aiorlinf.errors import ChannelError

__all__ = ["PATH_ENV", "Starter", "begin", "end_of_job", "ended", "spawn", "start_with"]

PATH_ENV = "AIORLINF_CHANNEL_PATH"
"""The variable in which a channel worker finds the module search path; it is taken out of the environment."""

_BOOTSTRAP = (
    f"import json, os, sys; sys.path[:] = json.loads(os.environ.pop({PATH_ENV!r})); from aiorlinf.launch.channel_worker import run; run()"
)
_END_SECONDS = 8.0
_LOOK_SECONDS = 0.01

Starter = Callable[[Mapping[str, str]], Callable[[], int | None]]
"""Begins to start a channel worker with these variables and returns at once; what it returns tells whether that has failed, as `ended`."""

_starter: Starter | None = None
_lock = threading.Lock()
_children: dict[int, str] = {}  # the manager that each was given
_results: dict[int, int] = {}  # exit codes of those that have ended


def start_with(starter: Starter | None) -> None:
    """From now on, this process starts channel workers so; None: as processes of this host."""
    global _starter
    _starter = starter


def begin(env: Mapping[str, str]) -> Callable[[], int | None]:
    """Start a channel worker in the way of this process; the result tells its exit code, None while it runs. Raises as `spawn`."""
    return partial(ended, spawn(env)) if _starter is None else _starter(env)


def spawn(env: Mapping[str, str]) -> int:
    """Start a channel worker with these variables on top of ours; its process id.

    Raises:
        ChannelError: no process can be started.
    """
    full = {**os.environ, **env, PATH_ENV: json.dumps(sys.path)}
    full.setdefault("OMP_NUM_THREADS", "1")
    full.pop("PYTHONSTARTUP", None)
    full["CUDA_VISIBLE_DEVICES"] = ""  # it would only take memory of them
    with _lock:
        _reap()
        try:
            pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-c", _BOOTSTRAP],
                full,
                file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
                setsid=True,
                setsigmask=[],
                setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGCHLD],
            )
        except OSError as error:
            raise ChannelError(f"no process can be started for the channel: {error}", operation="create_channel") from error
        _children[pid] = env["AIORLINF_MANAGER"]
    return pid


def ended(pid: int) -> int | None:
    """The exit code of a channel worker that has ended (-N for signal N), None while it runs."""
    with _lock:
        _reap()
        return None if pid in _children else _results.get(pid, 0)


def end_of_job(manager: str) -> None:
    """The job of this manager, which this process embeds, is over: its channel workers end.

    Blocks for some seconds at most; one that somebody is still connected to goes on until that is over.
    """
    with _lock:
        _reap()
        ending = [pid for pid, given in _children.items() if given == manager]
        for pid in ending:
            os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + _END_SECONDS
    while any(ended(pid) is None for pid in ending) and time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)


def _reap() -> None:
    for pid in list(_children):
        try:
            found, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # somebody else has collected it
            found, status = pid, 0
        if found:
            del _children[pid]
            _results[pid] = os.waitstatus_to_exitcode(status)


def _forget() -> None:
    """In a child: they are the parent's."""
    global _lock
    _lock = threading.Lock()
    _children.clear()


os.register_at_fork(after_in_child=_forget)
