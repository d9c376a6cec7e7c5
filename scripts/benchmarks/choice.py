"""Tables of the suite ``compression``: what to choose, how long everything took, and whether the aims are met. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from scripts.benchmarks.compressed import WAYS
from scripts.benchmarks.compression import FIXED, LINKS
from scripts.benchmarks.contender import Effort
from scripts.benchmarks.plan import MIB, Case
from scripts.benchmarks.results import Results
from scripts.benchmarks.summary import number, ratios

__all__ = ["AUTO_BOUND", "Check", "Figures", "checks", "render"]

GOOD_ENOUGH: Final = 1.05
"""A choice within this of the fastest is as good: the cheaper one is taken."""

FASTER: Final = 5.0
FEWER: Final = 0.4
RAW_BOUND: Final = 1.03
AUTO_BOUND: Final = 1.1


class Figures:
    """The results by payload, link and codec."""

    def __init__(self, cases: Sequence[Case], results: Results) -> None:
        self.cases = {case.name: case for case in cases}
        self.results = results

    def rounds(self, payload: str, link: str, codec: str, metric: str = "time") -> dict[int, float]:
        """Figure of each round that has one."""
        return {index: metrics[metric] for index, metrics in self.results.found.get((payload, link, codec), {}).items()}

    def median(self, payload: str, link: str, codec: str, metric: str = "time") -> float | None:
        """Of the rounds, None if there are none."""
        values = self.rounds(payload, link, codec, metric).values()
        return statistics.median(values) if values else None

    def ratio(self, payload: str, link: str, codec: str, baseline: str = "raw") -> float | None:
        """Time of a codec over that of another, taken within each round: median."""
        found = ratios(self.rounds(payload, link, codec), self.rounds(payload, link, baseline))
        return statistics.median(found) if found else None

    def choice(self, payload: str, link: str) -> str | None:
        """The fixed codec to choose: the cheapest of those that are about as fast as the fastest."""
        times = {codec: time for codec in FIXED if (time := self.median(payload, link, codec)) is not None}
        if not times:
            return None
        return next(codec for codec, time in times.items() if time <= GOOD_ENOUGH * min(times.values()))

    def fastest(self, payload: str, link: str) -> str | None:
        """The fixed codec with the least time."""
        times = {codec: time for codec in FIXED if (time := self.median(payload, link, codec)) is not None}
        return min(times, key=lambda codec: times[codec]) if times else None

    def links(self) -> list[str]:
        """Those that something was measured on."""
        return [link for link in LINKS if any(self.choice(payload, link) for payload in self.cases)]


@dataclass(frozen=True, slots=True)
class Check:
    """An aim and what was reached."""

    text: str
    reached: float
    met: bool

    def __str__(self) -> str:
        return f"{self.text}: {number(self.reached)}, {'met' if self.met else 'MISSED'}"


def checks(figures: Figures) -> Iterator[Check]:
    """The aims that can be judged by what was measured."""
    if "frames" in figures.cases:
        fastest = figures.fastest("frames", "link-1g")
        ratio = None if fastest is None else figures.ratio("frames", "link-1g", fastest)
        if ratio:
            yield Check(f"frames over 1 Gbit/s, times as fast as raw (aim: {FASTER:g}, with {fastest})", 1 / ratio, 1 / ratio >= FASTER)
    for link in figures.links():
        shares = {codec: figures.median("token_ids", link, codec, "wire") for codec in FIXED if codec != "raw"}
        known = {codec: share for codec, share in shares.items() if share is not None}
        if known:
            codec = min(known, key=lambda codec: known[codec])
            reached = known[codec]
            yield Check(
                f"token ids over {LINKS[link]}, share of their bytes sent (aim: {FEWER:g}, with {codec})", reached, reached <= FEWER
            )
            break
    for payload in ("random", "float32"):
        for link in figures.links():
            slowdowns = {codec: figures.ratio(payload, link, codec) for codec in WAYS if codec != "raw"}
            worst = max(((ratio, codec) for codec, ratio in slowdowns.items() if ratio is not None), default=None)
            if worst is not None:
                text = f"{payload} over {LINKS[link]}, time over raw (aim: {RAW_BOUND:g}; worst: {worst[1]})"
                yield Check(text, worst[0], worst[0] <= RAW_BOUND)
    for link in figures.links():
        for payload in figures.cases:
            fastest = figures.fastest(payload, link)
            ratio = None if fastest is None else figures.ratio(payload, link, "auto", fastest)
            if ratio is not None:
                text = f"auto for {payload} over {LINKS[link]}, time over the best choice (aim: {AUTO_BOUND:g}; best: {fastest})"
                yield Check(text, ratio, ratio <= AUTO_BOUND)


def render(cases: Sequence[Case], results: Results, facts: dict[str, str], effort: Effort) -> str:
    """All tables, with what they were measured on."""
    figures = Figures(cases, results)
    parts = ["# Compression between two processes", "", "; ".join(f"{name}: {value}" for name, value in facts.items()) + "."]
    parts += ["", f"One message of about {effort.tensor_bytes / MIB:.1f} MiB at a time, from the call of `send` until the answer of a"]
    parts += [f"receiver that has all of it; median of at least {effort.transfers} a round, then of the rounds.", ""]
    parts += [*choices(figures), "", *times(figures), *wires(figures), ""]
    found = list(checks(figures))
    parts += ["## Aims", "", *(f"- {check}" for check in found), *([] if found else ["None can be judged by what was measured."])]
    parts += missing(figures)
    return "\n".join(parts).rstrip() + "\n"


def choices(figures: Figures) -> Iterator[str]:
    """The one table that a user needs."""
    links = figures.links()
    yield "## What to choose"
    yield ""
    yield f"The cheapest of {', '.join(FIXED)} that is about as fast as the fastest, and how many times as fast as raw it is."
    yield ""
    yield f"| data | {' | '.join(LINKS[link] for link in links)} |"
    yield f"| --- |{' --- |' * len(links)}"
    for payload, case in figures.cases.items():
        cells = []
        for link in links:
            codec = figures.choice(payload, link)
            ratio = None if codec is None else figures.ratio(payload, link, codec)
            cells.append("-" if codec is None else codec if codec == "raw" or not ratio else f"{codec}, {number(1 / ratio)}")
        yield f"| {case.title} | {' | '.join(cells)} |"


def times(figures: Figures) -> Iterator[str]:
    """A table per link."""
    for link in figures.links():
        yield f"## {LINKS[link]}"
        yield ""
        yield "Milliseconds, and in brackets the share of raw's time, taken within each round. Bold: the fastest fixed choice."
        yield ""
        yield f"| data | {' | '.join(WAYS)} |"
        yield f"| --- |{' --- |' * len(WAYS)}"
        for payload, case in figures.cases.items():
            yield f"| {case.title} | {' | '.join(time_cell(figures, payload, link, codec) for codec in WAYS)} |"
        yield ""


def time_cell(figures: Figures, payload: str, link: str, codec: str) -> str:
    """One figure of a table of times."""
    time, ratio = figures.median(payload, link, codec), figures.ratio(payload, link, codec)
    if time is None:
        failed = (payload, link, codec) in figures.results.failed
        return "FAILED" if failed else "-"
    text = number(time) + ("" if ratio is None or codec == "raw" else f" ({number(ratio)})")
    return f"**{text}**" if figures.fastest(payload, link) == codec else text


def wires(figures: Figures) -> Iterator[str]:
    """How small everything gets: the same on each link, but for what could not be compressed in time."""
    link = next(iter(figures.links()), None)
    if link is None:
        return
    yield "## Bytes on the wire"
    yield ""
    yield f"Share of the tensors' bytes, with all headers, over {LINKS[link]}."
    yield ""
    yield f"| data | {' | '.join(WAYS)} |"
    yield f"| --- |{' --- |' * len(WAYS)}"
    for payload, case in figures.cases.items():
        shares = [figures.median(payload, link, codec, "wire") for codec in WAYS]
        yield f"| {case.title} | {' | '.join('-' if share is None else f'{share:.1%}' for share in shares)} |"


def missing(figures: Figures) -> list[str]:
    """What was not measured, and why."""
    results = figures.results
    parts = [f"- {LINKS[link]}: skipped, {reason}" for link, reason in results.skipped.items() if link in LINKS]
    parts += [f"- {LINKS[link]}: FAILED, {last_line(text)}" for link, text in results.broken.items() if link in LINKS]
    parts += [f"- {' '.join(part for part in key)}: FAILED, {last_line(text)}" for key, text in results.failed.items()]
    return ["", "## Not measured", "", *parts] if parts else []


def last_line(text: str) -> str:
    """What an error says in the end."""
    return text.strip().splitlines()[-1] if text.strip() else "without a word"
