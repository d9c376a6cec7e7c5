"""How large payloads travel between us and a peer, decided when their link comes up."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from aiorlinf.address import Identity
from aiorlinf.backends.gloo import GlooPair, gloo_available
from aiorlinf.backends.select import DEVICE_BACKENDS, Choice, select_backend
from aiorlinf.link.device_out import DevicePlan
from aiorlinf.link.equip_devices import equip_devices
from aiorlinf.link.link import LinkState
from aiorlinf.link.ways import LaneWay, SharedWay
from aiorlinf.rendezvous.pairs import Pairs

if TYPE_CHECKING:
    from aiorlinf.link.connection import Connection
    from aiorlinf.link.host_memory import HostMemory
    from aiorlinf.link.link import Link
    from aiorlinf.link.me import Self
    from aiorlinf.manager.emulation import Route
    from aiorlinf.wire.handshake import Hello
    from aiorlinf.work.home import LoopHome

__all__ = ["equip"]

log: logging.Logger = logging.getLogger("aiorlinf.link")


def equip(
    home: LoopHome,
    link: Link,
    me: Self,
    memory: HostMemory,
    connection: Connection,
    hello: Hello,
    identity: Identity,
    route: Route | None = None,
) -> None:
    """Give the link its ways around the stream. Each side chooses for what it sends, and is ready to receive any way.

    Args:
        route: of the emulated network, for what we send: such payloads stay on the stream, where they are held up.

    Raises:
        BackendUnavailable: the backend asked for cannot be had, and may not be replaced.
    """
    collective = me.config.cluster.collective
    same_host = me.host_id == hello.host_id
    gloo_problem = gloo_available() or _foreign_sockets("Gloo", me)
    shared_hello = hello.capabilities.get("shm")
    shared_hello = shared_hello if isinstance(shared_hello, dict) else {}
    shm_problem = memory.problem_with(shared_hello, same_host)
    emulated = None if route is None else f"the network between the two is emulated ({route})"
    choice: Choice = select_backend(
        me.backend if me.backend not in DEVICE_BACKENDS else "auto",
        fallback=collective.fallback,
        same_host=same_host,
        same_worker=False,
        shm_problem=emulated or shm_problem,
        gloo_problem=emulated or gloo_problem,
    )
    link.backend, link.reason = choice.name, choice.reason
    if emulated is not None and emulated not in link.reason:
        link.reason += f"; {emulated}"
    plan = DevicePlan(me.backend, collective.fallback, same_host, emulated, None if same_host else _foreign_sockets("NCCL", me))
    equip_devices(home, link, connection.send, plan, me.config.cluster.network.connect_timeout_s)
    threshold = max(collective.inline_max_bytes, 1)
    if shm_problem is None:
        shared = memory.equip(link, shared_hello, me.identity, identity)
        if choice.name == "shm":
            link.sender.ways.append(SharedWay(link.sender, shared, threshold, choice.required))
    if gloo_problem is None:
        own = connection.extra_info("sockname")
        # Over a Unix socket both are in one network namespace.
        host = own[0] if isinstance(own, tuple) else "127.0.0.1"
        pairs = Pairs(
            home,
            connection.send,
            lambda store, rank, timeout: GlooPair(store, rank, host, timeout),
            threshold=threshold,
            timeout=me.config.cluster.network.connect_timeout_s,
            local=link.local,
            remote=link.remote,
        )
        link.pairs = pairs
        link.receiver.lane = pairs
        if choice.name == "gloo":
            link.sender.ways.append(LaneWay(link.sender, pairs, choice.required, lambda reason: _fall_back(link, reason)))


def _foreign_sockets(library: str, me: Self) -> str | None:
    """Why a library that opens sockets of its own, on any port and for anybody, may not do so in this job."""
    if me.config.cluster.network.port_range is not None:
        return f"{library} listens on ports of its own choice, and cluster.network.port_range is set"
    if me.encrypted:
        return f"{library}'s sockets cannot be encrypted, and the job uses TLS"
    return None


def _fall_back(link: Link, reason: str) -> None:
    """Say once that the backend is given up, to whoever reads the log or the statistics. At the end of the link that is no news."""
    if link.state is not LinkState.UP:
        return
    link.reason = f"{link.backend} was chosen, but {reason}"
    link.backend = "stream"
    log.warning("%s: large payloads to %s go over their link from now on: %s", link.local, link.remote, link.reason)
