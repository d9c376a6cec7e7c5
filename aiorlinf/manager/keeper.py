"""Keeps one worker in its job: heartbeats, and the way back to the manager. Runs in the heartbeat thread (`manager.life_thread`)."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from aiorlinf.address import Identity, WorkerAddress
from aiorlinf.config import JobConfig, NetworkConfig
from aiorlinf.errors import AiorlinfError, ClosedError, DeclaredDead, RendezvousError
from aiorlinf.manager.client import ManagerClient
from aiorlinf.manager.emulation import Booking
from aiorlinf.manager.lives import End
from aiorlinf.manager.mirror import Mirror, News
from aiorlinf.manager.names import Holding
from aiorlinf.manager.protocol import BEATS_IN_LIMIT, Registration, WorkerRecord
from aiorlinf.manager.requests import Kind
from aiorlinf.manager.waiting import Named
from aiorlinf.rendezvous.hosts import process_identity
from aiorlinf.rendezvous.tls import Tls
from aiorlinf.trace.clock import Reading

__all__ = ["Keeper", "Owner"]

log: logging.Logger = logging.getLogger("aiorlinf.manager")

_ATTEMPT_S = 3600.0  # of reaching the manager again, with pauses in between; after it we begin anew
_WHOLE_S = 4.0  # so long it may take until all are back at a manager that was started anew
_REPORTS_AT_ONCE = 4
_JOINING_PAUSE_S = (0.05, 0.3)
_PAUSE_S = (0.5, 1.5)  # between attempts that failed for another reason than that nobody was there

R = TypeVar("R")


class Owner(Protocol):
    """Who is told what happens, in the heartbeat thread.

    Attributes:
        leaving: the worker is being closed, so that nobody need be told in the log how its manager is.
    """

    leaving: bool

    def alive(self) -> bool:
        """Whether the worker can still be operated at all."""

    def news(self, news: News) -> None:
        """Of another worker."""

    def dead(self, error: DeclaredDead) -> None:
        """This worker was declared dead: nothing more will come."""

    def gone(self) -> None:
        """The worker's loop has ended without closing it, and the keeper has ended, too."""

    async def report(self) -> dict[str, Any]:
        """What the worker is doing. It must come within a second or so, whatever the worker's loop is doing."""


