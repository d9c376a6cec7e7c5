"""The manager of a job that was started without one: a thread of this process, shared by all its workers."""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from concurrent.futures import Future
from typing import NamedTuple

from aiorlinf.config import JobConfig
from aiorlinf.errors import AuthenticationError, ConfigError, RendezvousError
from aiorlinf.manager.service import ManagerService
from aiorlinf.rendezvous.hosts import interface_host
from aiorlinf.work.threads import make_loop, start_thread

__all__ = ["EmbeddedManager", "Hosting", "acquire_embedded", "embedded_users", "manager_host", "random_token"]

_JOIN_LIMIT_S = 10.0


class EmbeddedManager:
    """One use of this process's embedded manager; made by `acquire_embedded`, ended by `release`.

    Attributes:
        address: ``host:port`` that workers connect to.
        token: the job's secret.
        job: the job's id.
        config: the job's configuration.
    """

    def __init__(self, runner: _Runner) -> None:
        self.address: str = runner.service.address
        self.token: bytes = runner.token
        self.job: str = runner.service.job
        self.config: JobConfig = runner.service.config
        self._runner: _Runner | None = runner

    def __repr__(self) -> str:
        return f"<EmbeddedManager {self.address} job {self.job}{' released' if self._runner is None else ''}>"

    def release(self) -> None:
        """Stop using it. The last release stops the manager and returns when its thread has ended. Further calls do nothing.

        In a child process after a fork it does nothing: the manager lives in the parent only.
        """
        runner, self._runner = self._runner, None
        if runner is not None:
            _release(runner)


class Hosting(NamedTuple):
    """How a manager is run that others are to find.

    Attributes:
        host: address to listen on; None: as `manager_host` says.
        expected: all workers of the job, if that is known.
        lives: so many lives every worker has had under earlier managers of the job.
    """

    host: str | None = None
    expected: tuple[str, ...] | None = None
    lives: int = 0


class _Runner:
    """The thread, its loop and the service on it."""

    def __init__(self, config: JobConfig, token: bytes, job: str | None, hosting: Hosting) -> None:
        self.pid: int = os.getpid()
        self.token = token
        self.users = 0
        self.host: str | None = hosting.host
        self.service: ManagerService = ManagerService(config=config, token=token, job=job, expected=hosting.expected, lives=hosting.lives)
        self._started: Future[None] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        # daemon: an exit without close must be prompt; nothing is lost, the manager has no state on disk
        self._thread = threading.Thread(target=self._run, name="aiorlinf manager", daemon=True)

    def start(self) -> None:
        start_thread(self._thread)
        try:
            self._started.result()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None:
            try:
                loop.call_soon_threadsafe(stop.set)
            except RuntimeError:
                pass  # the loop is closed already
        self._thread.join(_JOIN_LIMIT_S)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            # a loop of our own choice, whatever policy somebody has set or patched
            with asyncio.Runner(loop_factory=lambda: make_loop(asyncio.SelectorEventLoop)) as runner:
                runner.run(self._main())
        except BaseException as error:  # handed to the starter, who raises it
            if self._started.done():
                raise
            self._started.set_exception(error)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        try:
            await self.service.start(self.host or manager_host(self.service.config))
            self._started.set_result(None)
            await self._stop.wait()
        finally:
            await self.service.close()


_lock = threading.Lock()
_current: _Runner | None = None
_fork_hook = False  # whether `_forget` is called in the children of this process


def manager_host(config: JobConfig) -> str:
    """Where a manager listens that was not told: the configured host or interface, else loopback.

    Raises ConfigError when this host has no such interface.
    """
    network = config.cluster.network
    if network.bind_host != "auto":
        return network.bind_host
    return "127.0.0.1" if network.interface is None else interface_host(network.interface)


def random_token() -> bytes:
    """A fresh job token. It is ASCII text, so that an environment variable can carry it."""
    return secrets.token_hex(32).encode("ascii")


def _forget() -> None:
    """In a child: the thread is the parent's, and the lock may have been held by another thread at the fork."""
    global _lock, _current
    _lock = threading.Lock()
    _current = None


def acquire_embedded(
    config: JobConfig | None = None, token: bytes | None = None, job: str | None = None, hosting: Hosting | None = None
) -> EmbeddedManager:
    """Use this process's embedded manager, which is started now if this is its first use. Blocks for a few milliseconds.

    Args:
        config: the job's configuration; None or the default: whatever it runs with.
        token: the job's secret; None: a random one, or the one it runs with.
        job: the job's id; None: a random one, or the one it runs with.
        hosting: how it is run if it is started now.

    Raises:
        ConfigError: it runs with another configuration.
        AuthenticationError: it runs with another token.
        RendezvousError: it runs another job, or no socket could be bound.
    """
    global _current, _fork_hook
    with _lock:
        if not _fork_hook:
            os.register_at_fork(after_in_child=_forget)
            _fork_hook = True
        runner = _current
        if runner is None or not runner.alive:
            runner = _Runner(JobConfig() if config is None else config, token or random_token(), job, hosting or Hosting())
            runner.start()
            _current = runner
        else:
            _check_same(runner, config, token, job)
        runner.users += 1
        return EmbeddedManager(runner)


def embedded_users(address: str) -> int:
    """How many uses this process's embedded manager has, if it is the one at this address."""
    with _lock:
        return _current.users if _current is not None and _current.service.address == address else 0


def _check_same(runner: _Runner, config: JobConfig | None, token: bytes | None, job: str | None) -> None:
    service = runner.service
    if config is not None and config not in (JobConfig(), service.config):
        raise ConfigError(
            "",
            f"the embedded manager of this process, at {service.address}, runs with another configuration already",
            hint="pass the configuration to the first init of the process, and none or the same one to the others",
        )
    if token and token != runner.token:
        raise AuthenticationError("the embedded manager of this process runs with another token", address=service.address)
    if job is not None and job != service.job:
        raise RendezvousError(f"the embedded manager of this process runs job {service.job}, not {job}", address=service.address)


def _release(runner: _Runner) -> None:
    global _current
    if runner.pid != os.getpid():
        return
    with _lock:
        runner.users -= 1
        if runner.users > 0:
            return
        if _current is runner:
            _current = None
        runner.stop()
