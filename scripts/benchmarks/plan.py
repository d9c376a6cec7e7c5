"""What a suite consists of: cases with rows, aims, and how much is done. Data only. The suites: ``p2p``, ``host``, ``compression``."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final, Literal

from scripts.benchmarks.contender import CONTENDERS, Effort

__all__ = ["FULL", "MIB", "QUICK", "Aim", "Case", "Row", "Suite", "delay_rows", "rate_row", "time_row"]

MIB: Final = 1 << 20

FULL: Final = Effort(
    round_trips=1000,
    stream_messages=20_000,
    tensor_bytes=64 * MIB,
    transfers=5,
    both_ways_messages=6,
    both_ways_bytes=64 * MIB,
    works_in_flight=10_000,
    slow_share=0.1,
    given_transfers=20,
    steady_messages=200,
    steady_bytes=16 * MIB,
)
QUICK: Final = Effort(
    round_trips=50,
    stream_messages=500,
    tensor_bytes=4 * MIB,
    transfers=2,
    both_ways_messages=2,
    both_ways_bytes=4 * MIB,
    works_in_flight=500,
    slow_share=0.1,
    given_transfers=2,
    steady_messages=24,
    steady_bytes=1 * MIB,
)


@dataclass(frozen=True, slots=True)
class Aim:
    """What a row is meant to reach: its ratio to the row ``against``, or its own value when ``against`` is None."""

    sign: Literal["≤", "≥", "<"]
    bound: float
    against: str | None = None

    def met(self, value: float) -> bool:
        """Whether ``value`` reaches the bound."""
        return value >= self.bound if self.sign == "≥" else value < self.bound if self.sign == "<" else value <= self.bound


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a case's table. Rows with one contender and variant share a measurement and show different metrics of it."""

    label: str
    contender: str
    variant: str
    metric: str
    unit: str = ""
    """Only where it differs from the case's."""
    aims: tuple[Aim, ...] = ()
    compared: tuple[str, ...] = ()
    """Labels of further rows to show the ratio to, without an aim."""

    @property
    def measurement(self) -> tuple[str, str]:
        return (self.contender, self.variant)

    @property
    def baselines(self) -> tuple[str, ...]:
        """Labels of all rows that this one is held against, each once, in order."""
        return tuple(dict.fromkeys([*(aim.against for aim in self.aims if aim.against is not None), *self.compared]))


@dataclass(frozen=True, slots=True)
class Case:
    """One table: ``name`` is how the command line calls it, ``measure`` what the contenders are asked for."""

    name: str
    measure: str
    title: str
    unit: str
    better: Literal["lower", "higher"]
    rows: tuple[Row, ...]
    fresh: bool = False
    """Each measurement gets a contender that is opened anew and has not connected."""
    notes: tuple[str, ...] = field(default=())
    tensor_share: int = 1
    """Tensors of this case are so many times as large as ``Effort.tensor_bytes``."""

    def effort(self, effort: Effort) -> Effort:
        """What a contender is asked to do in this case."""
        return replace(effort, tensor_bytes=effort.tensor_bytes * self.tensor_share)


@dataclass(frozen=True, slots=True)
class Suite:
    """Cases that are run together: ``name`` is how the command line calls them."""

    name: str
    summary: str
    cases: tuple[Case, ...]
    full: Effort = FULL
    quick: Effort = QUICK
    rounds: int = 5
    """Without ``--rounds`` and ``--quick``."""

    @property
    def contenders(self) -> tuple[str, ...]:
        """Names of those that the rows ask for, in the order in which they are started."""
        wanted = {row.contender for case in self.cases for row in case.rows}
        return tuple(name for name in CONTENDERS if name in wanted)


def time_row(
    label: str, contender: str, variant: str, *, unit: str = "", aims: tuple[Aim, ...] = (), compared: tuple[str, ...] = ()
) -> Row:
    return Row(label, contender, variant, "time", unit, aims, compared)


def rate_row(label: str, contender: str, variant: str, *, aims: tuple[Aim, ...] = (), compared: tuple[str, ...] = ()) -> Row:
    return Row(label, contender, variant, "rate", "", aims, compared)


def delay_rows(label: str, contender: str, variant: str, *, aim: Aim | None = None) -> tuple[Row, Row]:
    return (
        Row(f"{label}, worst", contender, variant, "worst", aims=(aim,) if aim is not None else ()),
        Row(f"{label}, 99th percentile", contender, variant, "p99"),
    )
