"""Two doctors on two machines: can each reach the other, how fast, do their clocks agree, and which way do tensors
take between their accelerators.

They speak lines of JSON, each at most `_LINE` bytes, over a connection that exists only while both commands run. Nothing that comes is
believed: it is shown to a person, and bounded.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

from aiorlinf.errors import AiorlinfError, RendezvousError, WireError
from aiorlinf.link.device_facts import DeviceFacts
from aiorlinf.observe.doctor.devices import facts_here, ways_to_peer
from aiorlinf.observe.doctor.findings import Finding, Level
from aiorlinf.rendezvous.hosts import bind_listener, format_endpoint, host_identity

__all__ = ["meet", "wait_for_peer"]

_GREETING = "aiorlinf-doctor-1"
_LINE = 512
_DEVICES_LINE = 1 << 20
_SECONDS = 10.0
_PINGS = 9
_BULK_BYTES = 32 << 20
_PIECE = bytes(1 << 18)
_MUCH_OFFSET_SECONDS = 0.1
_NO_DOCTOR = (
    "run `aiorlinf doctor --listen` there, of this version, and give its port here; to test a job's manager, set AIORLINF_MANAGER and"
    " AIORLINF_TOKEN instead of --peer"
)


def _stranger() -> WireError:
    return WireError("the other side is no doctor of this version", hint="run `aiorlinf doctor` of one version on both machines")


class _Lines:
    """A connection as lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._file = connection.makefile("rb")

    def send(self, **message: Any) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, most: int = _LINE) -> dict[str, Any]:
        line = self._file.readline(most)
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise _stranger()
        return message

    def skip(self, count: int) -> None:
        while count:
            piece = self._file.read(min(count, len(_PIECE)))
            if not piece:
                raise WireError("the connection ended in the middle")
            count -= len(piece)


def wait_for_peer(host: str, port: int, say: Callable[[str], None], seconds: float | None = None) -> Iterator[Finding]:
    """Listen until one other doctor has come (``aiorlinf doctor --listen``).

    Args:
        host, port: where; port 0 for a free one.
        say: shows where it listens.
        seconds: how long to wait; None: until Ctrl-C.

    Raises:
        RendezvousError: cannot listen there, or nobody came in time.
    """
    with bind_listener(host, (port, port) if port else None) as listener:
        where = format_endpoint(host, listener.getsockname()[1])
        say(f"waiting on {where}; on the other machine: aiorlinf doctor --peer {where}")
        listener.settimeout(seconds)
        try:
            connection, peer = listener.accept()
        except TimeoutError:
            raise RendezvousError(f"nobody came to {where} within {seconds} s") from None
    with connection:
        connection.settimeout(_SECONDS)
        yield Finding(Level.GOOD, "peer", f"{peer[0]} reaches this host")
        yield from _answer(_Lines(connection), str(peer[0]))


