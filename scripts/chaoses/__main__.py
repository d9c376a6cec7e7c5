"""``scripts/chaos``: random faults for a job that is hard at work; is anything lost, doubled, late or left over?"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from scripts.chaoses.conductor import KINDS, Asked, Outcome, run_chaos

__all__ = ["main", "render"]

SHOWN = 40


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, metavar="N", help="how long (default: 1, or as long as --faults take)")
    parser.add_argument("--faults", type=int, metavar="N", help="end after so many")
    parser.add_argument("--workers", type=int, default=8, metavar="N", help="processes (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of what is done to whom and when; the machine's own mood stays")
    parser.add_argument("--rate", type=float, default=2.0, metavar="N", help="faults in a second, on average (default: %(default)s)")
    parser.add_argument("--heartbeat", type=float, default=4.0, metavar="S", help="silence that is death (default: %(default)s)")
    parser.add_argument("--pause", type=float, default=0.08, metavar="S", help="between what a worker does (default: %(default)s)")
    asked = parser.parse_args(arguments)
    if asked.workers < 5:
        parser.error("--workers: at least 5")
    for name in ("minutes", "faults", "rate", "heartbeat", "pause"):
        value = getattr(asked, name)
        if value is not None and value <= 0:
            parser.error(f"--{name}: above 0")
    if asked.minutes is None and asked.faults is None:
        asked.minutes = 1.0
    return asked


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print what happened, and return 1 when something was wrong."""
    asked = parse(arguments)
    outcome = run_chaos(
        Asked(
            workers=asked.workers,
            seconds=None if asked.minutes is None else 60 * asked.minutes,
            faults=asked.faults,
            seed=asked.seed,
            rate=asked.rate,
            heartbeat_s=asked.heartbeat,
            pause_s=asked.pause,
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
    )
    print(render(outcome, asked.seed), end="")
    return 1 if outcome.wrong else 0


def render(outcome: Outcome, seed: int) -> str:
    """A table, and what was wrong."""
    rows = [
        ("ran", f"{outcome.seconds:.0f} s (seed {seed}), {outcome.rests} times at rest"),
        ("faults", f"{outcome.faults.total():,}: " + ", ".join(f"{kind} {outcome.faults[kind]}" for kind in KINDS)),
        *((name, f"{count:,}") for name, count in sorted(outcome.counts.items())),
        ("errors that workers got", ", ".join(f"{name} {count:,}" for name, count in sorted(outcome.errors.items())) or "none"),
        ("longest, ms", ", ".join(f"{name} {value:,}" for name, value in sorted(outcome.slowest.items())) or "-"),
        ("wrong", str(len(outcome.wrong)) if outcome.wrong else "nothing"),
    ]
    lines = ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)]
    if outcome.wrong:
        lines += ["", *outcome.wrong[:SHOWN]]
        if len(outcome.wrong) > SHOWN:
            lines.append(f"... and {len(outcome.wrong) - SHOWN} more")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
