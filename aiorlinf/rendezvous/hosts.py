"""Which host this is, which network interfaces it has, and how a listening socket gets its port."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import platform
import secrets
import socket
import struct
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from aiorlinf.errors import ConfigError, RendezvousError, UsageError

__all__ = [
    "LISTEN_BACKLOG",
    "Interface",
    "bind_listener",
    "choose_interface",
    "format_endpoint",
    "host_identity",
    "host_labels",
    "interface_host",
    "is_ip",
    "is_loopback",
    "is_wildcard",
    "list_interfaces",
    "local_failure",
    "open_listener",
    "outward_host",
    "parse_endpoint",
    "process_identity",
]

LISTEN_BACKLOG = 4096
"""Connections that may wait for accept: a whole job joins in the same moment, and a crowd of strangers may be there, too."""

_INTERFACE_KEY = "cluster.network.interface"
_LOCAL_ERRORS = {
    errno.EMFILE: "this process has no file descriptors left",
    errno.ENFILE: "this host has no file descriptors left",
    errno.ENOBUFS: "this host has no socket buffers left",
    errno.ENOMEM: "this host has no memory left",
    errno.EADDRNOTAVAIL: "this host has no such address, or no local port left",
    errno.EACCES: "this user may not use that port",
    errno.EPERM: "this user may not open that connection",
}


# ------------------------------------------------------------------------------------------------------------- the host


def host_identity() -> str:
    """Text that is equal for two processes if, and only if, they can reach each other over loopback.

    It is the kernel's boot and the network namespace, so two containers of one machine differ. ``AIORLINF_HOST_ID`` overrides it
    (two processes with different ids are treated as two hosts).
    """
    override = os.environ.get("AIORLINF_HOST_ID")
    if override:
        return override[:256]
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:  # no Linux /proc: the name is the best there is
        return f"{platform.node()}/{sys.platform}"


def process_identity() -> str:
    """Text that no other process has, in whatever container; another one after a fork."""
    global _process
    pid = os.getpid()
    if _process[0] != pid:
        _process = (pid, secrets.token_hex(8))
    return _process[1]


_process = (0, "")


def host_labels(extra: Mapping[str, str] | None = None, configured: Mapping[str, str] | None = None) -> dict[str, str]:
    """Labels of a worker: ``host`` (its name), the configured ones, those of ``AIORLINF_LABELS`` (``name=value,name=value``), ``rack`` if
    ``AIORLINF_RACK`` is set, and the extra ones; later ones go before.

    Raises UsageError when ``AIORLINF_LABELS`` is of another form.
    """
    labels = {"host": socket.gethostname(), **(configured or {})}
    for item in os.environ.get("AIORLINF_LABELS", "").split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        if name and equals:
            labels[name] = value
        elif item.strip():
            raise UsageError(f"AIORLINF_LABELS has {item.strip()!r}", hint="it is of the form rack=a,zone=b")
    rack = os.environ.get("AIORLINF_RACK")
    if rack:
        labels["rack"] = rack
    labels.update(extra or {})
    return labels


# ------------------------------------------------------------------------------------------------------------ endpoints


def parse_endpoint(text: str) -> tuple[str, int]:
    """Split ``host:port`` or ``[v6]:port``.

    Raises:
        UsageError: the text is neither.
    """
    host, colon, port_text = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not colon or not host or not (port_text.isascii() and port_text.isdigit()) or not 0 < int(port_text[:6]) < 65536:
        raise UsageError(f"{text!r} is not a network address", hint="an address is host:port, such as 10.0.0.5:4711 or [fd00::5]:4711")
    return host, int(port_text)


def format_endpoint(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return address if mapped is None else mapped


def is_ip(host: str) -> bool:
    """Whether the host is an IP address, which needs no name look-up."""
    return _ip(host) is not None


def is_loopback(host: str) -> bool:
    """Whether the host (address or name, not resolved) means "this machine" to whoever uses it."""
    address = _ip(host)
    if address is None:
        return host.lower().rstrip(".") in ("localhost", "localhost.localdomain", "ip6-localhost")
    return address.is_loopback


def is_wildcard(host: str) -> bool:
    """Whether the host means every interface, such as ``0.0.0.0``: good for listening, useless for connecting."""
    address = _ip(host)
    return host == "" or (address is not None and address.is_unspecified)


def outward_host() -> str:
    """The address this host would use to reach others; loopback if it has no route. No packet is sent."""
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return "127.0.0.1"


# ----------------------------------------------------------------------------------------------------------- interfaces


@dataclass(frozen=True, slots=True)
class Interface:
    """One network interface and its addresses, IPv4 first."""

    name: str
    addresses: tuple[str, ...]

    @property
    def loopback(self) -> bool:
        """Whether it only leads back to this host."""
        return bool(self.addresses) and all(is_loopback(address) for address in self.addresses)

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.addresses) or 'no address'})"


def list_interfaces() -> tuple[Interface, ...]:
    """The interfaces of this network namespace, in the kernel's order. Addresses are known on Linux only."""
    v6 = _ipv6_addresses()
    found = []
    for _, name in socket.if_nameindex():
        v4 = _ipv4_address(name)
        found.append(Interface(name, ((v4,) if v4 is not None else ()) + tuple(v6.get(name, ()))))
    return tuple(found)


