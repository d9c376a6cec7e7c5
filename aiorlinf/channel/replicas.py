"""Making and finding the replicas of a channel: one on each node that uses it."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, cast

import orjson

from aiorlinf.address import WorkerAddress
from aiorlinf.channel.channel import Channel
from aiorlinf.channel.remote import RemotePort
from aiorlinf.channel.spread import SpreadPort
from aiorlinf.work.steps import AsyncFuncWork

if TYPE_CHECKING:
    from aiorlinf.channel.hub import ChannelHub, Role
    from aiorlinf.channel.settings import ChannelSettings
    from aiorlinf.link.table import LinkTable
    from aiorlinf.manager.lifeline import Lifeline
    from aiorlinf.work.base import AsyncWork

__all__ = ["Start", "on_node", "open_spread"]

Start = Callable[[str, Callable[[str], Mapping[str, str]]], Awaitable[None]]
"""Start a channel worker with this address unless there is one, with the environment that the function gives."""


async def open_spread(
    hub: ChannelHub,
    table: LinkTable,
    life: Lifeline,
    first: Channel,
    settings: ChannelSettings,
    role: Role,
    env: Callable[[str], Mapping[str, str]],
    start: Start,
    timeout: float,
) -> Channel:
    """A handle of all replicas, given one of the first. The one of this node is made unless there is one.

    Raises:
        ChannelError, RendezvousError: that is not possible.
    """
    end = time.monotonic() + timeout
    primary = _port_of(first)
    node = (await life.lookup(table.address, timeout)).labels.get("host", "")
    home = (await life.lookup(settings.worker, max(0.0, end - time.monotonic()))).labels.get("host", "")
    nodes: dict[str, str] = await primary.question(b"nodes " + orjson.dumps([home, settings.name]))

    async def open_replica(name: str, *, create: bool = False) -> RemotePort:
        at = next((each for each, other in nodes.items() if other == name), node)
        replica = settings if name == settings.name else settings.replica(at)
        table.expect(WorkerAddress(replica.worker))
        return _port_of(await hub.open(replica, role.elsewhere(), create=create))

    def begin(name: str) -> AsyncWork[RemotePort]:
        work: AsyncFuncWork[RemotePort] = AsyncFuncWork(primary.home, find, (name,), {})
        primary.home.call(work._start_alone)
        return work

    async def find(name: str) -> RemotePort:
        nodes.update(await primary.question(b"nodes"))
        return await open_replica(name)

    own = primary
    if node in nodes and nodes[node] != settings.name:
        own = await open_replica(nodes[node])
    elif node not in nodes:
        replica = settings.replica(node)
        await start(replica.worker, on_node(env, node))
        nodes[node] = replica.name
        own = await open_replica(replica.name, create=True)
        nodes = await primary.question(b"nodes " + orjson.dumps([node, replica.name]))
    return Channel(SpreadPort(node, primary, own, nodes, begin))


def _port_of(channel: Channel) -> RemotePort:
    return cast(RemotePort, channel._port)


def on_node(env: Callable[[str], Mapping[str, str]], node: str) -> Callable[[str], Mapping[str, str]]:
    """The environment of a channel worker that has our node's label, wherever that came from."""
    if "," in node or "=" in node or not node:
        return env
    known = os.environ.get("AIORLINF_LABELS", "")
    labels = {"AIORLINF_LABELS": f"{known},host={node}" if known else f"host={node}"}
    return lambda address: {**env(address), **labels}
