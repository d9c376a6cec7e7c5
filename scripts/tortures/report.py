"""Tables of what was found. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from scripts.tortures.rounds import Outcome
from scripts.tortures.steady import Side

__all__ = ["FAULTS_MAX", "SPREAD_MAX", "render_rounds", "render_steady", "steady_complaints"]

SPREAD_MAX = 8 << 20
"""Bytes that resident memory may vary by once the stream runs: half a message."""

FAULTS_MAX = 16.0
"""Page faults per message: of a message's 4,096 pages next to none."""


def render_rounds(outcome: Outcome, seed: int) -> str:
    """Of `scripts/torture shm`."""
    counts = outcome.counts
    rows = [
        ("rounds", f"{outcome.rounds} (seed {seed})"),
        ("killed", ", ".join(f"{address} {count} times" for address, count in sorted(outcome.killed.items()))),
        ("rounds that one survivor lived through", f"up to {outcome.longest_life}"),
        ("messages that survivors sent, received", f"{counts['sent']:,}, {counts['received']:,}"),
        ("sends that survivors lost with the peer", f"{counts['lost sends']:,}"),
        ("until the survivor had everything back", times(outcome.settle_s)),
        ("until the next life had exchanged messages", times(outcome.return_s)),
        ("growth of a survivor's own memory", f"at most {max(outcome.growth, default=0) / (1 << 20):.1f} MiB"),
        ("left over or wrong", str(len(outcome.wrong) or "nothing")),
    ]
    lines = ["# Sudden death in the middle of transfers", "", "| what | |", "| --- | --- |"]
    lines += [f"| {what} | {value} |" for what, value in rows]
    return "\n".join([*lines, *([""] if outcome.wrong else []), *outcome.wrong]) + "\n"


def times(seconds: Sequence[float]) -> str:
    """Median and worst."""
    if not seconds:
        return "-"
    return f"{statistics.median(seconds) * 1e3:,.0f} ms, at worst {max(seconds) * 1e3:,.0f} ms"


def render_steady(sides: Sequence[Side], messages: int, size: int, keep: int, settle: int) -> str:
    """Of `scripts/torture steady`."""
    mib = 1 << 20
    lines = [
        "# A steady stream",
        "",
        f"{messages:,} messages of {size / mib:g} MiB after {settle} others; the receiver keeps the last {keep}.",
        "",
        "| side | resident when settled | lowest to highest after that | page faults per message | more descriptors |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {side.name} | {side.settled / mib:.1f} MiB | {side.lowest / mib:.1f} to {side.highest / mib:.1f} MiB "
        f"| {side.faults:.2f} | {side.descriptors} |"
        for side in sides
    ]
    complaints = steady_complaints(sides)
    return "\n".join([*lines, "", *(complaints or ["Flat."])]) + "\n"


def steady_complaints(sides: Sequence[Side]) -> list[str]:
    """What is not as steady as it must be."""
    wrong = []
    for side in sides:
        if side.spread > SPREAD_MAX:
            wrong.append(f"the {side.name}'s memory varies by {side.spread / (1 << 20):.1f} MiB")
        if side.faults > FAULTS_MAX:
            wrong.append(f"the {side.name} has {side.faults:.1f} page faults per message")
        if side.descriptors > 0:
            wrong.append(f"the {side.name} has {side.descriptors} more descriptors")
    return wrong
