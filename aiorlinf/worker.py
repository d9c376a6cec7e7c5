"""Worker and init: everything a process needs to take part in a job."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch

from aiorlinf.address import WorkerAddress
from aiorlinf.channel.host import ChannelHost
from aiorlinf.channel.hub import ChannelHub
from aiorlinf.channel.pending import seen_channels
from aiorlinf.channel.spawn import end_of_job
from aiorlinf.channel.worker_calls import ChannelCalls
from aiorlinf.collective.collective import Collective
from aiorlinf.collective.exchange import Exchange
from aiorlinf.collective.job_calls import JobCalls
from aiorlinf.collective.pair_calls import PairCalls
from aiorlinf.collective.peer_calls import PeerCalls
from aiorlinf.config import JobConfig
from aiorlinf.device.registry import parse_device
from aiorlinf.errors import AiorlinfError, ClosedError, DeclaredDead, UnsupportedObject, UsageError
from aiorlinf.link import diagnosis
from aiorlinf.link.enrolment import Enrolment
from aiorlinf.link.launched import FLUSH_S, ending, heed_launcher
from aiorlinf.link.me import Self
from aiorlinf.link.pending import PendingOperation
from aiorlinf.link.report import make_report
from aiorlinf.link.table import LinkTable
from aiorlinf.link.trace import TraceCalls
from aiorlinf.link.unclosed import Unclosed
from aiorlinf.link.worker_stats import WorkerStats, count_worker
from aiorlinf.manager.lifeline import Lifeline
from aiorlinf.manager.membership import Streams
from aiorlinf.manager.mirror import News
from aiorlinf.rendezvous.hosts import local_failure
from aiorlinf.rendezvous.settings import TRACE_ENV, Backend, ConfigSource, JoinSettings
from aiorlinf.work.base import AsyncWork
from aiorlinf.work.home import LoopHome
from aiorlinf.work.loop_thread import LoopThread
from aiorlinf.work.notebook import heed_interrupts
from aiorlinf.work.steps import AsyncFuncWork

if TYPE_CHECKING:
    from aiorlinf.address import Incarnation

__all__ = ["Worker", "WorkerStats", "init"]

log: logging.Logger = logging.getLogger("aiorlinf")


def init(
    address: str | None = None,
    *,
    manager: str | None = None,
    token: str | bytes | None = None,
    backend: Backend | None = None,
    config: ConfigSource = None,
    loop: Literal["auto", "thread"] = "auto",
    labels: Mapping[str, str] | None = None,
    device: str | int | torch.device | None = None,
) -> Worker:
    """Join a job as one worker.

    Inside a running event loop the worker is bound to it and joins in the background: use it at once, or `await` it, or
    `async with` it, to know that it has joined. Without a running loop, or with ``loop="thread"``, it runs a loop in a thread of
    its own, and every operation can be used from synchronous code (`work.wait()`) and from any event loop (`await work`).

        >>> with aiorlinf.init("trainer:0") as comm:
        ...     sent = comm.send({"loss": 0.25}, comm.address)
        ...     comm.recv(comm.address).wait(timeout=10)
        {'loss': 0.25}

        >>> async def main():
        ...     async with aiorlinf.init("rollout:0") as rollout, aiorlinf.init("trainer:0") as trainer:
        ...         await rollout.send([1, 2, 3], "trainer:0")
        ...         return await trainer.recv("rollout:0").then(sum)
        >>> asyncio.run(main())
        6

    Args:
        address: ``group:rank``; else AIORLINF_ADDRESS, else torchrun's RANK (as ``worker:RANK``).
        manager: ``host:port`` of the job's manager; else AIORLINF_MANAGER, else under torchrun the one embedded in the process of rank 0,
            else one embedded in this process.
        token: the job's secret; else AIORLINF_TOKEN, else a random one for an embedded manager.
        backend: carrier of large payloads: auto, stream, shm or gloo, or nccl or cuda_ipc for tensors on accelerators; None leaves it to
            the configuration.
        config: a path, a mapping or a `JobConfig`, for an embedded manager; with another manager the job's configuration comes from there,
            and only the time limits of this one count until it is reached.
        loop: auto, or thread.
        labels: such as ``{"rack": "a"}``, on top of the host's name, the configuration's (cluster.topology) and those of AIORLINF_LABELS.
        device: where received tensors come to that are on an accelerator at their sender: "cpu", "cuda:1" and the like. None: the device
            of this process's accelerator that is current in the loop's thread when they come; CPU memory if there is none.

    Raises:
        UsageError, ConfigError: at the call.
        AuthenticationError, RendezvousError: by the worker's start: at the call when it runs in a thread and no loop is running here, else
            from `await` or `async with`, and from every operation.
    """
    settings = JoinSettings.gather(address, manager, token, backend, config, labels)
    landing = None if device is None else parse_device(device)
    if loop not in ("auto", "thread"):
        raise UsageError(f"loop={loop!r}", hint="loop is 'auto' or 'thread'")
    heed_launcher()
    running = asyncio._get_running_loop()
    if running is not None and loop == "auto":
        heed_interrupts(running)
        return Worker(settings, LoopHome(running, name=f"aiorlinf {settings.address}"), None, landing)
    thread = LoopThread(f"aiorlinf {settings.address}")
    worker = Worker(settings, thread.home, thread, landing)
    if running is None:
        try:
            worker._started.wait()
        except BaseException:  # Ctrl-C, too: nobody has a handle on it then
            worker._close()
            raise
    return worker


class _Closing(AsyncWork[None]):
    """All who close share one: to cancel it stops their waiting only."""

    __slots__ = ()

    def _cancel_now(self) -> bool:
        return False


class Worker(PairCalls, JobCalls, PeerCalls, ChannelCalls, TraceCalls):
    """One member of a job. Made by `init`.

    Use it as ``async with aiorlinf.init(...) as comm``, as ``comm = await aiorlinf.init(...)`` with ``await comm.close()`` at the
    end, or, when it lives in a thread of its own, as ``with aiorlinf.init(...) as comm``. One that lives on a loop of yours and is never
    closed is a ResourceWarning when it is collected, or at the end of the program; one in a thread may end with the program.

    Attributes:
        address: ours.
        collective: makes groups.
        home: the loop that everything runs on.
    """

    def __init__(self, settings: JoinSettings, home: LoopHome, thread: LoopThread | None, device: torch.device | None = None) -> None:
        self.address: WorkerAddress = settings.address
        self.home: LoopHome = home
        self._thread = thread
        diagnosis.register(self)
        self._self: Self | None = None
        self._closing: AsyncWork[None] | None = None
        self._failure: str | None = None
        self._streams: Streams = Streams()
        self._ready: asyncio.Future[tuple[Self, Lifeline]] = home.loop.create_future()
        self._started: AsyncWork[None] = AsyncWork(home, "init", abort=lambda _: None)
        self._unclosed = None if thread is not None else Unclosed(self, str(settings.address), self._started)
        config = settings.config or JobConfig()
        self._table = LinkTable(home, settings.address, self._ready)
        self._table.device = device
        self._enrolment = Enrolment(home, settings, self._table)
        self._exchange = Exchange(home, self._table, config.cluster.collective, device)
        self.collective: Collective = Collective(self._exchange)
        self._channels = ChannelHub(self._exchange)
        self._host: ChannelHost | None = None
        home.call(self._begin)

    # ---- start

    def _begin(self) -> None:
        self._ready.add_done_callback(_look)
        self._starting = self.home.hold(self._start(), f"init {self.address}")
        self._starting.add_done_callback(self._after_start)

    async def _start(self) -> None:
        me, life = await self._enrolment.enrol(self._listen_to)
        self._self = me
        self._exchange.configure(me.config.cluster.collective)
        self._exchange.asking.inspect = life.inspect
        self._trace_into(os.environ.get(TRACE_ENV), me.identity)
        self._ready.set_result((me, life))

    def _listen_to(self, life: Lifeline) -> None:
        life.on_news = self._take_news
        life.on_dead = self._declared_dead
        life.make_report = self.report

    def _after_start(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            error: BaseException | None = ClosedError("the worker was closed before it had joined", local=self.address)
        else:
            error = task.exception()
        if error is None:
            self._started._finish(None)
            return
        self._exchange.close()
        if isinstance(error, OSError):  # of our own system: what of the others' ends it is told by those who asked for it
            error = _wrap(error)
        if not self._ready.done():
            failure = error if isinstance(error, AiorlinfError) else _wrap(error)
            failure.fill(local=str(self.address))
            self._ready.set_exception(failure)
        self._started._fail(error)
        if not self._started.cancelled():
            self._started.exception()  # every operation reports it; nobody has to look here
        if task.cancelled() and self._closing is None:
            self._end_with_loop()
        else:
            self._close()

    def _take_news(self, news: News) -> None:
        self._table.take_news(news)
        for stream in self._streams.now() if news.certain else ():
            stream.take(news)

    def _declared_dead(self, error: DeclaredDead) -> None:
        if self._closing is None:
            log.error("%s: %s", self.address, error.message)
            self._table.condemn(lambda: DeclaredDead(error.message, local=self.address, hint=error.hint))
            for stream in self._streams.now():
                stream.end(error)

    # ---- ways to use it

    def __await__(self) -> Generator[Any, None, Worker]:
        """Wait until it has joined.

        Cancelling before that closes it: who waits for `init(...)` has no other handle on it.
        """
        joining = not self._started.done()
        try:
            yield from self._started.__await__()
        except asyncio.CancelledError:
            if joining:  # also if it has joined meanwhile, and who waited was cancelled before he heard of it
                self._close()
            raise
        return self

    async def __aenter__(self) -> Worker:
        try:
            await self._started
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.home.forked:
            return  # it is the parent's; whatever the child leaves the block with goes on
        self._note_failure(error)
        await self._close()

    def __enter__(self) -> Worker:
        if self.home.on_home():
            self._close()  # nobody has another handle on it
            raise UsageError("`with` would block the event loop", hint="use `async with aiorlinf.init(...)`, or loop='thread'")
        try:
            self._started.wait()
        except BaseException:
            self._close().wait()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.home.forked:
            return  # as in `__aexit__`
        self._note_failure(error)
        self._close().wait()
        if self._thread is not None:
            self._thread.join()

    def _note_failure(self, error: BaseException | None) -> None:
        """A block that is left by an error: what others may take for a good end is not one. To be cancelled, or Ctrl-C, is no error."""
        if isinstance(error, Exception) and not isinstance(error, asyncio.CancelledError):
            self._failure = f"{type(error).__name__}: {error}"

    # ---- facts

    @property
    def incarnation(self) -> Incarnation:
        """Which life of this address we are, from 1. Raises UsageError before the worker has joined."""
        return self._joined().identity.incarnation

    @property
    def config(self) -> JobConfig:
        """The job's configuration. Raises UsageError before the worker has joined."""
        return self._joined().config

    @property
    def job(self) -> str:
        """The job's id. Raises UsageError before the worker has joined."""
        return self._joined().job

    @property
    def manager_address(self) -> str:
        """``host:port`` of the manager. Raises UsageError before the worker has joined."""
        self._joined()
        assert self._manager is not None
        return self._manager.address

    @property
    def manager_away(self) -> bool:
        """Whether the manager cannot be reached at the moment. Home thread only."""
        return self._manager is not None and self._manager.away

    @property
    def closed(self) -> bool:
        """Whether it was closed, or is being closed."""
        return self._closing is not None

    @property
    def joined(self) -> bool:
        """Whether it has joined the job."""
        return self._self is not None

    @property
    def token(self) -> bytes:
        """The job's secret. Raises UsageError before the worker has joined."""
        return self._joined().token

    @property
    def _manager(self) -> Lifeline | None:
        return self._enrolment.life

    def _joined(self) -> Self:
        if self._self is None:
            raise UsageError(f"{self.address} has not joined yet", hint="await it first")
        return self._self

    def env(self, address: str) -> dict[str, str]:
        """Environment variables for a child process that shall join this job under `address`.

        Raises:
            UsageError: not an address, or we have not joined yet.
        """
        return {
            "AIORLINF_ADDRESS": WorkerAddress(address),
            "AIORLINF_MANAGER": self.manager_address,
            "AIORLINF_TOKEN": self.token.decode("utf-8", "surrogateescape"),
            **({} if self._table.tls is None else self._table.tls.env()),
        }

    def hold_channels(self, on_idle: Callable[[], None] = lambda: None) -> ChannelHost:
        """Be a channel worker: hold the channels that others make here. For programs of channel workers; home thread only.

        Args:
            on_idle: called when the last worker that was connected is gone.
        """
        self._joined()

        async def publish(name: str, value: Mapping[str, str]) -> None:
            assert self._manager is not None
            await self._manager.publish("channel", name, value)

        self._host = ChannelHost(self._exchange, publish, on_idle)
        return self._host

    def workers(self, group: str | None = None) -> tuple[WorkerAddress, ...]:
        """The workers that the job was started with, whether they are there or not, in the order of their addresses; see also `peers`.

        Args:
            group: only those of this group, such as ``"rollout"``.

        Raises:
            UsageError: anybody may join this job, so it has no such list; or before the worker has joined.
        """
        everybody = sorted(map(WorkerAddress, self._expected()), key=lambda address: address.sort_key)
        return tuple(address for address in everybody if group is None or address.group == group)

    def _expected(self) -> frozenset[str]:
        expected = self._joined().began
        if expected is None:
            raise UsageError(
                "anybody may join this job, so it has no list of all workers",
                hint="name them with members=[...], or start the manager with --expect",
            )
        return expected

    # ---- memory

    def empty(self, *size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """An uninitialised CPU tensor, as `torch.empty`, in memory that a worker of the same host can be given without a copy.

        Sending it gives it away: from the call of `send` or `send_tensor` on the handle has no elements, and sending it again is an
        error. The same holds for a `Parameter` made of it. Views of it (slices, `view`, `detach`, NumPy arrays) stay what they are: they
        are sent by copy, and where one is still there when the handle is sent, that payload is copied, too.

        A send that fails or is cancelled gives the memory back to the handle, unless the peer may have it: if the connection is lost
        after the message has left, the handle stays empty, and after a cancel it stays empty until the peer says that nobody took it.

        Where memory cannot be shared, or the bound (cluster.collective.shared_memory.max_bytes) is reached, it is an ordinary tensor, which
        sends copy and leave as it is. A new memory file gets its pages as they are first touched.

        From another thread than the worker's this waits for the worker's loop.

        Args:
            size: the shape, as one sequence or as several numbers.
            dtype: torch's default dtype if left out.

        Raises:
            UsageError: before the worker has joined; not a shape, or a dtype without plain memory.
        """
        self._joined()
        shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
        dims = tuple(torch.Size(shape))  # type: ignore[arg-type]  # checked by torch
        dtype = dtype or torch.get_default_dtype()
        memory = self._table.memory
        assert memory is not None
        if self.home.on_home():
            return memory.empty(dims, dtype)
        work: AsyncFuncWork[torch.Tensor] = AsyncFuncWork(self.home, memory.empty, (dims, dtype), {})
        self.home.call(work._start_alone)
        return work.wait()

    def empty_like(self, tensor: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """As `empty`, with the shape and dtype of `tensor`."""
        return self.empty(tuple(tensor.shape), dtype=dtype or tensor.dtype)

    # ---- seeing

    def stats(self) -> WorkerStats:
        """Counters of all links. From another thread than the worker's this waits for the worker's loop."""
        if self.home.on_home() or self.home.closed:
            return count_worker(str(self.address), self._table)
        work: AsyncFuncWork[WorkerStats] = AsyncFuncWork(self.home, count_worker, (str(self.address), self._table), {})
        self.home.call(work._start_alone)
        return work.wait()

    def pending(self) -> list[PendingOperation]:
        """Every operation that is not over: sends and receives per link, then calls of inboxes.

        Does not wait; best on the worker's loop.
        """
        return diagnosis.pending(self._table)

    def dump(self) -> str:
        """For people: links, what is pending on each, since when and begun where, and what the loop is busy with if it is blocked.

        Does not wait, so it can be called from any thread, a debugger or a signal handler; see `aiorlinf.dump_on_signal`.
        """
        return diagnosis.describe(str(self._self.identity if self._self is not None else self.address), self._table, self.home)

    def report(self) -> dict[str, Any]:
        """What `aiorlinf top` asks of each worker, as JSON values: pending operations, links, channels that are held here.

        Any thread, without waiting; from another one than the worker's it may raise RuntimeError, and can be tried again.
        """
        return make_report(self._table, self.home, lambda: [] if self._host is None else seen_channels(self._host))

    def __reduce__(self) -> NoReturn:
        raise UnsupportedObject("a worker cannot be sent or pickled", hint="send its address, or what its stats() gives")

    def __repr__(self) -> str:
        if self._closing is not None:
            state = "closed" if self._closing.done() else "closing"
        elif self._self is not None:
            state = f"#{self._self.identity.incarnation}, {len(self._table.links())} links"
        else:
            state = "joining"
        return f"<Worker {self.address} {state}>"

    # ---- the end

    def close(self, timeout: float | None = None) -> AsyncWork[None]:
        """Leave the job: what was sent still goes out, for at most `timeout` seconds (by default cluster.network.close_timeout_s).

        What could not be delivered is said in the log. Everything still pending fails with ClosedError. May be called again.
        Cancelling stops the waiting, not the closing.
        """
        return self._close(timeout)

    def _close(self, timeout: float | None = None) -> AsyncWork[None]:
        if self._closing is not None:
            return self._closing
        if self.home.on_home():
            self._channels.close(self._failure)  # what goes back to a channel is still sent
        self._exchange.close()
        if self._unclosed is not None:
            self._unclosed.take_back()
        self._enrolment.begin_leaving()
        work = _Closing(self.home, "close")
        self._closing = work
        if self._thread is not None:
            self._thread.will_close(work)
        try:
            self.home.call(self._begin_close, work, timeout)
        except AiorlinfError:  # the loop has ended before us: nothing is left to flush
            self._enrolment.abandon()
        return work

    def _end_with_loop(self) -> None:
        """All tasks of the loop were cancelled before we had joined, as at its end: one that is begun now is never done."""
        work = self._closing = _Closing(self.home, "close")
        self._table.abort()
        self.home.close_nowait()
        self._enrolment.abandon()
        work._finish(None)

    def _begin_close(self, work: AsyncWork[None], timeout: float | None) -> None:
        # Not `home.spawn`: closing the home cancels its tasks.
        self._close_task = self.home.loop.create_task(self._run_close(timeout), name=f"close {self.address}")
        self._close_task.add_done_callback(lambda task: self._after_close(task, work))

    async def _run_close(self, timeout: float | None) -> None:
        self._starting.cancel()
        await asyncio.wait([self._starting])
        for stream in self._streams.now():
            stream.end(ClosedError("the worker was closed", local=self.address))
        self._channels.close(self._failure)
        if self._host is not None:
            self._host.close()
        if timeout is None:
            timeout = (self._self.config if self._self is not None else JobConfig()).cluster.network.close_timeout_s
            if ending():
                timeout = min(timeout, FLUSH_S)
        try:
            lost = await self._table.close(timeout)
            for line in lost:
                log.warning("%s closed before it could deliver %s", self.address, line)
        finally:
            self._table.abort()
            if self._table.trace is not None:
                await self._table.trace.close()
            await self._enrolment.leave(min(timeout, 2.0), end_of_job)
            await self.home.close()

    def _after_close(self, task: asyncio.Task[None], work: AsyncWork[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("closing %s failed", self.address, exc_info=error)
        if task.cancelled():
            if self._table.trace is not None:
                self._table.trace.abandon()
            self._enrolment.abandon()
        work._finish(None)
        if self._thread is not None:
            self._thread.stop()


def _look(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


def _wrap(error: BaseException) -> AiorlinfError:
    local = local_failure(error) if isinstance(error, OSError) else None
    wrapped = AiorlinfError(f"joining failed: {local or f'{type(error).__name__}: {error}'}")
    wrapped.__cause__ = error
    return wrapped
