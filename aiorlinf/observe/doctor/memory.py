"""Checks of what shared memory and many connections need from the system."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

from aiorlinf.backends.shm.descriptors import abstract_listener, abstract_name
from aiorlinf.backends.shm.segment import create_segment
from aiorlinf.observe.doctor.findings import Finding, Level

__all__ = ["check_descriptors", "check_huge_pages", "check_limits", "check_memory_files"]

_FEW_FILES = 4096
_LITTLE_MEMORY = 4 << 30
_PROBE_BYTES = 4 << 20


def check_memory_files() -> Iterator[Finding]:
    """Payloads between workers of one host lie in memory files."""
    try:
        segment = create_segment(1, _PROBE_BYTES)
    except OSError as error:
        remedy = "payloads of one host go over sockets; raise the container's memory limit, or allow memfd_create in its seccomp profile"
        yield Finding(Level.WARNING, "memory files", f"cannot be made: {error}", remedy)
        return
    segment.close()
    yield Finding(Level.GOOD, "memory files", f"{_PROBE_BYTES >> 20} MiB made and touched")


def check_descriptors() -> Iterator[Finding]:
    """They are passed over Unix sockets without a name in the file system."""
    name = abstract_name("doctor")
    try:
        with abstract_listener(name, socket.SOCK_STREAM) as listener, socket.socket(socket.AF_UNIX) as client:
            listener.setblocking(True)
            listener.settimeout(5)
            client.connect(f"\0{name}")
            server, _ = listener.accept()
            with server:
                socket.send_fds(client, [b"x"], [client.fileno()])
                _, fds, _, _ = socket.recv_fds(server, 1, 4)
                for fd in fds:
                    os.close(fd)
                if not fds:
                    raise OSError("no descriptor came")
    except (OSError, AttributeError) as error:
        remedy = "payloads of one host go over loopback; use Linux, and let containers share the network namespace"
        yield Finding(Level.WARNING, "descriptor passing", f"does not work: {error}", remedy)
        return
    yield Finding(Level.GOOD, "descriptor passing", "works over abstract Unix sockets")


def check_huge_pages() -> Iterator[Finding]:
    """First touch of memory is several times faster with huge pages."""
    folder = Path("/sys/kernel/mm/transparent_hugepage")
    for file, what, good in (
        ("enabled", "received payloads", ("always", "madvise")),
        ("shmem_enabled", "memory files", ("always", "advise", "within_size")),
    ):
        try:
            text = (folder / file).read_text(encoding="ascii")
        except OSError:
            yield Finding(Level.NOTE, "huge pages", f"this kernel does not say whether it has them for {what}")
            continue
        chosen = text.partition("[")[2].partition("]")[0]
        if chosen in good:
            yield Finding(Level.GOOD, "huge pages", f"{chosen} for {what}")
        else:
            yield Finding(
                Level.NOTE,
                "huge pages",
                f"{chosen} for {what}: fresh memory is slower to touch",
                f"as root: echo {good[1]} > {folder / file}",
            )


def check_limits() -> Iterator[Finding]:
    """Open files and memory of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _FEW_FILES:
        text = f"{soft} (at most {hard}): a worker needs about three per peer"
        yield Finding(Level.WARNING, "open files", text, f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}")
    else:
        yield Finding(Level.GOOD, "open files", str(soft))
    limit = _memory_limit()
    if limit is not None and limit < _LITTLE_MEMORY:
        text = f"{limit >> 20} MiB for this process: the defaults allow 2 GiB of shared memory and 2 GiB of buffers per worker"
        remedy = "lower cluster.collective.shared_memory.max_bytes and tensor_buffer_pool.max_bytes"
        yield Finding(Level.WARNING, "memory", text, remedy)
    elif limit is not None:
        yield Finding(Level.GOOD, "memory", f"{limit >> 20} MiB")


def _memory_limit() -> int | None:
    """The smaller of the host's memory and the control group's limit, bytes."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(file).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit():
            found.append(int(text))
    return min(found)
