"""A handle of a channel of several replicas, one on each node: puts and gets go to the replica of their key.

What has no key is put on the own node. A get without a key asks there first, and after a moment on all nodes at once: the first item
wins, and what the others give goes back to its place. Keys have homes (`channel.affinity`), which the first replica knows. That one also
says when the stream is over; then the others are told, and gets take what is left there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiorlinf.channel.calls import GetCall, PutCall
from aiorlinf.channel.replica_table import ReplicaTable, outcome
from aiorlinf.channel.stats_sum import sum_stats
from aiorlinf.channel.watching import watch
from aiorlinf.errors import AiorlinfError, ChannelClosed, ChannelEmpty, ProducerLost
from aiorlinf.work.base import AsyncWork
from aiorlinf.work.waiters import Entry

if TYPE_CHECKING:
    from aiorlinf.channel.landing import Wish
    from aiorlinf.channel.records import Key
    from aiorlinf.channel.remote import RemotePort
    from aiorlinf.work.home import LoopHome

__all__ = ["SpreadPort"]

_OWN_FIRST_SECONDS = 0.002
"""So long a get without a key waits for the own node alone."""

_LOOK_SECONDS = 0.5
"""So often those who wait ask whether there are further nodes."""


class _Part(GetCall):
    """A get at one replica, on behalf of a `_SpreadGet`."""

    __slots__ = ("whole",)

    def __init__(self, whole: _SpreadGet, port: RemotePort) -> None:
        call = whole.call
        super().__init__(port, call.key, call.target, call.nowait, call.lease, call.seconds)
        self.work = call.work
        self.wish: Wish = call.wish
        self.whole: _SpreadGet = whole

    def fail(self, error: BaseException) -> None:
        self.work = None
        self.whole.part_failed(self, error)


class _PutUnderWay(Entry):
    """A put that its handle's close waits for."""

    __slots__ = ("_over",)
    counts = False

    def __init__(self, over: Callable[[], None]) -> None:
        self._over = over

    def _settled(self, work: AsyncWork[Any]) -> None:
        self._over()


class _SpreadGet(Entry):
    """A get that waits at several replicas. The first that has something ends the caller's work, and then the others stop.

    Attributes:
        winner: who had something.
        parts: by replica, those that wait.
        over: nothing more is wanted.
    """

    __slots__ = ("_last", "_port", "_rest", "call", "over", "parts", "winner")
    counts = False

    def __init__(self, port: SpreadPort, call: GetCall) -> None:
        self.call: GetCall = call
        self.winner: _Part | None = None
        self.parts: dict[RemotePort, _Part] = {}
        self.over: bool = False
        self._port = port
        self._rest: list[RemotePort] = []
        self._last: BaseException | None = None

    def begin(self, port: RemotePort) -> None:
        """Wait at this one, too."""
        if not self.over and port not in self.parts:
            self.parts[port] = part = _Part(self, port)
            port.start_get(part)

    def try_in_turn(self, ports: list[RemotePort]) -> None:
        """Ask one after the other, each once."""
        if not self.over:
            self._rest = ports
            self.begin(self._rest.pop(0))

    def _settled(self, work: AsyncWork[Any]) -> None:
        """The caller's work is over."""
        if self.over:
            return
        self.winner = next((part for part in self.parts.values() if part.work is None), None)
        self.stop()

    def stop(self) -> None:
        """Nobody wants it any more, but for what the winner has."""
        self.over = True
        self._port.waiting.discard(self)
        parts, self.parts = self.parts, {}
        for port, part in parts.items():
            if part is not self.winner:
                part.work = None
                port.stop_get(part)

    def part_failed(self, part: _Part, error: BaseException) -> None:
        """One of them gets nothing more."""
        if self.over:
            return
        port: Any = part.port
        self.parts.pop(port, None)
        if isinstance(error, ChannelEmpty) and self._rest:
            self.begin(self._rest.pop(0))
        elif isinstance(error, ProducerLost):
            self._port.when_all_have_said(lambda: self.fail(error))
        elif isinstance(error, (ChannelClosed, ChannelEmpty)):
            if isinstance(error, ChannelClosed) and port is self._port.primary:
                self._last = error
                self._port.stream_over(self)
            if self._rest:
                self.begin(self._rest.pop(0))
            elif not self.parts:
                self.fail(self._last or error)
        else:
            self.fail(error)  # that replica is dead

    def fail(self, error: BaseException) -> None:
        """All of it has failed."""
        if not self.over:
            self.stop()
            self.call.fail(error)


