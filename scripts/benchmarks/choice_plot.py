"""The picture of the suite ``compression``: for each network how much faster than raw each codec is, and how small everything gets."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from scripts.benchmarks.choice import Figures
from scripts.benchmarks.compressed import WAYS
from scripts.benchmarks.compression import LINKS
from scripts.benchmarks.plan import Case
from scripts.benchmarks.results import Results
from scripts.benchmarks.summary import number

__all__ = ["draw"]

COLUMNS: Final = 2
COLOURS: Final = dict(zip(WAYS, ("#8a8a8a", "#1b6ca8", "#9ecae1", "#d9a05b", "#b5651d", "#3b7d3b"), strict=True))
WIDTH: Final = 0.8


def draw(cases: Sequence[Case], results: Results, facts: dict[str, str], target: Path) -> None:
    """Write the picture."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figures = Figures(cases, results)
    links = figures.links()
    lines = max(1, math.ceil((len(links) + 1) / COLUMNS))
    figure, grid = pyplot.subplots(lines, COLUMNS, figsize=(9 * COLUMNS, 4 * lines), squeeze=False, layout="constrained")
    axes = list(grid.flat)
    for axis, link in zip(axes, links, strict=False):
        bars(axis, figures, functools.partial(speed, figures, link))
        axis.set_title(f"{LINKS[link]}: times as fast as raw", fontsize=9, loc="left")
        axis.set_yscale("log")
        axis.axhline(1.0, color="#444444", linewidth=0.8)
    if links:
        axis = axes[len(links)]
        bars(axis, figures, functools.partial(share, figures, links[0]))
        axis.set_title(f"share of the tensors' bytes on the wire, over {LINKS[links[0]]}", fontsize=9, loc="left")
    for axis in axes[len(links) + (1 if links else 0) :]:
        axis.set_axis_off()
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLOURS[codec]) for codec in WAYS]
    axes[0].legend(handles, list(WAYS), fontsize=7, ncols=len(WAYS), loc="upper right")
    figure.suptitle("; ".join(f"{name}: {value}" for name, value in facts.items()), fontsize=8)
    figure.savefig(target, dpi=110, format="png")
    pyplot.close(figure)


def speed(figures: Figures, link: str, payload: str, codec: str) -> float | None:
    """How many times as fast as raw."""
    ratio = figures.ratio(payload, link, codec)
    return 1 / ratio if ratio else None


def share(figures: Figures, link: str, payload: str, codec: str) -> float | None:
    """Of the tensors' bytes that were sent."""
    return figures.median(payload, link, codec, "wire")


def bars(axis: Any, figures: Figures, value: Callable[[str, str], float | None]) -> None:
    """A cluster per payload, a bar per codec."""
    each = WIDTH / len(WAYS)
    for place, codec in enumerate(WAYS):
        known = [(index, found) for index, payload in enumerate(figures.cases) if (found := value(payload, codec)) is not None]
        where = [index + (place + 0.5) * each - WIDTH / 2 for index, _ in known]
        axis.bar(where, [found for _, found in known], each, color=COLOURS[codec], label=codec)
        for at, (_, found) in zip(where, known, strict=True):
            axis.annotate(number(found), (at, found), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=5, rotation=90)
    axis.set_xlim(-0.5, len(figures.cases) - 0.5)
    axis.set_xticks(range(len(figures.cases)), list(figures.cases), fontsize=8)
    axis.tick_params(axis="y", labelsize=7)
    axis.margins(y=0.2)
