"""What happens to a job when one of its workers ends, or when somebody wants it to end. Pure: events in, orders out."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = ["JobState", "Order", "Phase", "Stop"]


class Phase(enum.Enum):
    """How far a job is. It moves down this list only.

    * RUNNING -> HOLDING when a worker fails because, by its own words, another one was lost: that one is the cause, but may need
      longer to end;
    * RUNNING or HOLDING -> ENDING when a worker fails of itself, the hold is over, or somebody asks for the end;
    * ENDING -> KILLING when the grace is over or somebody asks again;
    * any -> ENDED when the last worker has ended.
    """

    RUNNING = "running"
    HOLDING = "holding"
    ENDING = "ending"
    KILLING = "killing"
    ENDED = "ended"


class Order(enum.Enum):
    """What to do to every worker that is still there."""

    NOTHING = "nothing"
    HOLD = "hold"  # leave it alone, and start the clock of the hold
    TERMINATE = "terminate"  # ask it to end, and start the clock of the grace
    KILL = "kill"


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a job ended before all its workers were done. ``signal`` is the number of the signal that asked for it."""

    kind: Literal["failure", "signal", "timeout", "cancel", "error"]
    signal: int | None = None


class JobState:
    """The record of one job."""

    def __init__(self, workers: Iterable[str]) -> None:
        self.phase: Phase = Phase.RUNNING
        self.running: set[str] = set(workers)
        self.returncodes: dict[str, int] = {}  # as subprocess has them: -N for signal N
        self.failed: str | None = None  # the first that failed of itself; while there is none, the first that failed
        self.stopped: Stop | None = None  # set when the phase left RUNNING early

    def exited(self, worker: str, returncode: int, *, consequence: bool = False) -> Order:
        """A worker ended. A failure of one ends the others; what they return after that is not held against them.

        `consequence`: it says that it failed because another worker was lost.
        """
        self.running.discard(worker)
        self.returncodes[worker] = returncode
        order = Order.NOTHING
        if returncode != 0 and self.phase in (Phase.RUNNING, Phase.HOLDING):
            if self.failed is None or not consequence:
                self.failed = worker
            self.stopped = Stop("failure")
            if not consequence:
                self.phase, order = Phase.ENDING, Order.TERMINATE
            elif self.phase is Phase.RUNNING:
                self.phase, order = Phase.HOLDING, Order.HOLD
        if not self.running:
            self.phase = Phase.ENDED
        return order

    def dropped(self, worker: str) -> None:
        """A worker will not be started after all."""
        self.running.discard(worker)
        if not self.running and self.phase is not Phase.RUNNING:
            self.phase = Phase.ENDED

    def stop(self, why: Stop) -> Order:
        """Somebody wants the job to end. Asking twice means it."""
        if self.phase in (Phase.RUNNING, Phase.HOLDING):
            self.phase, self.stopped = Phase.ENDING, self.stopped or why
            return Order.TERMINATE
        if self.phase is Phase.ENDING:
            self.phase = Phase.KILLING
            return Order.KILL
        return Order.KILL  # after the last worker only processes that it left behind are still there

    def hold_over(self) -> Order:
        """Nobody else failed meanwhile: whoever was lost was not lost by failing."""
        if self.phase is Phase.HOLDING:
            self.phase = Phase.ENDING
            return Order.TERMINATE
        return Order.NOTHING

    def grace_over(self) -> Order:
        """The time that workers had to end by themselves has passed."""
        if self.phase is Phase.ENDING:
            self.phase = Phase.KILLING
            return Order.KILL
        return Order.NOTHING
