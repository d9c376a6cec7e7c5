"""A job's manager in a thread of the test's process, which can be killed and started again."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from aiorlinf.config import JobConfig
from aiorlinf.errors import UsageError
from aiorlinf.manager.embedded import random_token
from aiorlinf.manager.instructions import Instruction, Reply
from aiorlinf.manager.protocol import WorkerRecord
from aiorlinf.manager.service import ManagerService
from aiorlinf.rendezvous.hosts import parse_endpoint

__all__ = ["ManagerThread", "Route"]

_LIMIT_S = 20.0

Route = Callable[[str, WorkerRecord], WorkerRecord]
"""Called in the manager's thread, with who asks (``group:rank``) and where the other one is; returns what he is told."""


class ManagerThread:
    """A manager that goes on while the loop of the test is blocked. `start` and `kill` block for some milliseconds.

    Args:
        config: the job's configuration; None: the default.
        job: the job's id.
        expected: all workers of the job, if it shall be closed to others.
        route: what workers are told of each other, if it shall not be the truth.

    Attributes:
        address: ``host:port`` for `aiorlinf.init(manager=...)`, once it was started; the same after each start.
        token: the job's secret.
    """

    def __init__(
        self, config: JobConfig | None = None, *, job: str = "test", expected: Iterable[str] | None = None, route: Route | None = None
    ) -> None:
        self.config: JobConfig = config or JobConfig()
        self.token: bytes = random_token()
        self.address: str = ""
        self._job = job
        self._expected = None if expected is None else list(expected)
        self._route = route
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    @property
    def running(self) -> bool:
        """Whether it can be reached."""
        return self._thread is not None

    def start(self) -> None:
        """Start it; after a `kill` on the same port, where it learns from its workers what it had known.

        Raises:
            UsageError: it runs.
            RendezvousError: the port is taken.
        """
        if self._thread is not None:
            raise UsageError("the manager runs already")
        started: Future[str] = Future()
        thread = threading.Thread(target=self._run, args=(started,), name="aiorlinf test manager", daemon=True)
        thread.start()
        try:
            self.address = started.result(_LIMIT_S)
        except BaseException:
            thread.join(_LIMIT_S)
            raise
        self._thread = thread

    def kill(self) -> None:
        """Cut all of its connections without a word, as they are when its process dies. May be called again."""
        thread, self._thread = self._thread, None
        if thread is not None:
            assert self._loop is not None
            assert self._stop is not None
            self._loop.call_soon_threadsafe(self._stop.set)
            thread.join(_LIMIT_S)

    def _run(self, started: Future[str]) -> None:
        try:
            with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
                runner.run(self._main(started))
        except BaseException as error:  # the starter raises it
            if started.done():
                raise
            started.set_exception(error)

    async def _main(self, started: Future[str]) -> None:
        again = bool(self.address)
        service = _Routing(config=self.config, token=self.token, job=self._job, expected=self._expected, recover=again)
        service.route = self._route
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        try:
            host, port = parse_endpoint(self.address) if again else ("127.0.0.1", 0)
            await service.start(host, port)
            started.set_result(service.address)
            await self._stop.wait()
        finally:
            await service.close()


class _Routing(ManagerService):
    route: Route | None = None

    def _obey(self, instructions: list[Instruction]) -> None:
        if self.route is not None:
            instructions = [self._told(instruction) for instruction in instructions]
        super()._obey(instructions)

    def _told(self, instruction: Instruction) -> Instruction:
        if not isinstance(instruction, Reply) or "worker" not in instruction.body:
            return instruction
        assert self.route is not None
        asker = self._directory.name(instruction.session)
        told = self.route(asker or "", WorkerRecord.from_dict(instruction.body["worker"]))
        return dataclasses.replace(instruction, body={**instruction.body, "worker": told.to_dict()})
