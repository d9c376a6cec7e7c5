"""Statistics of rounds. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Summary", "number", "quantile", "ratios", "summarise"]


class Summary(NamedTuple):
    """The median of the rounds and their spread."""

    median: float
    low: float
    high: float
    rounds: int

    def __str__(self) -> str:
        if self.rounds == 1:
            return f"**{number(self.median)}**"
        return f"**{number(self.median)}** ({number(self.low)}-{number(self.high)})"


def summarise(values: Sequence[float]) -> Summary:
    """Summary of at least one round."""
    return Summary(statistics.median(values), min(values), max(values), len(values))


def ratios(ours: dict[int, float], baseline: dict[int, float]) -> list[float]:
    """Ratio in each round that has both: the two were measured seconds apart, so the machine's mood cancels out."""
    return [ours[index] / baseline[index] for index in sorted(ours.keys() & baseline.keys()) if baseline[index]]


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the ordered, non-empty values lie."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def number(value: float) -> str:
    """Three significant digits (two below 0.1), thousands separated, no exponent."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 100:
        return f"{round(value):,}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 0.095:
        return f"{value:.2f}"
    return f"{value:.2g}"
