"""How late the event loop runs what is due."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from scripts.benchmarks.contender import Metrics
from scripts.benchmarks.summary import quantile

__all__ = ["LoopDelay"]

PERIOD: Final = 0.001


class LoopDelay:
    """Asks the loop to call back after one millisecond, again and again, and notes how much later it did.

    uvloop's timers count whole milliseconds, so up to one millisecond is its rounding: compare with the idle loop's figure.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.late: list[float] = []
        self.due = 0.0
        self.handle: asyncio.TimerHandle | None = None

    def __enter__(self) -> LoopDelay:
        self._arm()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.handle is not None:
            self.handle.cancel()
            self.handle = None
        # A tick that is overdue at the end is a delay too: the work before it may have held the loop until now.
        self.late.append(max(0.0, time.perf_counter() - self.due))

    def _arm(self) -> None:
        self.due = time.perf_counter() + PERIOD
        self.handle = self.loop.call_later(PERIOD, self._tick)

    def _tick(self) -> None:
        self.late.append(max(0.0, time.perf_counter() - self.due))
        self._arm()

    def metrics(self) -> Metrics:
        """Milliseconds of delay: the worst tick and the 99th percentile."""
        late = sorted(self.late)
        return {"worst": late[-1] * 1e3, "p99": quantile(late, 0.99) * 1e3}
