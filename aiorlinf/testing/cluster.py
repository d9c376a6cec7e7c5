"""A whole job for a test: its manager, and workers on the loop of the test. No port is chosen, and nothing is mocked.

::

    async with local_cluster("rollout=2,trainer=1") as cluster:
        rollout, trainer = cluster["rollout:0"], cluster["trainer:0"]
        await rollout.send({"reward": 1.0}, "trainer:0")
        print(await trainer.recv("rollout:0"))

        await cluster.kill("rollout:0")  # no goodbye: the others get PeerLost
        again = await cluster.join("rollout:0")  # its next life
        await cluster.kill_manager()
        await cluster.start_manager()

As fixtures for pytest they are in `aiorlinf.testing.pytest_plugin`; `aiorlinf.testing.spawned` has workers in processes of their own.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, Self

import torch

from aiorlinf.address import WorkerAddress
from aiorlinf.channel.host import ChannelHost
from aiorlinf.channel.spawn import end_of_job
from aiorlinf.config import load_config
from aiorlinf.errors import ClosedError, UsageError
from aiorlinf.launch.spec import worker_addresses
from aiorlinf.manager.protocol import WorkerRecord
from aiorlinf.rendezvous.settings import Backend, ConfigSource
from aiorlinf.testing.manager import ManagerThread
from aiorlinf.testing.proxy import Plan, Proxy
from aiorlinf.worker import Worker, init

__all__ = ["LocalCluster", "Workers", "addresses_of", "local_cluster"]

Workers = str | Mapping[str, int] | Iterable[str]
"""``"rollout=2,trainer=1"``, the same as a mapping, or addresses."""


class LocalCluster:
    """One job. Made by `local_cluster`.

    Attributes:
        manager: its manager; `kill_manager` and `start_manager` are for tests.
    """

    def __init__(self, workers: Workers = (), config: ConfigSource = None, *, backend: Backend | None = None, closed: bool = False) -> None:
        self._initial = addresses_of(workers)
        self._backend = backend
        self._proxies: dict[frozenset[str], Proxy] = {}
        self._living: dict[WorkerAddress, Worker] = {}
        self._all: list[Worker] = []
        loaded = None if config is None else load_config(config)
        self.manager: ManagerThread = ManagerThread(loaded, expected=self._initial if closed else None, route=self._route)

    async def __aenter__(self) -> Self:
        await self.start_manager()
        try:
            workers = await asyncio.gather(*(self.join(address) for address in self._initial))
        except BaseException:
            await self._end()
            raise
        self._living = {worker.address: worker for worker in workers}  # in the order that was asked for, not that of their answers
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._end()

    # ---- workers

    async def join(
        self,
        address: str,
        *,
        backend: Backend | None = None,
        loop: Literal["auto", "thread"] = "auto",
        labels: Mapping[str, str] | None = None,
        device: str | int | torch.device | None = None,
    ) -> Worker:
        """A worker of this process joins, as by `aiorlinf.init`; it is closed with the cluster. Raises what that raises.

        Cancelling closes it.
        """
        worker = init(
            address,
            manager=self.manager.address,
            token=self.manager.token,
            backend=backend or self._backend,
            loop=loop,
            labels=labels,
            device=device,
        )
        self._all.append(worker)
        await worker
        self._living[worker.address] = worker
        return worker

    def __getitem__(self, address: str) -> Worker:
        """The worker that has joined under this address, in its present life. Raises KeyError, which says who is there."""
        return self._living[self._there(address)]

    def _there(self, address: str) -> WorkerAddress:
        where = WorkerAddress(address)
        if where not in self._living:
            raise KeyError(f"no worker {where} in this process; there are: {', '.join(self._living) or 'none'}")
        return where

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._living.values()))

    def __len__(self) -> int:
        return len(self._living)

    async def leave(self, address: str) -> None:
        """It closes: what others wait for from it fails with `PeerLeft`. Raises KeyError. Cancelling leaves it closing."""
        await self._living.pop(self._there(address)).close()

    async def kill(self, address: str) -> None:
        """It is gone from one moment to the next, as if its process had been killed: the others get `PeerLost`, it itself `ClosedError`.

        Raises KeyError. Cancelling leaves it half gone, until the cluster ends.
        """
        worker = self._living.pop(self._there(address))

        def vanish() -> None:
            worker._table.condemn(lambda: ClosedError("the test has killed this worker", local=worker.address))

        if worker.home.on_home():
            vanish()
        else:
            worker.home.call(vanish)
        if worker._manager is not None:
            await asyncio.to_thread(worker._manager.abandon)
        await worker.close()

    async def hold_channels(self, name: str) -> ChannelHost:
        """A channel worker of this process: a channel of this name that a worker creates is held here, not in a process of its own."""
        worker = await self.join(f"channel.{name}:0")
        return worker.hold_channels()

    def env(self, address: str) -> dict[str, str]:
        """The environment for a process that shall join under this address. Raises UsageError: not an address."""
        return {
            "AIORLINF_ADDRESS": WorkerAddress(address),
            "AIORLINF_MANAGER": self.manager.address,
            "AIORLINF_TOKEN": self.manager.token.decode("ascii"),
        }

    # ---- what can go wrong

    def between(self, one: str, other: str, *plans: Plan) -> Proxy:
        """Put a proxy between two workers, for every link that they make from now on. It lives on the running loop, as long as the cluster.

        With ``backend="stream"`` everything that the two exchange goes through it; otherwise large payloads go around it, in the memory of
        this host. What it does to the first bytes of a connection, it does to the proof of who is there. A link that it cuts or forgets is
        restored past it, for the two have told each other where they are; with ``cluster.network.reconnect_timeout_s: 0`` it is lost, and
        the next one goes through the proxy again.

        Raises UsageError: these are not two addresses, or there is a proxy between them.
        """
        pair = frozenset((WorkerAddress(one), WorkerAddress(other)))
        if len(pair) != 2 or pair in self._proxies:
            raise UsageError(f"there is a proxy between {one} and {other} already" if len(pair) == 2 else f"{one} is one worker, not two")
        proxy = self._proxies[pair] = Proxy(*plans)
        return proxy

    def _route(self, asker: str, record: WorkerRecord) -> WorkerRecord:
        """What the manager tells: where the proxy is. In its thread."""
        proxy = self._proxies.get(frozenset((asker, str(record.address))))
        if proxy is None:
            return record
        host, port = proxy.door(record.host, record.port)
        return dataclasses.replace(record, host=host, port=port, unix="")

    async def start_manager(self) -> None:
        """Start the manager, again after `kill_manager`: under the same address, and it learns what it had known from the workers.

        It may be some seconds until it lets new workers in. Cancelling leaves it starting.
        """
        await asyncio.to_thread(self.manager.start)

    async def kill_manager(self) -> None:
        """The manager is gone without a word. Links go on. Cancelling leaves it ending."""
        await asyncio.to_thread(self.manager.kill)

    # ---- the end

    async def _end(self) -> None:
        workers, self._all = self._all, []
        self._living.clear()
        await asyncio.gather(*(worker.close() for worker in workers if not worker.closed))
        await asyncio.gather(*(worker.close() for worker in workers))  # those that something else has closed may not be over yet
        await asyncio.gather(*(proxy.close() for proxy in self._proxies.values()))
        await asyncio.to_thread(end_of_job, self.manager.address)
        await asyncio.to_thread(self.manager.kill)


def local_cluster(
    workers: Workers = (), config: ConfigSource = None, *, backend: Backend | None = None, closed: bool = False
) -> LocalCluster:
    """A job in this process, for ``async with``. Several may be there at once.

    Args:
        workers: who joins at its beginning.
        config: the job's configuration: a path, a mapping or a `JobConfig`.
        backend: of all workers that do not name another.
        closed: nobody but `workers` belongs to the job: to use any other address is an error at once.

    Raises:
        UsageError, ConfigError: at the call.
        AiorlinfError: from ``async with``: what a worker's start raised.
    """
    return LocalCluster(workers, config, backend=backend, closed=closed)


def addresses_of(workers: Workers) -> list[WorkerAddress]:
    """Raises UsageError: not workers, or one twice."""
    if isinstance(workers, (str, Mapping)):
        return worker_addresses(workers)
    found = [WorkerAddress(address) for address in workers]
    if len(set(found)) != len(found):
        raise UsageError(f"one worker twice: {', '.join(found)}")
    return found
