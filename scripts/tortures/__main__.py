"""``scripts/torture``: what is left after sudden death, and whether a steady stream stays steady."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from scripts.tortures.channel import Bounds, ExactlyOnce, Leases, render, run_bounds, run_exactly_once, run_leases
from scripts.tortures.exchanges import render_exchanges, run_exchanges
from scripts.tortures.report import render_rounds, render_steady, steady_complaints
from scripts.tortures.rounds import run_rounds
from scripts.tortures.stage import Failed
from scripts.tortures.steady import run_steady

__all__ = ["main"]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/torture", description=__doc__)
    tortures = parser.add_subparsers(dest="torture", required=True)
    shm = tortures.add_parser("shm", help="rounds in which one of two workers is killed in the middle of transfers in shared memory")
    shm.add_argument("--rounds", type=positive, default=500, metavar="N")
    shm.add_argument("--seed", type=int, default=1, metavar="N", help="of sizes, orders and moments; the machine's own mood stays")
    steady = tortures.add_parser("steady", help="a stream of large messages: resident memory and page faults of both sides")
    steady.add_argument("--messages", type=positive, default=1000, metavar="N")
    steady.add_argument("--settle", type=positive, default=50, metavar="N", help="messages before the first look")
    steady.add_argument("--mib", type=positive, default=16, metavar="N", help="size of a message")
    steady.add_argument("--keep", type=positive, default=8, metavar="N", help="messages that the receiver keeps")
    channel = tortures.add_parser("channel", help="a channel: cancelled calls, killed consumers, a slow consumer")
    channel.add_argument("--items", type=positive, default=5000, metavar="N", help="of each drill")
    channel.add_argument("--kills", type=positive, default=20, metavar="N", help="consumers with leases")
    channel.add_argument("--mib", type=positive, default=1024, metavar="N", help="to move through a bound of 64 MiB")
    channel.add_argument("--seed", type=int, default=1, metavar="N")
    exchanges = tortures.add_parser("all_to_all", help="ragged, nested objects among eight workers, against a model")
    exchanges.add_argument("--cases", type=positive, default=500, metavar="N")
    exchanges.add_argument("--seed", type=int, default=1, metavar="N", help="of the objects")
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print a table, and return 1 when something was wrong."""
    asked = parse(arguments)
    try:
        if asked.torture == "shm":
            outcome = run_rounds(asked.rounds, asked.seed, say=asked.rounds > 25)
            print(render_rounds(outcome, asked.seed), end="")
            return 1 if outcome.wrong else 0
        if asked.torture == "channel":
            parts: list[ExactlyOnce | Leases | Bounds] = [
                run_exactly_once(asked.items, batches=False, seed=asked.seed),
                run_exactly_once(asked.items, batches=True, seed=asked.seed),
                run_leases(asked.items, consumers=3, kills=asked.kills, seed=asked.seed),
                run_bounds(asked.mib << 20),
                run_bounds(asked.mib << 20, backend="stream"),
            ]
            print(render(parts, asked.seed), end="")
            return 1 if any(part.wrong() for part in parts) else 0
        if asked.torture == "all_to_all":
            found = run_exchanges(asked.cases, asked.seed)
            print(render_exchanges(found, asked.seed), end="")
            return 1 if found.wrong else 0
        size = asked.mib << 20
        sides = run_steady(asked.messages, size, asked.keep, asked.settle)
        print(render_steady(sides, asked.messages, size, asked.keep, asked.settle), end="")
        return 1 if steady_complaints(sides) else 0
    except Failed as failure:
        print(f"scripts/torture: {failure}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
