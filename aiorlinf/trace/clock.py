"""One clock for all workers of a job: the manager's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Reading", "microseconds"]

_APART_S = 1.0
"""Two readings that are nearer say nothing of how fast a clock runs."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The job's clock had `job_ns` nanoseconds when this process's monotonic clock had `at` seconds, right to within `error_ns`.

    The job's clock is the manager's monotonic one, set by its wall clock when it was started: it does not jump.
    """

    at: float
    job_ns: int
    error_ns: int

    @classmethod
    def of_this_host(cls) -> Reading:
        """Its wall clock, if there is nobody to ask. How wrong that is, nobody knows; a second is meant."""
        return cls(time.monotonic(), time.time_ns(), 10**9)


def microseconds(readings: Sequence[Reading], base_ns: int) -> Callable[[float], float]:
    """What makes microseconds of the job's clock since `base_ns` of this process's seconds.

    Two clocks do not run alike: between the first reading and the last it is evened out, if they are far enough from each other for that.
    """
    first, last = readings[0], readings[-1]
    start = (first.job_ns - base_ns) / 1000
    rate = 1e6
    if last.at - first.at > _APART_S:
        rate = (last.job_ns - first.job_ns) / 1000 / (last.at - first.at)
    return lambda at: start + (at - first.at) * rate
