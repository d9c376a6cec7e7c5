"""The channels that one channel worker holds, and those who use them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

import torch

from aiorlinf.channel.affinity import Affinity
from aiorlinf.channel.budget import ByteBudget
from aiorlinf.channel.entries import HEAD, HELLO, REQUESTS
from aiorlinf.channel.host_port import Hosted
from aiorlinf.channel.pending import CONTEXTS
from aiorlinf.channel.queue import ChannelQueue
from aiorlinf.channel.records import Delivery, Put, PutState, Rejected, Told
from aiorlinf.channel.session import Session
from aiorlinf.channel.settings import NOT_HELD, ChannelSettings
from aiorlinf.channel.stats import take_stats
from aiorlinf.channel.watching import watch
from aiorlinf.collective.inbox import ParcelInbox
from aiorlinf.errors import AiorlinfError, UsageError, WireError

if TYPE_CHECKING:
    from aiorlinf.address import WorkerAddress
    from aiorlinf.channel.stats import ChannelStats
    from aiorlinf.collective.exchange import Exchange
    from aiorlinf.link.pending import PendingOperation
    from aiorlinf.work.base import AsyncWork
    from aiorlinf.work.home import LoopHome

__all__ = ["ChannelHost"]

log: logging.Logger = logging.getLogger("aiorlinf.channel")

_LOOK_AGAIN_SECONDS = 1.0
_ADMITTED = PutState.ADMITTED  # compared for every put


class ChannelHost:
    """See the module. Made on the home thread of a worker that does nothing else.

    Args:
        exchange: the worker's.
        publish: tells the manager of a new channel, by its name and what others shall know of it.
        on_idle: called when the last worker that used a channel is gone.

    Attributes:
        sessions: the workers that use channels.
        contexts: of its messages (see `link.pending.Reporter`).
    """

    contexts = CONTEXTS

    def __init__(
        self,
        exchange: Exchange,
        publish: Callable[[str, Mapping[str, str]], Coroutine[Any, Any, None]] | None = None,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        self.exchange = exchange
        self.home: LoopHome = exchange.home
        self.sessions: dict[WorkerAddress, Session] = {}
        self._publish = publish
        self._on_idle = on_idle
        exchange.table.pass_on()
        exchange.table.device = torch.device("cpu")  # nothing is kept on an accelerator here, whoever shares the process
        for link in exchange.table.links():
            link.receiver.delivery.landing.default = exchange.table.device
        exchange.table.reporters.add(self)
        self._channels: dict[str, Hosted] = {}
        self._publishing: dict[str, asyncio.Task[None]] = {}
        self._told: deque[Told] = deque()
        self._shared: ByteBudget | None = None
        self._working = False
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._inbox = ParcelInbox(exchange, REQUESTS, 0)
        self._listen()

    def pending(self) -> list[PendingOperation]:
        """Nothing that a program has called: see `link.pending.Reporter`."""
        return []

    def stats(self) -> list[tuple[Hosted, ChannelStats]]:
        """Each channel with its figures."""
        now, local = time.monotonic(), str(self.exchange.local)
        return [(hosted, take_stats(hosted.queue, now, local, hosted.settings.policy)) for hosted in list(self._channels.values())]

    @property
    def length(self) -> int:
        """Items of all channels."""
        return sum(hosted.queue.length for hosted in self._channels.values())

    async def channel(self, settings: ChannelSettings, *, create: bool) -> Hosted:
        """The channel of this name; made (`create`) with these settings if there is none.

        Raises:
            UsageError: there is one of other settings, or none, or its policy cannot be made here.
            RendezvousError: another channel worker has one of this name, or the manager cannot be told.
        """
        name = settings.name
        if name not in self._channels:
            if not create:
                raise UsageError(f"{self.exchange.local} {NOT_HELD} {name!r}", operation="connect_channel")
            hosted = self._make(settings)
            self._channels[name] = hosted
            if self._publish is not None:
                self._publishing[name] = self.home.hold(self._publish(name, settings.published()), f"publish {name}")
        hosted = self._channels[name]
        if create and hosted.settings != settings:
            different = settings.differs(hosted.settings) or "another policy object"
            raise UsageError(f"channel {name!r} exists with other settings: {different}", operation="create_channel")
        publishing = self._publishing.get(name)
        if publishing is not None:
            try:
                await asyncio.shield(publishing)
            except AiorlinfError:
                if self._channels.get(name) is hosted:
                    del self._channels[name]
                raise
            finally:
                if publishing.done():
                    self._publishing.pop(name, None)
        return hosted

    def _make(self, settings: ChannelSettings) -> Hosted:
        if settings.worker != self.exchange.local:
            raise UsageError(f"channel {settings.name!r} belongs to {settings.worker}, not to {self.exchange.local}")
        policy = settings.make_policy(allow_pickle=self.exchange.config.allow_pickle)
        if self._shared is None:
            self._shared = ByteBudget(settings.shared_max_bytes)
        elif settings.shared_max_bytes != self._shared.limit:
            raise UsageError(
                f"channel {settings.name!r} asks for shared_max_bytes={settings.shared_max_bytes} of {self.exchange.local}, "
                f"whose channels share {self._shared.limit}",
                operation="create_channel",
            )
        queue = ChannelQueue(
            settings.name,
            maxsize=settings.maxsize,
            max_bytes=settings.max_bytes,
            policy=policy,
            producers=settings.producers,
            shared=self._shared,
            told=self._told,
        )
        return Hosted(settings, queue, Affinity() if settings.distributed else None)

    # ---- listening

    def _listen(self) -> None:
        while not self._closed:
            try:
                work = self._inbox.recv()
            except AiorlinfError:
                return
            if not work.done():
                watch(work, self._heard)
                return
            self._take(work)

    def _heard(self, work: AsyncWork[Any]) -> None:
        try:
            self._take(work)
        finally:
            self._listen()

    def _take(self, work: AsyncWork[Any]) -> None:
        if work.cancelled():
            self._closed = True
            return
        error = work.exception()
        if error is not None:
            # Closed, or its sender died in the middle of it, of which its session hears.
            self._closed = self._closed or not self.exchange.table.inboxes
            return
        sender, parcel = work.result()
        body = parcel.whole_body(keep=True)
        session: Session | None = None
        try:
            if body is None or len(body) < HEAD.size:
                raise WireError("a message without a head")
            number, flags = HEAD.unpack_from(body)
            session = self.sessions.get(sender)
            if session is None or session.number != number:
                if not flags & HELLO:
                    return  # the rest of a conversation that has ended
                if session is not None:
                    session.end("it began a new conversation")
                session = self.sessions[sender] = Session(self, sender, number)
                session.watch_life()
            session.obey(body)
            self.work_off()
        except WireError as wrong:
            log.error("the conversation with %s ends: %s", sender, wrong)
            if session is not None:
                session.break_off(f"the worker broke the protocol: {wrong.message}")
        except Exception as error:  # a fault of ours ends this conversation and nothing else
            log.exception("the conversation with %s ends", sender)
            if session is not None:
                session.break_off(f"the channel worker failed: {type(error).__name__}: {error}")

    def not_told(self, session: Session) -> list[Delivery]:
        """What was handed to gets of this session, and the session has not heard of."""
        return [each for each in self._told if isinstance(each, Delivery) and each.get.owner.session is session]

    def session_ended(self, session: Session) -> None:
        """Told by the session."""
        if self.sessions.get(session.peer) is session:
            del self.sessions[session.peer]
        self.work_off()
        if not self.sessions:
            self._on_idle()

    # ---- doing what the queues tell

    def work_off(self) -> None:
        """Pass on what the queues tell."""
        if self._working:
            return
        self._working = True
        told = self._told
        try:
            while told:
                each = told.popleft()
                if type(each) is Delivery:
                    self._deliver(each)
                elif type(each) is Put:
                    if each.state == _ADMITTED and not each.owner.session.ended:
                        each.owner.session.admitted(each.owner, each)
                elif type(each) is Rejected:
                    port = each.request.owner
                    if not port.session.ended:
                        port.session.rejected(port, each)
        finally:
            self._working = False
        self._wind()

    def _deliver(self, delivery: Delivery) -> None:
        port = delivery.get.owner
        if port.session.ended:
            if delivery.open:
                port.hosted.queue.returned(delivery, time.monotonic())
        else:
            port.session.handout.deliver(port, delivery)

    def _wind(self) -> None:
        now = time.monotonic()
        deadlines = []
        for hosted in self._channels.values():
            queue = hosted.queue
            deadline = queue.next_deadline()
            if deadline is not None:
                deadlines.append(deadline)
            if queue.uneven:
                deadlines.append(now + _LOOK_AGAIN_SECONDS)
        if not deadlines:
            return
        if self._timer is not None:
            if self._timer.when() <= self.home.loop.time() + max(0.0, min(deadlines) - now):
                return
            self._timer.cancel()
        self._timer = self.home.loop.call_later(max(0.0, min(deadlines) - now), self._ring)

    def _ring(self) -> None:
        self._timer = None
        now = time.monotonic()
        for hosted in self._channels.values():
            hosted.queue.tick(now)
        self.work_off()

    def close(self) -> None:
        """The worker is closing."""
        self._closed = True
        self._inbox.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
