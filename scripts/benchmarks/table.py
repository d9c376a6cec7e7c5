"""Markdown tables of the results. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from scripts.benchmarks.contender import Effort
from scripts.benchmarks.plan import MIB, Aim, Case, Row
from scripts.benchmarks.results import Results
from scripts.benchmarks.summary import Summary, number, summarise

__all__ = ["render"]


def render(cases: Sequence[Case], results: Results, facts: dict[str, str], effort: Effort) -> str:
    """All tables, with what they were measured on."""
    parts = ["# Two processes on one host", "", "; ".join(f"{name}: {value}" for name, value in facts.items()) + "."]
    parts += ["", "Median of the rounds (lowest-highest round). A ratio is taken within each round, then summarised the same way.", ""]
    for case in cases:
        parts += [f"## {case.name}", "", f"{case.title} ({amount(case, effort)}), {case.unit}, {case.better} is better.", ""]
        parts += ["| who | median (lowest-highest) | ratio | aim |", "| --- | --- | --- | --- |"]
        parts += [line(case, row, results) for row in case.rows]
        parts += ["", *(f"{note}\n" for note in case.notes)]
    return "\n".join(parts).rstrip() + "\n"


def amount(case: Case, effort: Effort) -> str:
    """How much one round of the case did."""
    effort = case.effort(effort)
    return {
        "small_dict_rtt": f"median of {effort.round_trips} round trips a round",
        "small_tensor_rtt": f"median of {effort.round_trips} round trips a round",
        "nested": f"{effort.tensor_bytes / MIB:g} MiB in all, median of {effort.transfers} a round",
        "given": f"median of {effort.given_transfers} of each size a round",
        "both_directions": f"{effort.both_ways_messages} messages of {effort.both_ways_bytes / MIB:g} MiB each way a round",
        "steady": f"{effort.steady_messages} messages of {effort.steady_bytes / MIB:g} MiB a round",
        "tensor": f"{effort.tensor_bytes / MIB:g} MiB, median of {effort.transfers} a round",
        "stream_256B": f"{effort.stream_messages:,} a round",
        "loop_delay": f"{effort.both_ways_messages} messages of {effort.both_ways_bytes / MIB:g} MiB each way a round",
        "channel_items": f"{effort.stream_messages:,} a round",
        "channel_large": f"{200 * effort.transfers} a round",
        "channel_balance": f"{max(64, effort.stream_messages // 10)} items a round",
        "in_flight": f"{effort.works_in_flight:,} works a side",
        "first_message": "one a round",
    }[case.measure]


def line(case: Case, row: Row, results: Results) -> str:
    """One row of the table: figures, or why there are none."""
    values = results.values(case, row)
    if not values:
        return f"| {row.label} | {results.why_not(case, row)} | - | - |"
    unit = f" {row.unit}" if row.unit else ""
    by_label = {other.label: other for other in case.rows}
    compared: dict[str, Summary] = {}
    for label in row.baselines:
        if found := results.ratios(case, row, by_label[label]):
            compared[label] = summarise(found)
    ratio_cell = "; ".join(f"{summary} of {plain(label)}" for label, summary in compared.items()) or "-"
    aim_cell = "; ".join(verdict(aim, compared, summarise(list(values.values()))) for aim in row.aims) or "-"
    return f"| {row.label} | {summarise(list(values.values()))}{unit} | {ratio_cell} | {aim_cell} |"


def verdict(aim: Aim, compared: dict[str, Summary], own: Summary) -> str:
    """The aim and whether the median reaches it."""
    what = f"{aim.sign} {number(aim.bound)}"
    if aim.against is None:
        reached = own
    elif aim.against in compared:
        reached = compared[aim.against]
        what += f" of {plain(aim.against)}"
    else:
        return f"{what} of {plain(aim.against)}: not measured"
    return f"{what}: {'met' if aim.met(reached.median) else 'MISSED'}"


def plain(label: str) -> str:
    """A label in running text."""
    return label.removeprefix("limit: ").replace("**", "")
