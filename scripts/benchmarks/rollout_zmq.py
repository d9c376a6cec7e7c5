"""``scripts/bench rollout`` over pyzmq and pickle: PUSH and PULL for the trajectories, and for the weights a pair per rollout worker."""

from __future__ import annotations

import importlib
import pickle
import tempfile
from typing import Any

import uvloop
from atari.messages import Trajectory, Weights

from scripts.benchmarks.rollout_job import Figures, Job, roll_out, train
from scripts.benchmarks.rollout_processes import run_processes

__all__ = ["run"]


def run(job: Job) -> Figures:
    """One run in processes of its own."""
    importlib.import_module("zmq")
    with tempfile.TemporaryDirectory(prefix="aiorlinf-bench-") as folder:
        return run_processes(job, _rollout, _trainer, folder)


class _Sockets:
    """Those of one process. At most `ahead` messages wait on each side of a socket."""

    def __init__(self, folder: str, ahead: int) -> None:
        self._zmq = importlib.import_module("zmq")
        self._context: Any = importlib.import_module("zmq.asyncio").Context()
        self._folder = folder
        self._ahead = ahead

    def make(self, kind: str, name: str, *, binds: bool) -> Any:
        socket = self._context.socket(getattr(self._zmq, kind))
        for option in (self._zmq.SNDHWM, self._zmq.RCVHWM):
            socket.setsockopt(option, self._ahead)
        (socket.bind if binds else socket.connect)(f"ipc://{self._folder}/{name}")
        return socket

    def close(self, linger_ms: int) -> None:
        self._context.destroy(linger=linger_ms)


class _Rollout:
    def __init__(self, sockets: _Sockets, rank: int) -> None:
        self._trajectories = sockets.make("PUSH", "trajectories", binds=False)
        self._news = sockets.make("PULL", f"weights{rank}", binds=False)

    async def put(self, trajectory: Trajectory) -> None:
        await self._trajectories.send(pickle.dumps(trajectory, protocol=5), copy=False)

    async def weights(self) -> Weights | None:
        got: Weights | None = pickle.loads((await self._news.recv(copy=False)).buffer)
        return got


class _Trainer:
    def __init__(self, sockets: _Sockets, rollouts: int) -> None:
        self._trajectories = sockets.make("PULL", "trajectories", binds=True)
        self._news = [sockets.make("PUSH", f"weights{rank}", binds=True) for rank in range(rollouts)]

    async def get(self) -> Trajectory:
        got: Trajectory = pickle.loads((await self._trajectories.recv(copy=False)).buffer)
        return got

    async def publish(self, weights: Weights | None) -> None:
        text = pickle.dumps(weights, protocol=5)
        for socket in self._news:
            await socket.send(text, copy=False)


def _rollout(job: Job, rank: int, folder: str) -> None:
    async def main() -> None:
        sockets = _Sockets(folder, 1)
        try:
            await roll_out(_Rollout(sockets, rank), job, rank)
        finally:
            sockets.close(0)

    uvloop.run(main())


def _trainer(job: Job, answers: Any, folder: str) -> None:
    async def main() -> None:
        sockets = _Sockets(folder, max(1, job.ahead // job.rollouts - 1))  # of each rollout worker, which has one more at its end
        try:
            answers.put((await train(_Trainer(sockets, job.rollouts), job)).to_json())
        finally:
            sockets.close(1000)

    uvloop.run(main())
