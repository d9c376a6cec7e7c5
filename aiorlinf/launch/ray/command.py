"""``aiorlinf run --ray``."""

from __future__ import annotations

import asyncio
import importlib
import signal

import yaml

from aiorlinf.errors import UsageError
from aiorlinf.launch.api import JobSpec, new_loop
from aiorlinf.launch.ray.needs import ray_itself
from aiorlinf.launch.result import LaunchResult

__all__ = ["run_there"]


def run_there(spec: JobSpec, address: str, placement: str | None) -> int:
    """Connect to the cluster (``host:port``, ``auto``, or ``local`` for one of its own) and run the job; the exit code.

    Raises:
        UsageError: Ray is not installed; there is no such cluster; the placement is not a mapping of groups.
    """
    ray = ray_itself()
    running = importlib.import_module("aiorlinf.launch.ray.running")  # the rest is heavy, and most jobs do without
    try:
        options = running.check_placement(None if placement is None else yaml.safe_load(placement), spec)
    except (yaml.YAMLError, AttributeError) as error:
        raise UsageError(f"--placement is no mapping: {error}", hint="such as '{rollout: {num_cpus: 2}}'") from error
    try:
        ray.init(address=address)
    except Exception as error:  # Ray has many of its own
        raise UsageError(f"no Ray cluster at {address}: {error}") from error

    async def run() -> int:
        task = asyncio.ensure_future(running.run_on_ray(spec, options))
        loop = asyncio.get_running_loop()
        stopped: list[int] = []

        def on_signal(number: int) -> None:
            stopped.append(number)
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal, number)
        try:
            result: LaunchResult = await task
        except asyncio.CancelledError:
            return 128 + stopped[0]
        return result.returncode

    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            return runner.run(run())
    finally:
        ray.shutdown()