def _ipv4_address(name: str) -> str | None:
    if sys.platform != "linux":
        return None
    import fcntl  # not on every platform

    siocgifaddr = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), siocgifaddr, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _ipv6_addresses() -> dict[str, list[str]]:
    """From the kernel's table; link-local ones are left out, they need a scope that the peer does not have."""
    try:
        table = Path("/proc/net/if_inet6").read_text(encoding="ascii")
    except OSError:
        return {}
    found: dict[str, list[str]] = {}
    for line in table.splitlines():
        parts = line.split()
        if len(parts) == 6:
            address = ipaddress.IPv6Address(int(parts[0], 16))
            if not address.is_link_local:
                found.setdefault(parts[5], []).append(str(address))
    return found


def choose_interface(setting: str, interfaces: Iterable[Interface] | None = None) -> Interface:
    """The interface that the setting means.

    Args:
        setting: a name, several names in order of preference, or ``^name,name`` for the first one that is none of these.
        interfaces: to choose from; by default those of this host.

    Raises:
        ConfigError: a name is not an interface of this host (the real ones are listed), or none is left that has an address.
    """
    known = tuple(list_interfaces() if interfaces is None else interfaces)
    exclude = setting.startswith("^")
    names = [name.strip() for name in setting.removeprefix("^").split(",")]
    by_name = {interface.name: interface for interface in known}
    listing = f"this host has: {', '.join(str(interface) for interface in known)}"
    for name in names:
        if name not in by_name:
            raise ConfigError(_INTERFACE_KEY, f"{name!r} is not an interface of this host; {listing}")
    if exclude:
        # real interfaces first: loopback is only right when nothing else is left
        left = sorted((i for i in known if i.name not in names and i.addresses), key=lambda interface: interface.loopback)
        if not left:
            raise ConfigError(_INTERFACE_KEY, f"{setting!r} leaves no interface that has an address; {listing}")
        return left[0]
    for name in names:
        if by_name[name].addresses:
            return by_name[name]
    raise ConfigError(_INTERFACE_KEY, f"{setting!r} has no address; {listing}")


def interface_host(setting: str) -> str:
    """The first address of the interface that the setting means. Raises ConfigError as `choose_interface` does."""
    return choose_interface(setting).addresses[0]


# ------------------------------------------------------------------------------------------------------------ listening


def local_failure(error: OSError) -> str | None:
    """What is wrong on this side, if the error is about this host's own resources and says nothing about a peer."""
    return None if error.errno is None else _LOCAL_ERRORS.get(error.errno)


def bind_listener(host: str, port_range: tuple[int, int] | None = None) -> socket.socket:
    """A non-blocking listening TCP socket, not inheritable by child programs.

    Args:
        host: an address or name of this host; all answers of the name look-up are tried.
        port_range: first and last port to try, in order; (p, p) for one port; None: the kernel chooses.

    Raises:
        RendezvousError: nothing could be bound; names the host, the ports tried and the reason.
    """
    first, last = (0, 0) if port_range is None else port_range
    try:
        answers = socket.getaddrinfo(host, first, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise RendezvousError(f"cannot listen on {host!r}: {_reason(error)}", hint=_BIND_HINT) from error
    reason = "no address"
    for port in range(first, last + 1):
        for family, kind, protocol, _, where in answers:
            try:
                return _listen(family, kind, protocol, (where[0], port, *where[2:]))
            except OSError as error:
                reason = _reason(error)
                if error.errno not in (errno.EADDRINUSE, errno.EACCES, *_FAMILY_ERRORS):
                    raise _cannot_listen(host, port_range, reason) from error
    raise _cannot_listen(host, port_range, reason)


async def open_listener(host: str, port_range: tuple[int, int] | None = None) -> socket.socket:
    """`bind_listener` with the look-up of a host name done off the loop. Cancelling leaves nothing open."""
    if is_ip(host):
        return bind_listener(host, port_range)
    try:
        answers = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise RendezvousError(f"cannot listen on {host!r}: {_reason(error)}", hint=_BIND_HINT) from error
    failure: RendezvousError | None = None
    for address in dict.fromkeys(str(where[0]) for *_, where in answers):
        try:
            return bind_listener(address, port_range)
        except RendezvousError as error:
            failure = error
    raise failure or RendezvousError(f"cannot listen on {host!r}: it has no address", hint=_BIND_HINT)


_BIND_HINT = "a listening address is one of the host that listens; see cluster.network.bind_host"
_FAMILY_ERRORS = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT)


def _listen(family: int, kind: int, protocol: int, where: tuple[object, ...]) -> socket.socket:
    listener = socket.socket(family, kind, protocol)
    try:
        # a manager that is restarted on its port must not wait for the old connections' TIME_WAIT; a live listener still excludes us
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.setblocking(False)
        listener.bind(where)
        listener.listen(LISTEN_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _cannot_listen(host: str, port_range: tuple[int, int] | None, reason: str) -> RendezvousError:
    if port_range is None:
        return RendezvousError(f"cannot listen on {host}: {reason}", hint=_BIND_HINT)
    first, last = port_range
    if first == last:
        hint = "choose another port, or 0 for a free one"
        return RendezvousError(f"cannot listen on {format_endpoint(host, first)}: {reason}", hint=hint)
    hint = "widen cluster.network.port_range, or leave it out for ports chosen by the kernel"
    return RendezvousError(f"cannot listen on {host}, ports {first} to {last}: the last one tried says {reason}", hint=hint)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        if error.errno == errno.EADDRINUSE:
            return "the port is taken"
        if not isinstance(error, socket.gaierror):
            text = local_failure(error)
            if text is not None:
                return text
        return error.strerror or str(error)
    return str(error)