class Keeper:
    """See the module.

    Args:
        worker: its address.
        manager: ``host:port``.
        limits: for the first connection; the job's own count after that.
        tls: what the manager is reached with.

    Attributes:
        mirror: what is known of the job.
        config: the job's, once `connect` has returned.
        registration: once registered.
        away_since: when the connection to the manager was lost, by this loop's clock; None while it is there.
    """

    def __init__(
        self, owner: Owner, worker: WorkerAddress, manager: str, token: bytes | None, limits: NetworkConfig | None, tls: Tls | None = None
    ) -> None:
        self.mirror: Mirror = Mirror()
        self.config: JobConfig = JobConfig()
        self.away_since: float | None = None
        self._whole_at = 0.0  # by then all workers are back at a manager that was started anew
        self.registration: Registration | None = None
        self._owner = owner
        self._worker = worker
        self._manager = manager
        self._token = token
        self._limits = limits
        self._tls = tls
        self._client: ManagerClient | None = None
        self._details: dict[str, Any] = {}  # what we register with
        self._following = False
        self._end: AiorlinfError | None = None
        self._gone = asyncio.Event()  # the connection of `_client` has ended
        self._changed: set[asyncio.Future[None]] = set()  # done when the manager comes back, or never will
        self._task: asyncio.Task[None] | None = None
        self._reports: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------------------------------------------------- joining

    async def connect(self) -> ManagerClient:
        """The first connection. Raises what `ManagerClient.connect` and `ask_config` do."""
        self._client = await self._open(None, None)
        client, config = await self._while_joining(lambda client: client.ask_config())
        self._limits = config.cluster.network
        self.config = config
        return client

    async def _while_joining(self, ask: Callable[[ManagerClient], Awaitable[R]]) -> tuple[ManagerClient, R]:
        """Ask the manager; one that is lost meanwhile is waited for, as one that is not there yet. Who answered, and what."""
        loop = asyncio.get_running_loop()
        end = loop.time() + (NetworkConfig() if self._limits is None else self._limits).rendezvous_timeout_s
        said = False
        while True:
            client = self._client
            assert client is not None
            try:
                return client, await ask(client)
            except RendezvousError as error:
                if not client.is_closed() or self.ended() or loop.time() >= end:
                    raise
                if not said:
                    said = True
                    log.warning("%s lost the manager while it joined, and tries on: %s", self._worker, error)
            await asyncio.sleep(random.uniform(*_JOINING_PAUSE_S))
            self._client = await self._open(None, max(0.001, end - loop.time()))

    async def register(self, **details: Any) -> Registration:
        """Register, and stay registered. Raises what `ManagerClient.register` does."""
        limit = self.config.cluster.network.heartbeat_timeout_s
        _, registration = await self._while_joining(lambda client: client.register(self._worker, timeout=limit + 15.0, **details))
        self.registration = registration
        began = registration.began
        if began is not None and self._worker not in began and not str(self._worker).startswith("channel."):
            log.warning(
                "%s joins a job that began without it, so that what all workers of the job do is done without it: is its address right?",
                self._worker,
            )
        self._details = details
        self.config = registration.config
        self.mirror.own = registration.identity
        self._task = asyncio.get_running_loop().create_task(self._keep(), name=f"heartbeat of {self._worker}")
        return registration

    async def _open(self, job: str | None, deadline: float | None) -> ManagerClient:
        gone = asyncio.Event()
        client = await ManagerClient.connect(
            self._manager,
            self._token,
            job,
            deadline=deadline,
            network=self._limits,
            worker=self._worker,
            on_event=self._on_event,
            on_lost=lambda _: gone.set(),
            tls=self._tls,
        )
        self._gone = gone
        return client

    # ---------------------------------------------------------------------------------------------------------- heartbeats

    async def _keep(self) -> None:
        while not self.ended():
            client = self._client
            assert client is not None
            await self._beat(client)
            if self.ended():
                return
            if not self._owner.alive():
                await self._abandon(client)
                return
            self._client = None
            self.away_since = asyncio.get_running_loop().time()
            if not self._owner.leaving:
                log.warning("%s lost the manager at %s; its links go on, and it tries to come back", self._worker, self._manager)
            await self._come_back()

    async def _beat(self, client: ManagerClient) -> None:
        """Until the connection is lost, the manager silent, or the worker's loop no more."""
        interval = self.config.cluster.network.heartbeat_timeout_s / BEATS_IN_LIMIT
        while not self._gone.is_set() and self._owner.alive():
            # beats that were not answered, not seconds: when this process itself stood still, the manager was not silent meanwhile
            if client.unanswered >= BEATS_IN_LIMIT:
                self._give_up_neighbours(client)
                client.abort()
                return
            client.beat()
            try:
                async with asyncio.timeout(interval):
                    await self._gone.wait()
            except TimeoutError:
                pass

    def _give_up_neighbours(self, client: ManagerClient) -> None:
        """Nothing was heard of the manager, nor then of the workers in its process, which nobody could declare lost but itself.

        It may be us who are cut off, so this ends our links with them, and not their lives.
        """
        if client.process == process_identity():
            return
        limit = self.config.cluster.network.heartbeat_timeout_s
        end = End("lost", f"nothing was heard of its process for {limit:g} s, in which the manager is")
        for identity in self.mirror.beside(client.process):
            self._owner.news(News(identity, end, silent=True, certain=False))

    async def _abandon(self, client: ManagerClient) -> None:
        self._finish(ClosedError("the event loop that the worker lives on was closed", local=self._worker))
        client.abort()
        await client.wait_closed()
        self._owner.gone()

    # ---------------------------------------------------------------------------------------------------------- coming back

    async def _come_back(self) -> None:
        said = ""
        while not self.ended() and self._owner.alive():
            client = None
            try:
                assert self.registration is not None
                client = await self._open(self.registration.job, _ATTEMPT_S)
                await self._rejoin(client)
            except DeclaredDead as error:
                assert client is not None
                client.abort()
                self.die(error.message)
                return
            except (AiorlinfError, OSError) as error:  # it may be another job's, or gone again; whatever it was, there may be a better one
                if client is not None:
                    client.abort()
                if str(error) != said and not self._owner.leaving:
                    said = str(error)
                    log.warning("%s cannot come back to its manager yet: %s", self._worker, error)
                await asyncio.sleep(random.uniform(*_PAUSE_S))
                continue
            except asyncio.CancelledError:
                if client is not None:
                    client.abort()
                raise
            if not self.ended():
                self._client, self.away_since = client, None
                self._whole_at = asyncio.get_running_loop().time() + _WHOLE_S if client.recovering else 0.0
                self._wake()
                if not self._owner.leaving:
                    log.warning("%s is back at the manager", self._worker)
            else:
                client.abort()
            return

    async def _rejoin(self, client: ManagerClient) -> None:
        registration = self.registration
        assert registration is not None
        if client.recovering:
            client.remember(registration.config, registration.expected)
        again = await client.register(self._worker, life=registration.identity.incarnation, **self._details)
        if again.config != registration.config:
            log.warning("the manager at %s has another configuration now; %s keeps its own", self._manager, self._worker)
        client.learn(self.mirror.told())
        client.watch(self.mirror.links())
        for named, value in list(self.mirror.names.items()):
            try:
                await client.publish(named.kind, named.name, value, again=True)
            except RendezvousError as error:
                if client.is_closed():
                    raise
                del self.mirror.names[named]
                log.warning("%s does not hold the %s %r any more: %s", self._worker, named.kind, named.name, error)
        if self._following:
            await self._follow(client)

    # ---------------------------------------------------------------------------------------------------------------- news

    def _on_event(self, event: dict[str, Any]) -> None:
        if self._end is not None:
            return
        if event.get("event") == "dead":
            who = self._worker if self.registration is None else self.registration.identity
            self.die(f"{who} was declared dead: {str(event.get('detail'))[:1000]}")
            return
        if event.get("event") == "inspect":
            self._inspected(event.get("number"))
            return
        news = self.mirror.take(event)
        if news is not None:
            self._owner.news(news)

    def _inspected(self, number: object) -> None:
        """Somebody wants to know what this worker is doing. Not more than a few at a time: who asks so often gets no answer."""
        client = self._client
        if client is None or type(number) is not int or len(self._reports) >= _REPORTS_AT_ONCE:
            return

        async def answer() -> None:
            report = await self._owner.report()
            if not client.is_closed():
                client.tell(number, report)

        task = asyncio.get_running_loop().create_task(answer(), name=f"report of {self._worker}")
        self._reports.add(task)
        task.add_done_callback(self._reported)

    def _reported(self, task: asyncio.Task[None]) -> None:
        self._reports.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.warning("%s cannot say what it is doing", self._worker, exc_info=error)

    def die(self, message: str) -> None:
        """This worker was declared dead."""
        hint = "the others go on without it; close it, and call init() for a new life"
        error = DeclaredDead(message, local=self._worker, hint=hint)
        self._finish(error)
        if self._client is not None:
            self._client.abort()
        self._owner.dead(error)

    async def follow(self) -> list[Identity]:
        """Hear of every worker from now on; who lives at the moment."""
        self._following = True
        await self._ask(self._follow, None)
        return [identity for identity, end in self.mirror.told() if end is None]

    async def _follow(self, client: ManagerClient) -> None:
        await client.subscribe()
        for record in await client.workers():
            if self.mirror.own is None or record.address != self.mirror.own.address:
                unknown = self.mirror.lives.learn(record.identity)
                self.mirror.saw(record)
                if unknown:
                    self._owner.news(News(record.identity, None))

    # ----------------------------------------------------------------------------------------------------------- questions

    async def lookup(self, peer: WorkerAddress, timeout: float | None, above: int) -> WorkerRecord:
        """As `ManagerClient.lookup`; while the manager is away, from what is known."""

        async def ask(client: ManagerClient, left: float | None) -> WorkerRecord:
            return await client.lookup(peer, left, above)

        record = await self._ask_within(
            ask, timeout, lambda: self.mirror.find(peer, above), f"where {peer} is, which it has not told before"
        )
        self.mirror.saw(record)
        return record

    async def workers(self) -> list[WorkerRecord]:
        """All registered workers; while the manager is away, those that are known and may live."""

        async def ask(client: ManagerClient, _: float | None) -> list[WorkerRecord]:
            records = await client.workers()
            for record in records:
                if self.mirror.own is None or record.address != self.mirror.own.address:
                    self.mirror.saw(record)
            if asyncio.get_running_loop().time() < self._whole_at:  # others that live may not have come back to it yet
                here = {record.address for record in records}
                records = sorted(
                    [*records, *(known for known in self.mirror.records() if known.address not in here)],
                    key=lambda record: record.address.sort_key,
                )
            return records

        return await self._ask_within(ask, None, self.mirror.records, "")

    async def expect(self, address: WorkerAddress) -> None:
        """As `ManagerClient.expect`, of one worker; waits while the manager is away."""

        async def tell(client: ManagerClient) -> None:
            client.expect([address])

        await self._ask(tell, None)

    async def publish(self, kind: Kind, name: str, value: Mapping[str, str]) -> None:
        """As `ManagerClient.publish`; waits while the manager is away."""
        await self._ask(lambda client: client.publish(kind, name, value), None)
        self.mirror.names[Named(kind, name)] = dict(value)

    async def withdraw(self, kind: Kind, name: str) -> None:
        """As `ManagerClient.withdraw`; waits while the manager is away."""
        self.mirror.names.pop(Named(kind, name), None)
        await self._ask(lambda client: client.withdraw(kind, name), None)

    async def find(self, kind: Kind, name: str, timeout: float | None) -> Holding:
        """As `ManagerClient.find`; waits while the manager is away."""

        async def ask(client: ManagerClient, left: float | None) -> Holding:
            return await client.find(kind, name, left)

        return await self._ask_within(ask, timeout, lambda: None, f"who holds the {kind} {name!r}")

    async def clock(self) -> Reading:
        """As `ManagerClient.clock`; waits while the manager is away."""
        return await self._ask(lambda client: client.clock(), None)

    async def book(self, budgets: Sequence[int], nbytes: int, timeout: float) -> Booking:
        """As `ManagerClient.book`; fails at once while the manager is away."""
        return await self._present().book(budgets, nbytes, timeout)

    async def inspect(self, identity: Identity, timeout: float) -> dict[str, Any]:
        """As `ManagerClient.inspect`; fails at once while the manager is away."""
        return await self._present().inspect(identity, timeout)

    def _present(self) -> ManagerClient:
        client = self._client
        if client is None or self.ended():
            raise self._copy_of_end() if self.ended() else RendezvousError("the manager is away", local=self._worker, address=self._manager)
        return client

    def watch(self, identity: Identity, record: WorkerRecord | None) -> None:
        """There is a link with this worker, which told where it is itself."""
        self.mirror.linked(identity)
        if record is not None:
            self.mirror.saw(record)
        client = self._client
        if client is not None and not client.is_closed() and not self.ended():
            client.watch([identity])

    async def _ask(self, ask: Callable[[ManagerClient], Awaitable[R]], timeout: float | None) -> R:
        return await self._ask_within(lambda client, _: ask(client), timeout, lambda: None, "this")

    async def _ask_within(
        self, ask: Callable[[ManagerClient, float | None], Awaitable[R]], timeout: float | None, known: Callable[[], R | None], what: str
    ) -> R:
        """Ask the manager, again when its connection is lost meanwhile; while it is away, take what is known, or wait for it."""
        loop = asyncio.get_running_loop()
        end = None if timeout is None else loop.time() + timeout
        while True:
            if self.ended():
                raise self._copy_of_end()
            left = None if end is None else max(0.0, end - loop.time())
            client = self._client
            if client is not None and not client.is_closed():
                try:
                    return await ask(client, left)
                except (RendezvousError, ClosedError):
                    if not client.is_closed():
                        raise  # that is the answer
                    continue
            found = known()
            if found is not None:
                return found
            if left == 0.0:
                since = 0.0 if self.away_since is None else loop.time() - self.away_since
                text = f"the manager has been away for {since:.1f} s, and cannot be asked {what}"
                raise RendezvousError(text, local=self._worker, address=self._manager)
            await self._wait_for_change(left)

    async def _wait_for_change(self, limit: float | None) -> None:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._changed.add(future)
        try:
            await asyncio.wait([future], timeout=limit)
        finally:
            self._changed.discard(future)
            future.cancel()

    def _wake(self) -> None:
        for future in self._changed:
            if not future.done():
                future.set_result(None)

    # -------------------------------------------------------------------------------------------------------------- the end

    def ended(self) -> bool:
        """Whether it is over, for whatever reason."""
        return self._end is not None

    def _finish(self, error: AiorlinfError) -> None:
        if self._end is None:
            self._end = error
            self._wake()
            for report in list(self._reports):
                report.cancel()

    def _copy_of_end(self) -> AiorlinfError:
        assert self._end is not None
        kind = type(self._end)
        return kind(self._end.message, local=self._end.local, hint=self._end.hint)

    async def close(self, timeout: float) -> None:
        """Say goodbye to the manager, within the time, and end."""
        self._finish(ClosedError("the worker was closed", local=self._worker))
        client, task = self._client, self._task
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        if client is not None:
            await client.close(timeout)

    async def abort(self) -> None:
        """End at once; the manager takes the worker for lost."""
        self._finish(ClosedError("the worker was closed", local=self._worker))
        client, task = self._client, self._task
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        if client is not None:
            client.abort()
            await client.wait_closed()