class SpreadPort:
    """See the module, and `calls.Port`. Home thread only, but for `check` and `prepare`.

    Args:
        primary: the first replica, `own` that of this node.
        open_replica: a handle of the replica of this name.

    Attributes:
        waiting: gets that are not served.
    """

    def __init__(
        self, node: str, primary: RemotePort, own: RemotePort, nodes: dict[str, str], open_replica: Callable[[str], AsyncWork[RemotePort]]
    ) -> None:
        self.home: LoopHome = primary.home
        self.name: str = primary.name
        self.primary = primary
        self.own = own
        self.waiting: set[_SpreadGet] = set()
        self._replicas = ReplicaTable(node, primary, own, open_replica, self._opened)
        self._producing = False
        self._puts: list[PutCall] | None = None  # that wait until we are known as a producer
        self._under_way = 0  # puts
        self._closed = False
        self._leaving = False  # once those are over
        self._over = False
        self._timer: asyncio.TimerHandle | None = None
        self._replicas.find(nodes)

    # ---- any thread

    def check(self) -> None:
        self.primary.check()

    def prepare(self, item: Any) -> tuple[Any, int]:
        return self.primary.prepare(item)

    def _opened(self, replica: RemotePort) -> None:
        """A further one is known: it hears what the others have heard, and is asked what they are asked."""
        if self._producing:
            replica.question(b"produce")
        if self._over:
            _shut(replica)
        for get in list(self.waiting):
            if get.call.key is None and not get.call.nowait:
                get.begin(replica)

    # ---- puts

    def start_put(self, call: PutCall) -> None:
        if self._closed:
            self._give_up(call, ChannelClosed(f"this handle of channel {self.name!r} was closed", operation="put"))
            return
        if call.work is not None:
            self._under_way += 1
            call.work._attach(_PutUnderWay(self._put_over))
        if self._puts is not None:
            self._puts.append(call)
        elif self._producing:
            self._put(call)
        else:
            self._puts = [call]
            watch(self.primary.question(b"produce"), self._may_put)

    def _may_put(self, work: AsyncWork[Any]) -> None:
        """The first replica knows us as a producer, and so the stream does not end before we do."""
        error = outcome(work)
        puts, self._puts = self._puts or [], None
        if not isinstance(error, AiorlinfError):
            self._producing = True
            for port in self._replicas.others():
                port.question(b"produce")
        for call in puts:
            if isinstance(error, AiorlinfError):
                self._give_up(call, error)
            else:
                self._put(call)

    def _put(self, call: PutCall) -> None:
        def routed(port: RemotePort | AiorlinfError) -> None:
            if isinstance(port, AiorlinfError):
                self._give_up(call, port)
            else:
                call.port = port
                port.start_put(call)

        self._replicas.with_home(call.key, routed)

    def _put_over(self) -> None:
        self._under_way -= 1
        if self._leaving and not self._under_way:
            self._leaving = False
            work: AsyncWork[None] = AsyncWork(self.home, "close")
            watch(work, lambda _: None)
            self._tell_all(work, shutdown=False, immediate=False)

    def _give_up(self, call: PutCall, error: AiorlinfError) -> None:
        self.primary.forget_put(call)
        call.fail(error)

    def stop_put(self, call: PutCall) -> None:
        """It was on its way to its replica, which will find that nobody wants it."""

    # ---- gets

    def start_get(self, call: GetCall) -> None:
        if call.work is None:
            return
        get = _SpreadGet(self, call)
        call.record = get
        call.work._attach(get)
        if call.key is None and call.nowait:
            self._replicas.when_all_are_known(lambda: get.try_in_turn(self._replicas.alive()))
            return
        if call.nowait:
            self._replicas.with_home(call.key, lambda port: get.fail(port) if isinstance(port, AiorlinfError) else get.begin(port))
            return
        self.waiting.add(get)
        if call.key is None:
            get.begin(self._replicas.alive()[0])
            self.home.loop.call_later(_OWN_FIRST_SECONDS, self._ask_all, get)
        else:
            self._replicas.with_home(call.key, lambda port: self._get_of_key(get, port))
        if self._timer is None:
            self._timer = self.home.loop.call_later(_LOOK_SECONDS, self._look)

    def _ask_all(self, get: _SpreadGet) -> None:
        for port in self._replicas.alive():
            get.begin(port)

    def _get_of_key(self, get: _SpreadGet, port: RemotePort | AiorlinfError) -> None:
        if isinstance(port, AiorlinfError):
            get.fail(port)
            return
        get.begin(port)
        get.begin(self.primary)  # which says when the stream is over

    def _look(self) -> None:
        """Are there further nodes?"""
        self._timer = None
        if self.waiting and self.primary.lost is None:
            watch(self.primary.question(b"nodes"), self._looked)
            self._timer = self.home.loop.call_later(_LOOK_SECONDS, self._look)

    def _looked(self, work: AsyncWork[Any]) -> None:
        nodes = outcome(work)
        if not isinstance(nodes, AiorlinfError):
            self._replicas.find(nodes)

    def stream_over(self, get: _SpreadGet) -> None:
        """The first replica says that nothing more is put anywhere: the others end, too, once they are empty."""
        self._over = True
        for port in self._replicas.others():
            if port.lost is None:
                _shut(port)
        if get.call.key is None and not get.call.nowait:
            self._ask_all_but(get, self.primary)

    def _ask_all_but(self, get: _SpreadGet, but: RemotePort) -> None:
        for port in self._replicas.alive():
            if port is not but:
                get.begin(port)

    def when_all_have_said(self, then: Callable[[], None]) -> None:
        """Call this when every replica has answered, and with that has handed out what it had."""
        works = [port.question(b"length") for port in self._replicas.alive()]
        missing = len(works)

        def answered(_: AsyncWork[Any]) -> None:
            nonlocal missing
            missing -= 1
            if not missing:
                then()

        for work in works:
            watch(work, answered)

    def stop_get(self, call: GetCall) -> None:
        if isinstance(call.record, _SpreadGet):
            call.record.stop()

    def give_back(self, call: GetCall, value: Any) -> None:
        winner = call.record.winner
        winner.port.give_back(winner, value)

    def end_lease(self, call: GetCall, *, done: bool) -> None:
        winner = call.record.winner
        winner.port.end_lease(winner, done=done)

    def stream(self, key: Key, count: int, wish: Wish) -> None:
        """See `calls.Port`: each get may have to look on several nodes."""

    # ---- the rest

    def ask(self, work: AsyncWork[Any], what: str, key: Key, all_keys: bool) -> None:
        def routed(port: RemotePort | AiorlinfError) -> None:
            if isinstance(port, AiorlinfError):
                work._fail(port)
            else:
                port.ask(work, what, key, all_keys)

        if what == "full":
            self.own.ask(work, what, key, all_keys)
        elif key is not None:
            self._replicas.with_home(key, routed)
        else:
            self._replicas.when_all_are_known(lambda: self._ask_each(work, what, all_keys))

    def _ask_each(self, work: AsyncWork[Any], what: str, all_keys: bool) -> None:
        parts: list[AsyncWork[Any]] = []
        missing = 0

        def answered(_: AsyncWork[Any]) -> None:
            nonlocal missing
            missing -= 1
            if missing:
                return
            values = [outcome(part) for part in parts]
            wrong = next((value for value in values if isinstance(value, AiorlinfError)), None)
            if wrong is not None:
                work._fail(wrong)
            elif what == "length":
                work._finish(sum(values))
            elif what == "stats":
                work._finish(sum_stats(self.name, values))
            else:
                work._finish([item for value in values for item in value])

        ports = self._replicas.alive()
        missing = len(ports)
        for port in ports:
            part: AsyncWork[Any] = AsyncWork(self.home, what)
            parts.append(part)
            port.ask(part, what, None, all_keys)
        for part in parts:
            watch(part, answered)

    def report(self, free_memory: int | None) -> None:
        for port in self._replicas.alive():
            port.report(free_memory)

    def close(self, work: AsyncWork[None], *, shutdown: bool, immediate: bool) -> None:
        if shutdown:
            self._tell_all(work, shutdown=True, immediate=immediate)
            return
        self._closed = True
        if self._under_way:  # what was put before comes first, and may wait for room for long
            self._leaving = True
            work._finish(None)
        else:
            self._tell_all(work, shutdown=False, immediate=False)

    def _tell_all(self, work: AsyncWork[None], *, shutdown: bool, immediate: bool) -> None:
        """The first replica hears of it last: when it ends the stream, what we have put elsewhere is there."""
        others = [port for port in self._replicas.others() if port.lost is None]
        missing = len(others)

        def closed(_: AsyncWork[Any]) -> None:
            nonlocal missing
            missing -= 1
            if missing <= 0:
                self.primary.close(work, shutdown=shutdown, immediate=immediate)

        if not others:
            closed(work)
            return
        for port in others:
            part: AsyncWork[None] = AsyncWork(self.home, "close")
            port.close(part, shutdown=shutdown, immediate=immediate)
            watch(part, closed)

    def describe(self) -> str:
        return f"{self.primary.describe()}, {len(self._replicas)} replicas"


def _shut(port: RemotePort) -> None:
    """End the stream at one replica. Again is harmless."""
    work: AsyncWork[None] = AsyncWork(port.home, "shutdown")
    port.close(work, shutdown=True, immediate=False)
    watch(work, lambda _: None)
