"""The manager's server: a listening socket and proven connections around the pure `Directory`."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import resource
import secrets
import time
from collections.abc import Iterable
from typing import Any

from aiorlinf.address import WorkerAddress
from aiorlinf.config import JobConfig, config_to_dict, load_config
from aiorlinf.errors import AuthenticationError, ClosedError, ConfigError, LinkError, UsageError, WireError
from aiorlinf.manager.connection import ManagerConnection
from aiorlinf.manager.directory import Directory
from aiorlinf.manager.emulation import Budgets, missing_ranges
from aiorlinf.manager.instructions import Cut, Instruction, Probe, Refuse, Reply, SessionId, Tell, Wait
from aiorlinf.manager.protocol import BEATS_IN_LIMIT, error_to_dict
from aiorlinf.manager.requests import (
    AskJob,
    AskTime,
    Beat,
    Book,
    Expect,
    Find,
    Forget,
    Inspect,
    Learn,
    ListWorkers,
    Lookup,
    Pong,
    Publish,
    Register,
    Remember,
    Request,
    Subscribe,
    Told,
    Unregister,
    Watch,
    Withdraw,
    parse_request,
)
from aiorlinf.manager.roster import Patience
from aiorlinf.manager.throttle import Throttle
from aiorlinf.rendezvous.door import Door
from aiorlinf.rendezvous.hosts import (
    format_endpoint,
    host_identity,
    is_wildcard,
    open_listener,
    outward_host,
    process_identity,
)
from aiorlinf.rendezvous.tls import tls_of
from aiorlinf.wire.handshake import Hello, ServerHandshake, encode_hello

__all__ = ["RECOVERY_S", "ManagerService", "max_unproven"]

_log = logging.getLogger("aiorlinf.manager")

PROBE_TIMEOUT_S = 2.0
RECOVERY_S = 3.0
"""How long a manager that was started anew waits for the workers of its job; they try to reach it at least every 1.5 s."""

_CLOSED_GRACE_S = 0.5
_TICKS = 16  # in a heartbeat's limit, at least


class ManagerService:
    """One job's registry. Belongs to the loop that `start` runs on.

    Args:
        config: handed to every worker; its network section also tells where and how long to listen.
        token: the job's secret.
        job: the job's id; by default a random one.
        expected: all workers of the job, if it is closed: looking up any other fails at once.
        recover: the job may be going on already, under a manager that is gone: its workers come back in the first `RECOVERY_S` seconds,
            and new ones wait so long. Needs the job's id. Without a ``config`` it is learnt from them.
        lives: so many lives every worker has had already: the next is the one after.

    Raises:
        AuthenticationError: there is no token.
        UsageError: the configuration is too large to be handed out.
    """

    def __init__(
        self,
        *,
        config: JobConfig | None,
        token: bytes,
        job: str | None = None,
        expected: Iterable[str] | None = None,
        recover: bool = False,
        lives: int = 0,
    ) -> None:
        if not token:
            raise AuthenticationError("a manager needs a job token", hint="set AIORLINF_TOKEN, or pass a random token")
        if recover and job is None:
            raise UsageError("a manager can only recover a job whose id it is given")
        self.config: JobConfig = config or JobConfig()
        self.job: str = secrets.token_hex(8) if job is None else job
        self.address: str = ""  # host:port that workers connect to, once started
        self.max_unproven: int = max_unproven()  # connections that may be in the handshake at once; the oldest is dropped for the next
        self.refused: int = 0  # connections that did not get through the handshake
        self._token = token
        self._epoch_ns = time.time_ns() - time.monotonic_ns()  # of the job's clock, see `trace.clock`
        self._tick_s = 0.0
        self._ticker: asyncio.TimerHandle | None = None
        # in the hello already: a worker must know where to listen before it can register
        told = None if config is None and recover else config_to_dict(self.config)
        workers = None if expected is None else [WorkerAddress(address) for address in expected]
        for name in () if workers is None else missing_ranges(self.config.cluster.net_emulation, workers):
            _log.warning("cluster.net_emulation names %s, but the job has no such worker", name)
        self._directory = self._new_directory(told, workers, recover, lives)
        self._budgets = Budgets(self.config.cluster.net_emulation)
        self._greet()  # a configuration that is too large for it fails here and not at every connection
        self._door: Door | None = None
        self._closed = False
        self._numbers = itertools.count(1)
        self._unproven: dict[_Session, None] = {}  # connections in the handshake, oldest first
        self._sessions: dict[SessionId, _Session] = {}  # proven ones
        self._tasks: set[asyncio.Task[None]] = set()  # probes under way
        self._warnings = Throttle(_log)

    def _new_directory(self, config: dict[str, Any] | None, expected: Iterable[str] | None, recover: bool, lives: int) -> Directory:
        limit = self.config.cluster.network.heartbeat_timeout_s
        self._tick_s = min(0.25, limit / _TICKS)
        return Directory(
            job=self.job,
            config=config,
            expected=expected,
            patience=self._patience(),
            recovering=math.ceil(RECOVERY_S / self._tick_s) if recover else 0,
            silence=f"{limit:g} s",
            lives=lives,
        )

    def _patience(self) -> Patience:
        limit = self.config.cluster.network.heartbeat_timeout_s
        seconds = (limit, limit / BEATS_IN_LIMIT + _CLOSED_GRACE_S, _CLOSED_GRACE_S)
        # one more than the time: the first tick may come at once
        silent, broken, closed = (math.ceil(each / self._tick_s) + 1 for each in seconds)
        return Patience(silent, min(broken, silent), min(closed, silent))

    def _greet(self) -> None:
        """What every connection is told from now on."""
        told: dict[str, Any] = {"process": process_identity(), "recovering": self._directory.recovering}
        if self._directory.config is not None:
            told["config"] = self._directory.config
        self._hello = Hello(role="manager", job=self.job, host_id=host_identity(), capabilities=told)
        self._hello_frame = encode_hello(self._hello)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "running" if self._door is not None else "new"
        living = len(self._directory.living)
        return f"<ManagerService {self.address or 'not started'} job {self.job} {state}, {living} workers, {self.refused} refused>"

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen. With port 0 the kernel chooses, or the first free one of ``cluster.network.port_range``.

        Raises:
            RendezvousError: the address or port cannot be used; says why.
            ConfigError: the files for TLS cannot be used.
            ClosedError: it was closed.

        Cancelling may leave it listening: close it.
        """
        if self._closed:
            raise ClosedError("this manager was closed")
        if self._door is not None:
            raise UsageError("this manager is running already")
        network = self.config.cluster.network
        tls = tls_of(network)
        wanted = network.port_range if port == 0 else (port, port)
        listener = await open_listener(host, wanted)
        bound_host, bound_port = listener.getsockname()[:2]
        if is_wildcard(bound_host):
            bound_host = network.advertise_host or outward_host()
        self.address = format_endpoint(bound_host, bound_port)
        self._door = Door(
            asyncio.get_running_loop(),
            listener,
            self._accept,
            time_limit_s=network.handshake_timeout_s,
            limit=lambda: self.max_unproven - len(self._unproven),
            turned_away=self._turned_away,
            tls=None if tls is None else tls.server,
        )
        self._ticker = asyncio.get_running_loop().call_later(self._tick_s, self._tick)

    def _tick(self) -> None:
        self._ticker = asyncio.get_running_loop().call_later(self._tick_s, self._tick)
        was_recovering = self._directory.recovering
        self._obey(self._directory.tick())
        if was_recovering and not self._directory.recovering:
            self._greet()
            _log.info("job %s goes on with %d workers", self.job, len(self._directory.living))

    async def close(self) -> None:
        """Stop listening and cut every connection. May be called again. Cancelling leaves it closing."""
        self._closed = True
        if self._ticker is not None:
            self._ticker.cancel()
        door, self._door = self._door, None
        if door is not None:
            door.close()
            await door.wait_closed()
        for task in list(self._tasks):
            task.cancel()
        sessions = [*self._unproven, *self._sessions.values()]
        for session in sessions:
            session.connection.abort(ClosedError("the manager was closed"))
        await asyncio.gather(*(session.connection.wait_closed() for session in sessions), *self._tasks, return_exceptions=True)

    # ----------------------------------------------------------------------------------------------------- connections

    def _accept(self) -> ManagerConnection:
        while len(self._unproven) >= self.max_unproven:
            # those who could be anybody go first: a real worker says its preamble at once
            oldest = next((session for session in self._unproven if session.connection.early), next(iter(self._unproven)))
            del self._unproven[oldest]
            oldest.connection.abort(LinkError("too many connections have not proved themselves"))
        session = _Session(self, SessionId(next(self._numbers)))
        self._unproven[session] = None
        if self._closed:  # accepted in the moment of closing
            session.connection.abort(ClosedError("the manager was closed"))
        return session.connection

    def _turned_away(self, why: str) -> None:
        self.refused += 1
        self._warnings.warn("refused a connection to the manager: %s", LinkError(why))

    @property
    def unproven(self) -> int:
        """Connections that have not proved themselves."""
        return len(self._unproven) + (0 if self._door is None else self._door.quiet)

    def _proven(self, session: _Session) -> None:
        self._unproven.pop(session, None)
        self._sessions[session.id] = session
        self._directory.join(session.id, session.connection.peer_host)

    def _lost(self, session: _Session, reason: LinkError | ClosedError) -> None:
        self._unproven.pop(session, None)
        if self._sessions.pop(session.id, None) is None:
            if session.connection.gone:  # as a worker whose join is cancelled, or who asks whether somebody listens
                self.refused += 1
                _log.debug("refused a connection to the manager: %s", reason)
            elif not isinstance(reason, ClosedError):
                self._turned_away(str(reason))
            return
        if isinstance(reason, WireError):
            self._warnings.warn("cut a worker's connection to the manager: %s", reason)
        closed = isinstance(reason, ClosedError) or session.connection.ended
        self._obey(self._directory.drop(session.id, reason.message, broken=not closed))

    # -------------------------------------------------------------------------------------------------------- requests

    def _handle(self, session: _Session, request: Request) -> None:
        directory = self._directory
        self._obey(directory.heard(session.id))
        match request:
            case Beat():
                session.connection.send({"event": "beat"})
            case Pong():
                session.alive.set()
            case Lookup():
                self._obey(directory.lookup(session.id, request))
            case Register():
                if directory.unexpected(request.address):
                    _log.warning("%s joins, which was not expected in this job", request.address)
                self._obey(directory.register(session.id, request))
            case Watch():
                self._obey(directory.watch(session.id, request))
            case Unregister():
                self._obey(directory.unregister(session.id, request))
            case ListWorkers():
                self._obey(directory.workers(session.id, request))
            case Book():
                session.answer(request.id, self._book(request))
            case Forget():
                session.stop_timer(request.id)
                directory.forget(session.id, request.id)
            case Expect():
                directory.expect(request)
            case Subscribe():
                self._obey(directory.subscribe(session.id, request))
            case Find():
                self._obey(directory.find(session.id, request))
            case Publish():
                self._obey(directory.publish(session.id, request))
            case Withdraw():
                self._obey(directory.withdraw(session.id, request))
            case Learn():
                self._obey(directory.learn(request))
            case AskJob():
                self._obey(directory.ask_job(session.id, request))
            case Remember():
                self._remember(request)
            case Inspect():
                self._obey(directory.inspect(session.id, request))
            case Told():
                self._obey(directory.told(session.id, request))
            case AskTime():
                session.answer(request.id, {"ok": {"job_ns": self._epoch_ns + time.monotonic_ns(), "epoch_ns": self._epoch_ns}})

    def _book(self, request: Book) -> dict[str, Any]:
        if max(request.budgets) >= len(self._budgets):
            error = UsageError(f"the emulated network has {len(self._budgets)} budgets, not {request.budgets}")
            return {"error": error_to_dict(error)}
        booking = self._budgets.book(request.budgets, request.nbytes, time.monotonic())
        return {"ok": {"wait": booking.wait_s, "span": booking.span_s}}

    def _remember(self, request: Remember) -> None:
        if not self._directory.recovering or self._directory.config is not None:
            self._directory.remember(request)
            return
        try:
            self.config = load_config(request.config)
        except ConfigError as error:
            raise WireError(f"a worker remembers a configuration that this version does not know: {error}") from None
        self._budgets = Budgets(self.config.cluster.net_emulation)
        self._directory.remember(request)
        self._directory.be_patient(self._patience(), f"{self.config.cluster.network.heartbeat_timeout_s:g} s")
        self._greet()

    def _obey(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            session = self._sessions.get(instruction.session)
            if session is None:
                continue
            match instruction:
                case Reply():
                    session.answer(instruction.request, {"ok": instruction.body})
                case Refuse():
                    session.answer(instruction.request, {"error": error_to_dict(instruction.error)})
                case Tell():
                    session.connection.send(instruction.event)
                case Wait():
                    session.start_timer(instruction)
                case Probe():
                    self._spawn(self._probe(instruction))
                case Cut():
                    session.connection.close(LinkError(instruction.detail))

    def expire(self, session: _Session, request: int, waited: float) -> None:
        """A look-up's time is over."""
        self._obey(self._directory.expire(session.id, request, waited))

    async def _probe(self, probe: Probe) -> None:
        """The address is taken. Its holder may have died a moment ago, with the end of its connection still unread."""
        holder = self._sessions.get(probe.holder)
        state = "alive"
        if holder is not None:
            holder.alive.clear()
            holder.connection.send({"event": "ping"})
            answers = [asyncio.ensure_future(holder.alive.wait()), asyncio.ensure_future(holder.connection.wait_closed())]
            try:
                done, _ = await asyncio.wait(answers, timeout=PROBE_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    state = "silent"
            finally:
                for answer in answers:
                    answer.cancel()
        if probe.session in self._sessions:
            self._obey(self._directory.register(probe.session, probe.request, holder=state))

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine, name="aiorlinf manager probe")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --------------------------------------------------------------------------------------------- what sessions call

    def handshake(self) -> ServerHandshake:
        """The server's end of a new connection's handshake."""
        return ServerHandshake(self._token, self._hello, frame=self._hello_frame)

    def take(self, session: _Session, message: dict[str, Any]) -> None:
        """A message of a proven connection. Raises WireError when it is malformed."""
        self._handle(session, parse_request(message))

    def ready(self, session: _Session) -> None:
        """The connection has proved itself."""
        self._proven(session)

    def lost(self, session: _Session, reason: LinkError | ClosedError) -> None:
        """The connection is closed."""
        self._lost(session, reason)


def max_unproven() -> int:
    """Half of this process's file descriptors, 1024 at most: a flood of strangers must leave room for the proven connections."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1024 if soft == resource.RLIM_INFINITY else max(16, min(1024, soft // 2))


class _Session:
    """One connection and the timers of its look-ups."""

    def __init__(self, service: ManagerService, number: SessionId) -> None:
        self.id = number
        self.alive: asyncio.Event = asyncio.Event()  # set by a pong
        self.connection: ManagerConnection = ManagerConnection(
            service.handshake(),
            service.config.cluster.network.handshake_timeout_s,
            on_ready=lambda _: service.ready(self),
            on_message=lambda message: service.take(self, message),
            on_closed=self._closed,
        )
        self._service = service
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def answer(self, request: int, body: dict[str, Any]) -> None:
        self.stop_timer(request)
        try:
            self.connection.send({"id": request, **body})
        except UsageError as error:  # too large for one message; the asker must hear of it
            self.connection.send({"id": request, "error": error_to_dict(error)})

    def start_timer(self, wait: Wait) -> None:
        if wait.timeout is not None:
            loop = asyncio.get_running_loop()
            waited = wait.before + wait.timeout
            self._timers[wait.request] = loop.call_later(wait.timeout, self._service.expire, self, wait.request, waited)

    def stop_timer(self, request: int) -> None:
        timer = self._timers.pop(request, None)
        if timer is not None:
            timer.cancel()

    def _closed(self, reason: LinkError | ClosedError) -> None:
        for request in list(self._timers):
            self.stop_timer(request)
        self._service.lost(self, reason)
