"""Two racks of two hosts on one machine: network namespaces behind bridges, and a link of a chosen bandwidth between the racks.

Each host is a namespace that its first process has moved into; the bridges are in that of the process which builds it all. As in `shaped`
nothing has a name that could be left: the kernel takes it away with the processes.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from scripts.benchmarks import shaped

__all__ = ["HOSTS", "RACKS", "address_of", "build", "crossed_bytes", "enter_namespace_of", "rack_of", "racks_problem", "take_address"]

RACKS: Final = ("a", "b")
HOSTS: Final = 4

_CLONE_NEWNET: Final = 0x40000000
_TRIAL: Final = (
    "ip link add name rack type bridge && ip link add name port0 type veth peer name port1 && ip link set port0 master rack"
    " && tc qdisc add dev port0 root tbf rate 1gbit burst 256kb limit 1mb"
)


def racks_problem() -> str | None:
    """Why there can be no such network here, or None. Tries all that it takes, in a process of its own."""
    return shaped.shaping_problem(_TRIAL)


def rack_of(host: int) -> str:
    """The first half of the hosts is in the first rack."""
    return RACKS[host * len(RACKS) // HOSTS]


def address_of(host: int) -> str:
    """On the network that both racks are."""
    return shaped.address_of(host)


def enter_namespace_of(pid: int) -> None:
    """Move this process to where that one is. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net", "rb") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"setns: {os.strerror(number)}")


def build(pids: Sequence[int], mbps: float) -> None:
    """Connect the namespaces of these processes, one for each host, by way of that of this one."""
    shaped.run("ip link add name link-a type veth peer name link-b")
    for rack in RACKS:
        shaped.run(f"ip link add name rack-{rack} type bridge && ip link set rack-{rack} up")
        _plug(f"link-{rack}", rack)
        shaped.limit(f"link-{rack}", mbps)
    for host, pid in enumerate(pids):
        shaped.run(f"ip link add name port{host} type veth peer name {shaped.INTERFACE} netns {pid}")
        _plug(f"port{host}", rack_of(host))


def _plug(interface: str, rack: str) -> None:
    shaped.run(f"ip link set {interface} master rack-{rack} && ip link set {interface} up")


def take_address(host: int) -> None:
    """In the namespace of a host, after `build`."""
    shaped.run(f"ip addr add {address_of(host)}/24 dev {shaped.INTERFACE} && ip link set {shaped.INTERFACE} up")


def crossed_bytes(pid: int) -> int:
    """What has gone from the first rack to the second, with all headers. `pid` is of the process that has built the network."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == "link-a":
            return int(rest.split()[8])
    raise LookupError(f"process {pid} has built no racks")
