"""The section cluster.network: addresses, ports, time limits, certificates."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from aiorlinf.config.options import option

__all__ = ["NetworkConfig", "TlsConfig"]


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """Files in PEM format, by which both sides of every connection prove who they are. All three, or none: then nothing is encrypted."""

    cert: str | None = option(None, "certificate of the process, followed by those between it and the authority")
    key: str | None = option(None, "private key of that certificate")
    ca: str | None = option(None, "certificate of the job's own authority, which has signed all the others")

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield (key, complaint) for what a single key cannot tell."""
        named = [name for name in ("cert", "key", "ca") if getattr(self, name)]
        for name in ("cert", "key", "ca"):
            if named and name not in named:
                yield name, f"this key is required when {named[0]} is given"

    @property
    def enabled(self) -> bool:
        """Whether there is any."""
        return self.ca is not None


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    """Where workers listen, what they tell their peers, and how long they wait."""

    bind_host: str = option("auto", "address to listen on; auto is the address of the worker's own connection to the manager")
    advertise_host: str | None = option(None, "address that peers are told, instead of the one learnt from the live connection")
    interface: str | None = option(None, "network interface to use, or ^name,name to exclude some")
    port_range: tuple[int, int] | None = option(
        None, "first and last port of every listening socket; absent: chosen by the kernel", minimum=1, maximum=65535
    )
    connect_timeout_s: float = option(10.0, "seconds for one connection to be made", above=0, maximum=86400)
    handshake_timeout_s: float = option(5.0, "seconds for a connection to prove itself", above=0, maximum=86400)
    rendezvous_timeout_s: float = option(60.0, "seconds to wait for a worker that has not joined yet", above=0, maximum=86400 * 30)
    reconnect_timeout_s: float = option(
        30.0, "seconds that a link between hosts, once cut by the network, is tried to be restored; 0: not at all", minimum=0, maximum=86400
    )
    heartbeat_timeout_s: float = option(
        15.0, "seconds without a word of a worker's process after which it is taken for dead", minimum=0.5, maximum=86400
    )
    close_timeout_s: float = option(5.0, "seconds that close spends flushing", minimum=0, maximum=86400)
    tls: TlsConfig = dataclasses.field(default_factory=TlsConfig)

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield (key, complaint) for what a single key cannot tell."""
        if self.port_range is not None and self.port_range[0] > self.port_range[1]:
            yield "port_range", f"the first port is above the last: {list(self.port_range)}"
        if not self.bind_host:
            yield "bind_host", "empty; allowed: auto, a host name or an IP address"
