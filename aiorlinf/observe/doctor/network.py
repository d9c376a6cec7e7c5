"""Checks of names, interfaces, ports and the job's manager."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator

from aiorlinf.config import NetworkConfig
from aiorlinf.errors import AiorlinfError, ConfigError
from aiorlinf.manager.client import ManagerClient
from aiorlinf.observe.doctor.findings import Finding, Level
from aiorlinf.rendezvous.hosts import (
    bind_listener,
    choose_interface,
    interface_host,
    is_loopback,
    list_interfaces,
    outward_host,
    parse_endpoint,
)

__all__ = ["check_host_name", "check_interfaces", "check_manager", "check_ports"]

_MANAGER_SECONDS = 5.0


def check_interfaces(network: NetworkConfig) -> Iterator[Finding]:
    """What others could reach this host at."""
    known = list_interfaces()
    yield Finding(Level.GOOD, "interfaces", "; ".join(map(str, known)) or "none")
    if network.interface is not None:
        try:
            yield Finding(Level.GOOD, "interface chosen", str(choose_interface(network.interface, known)))
        except ConfigError as error:
            yield Finding(Level.PROBLEM, "interface chosen", str(error), "correct cluster.network.interface")
    outward = outward_host()
    if is_loopback(outward):
        yield Finding(Level.NOTE, "route", "none that leads out: workers of other hosts cannot reach this one")
    else:
        yield Finding(Level.GOOD, "route", f"others see this host as {outward}")


def check_host_name() -> Iterator[Finding]:
    """Addresses are learnt from connections, so the host's name matters little; torch's own tools look it up, though."""
    name = socket.gethostname()
    try:
        answers = sorted({str(where[0]) for *_, where in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except OSError as error:
        remedy = "aiorlinf does not need it; for torchrun and Gloo of other libraries add the name to /etc/hosts"
        yield Finding(Level.NOTE, "host name", f"{name} has no address: {error}", remedy)
        return
    text = f"{name} is {', '.join(answers)}"
    if all(map(is_loopback, answers)):
        text += ", which other hosts cannot reach; aiorlinf does not use it"
    yield Finding(Level.GOOD, "host name", text)


_FOR_EACH = "each worker of this machine needs one port of cluster.network.port_range for itself"


def check_ports(network: NetworkConfig) -> Iterator[Finding]:
    """Whether a worker could listen as it is configured."""
    try:
        host = _listening_host(network)
        with bind_listener(host, network.port_range) as listener:
            where = listener.getsockname()
    except AiorlinfError as error:
        remedy = error.hint or "correct cluster.network"
        if network.port_range is not None:
            remedy = f"{_FOR_EACH}: end what has them ({_who_has(network.port_range)} shows it), or choose others"
        yield Finding(Level.PROBLEM, "listening", error.message, remedy)
        return
    span = "a port of the kernel's choice" if network.port_range is None else f"ports {network.port_range[0]} to {network.port_range[1]}"
    yield Finding(Level.GOOD, "listening", f"works on {where[0]}, {span}")
    if network.port_range is not None and (taken := _taken(str(where[0]), network.port_range)):
        ports = f"{', '.join(map(str, taken[:5]))}{', ...' if len(taken) > 5 else ''}"
        text = f"{len(taken)} of the {network.port_range[1] - network.port_range[0] + 1} ports are taken: {ports}"
        yield Finding(Level.NOTE, "listening", text, f"{_FOR_EACH}; {_who_has(network.port_range)} shows who has them")
    if is_loopback(str(where[0])):
        yield Finding(Level.NOTE, "listening", "on this machine only", "for several machines set cluster.network.bind_host or interface")


def _taken(host: str, port_range: tuple[int, int]) -> list[int]:
    """Those ports, of the first thousand, that nobody can listen on now."""
    first, last = port_range
    taken = []
    for port in range(first, min(last, first + 999) + 1):
        try:
            bind_listener(host, (port, port)).close()
        except AiorlinfError:
            taken.append(port)
    return taken


def _who_has(port_range: tuple[int, int]) -> str:
    first, last = port_range
    return f"`ss -ltnp 'sport >= :{first} and sport <= :{last}'`"


def _listening_host(network: NetworkConfig) -> str:
    """As a worker decides it; ``auto`` is the address from which it reaches the manager."""
    if network.interface is not None:
        return interface_host(network.interface)
    if network.bind_host != "auto":
        return network.bind_host
    manager = os.environ.get("AIORLINF_MANAGER")
    if not manager:
        return "127.0.0.1"
    family, _, _, _, where = socket.getaddrinfo(*parse_endpoint(manager), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)  # sends nothing
        return str(probe.getsockname()[0])


def check_manager() -> Iterator[Finding]:
    """The manager that the environment names."""
    address = os.environ.get("AIORLINF_MANAGER")
    if not address:
        yield Finding(Level.NOTE, "manager", "AIORLINF_MANAGER is not set: workers of this environment would start one in their process")
        return
    try:
        text = asyncio.run(_ask_manager(address, os.environ.get("AIORLINF_TOKEN")))
    except AiorlinfError as error:
        yield Finding(Level.PROBLEM, "manager", error.message, error.hint or "is `aiorlinf manager` running there?")
        return
    yield Finding(Level.GOOD, "manager", text)


async def _ask_manager(address: str, token: str | None) -> str:
    proof = None if token is None else token.encode("utf-8", "surrogateescape")
    client = await ManagerClient.connect(address, proof, deadline=_MANAGER_SECONDS)
    try:
        workers = await client.workers(_MANAGER_SECONDS)
    finally:
        await client.close()
    shown = ", ".join(str(worker.identity) for worker in workers[:8]) + (", …" if len(workers) > 8 else "")
    return f"{address} knows {len(workers)} workers{': ' if workers else ''}{shown}"
