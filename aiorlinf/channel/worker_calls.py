"""How a worker makes channels and connects to them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from aiorlinf.channel import opening
from aiorlinf.channel.hub import ChannelHub, Role
from aiorlinf.channel.settings import ChannelSettings, PolicySource, check_name
from aiorlinf.errors import AiorlinfError
from aiorlinf.work.base import DONE, AsyncWork
from aiorlinf.work.deadline import check_limit
from aiorlinf.work.steps import AsyncFuncWork

if TYPE_CHECKING:
    from aiorlinf.channel.channel import Channel
    from aiorlinf.collective.exchange import Exchange
    from aiorlinf.link.me import Self
    from aiorlinf.link.table import LinkTable
    from aiorlinf.manager.lifeline import Lifeline
    from aiorlinf.work.home import LoopHome

__all__ = ["ChannelCalls"]


class ChannelCalls:
    """`Worker.create_channel` and `connect_channel`."""

    home: LoopHome
    _exchange: Exchange
    _table: LinkTable
    _channels: ChannelHub
    _ready: asyncio.Future[tuple[Self, Lifeline]]

    def env(self, address: str) -> dict[str, str]:
        """Of the worker."""
        raise NotImplementedError

    def create_channel(
        self,
        name: str,
        *,
        maxsize: int = 0,
        max_bytes: int | None = None,
        policy: PolicySource = None,
        producers: int = 1,
        worker: str | None = None,
        shared_max_bytes: int | None = None,
        distributed: bool = False,
        producer: bool | str = False,
        consumer: bool | str = False,
        share: float = 1.0,
        labels: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> AsyncWork[Channel]:
        """Make a named queue, held by a worker in a process of its own, and connect to it.

        If there is one of this name and these settings already, it is only connected to. The process is started on this host, and ends with
        the job.

        Args:
            name: unique in the job.
            maxsize: bound on items, 0 for none. Items that were handed out do not count.
            max_bytes: bound on payload bytes, of items in the queue and of those handed out and not yet taken; None for none. An item
                that is larger by itself waits until it is alone.
            policy: which consumer gets an item: ``weighted_round_robin``, ``shortest_queue``, ``performance_aware``, ``memory_aware``, an
                import path ``module:name``, or a `LoadBalancePolicy` that can be pickled. None: whoever asks next gets the oldest item.
            producers: so many must have come before the stream can end.
            worker: name of the channel worker, by default the channel's; channels of one worker share a process.
            shared_max_bytes: bound on the payload bytes of all channels of that worker, None for none; the same for all of them.
            distributed: one replica on each node (label ``host``) that uses the channel. A key belongs to the node that used it first; what
                has no key is put on the own node, and a get without a key asks there first, then everywhere. The bounds are of each
                replica. Gets that wait at a replica which is lost end with `PeerLost`, which names it.
            producer, consumer: what this handle is from now on, not only from its first put or get; a text is its name (by default our
                address).
            share, labels: what a policy shall know of it as a consumer.
            timeout: seconds, by default cluster.network.rendezvous_timeout_s.

        Raises:
            UsageError: at the call, for an argument; by the work, if there is a channel of this name with other settings, which are shown.
            ChannelError: the process could not be started.
            RendezvousError: it did not join in time.

        Cancelling leaves open whether the channel is made.
        """
        settings = ChannelSettings.make(
            name,
            maxsize=maxsize,
            max_bytes=max_bytes,
            policy=policy,
            producers=producers,
            worker=worker,
            shared_max_bytes=shared_max_bytes,
            distributed=distributed,
        )
        role = Role.make(producer, consumer, share, labels)
        check_limit(timeout)

        async def create() -> Channel:
            me, life = await asyncio.shield(self._ready)
            limit = me.config.cluster.network.rendezvous_timeout_s if timeout is None else timeout
            return await opening.create(self._channels, self._table, life, settings, role, self.env, limit)

        return self._begin_work(create)

    def connect_channel(
        self,
        name: str,
        *,
        producer: bool | str = False,
        consumer: bool | str = False,
        share: float = 1.0,
        labels: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> AsyncWork[Channel]:
        """Connect to a channel that some worker makes with `create_channel`; waits until there is one.

        Args: as of `create_channel`.

        Raises:
            UsageError: at the call, for an argument.
            RendezvousError: nobody made it within `timeout` seconds.

        Cancelling is harmless.
        """
        check_name(name)
        role = Role.make(producer, consumer, share, labels)
        check_limit(timeout)

        async def connect() -> Channel:
            me, life = await asyncio.shield(self._ready)
            limit = me.config.cluster.network.rendezvous_timeout_s if timeout is None else timeout
            return await opening.connect(self._channels, self._table, life, name, role, self.env, limit)

        return self._begin_work(connect)

    def _begin_work(self, fn: Callable[[], Coroutine[Any, Any, Channel]]) -> AsyncWork[Channel]:
        """A handle that nobody gets, because the work was cancelled or its time was over meanwhile, is given up."""
        self._exchange.check(0)

        @functools.wraps(fn)
        async def open_it() -> Channel:
            try:
                channel = await fn()
            except AiorlinfError:
                if work.done():  # it was given up meanwhile: nobody is left whom this could be told
                    raise asyncio.CancelledError from None
                raise
            task = asyncio.current_task()
            assert task is not None
            task.add_done_callback(lambda _: _give_up(channel) if work.done() and work._state != DONE else None)  # after the work's own
            return channel

        work: AsyncFuncWork[Channel] = AsyncFuncWork(self.home, open_it, (), {})
        work._give_back = _give_up
        self.home.call(work._start_alone)
        return work


def _give_up(channel: Channel) -> None:
    port: Any = channel._port  # of a channel worker
    port.give_up()
