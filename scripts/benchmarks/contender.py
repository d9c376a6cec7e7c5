"""One half of a pair of processes that can be measured: the interface that ours, the limits and the peers all meet."""

from __future__ import annotations

import abc
import importlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

__all__ = [
    "CONTENDERS",
    "SMALL_DICT",
    "BlockingContender",
    "Contender",
    "Effort",
    "Metrics",
    "Place",
    "load",
    "missing_reason",
    "unknown",
]

SMALL_DICT: Final[dict[str, Any]] = {"step": 1, "reward": 0.5, "name": "x", "ids": [1, 2, 3]}

Metrics = dict[str, float]
"""What one measurement found: metric name to value. When both sides report one name, the larger value counts."""

CONTENDERS: Final[dict[str, str]] = {
    "bare": "scripts.benchmarks.bare:Bare",
    "ours-auto": "scripts.benchmarks.ours:OursAuto",
    "ours-shm": "scripts.benchmarks.ours:OursShm",
    "ours-stream": "scripts.benchmarks.ours:OursStream",
    "ours-gloo": "scripts.benchmarks.ours:OursGloo",
    "raw-gloo": "scripts.benchmarks.raw_gloo:RawGloo",
    "pipe": "scripts.benchmarks.pipe:Pipe",
    "zmq": "scripts.benchmarks.zmq_peer:Zmq",
    "torch-queue": "scripts.benchmarks.torch_queue:TorchQueue",
    "ray": "scripts.benchmarks.ray_peer:Ray",
    "ours-channel": "scripts.benchmarks.channel_ours:OursChannel",
    "ray-queue": "scripts.benchmarks.ray_queue:RayQueue",
    "link-100m": "scripts.benchmarks.compressed:Link100M",
    "link-1g": "scripts.benchmarks.compressed:Link1G",
    "link-10g": "scripts.benchmarks.compressed:Link10G",
    "emulated-1g": "scripts.benchmarks.compressed:Emulated1G",
    "emulated-far": "scripts.benchmarks.compressed:EmulatedFar",
}
"""Contender name to ``module:class``. Imported only in the processes that run it, so that nothing else pays for it."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much each measurement does in one round."""

    round_trips: int
    stream_messages: int
    tensor_bytes: int
    transfers: int
    both_ways_messages: int
    both_ways_bytes: int
    works_in_flight: int
    slow_share: float
    """Share of ``stream_messages`` that peers far below the limit are given, so that a round does not become theirs."""
    given_transfers: int
    """Transfers of a tensor that is given away: they take next to nothing, so there can be more of them."""
    steady_messages: int
    """The first quarter warms up; what the rest adds is measured."""
    steady_bytes: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Place:
    """Where this half lives. Role 0 starts and takes the time, role 1 answers."""

    role: int
    directory: Path
    """An empty directory that only this pair uses."""
    generation: int
    """Counts how often the contender was opened in these processes; makes names in ``directory`` fresh."""


class Contender(abc.ABC):
    """One half of a contender. Both halves are told to do the same steps at the same time.

    The order is ``offer`` on both sides, ``open`` with the other side's offer, ``measure`` any number of times, ``close``.
    ``open`` gets ready without connecting where the contender has a choice: the first ``measure`` connects, which is what the
    case ``first_message`` measures.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    """Modules without which this contender is skipped."""
    one_sided: ClassVar[bool] = False
    """The leading half starts its own other end; the answering half idles and needs no modules."""

    def __init__(self, place: Place) -> None:
        self.place = place

    @classmethod
    def problem(cls) -> str | None:
        """Why it cannot run on this machine though its modules are there, or None."""
        return None

    @property
    def leads(self) -> bool:
        """True in the half that starts and takes the time."""
        return self.place.role == 0

    async def offer(self) -> dict[str, str]:
        """Start what the other half has to know about, and describe it."""
        return {}

    @abc.abstractmethod
    async def open(self, offer: dict[str, str]) -> None:
        """Get ready, knowing what the other half offered."""

    @abc.abstractmethod
    async def measure(self, case: str, variant: str, effort: Effort) -> Metrics:
        """Play this half's part in one measurement."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Give back everything that ``offer``, ``open`` and ``measure`` made."""


class BlockingContender(Contender):
    """A contender without an event loop. Its processes do nothing else, so it may block them."""

    async def open(self, offer: dict[str, str]) -> None:
        self.open_blocking(offer)

    async def measure(self, case: str, variant: str, effort: Effort) -> Metrics:
        return self.measure_blocking(case, variant, effort)

    async def close(self) -> None:
        self.close_blocking()

    @abc.abstractmethod
    def open_blocking(self, offer: dict[str, str]) -> None: ...

    @abc.abstractmethod
    def measure_blocking(self, case: str, variant: str, effort: Effort) -> Metrics: ...

    @abc.abstractmethod
    def close_blocking(self) -> None: ...


def load(name: str) -> type[Contender]:
    """The class of a contender, imported now."""
    module, _, attribute = CONTENDERS[name].partition(":")
    found: type[Contender] = getattr(importlib.import_module(module), attribute)
    return found


def missing_reason(name: str, role: int) -> str | None:
    """Why this half of the contender cannot run here, or None. Imports its modules: call it in a process made for it."""
    try:
        contender = load(name)
        for module in () if role and contender.one_sided else contender.needs:
            importlib.import_module(module)
    except ImportError as error:
        return f"not installed: {error}"
    return contender.problem()


def unknown(case: str, variant: str) -> AssertionError:
    """The plan asked a contender for something it does not have: a mistake in the suite."""
    return AssertionError(f"no measurement {case}/{variant}")
