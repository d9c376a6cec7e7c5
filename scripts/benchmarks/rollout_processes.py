"""Processes for the transports of ``scripts/bench rollout`` that bring none of their own."""

from __future__ import annotations

import multiprocessing
import queue
import time
from collections.abc import Callable
from typing import Any

from scripts.benchmarks.rollout_job import Figures, Job

__all__ = ["run_processes"]

_LIMIT_S = 600.0
_LOOK_S = 0.5
_GRACE_S = 3.0


def run_processes(job: Job, rollout: Callable[..., None], trainer: Callable[..., None], *shared: Any, context: Any = None) -> Figures:
    """Call ``rollout(job, rank, *shared)`` in so many processes and ``trainer(job, answers, *shared)`` in one; what the latter answers.

    Raises:
        SystemExit: one of them failed.
    """
    context = context or multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["scripts.benchmarks.rollout_job"])  # torch is imported once
    answers = context.Queue()
    processes = [context.Process(target=rollout, args=(job, rank, *shared)) for rank in range(job.rollouts)]
    processes.append(context.Process(target=trainer, args=(job, answers, *shared)))
    for process in processes:
        process.start()
    end = time.monotonic() + _LIMIT_S
    try:
        while True:
            try:
                return Figures(**answers.get(timeout=_LOOK_S))
            except queue.Empty:
                failed = [process.exitcode for process in processes if process.exitcode]
                if failed or time.monotonic() > end:
                    raise SystemExit(f"a process of the benchmark ended with {failed}") from None
    finally:
        for process in processes:
            process.join(_GRACE_S)  # some are in the middle of a put that nobody will take
            if process.is_alive():
                process.kill()
            process.join()