def _answer(lines: _Lines, peer: str) -> Iterator[Finding]:
    hello = lines.receive()
    if hello.get("hello") != _GREETING or type(hello.get("port")) is not int or not 0 < hello["port"] < 65536:
        raise _stranger()
    lines.send(hello=_GREETING)
    for _ in range(_PINGS):
        lines.receive()
        lines.send(time=time.time())
    back = format_endpoint(peer, hello["port"])
    try:
        with socket.create_connection((peer, hello["port"]), _SECONDS):
            error = ""
    except OSError as failure:
        error = str(failure)
    lines.send(error=error[: _LINE // 2])
    yield _way_back(back, error)
    for _ in range(_BULK_BYTES // len(_PIECE)):
        lines.socket.sendall(_PIECE)
    told = lines.receive(_DEVICES_LINE)
    lines.send(**_devices())
    yield from _ways(told)


def _devices() -> dict[str, Any]:
    return {"host": host_identity(), "devices": [facts.encode().decode() for facts in facts_here()]}


def _ways(told: dict[str, Any]) -> Iterator[Finding]:
    """What the other side says of its accelerators, beside ours."""
    host, devices = told.get("host"), told.get("devices")
    if type(host) is not str or type(devices) is not list or not devices or not all(type(each) is str for each in devices):
        raise _stranger()
    there = [DeviceFacts.decode(each.encode()) for each in devices]
    yield from ways_to_peer(facts_here(), there, same_host=host == host_identity())


def _way_back(where: str, error: str) -> Finding:
    if error:
        remedy = "open the firewall for cluster.network.port_range, or let the other side's interface be chosen (cluster.network.interface)"
        return Finding(Level.PROBLEM, "way back", f"the listening side cannot connect to {where}: {error}", remedy)
    return Finding(Level.GOOD, "way back", f"the listening side connects to {where}")


def meet(host: str, port: int, listen_host: str | None = None) -> Iterator[Finding]:
    """Go to a doctor that listens (``aiorlinf doctor --peer HOST:PORT``).

    Args:
        host, port: where it listens.
        listen_host: our own address that it shall connect back to; by default the one that we reach it from.
    """
    where = format_endpoint(host, port)
    try:
        connection = socket.create_connection((host, port), _SECONDS)
    except OSError as error:
        yield Finding(Level.PROBLEM, "peer", f"{where} cannot be reached: {error}", _why_not(error))
        return
    with connection:
        connection.settimeout(_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield Finding(Level.GOOD, "peer", f"{where} is reached")
        lines = _Lines(connection)
        own_host = listen_host or str(connection.getsockname()[0])
        with bind_listener(own_host) as listener:
            try:
                _greet(lines, listener.getsockname()[1])
            except (OSError, AiorlinfError) as error:
                how = f"it says nothing for {_SECONDS:g} s" if isinstance(error, TimeoutError) else "it answers otherwise"
                text = f"what listens at {where} is not `aiorlinf doctor --listen`, but a job's manager or another program: {how}"
                yield Finding(Level.PROBLEM, "peer", text, _NO_DOCTOR)
                return
            try:
                yield from _ask(lines, own_host, listener)
            except (OSError, AiorlinfError) as error:
                text = f"the conversation with {where} broke: {error}"
                yield Finding(Level.PROBLEM, "peer", text, "was that doctor ended, or is there a firewall or a proxy in between?")


def _why_not(error: OSError) -> str:
    """What a connection that cannot be made says about the way."""
    if isinstance(error, ConnectionRefusedError):
        return "that host answers, and nobody listens on this port: start `aiorlinf doctor --listen` there, and give its port here"
    if isinstance(error, TimeoutError):
        return "that port is blocked: a firewall drops what is sent to it (see cluster.network.port_range); or no such host is there"
    return "is this an address of that host, and is there a way from here? `aiorlinf doctor --listen` there says which address it has"


def _greet(lines: _Lines, port: int) -> None:
    lines.send(hello=_GREETING, port=port)
    if lines.receive().get("hello") != _GREETING:
        raise _stranger()


def _ask(lines: _Lines, own_host: str, listener: socket.socket) -> Iterator[Finding]:
    with listener:
        port = listener.getsockname()[1]
        yield from _clocks(lines)
        error = lines.receive().get("error")
        yield _way_back(format_endpoint(own_host, port), str(error or ""))
    begin = time.perf_counter()
    lines.skip(_BULK_BYTES)
    seconds = time.perf_counter() - begin
    lines.send(done=True, **_devices())
    yield Finding(Level.GOOD, "rate", f"{_BULK_BYTES / seconds / 1e6:.0f} MB/s from there over one TCP connection")
    yield from _ways(lines.receive(_DEVICES_LINE))


def _clocks(lines: _Lines) -> Iterator[Finding]:
    """The offset from the exchange with the shortest round trip, as NTP (RFC 5905) does."""
    best = (float("inf"), 0.0)
    for _ in range(_PINGS):
        begin = time.time()
        lines.send(ping=True)
        theirs = lines.receive().get("time")
        end = time.time()
        if not isinstance(theirs, float):
            raise _stranger()
        best = min(best, (end - begin, theirs - (begin + end) / 2))
    round_trip, offset = best
    yield Finding(Level.GOOD, "round trip", f"{round_trip * 1e3:.2f} ms")
    text = f"its clock is {abs(offset) * 1e3:.1f} ms {'ahead' if offset >= 0 else 'behind'}, give or take {round_trip * 500:.1f}"
    if abs(offset) > _MUCH_OFFSET_SECONDS + round_trip:
        yield Finding(Level.WARNING, "clocks", text, "run NTP or chrony on both; log lines of the two do not sort")
    else:
        yield Finding(Level.GOOD, "clocks", text)
