"""Runs the rounds: every measurement once a round, in an order that shifts from round to round."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from scripts.benchmarks.contender import CONTENDERS, Effort
from scripts.benchmarks.pair import ContenderMissing, Pair, PairFailed
from scripts.benchmarks.plan import Case
from scripts.benchmarks.results import Results

__all__ = ["run_rounds"]

GIVE_UP_AFTER: Final = 2
"""Failures of one measurement after which it is not tried again."""


async def run_rounds(
    cases: Sequence[Case], contenders: Collection[str], effort: Effort, rounds: int, *, profiles: Path | None = None
) -> Results:
    """Measure all cases with the chosen contenders. Cancelling ends every process before it returns."""
    results = Results()
    for name in CONTENDERS.keys() - set(contenders):
        results.skipped[name] = "not chosen"
    failures: dict[tuple[str, str, str], int] = {}
    wanted = {row.contender for case in cases for row in case.rows}
    pairs = {name: Pair(name, profiles) for name in contenders if name in wanted}
    try:
        for name, pair in pairs.items():
            say(f"starting {name}")
            try:
                await pair.start()
            except ContenderMissing as error:
                results.skipped[name] = str(error)
            except PairFailed as error:
                results.broken[name] = str(error)
                complain(f"starting {name}", error)
        for index in range(rounds):
            for case in cases:
                measurements = list(dict.fromkeys(row.measurement for row in case.rows))
                shift = index % len(measurements)
                for contender, variant in measurements[shift:] + measurements[:shift]:
                    key = (case.name, contender, variant)
                    if contender in results.skipped or contender in results.broken or failures.get(key, 0) >= GIVE_UP_AFTER:
                        continue
                    say(f"round {index + 1} of {rounds}: {case.name} {contender} {variant}")
                    pair = pairs[contender]
                    try:
                        if case.fresh or not pair.opened:
                            await pair.reopen()
                    except PairFailed as error:
                        results.broken[contender] = str(error)
                        complain(f"opening {contender}", error)
                        continue
                    try:
                        results.add(case, contender, variant, index, await pair.measure(case.measure, variant, case.effort(effort)))
                    except PairFailed as error:
                        failures[key] = failures.get(key, 0) + 1
                        results.failed[key] = str(error)
                        complain(" ".join(key), error)
        for name, pair in pairs.items():
            try:
                await pair.close()
            except PairFailed as error:
                results.failed["close", name, ""] = str(error)
                complain(f"closing {name}", error)
    finally:
        for pair in pairs.values():
            await pair.end()
        say("")
    return results


def say(what: str) -> None:
    """Progress on one line of the terminal; nothing when nobody watches."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{what}", end="", file=sys.stderr, flush=True)


def complain(what: str, error: Exception) -> None:
    say("")
    print(f"{what} failed:\n{error}", file=sys.stderr, flush=True)
