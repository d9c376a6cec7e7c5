"""Finding a channel by its name, and making it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from aiorlinf.address import WorkerAddress
from aiorlinf.channel import spawn
from aiorlinf.channel.replicas import on_node, open_spread
from aiorlinf.channel.settings import NOT_HELD, ChannelSettings
from aiorlinf.errors import ChannelError, RendezvousError, UsageError

if TYPE_CHECKING:
    from aiorlinf.channel.channel import Channel
    from aiorlinf.channel.hub import ChannelHub, Role
    from aiorlinf.link.table import LinkTable
    from aiorlinf.manager.lifeline import Lifeline
    from aiorlinf.work.base import AsyncWork

__all__ = ["connect", "create"]

_LOOK_SECONDS = 0.1
_ANSWER_GRACE_SECONDS = 5.0
"""How much longer than the call's own time a channel worker that is there may take to answer: also a call with none left is answered."""


async def create(
    hub: ChannelHub,
    table: LinkTable,
    life: Lifeline,
    settings: ChannelSettings,
    role: Role,
    env: Callable[[str], Mapping[str, str]],
    timeout: float,
) -> Channel:
    """A handle of the channel, which is made unless there is one of these settings.

    Raises:
        UsageError: it exists with other settings.
        ChannelError: its process could not be started.
        RendezvousError: that did not join in time, or does not answer.
    """
    end = time.monotonic() + timeout
    held = await _held(life, settings.name)
    if held is not None:
        if different := settings.differs(held):
            raise UsageError(
                f"channel {settings.name!r} exists with other settings: {different}",
                operation="create_channel",
                hint="connect_channel(name) takes it as it is",
            )
    elif not await _alive(life, settings.worker):
        first = on_node(env, (await life.lookup(table.address, timeout)).labels.get("host", "")) if settings.distributed else env
        await _start(life, settings.worker, first, end)
    host = WorkerAddress(settings.worker)
    table.expect(host)
    channel = await _answered(hub.open(settings, role, create=True), settings.worker, end, "create_channel")
    return channel if not settings.distributed else await _spread(hub, table, life, channel, settings, role, env, end)


async def _spread(
    hub: ChannelHub,
    table: LinkTable,
    life: Lifeline,
    channel: Channel,
    settings: ChannelSettings,
    role: Role,
    env: Callable[[str], Mapping[str, str]],
    end: float,
) -> Channel:
    async def start(address: str, env: Callable[[str], Mapping[str, str]]) -> None:
        if not await _alive(life, address):
            await _start(life, address, env, end)

    return await open_spread(hub, table, life, channel, settings, role, env, start, max(0.0, end - time.monotonic()))


async def connect(
    hub: ChannelHub,
    table: LinkTable,
    life: Lifeline,
    name: str,
    role: Role,
    env: Callable[[str], Mapping[str, str]],
    timeout: float,
) -> Channel:
    """A handle of the channel of this name. Waits until there is one.

    Raises:
        RendezvousError: nobody made it in time, or its worker does not answer.
    """
    end = time.monotonic() + timeout
    while True:
        try:
            holding = await life.find("channel", name, max(0.0, end - time.monotonic()))
        except RendezvousError as error:
            error.fill(operation="connect_channel", hint=f"some worker calls comm.create_channel({name!r})")
            raise
        settings = ChannelSettings.unpublished(holding.value)
        table.expect(holding.owner.address)
        try:
            channel = await _answered(hub.open(settings, role, create=False), settings.worker, end, "connect_channel")
        except UsageError as error:
            # Its worker has died and lives anew without it, and the name is still that of the earlier life: as if there were no channel.
            if NOT_HELD not in error.message:
                raise
            if time.monotonic() >= end:
                hint = f"some worker calls comm.create_channel({name!r})"
                raise RendezvousError(error.message, operation="connect_channel", elapsed=timeout, hint=hint) from None
        else:
            return channel if not settings.distributed else await _spread(hub, table, life, channel, settings, role, env, end)
        await asyncio.sleep(min(_LOOK_SECONDS, max(0.0, end - time.monotonic())))


async def _answered(work: AsyncWork[Channel], worker: str, end: float, operation: str) -> Channel:
    """The handle, once its channel worker knows of it.

    Raises:
        RendezvousError: that worker is there and does not answer: it is frozen, or its loop is blocked.
    """
    began = time.monotonic()
    limit = asyncio.timeout(max(0.0, end - began) + _ANSWER_GRACE_SECONDS)
    try:
        async with limit:
            return await work
    except TimeoutError:
        if not limit.expired():
            raise
        raise RendezvousError(
            f"the channel worker {worker} has joined the job and does not answer",
            operation=operation,
            remote=worker,
            elapsed=time.monotonic() - began,
            hint="it is stopped, or its loop is blocked",
        ) from None


async def _held(life: Lifeline, name: str) -> ChannelSettings | None:
    try:
        holding = await life.find("channel", name, 0.0)
    except RendezvousError:
        return None
    return ChannelSettings.unpublished(holding.value)


async def _alive(life: Lifeline, address: str) -> bool:
    try:
        await life.lookup(address, 0.0)
    except RendezvousError:
        return False
    return True


async def _start(life: Lifeline, address: str, env: Callable[[str], Mapping[str, str]], end: float) -> None:
    """Start the channel worker and wait until it, or one that somebody else started at the same time, has joined."""
    await life.expect(address)  # where all workers were named beforehand, it was not
    ended = spawn.begin(env(address))
    joined = asyncio.ensure_future(life.lookup(address, max(0.0, end - time.monotonic())))
    try:
        while not joined.done():
            await asyncio.wait({joined}, timeout=_LOOK_SECONDS)
            code = ended()
            if code and not joined.done():
                how = f"with exit code {code}" if code > 0 else f"by signal {-code}"
                raise ChannelError(
                    f"the channel worker {address} ended {how} before it had joined",
                    operation="create_channel",
                    hint="see what it has printed",
                )
        await joined
    finally:
        joined.cancel()
