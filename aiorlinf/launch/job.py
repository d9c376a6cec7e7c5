"""What happens to a job when one of its workers ends, or when somebody wants it to end. Pure: events in, orders out."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = ["JobState", "Order", "Phase", "Stop"]


class Phase(enum.Enum):
    """How far a job is. It moves down this list only.

    * RUNNING -> ENDING when a worker fails or somebody asks for the end;
    * ENDING -> KILLING when the grace is over or somebody asks again;
    * any -> ENDED when the last worker has ended.
    """

    RUNNING = "running"
    ENDING = "ending"
    KILLING = "killing"
    ENDED = "ended"


class Order(enum.Enum):
    """What to do to every worker that is still there."""

    NOTHING = "nothing"
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
        self.phase = Phase.RUNNING
        self.running: set[str] = set(workers)
        self.returncodes: dict[str, int] = {}  # as subprocess has them: -N for signal N
        self.failed: str | None = None  # the first that failed of its own accord
        self.stopped: Stop | None = None  # set when the phase left RUNNING early

    def exited(self, worker: str, returncode: int) -> Order:
        """A worker ended. A failure of one ends the others; what they return after that is not held against them."""
        self.running.discard(worker)
        self.returncodes[worker] = returncode
        order = Order.NOTHING
        if returncode != 0 and self.phase is Phase.RUNNING:
            self.failed = worker
            order = self.stop(Stop("failure"))
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
        if self.phase is Phase.RUNNING:
            self.phase, self.stopped = Phase.ENDING, why
            return Order.TERMINATE
        if self.phase is Phase.ENDING:
            self.phase = Phase.KILLING
            return Order.KILL
        return Order.KILL  # after the last worker only processes that it left behind are still there

    def grace_over(self) -> Order:
        """The time that workers had to end by themselves has passed."""
        if self.phase is Phase.ENDING:
            self.phase = Phase.KILLING
            return Order.KILL
        return Order.NOTHING
