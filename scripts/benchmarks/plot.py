"""One picture of a run: a panel per case, a bar per row with its spread."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from scripts.benchmarks.plan import Case, Row
from scripts.benchmarks.results import Results
from scripts.benchmarks.summary import Summary, number, summarise
from scripts.benchmarks.table import plain

__all__ = ["draw", "missing"]

COLUMNS: Final = 2
OURS: Final = "#1b6ca8"
LIMIT: Final = "#8a8a8a"
PEER: Final = "#d9a05b"


def missing() -> str | None:
    """Why nothing can be drawn here, or None."""
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        return str(error)
    return None


def draw(cases: Sequence[Case], results: Results, facts: dict[str, str], target: Path) -> None:
    """Write the picture of all cases that have figures; each unit of a case gets a panel of its own."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    found = list(panels(cases, results))
    lines = max(1, math.ceil(len(found) / COLUMNS))
    tallest = max((len(bars) for _, _, bars in found), default=1)
    figure, grid = pyplot.subplots(
        lines, COLUMNS, figsize=(9 * COLUMNS, lines * (1.2 + 0.25 * tallest)), squeeze=False, layout="constrained"
    )
    axes = list(grid.flat)
    for axis, (title, unit, bars) in zip(axes, found, strict=False):
        panel(axis, title, unit, bars)
    for axis in axes[len(found) :]:
        axis.set_axis_off()
    figure.suptitle("; ".join(f"{name}: {value}" for name, value in facts.items()), fontsize=8)
    figure.savefig(target, dpi=110, format="png")
    pyplot.close(figure)


def panels(cases: Sequence[Case], results: Results) -> list[tuple[str, str, list[tuple[Row, Summary]]]]:
    """Title, unit and bars of each panel."""
    found = []
    for case in cases:
        units: dict[str, list[tuple[Row, Summary]]] = {}
        for row in case.rows:
            if values := results.values(case, row):
                units.setdefault(row.unit or f"{case.unit}, {case.better} is better", []).append((row, summarise(list(values.values()))))
        found += [(f"{case.name}: {case.title}", unit, bars) for unit, bars in units.items()]
    return found


def panel(axis: Any, title: str, unit: str, bars: list[tuple[Row, Summary]]) -> None:
    """One case's bars, the first row on top."""
    places = range(len(bars))
    middles = [summary.median for _, summary in bars]
    spread = [[summary.median - summary.low for _, summary in bars], [summary.high - summary.median for _, summary in bars]]
    axis.barh(places, middles, xerr=spread, color=[colour(row) for row, _ in bars], error_kw={"elinewidth": 0.8, "capsize": 2})
    axis.set_yticks(places, [plain(row.label) for row, _ in bars], fontsize=7)
    axis.invert_yaxis()
    positive = [value for value in middles if value > 0]
    if positive and max(positive) > 50 * min(positive):
        axis.set_xscale("log")  # else the shorter bars could not be told apart
    for place, (_, summary) in zip(places, bars, strict=True):
        axis.annotate(number(summary.median), (summary.high, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=7)
    axis.margins(x=0.15)
    axis.set_title(title, fontsize=9, loc="left")
    axis.set_xlabel(unit, fontsize=7)
    axis.tick_params(axis="x", labelsize=7)


def colour(row: Row) -> str:
    if row.contender.startswith("ours"):
        return OURS
    return LIMIT if row.contender == "bare" else PEER
