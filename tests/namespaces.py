"""Two hosts on one machine: network namespaces joined by a veth pair, where the kernel and our rights allow them.

A namespace is held by a process and has no name, so that it is gone when that process is, however the tests end. Workers enter
it with `Host.enter`, which also gives them a host name and an ``/etc/hosts`` of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator

import pytest

from tests import peers

__all__ = ["Host", "two_hosts"]

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18


class Host:
    """One namespace.

    Attributes:
        address, address6: of its end of the veth pair, which is called eth0.
    """

    def __init__(self, holder: peers.Peer, name: str, number: int) -> None:
        self._holder = holder
        self.name = name
        self.address = f"10.77.0.{number}"
        self.address6 = f"fd77::{number}"

    @property
    def pid(self) -> int:
        """A process inside."""
        return self._holder.pid

    def enter(self, hosts: str = "") -> Callable[[], None]:
        """What a process calls to be inside; for `peers.process(prepare=...)`. `hosts` are more lines of its /etc/hosts."""
        return functools.partial(_enter, self.pid, self.name, f"127.0.0.1 localhost\n{hosts}")

    def run(self, command: str) -> str:
        """Run a shell command inside; its output. Raises RuntimeError if it fails."""
        self._holder.say(command)
        status, output = self._holder.wait_hear()
        if status != 0:
            raise RuntimeError(f"{command}: {output}")
        return str(output)

    def listening_ports(self) -> set[int]:
        """TCP ports on which somebody inside listens."""
        rows = [line.split() for line in self.run("cat /proc/net/tcp /proc/net/tcp6").splitlines()]
        return {int(row[1].rpartition(":")[2], 16) for row in rows if len(row) > 3 and row[3] == "0A"}

    def let_in(self, *ports: int | str) -> None:
        """Drop whatever TCP comes over eth0, silently, but for packets to or from these ports (or ranges ``first-last``)."""
        # The table of our own addresses comes first by default: then nothing that is for us could be dropped.
        self.run("ip rule add pref 100 lookup local && ip rule del pref 0")
        for port in ports:
            for side in ("dport", "sport"):
                self.run(f"ip rule add pref 10 iif eth0 ipproto tcp {side} {port} lookup local")
        self.run("ip rule add pref 20 iif eth0 ipproto tcp blackhole")


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two connected hosts. Skips the test where that is not permitted."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` command")
    with peers.process(_hold) as first, peers.process(_hold) as second:
        for holder in (first, second):
            problem = holder.wait_hear()
            if problem is not None:
                pytest.skip(f"network namespaces are not permitted here: {problem}")
        a, b = Host(first, "host-a", 1), Host(second, "host-b", 2)
        try:
            a.run(f"ip link add eth0 type veth peer name eth0 netns {b.pid}")
        except RuntimeError as error:
            pytest.skip(f"veth pairs are not permitted here: {error}")
        for host in (a, b):
            host.run(f"ip addr add {host.address}/24 dev eth0 && ip link set lo up && ip link set eth0 up")
        yield a, b


def _call(function: str, *args: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, function)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")


def _hold(pipe: peers.Pipe) -> None:
    try:
        _call("unshare", _CLONE_NEWNET)
    except OSError as error:
        pipe.say(str(error))
        return
    pipe.say(None)
    while True:
        done = subprocess.run(
            ["/bin/sh", "-c", pipe.hear(None)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        pipe.say((done.returncode, done.stdout))


def _enter(pid: int, name: str, hosts: str) -> None:
    with open(f"/proc/{pid}/ns/net", "rb") as namespace:
        _call("setns", namespace.fileno(), _CLONE_NEWNET)
    _call("unshare", _CLONE_NEWNS | _CLONE_NEWUTS)
    _call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    socket.sethostname(name)
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(hosts)
        file.flush()
        _call("mount", file.name.encode(), b"/etc/hosts", None, _MS_BIND, None)
