"""What this process holds, read from ``/proc``; everything is empty where there is no ``/proc``."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from multiprocessing import forkserver, resource_tracker
from typing import NamedTuple

import uvloop

__all__ = [
    "Child",
    "child_processes",
    "describe_child",
    "describe_shm",
    "make_process_globals",
    "new_descriptors",
    "open_descriptors",
    "ours_in_shm",
    "shm_names",
    "where_thread_is",
]


_STANDARD_LIBRARY = os.path.dirname(os.__file__)
_SHM = "/dev/shm"
_SEMAPHORE = "sem.mp-"
_TCP_STATES = {"01": "established", "06": "time-wait", "08": "close-wait", "0A": "listening"}


class Child(NamedTuple):
    """A child process. The start time tells two processes with one id apart."""

    pid: int
    started: int


@functools.cache
def make_process_globals() -> None:
    """Make what a process makes once and keeps, so that it is there before the first look: libuv's signal pipe."""
    uvloop.new_event_loop().close()


def open_descriptors() -> dict[int, str]:
    """Each open descriptor with what it points to, less those that multiprocessing keeps for the whole process."""
    found: dict[int, str] = {}
    for number in map(int, _list_folder("/proc/self/fd")):
        # The descriptor of the listing itself is closed by now.
        with contextlib.suppress(OSError):
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    for number in _kept_descriptors():
        found.pop(number, None)
    return found


def new_descriptors(before: dict[int, str], after: dict[int, str]) -> dict[int, str]:
    """Each descriptor that came, with a line about it. By target, not by number: a number is used again when it is free."""
    missing = Counter(after.values()) - Counter(before.values())
    new = {}
    # Those whose number is new are the likelier ones where several point to the same thing.
    for number in sorted(after, key=lambda number: (before.get(number) == after[number], number)):
        target = after[number]
        if missing[target] > 0:
            missing[target] -= 1
            new[number] = f"{number} -> {_describe_target(target)}"
    return new


def child_processes() -> frozenset[Child]:
    """The direct children, dead or alive, less multiprocessing's own helpers."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return frozenset()  # none at all; saves reading all of /proc
    helpers = {getattr(_tracker(), "_pid", None), getattr(_fork_server(), "_forkserver_pid", None)}
    me = os.getpid()
    found = set()
    for pid in _children_listed() or map(int, filter(str.isdigit, _list_folder("/proc"))):
        if pid not in helpers:
            fields = _process_fields(pid)
            if fields and int(fields[1]) == me:
                found.add(Child(pid, int(fields[19])))
    return frozenset(found)


def describe_child(child: Child) -> str:
    """Process id, state letter and command line."""
    fields = _process_fields(child.pid)
    if not fields:
        return f"pid {child.pid} (gone)"
    if fields[0] == "Z":
        return f"pid {child.pid} (dead, not waited for)"
    command = _read(f"/proc/{child.pid}/cmdline").replace("\0", " ").strip()
    return f"pid {child.pid} (state {fields[0]}): {command[:200]}"


def shm_names() -> frozenset[str]:
    """The names in ``/dev/shm``."""
    return frozenset(_list_folder(_SHM))


def ours_in_shm(names: Iterable[str]) -> list[str]:
    """Those of ``names`` that still exist and that only our own processes, or nobody, has open: others use the folder too.

    Of the semaphores of `multiprocessing` only those that ours have open. Nobody has those of a process that was killed, be it somebody
    else's, until its resource tracker takes them away.
    """
    inodes = {name: inode for name in sorted(names) if (inode := _inode(f"{_SHM}/{name}"))}
    if not inodes:
        return []
    family = {os.getpid(), *(child.pid for child in child_processes())}
    ours, elsewhere = set[int](), set[int]()
    for pid in map(int, filter(str.isdigit, _list_folder("/proc"))):
        (ours if pid in family else elsewhere).update(_mapped_shm(pid))
    left = [name for name, inode in inodes.items() if inode not in elsewhere]
    return [name for name in left if not name.startswith(_SEMAPHORE) or inodes[name] in ours]


def describe_shm(name: str) -> str:
    """Path and size."""
    try:
        return f"{_SHM}/{name} ({os.stat(f'{_SHM}/{name}').st_size} bytes)"
    except OSError:
        return f"{_SHM}/{name}"


def where_thread_is(ident: int | None) -> str | None:
    """File, line and function that a thread is in, outside the standard library if it can be; None when it cannot be told."""
    innermost = sys._current_frames().get(ident) if ident is not None else None
    frame = innermost
    while frame is not None and _is_standard(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or innermost
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}" if frame else None


def _is_standard(filename: str) -> bool:
    return filename.startswith(_STANDARD_LIBRARY) and "site-packages" not in filename


def _kept_descriptors() -> Iterator[int]:
    for keeper, attribute in ((_tracker(), "_fd"), (_fork_server(), "_forkserver_alive_fd")):
        number = getattr(keeper, attribute, None)
        if isinstance(number, int):
            yield number


def _tracker() -> object:
    return getattr(resource_tracker, "_resource_tracker", None)


def _fork_server() -> object:
    return getattr(forkserver, "_forkserver", None)


def _children_listed() -> list[int]:
    """The children that each of our threads has started, as some kernels list them; reading all of /proc takes a hundred times as long."""
    return [int(pid) for thread in _list_folder("/proc/self/task") for pid in _read(f"/proc/self/task/{thread}/children").split()]


def _inode(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0


def _mapped_shm(pid: int) -> Iterator[int]:
    """The inodes of what it has mapped of ``/dev/shm``. Not the paths: a semaphore is mapped under another one, before it gets its name."""
    for line in _read(f"/proc/{pid}/maps").splitlines():
        if f" {_SHM}/" in line:
            yield int(line.split(maxsplit=5)[4])


def _process_fields(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` from the state on. The command before it may hold blanks and brackets."""
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _describe_target(target: str) -> str:
    if not target.startswith("socket:["):
        return target
    inode = target[8:-1]
    return _describe_inet(inode) or _describe_unix(inode) or target


def _describe_inet(inode: str) -> str | None:
    for protocol in ("tcp", "tcp6", "udp", "udp6"):
        for line in _read(f"/proc/self/net/{protocol}").splitlines()[1:]:
            columns = line.split()
            if columns[9] == inode:
                local, remote = (int(columns[index].rpartition(":")[2], 16) for index in (1, 2))
                state = _TCP_STATES.get(columns[3], f"state {columns[3]}")
                return f"{protocol} socket, local port {local}, remote port {remote}, {state}"
    return None


def _describe_unix(inode: str) -> str | None:
    for line in _read("/proc/self/net/unix").splitlines()[1:]:
        columns = line.split()
        if columns[6] == inode:
            return f"unix socket {columns[7] if len(columns) > 7 else '(no name)'}"
    return None


def _list_folder(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
