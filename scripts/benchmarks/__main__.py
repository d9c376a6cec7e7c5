"""``scripts/bench``: compare aiorlinf with what the machine can do and with what else there is."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import platform
import signal
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from scripts.benchmarks import choice, choice_plot, plot, table
from scripts.benchmarks.channel import CHANNEL
from scripts.benchmarks.compression import COMPRESSION
from scripts.benchmarks.driver import run_rounds
from scripts.benchmarks.host import HOST
from scripts.benchmarks.p2p import P2P
from scripts.benchmarks.plan import Suite
from scripts.benchmarks.results import Results

__all__ = ["main"]

SUITES: Final = {suite.name: suite for suite in (P2P, HOST, COMPRESSION, CHANNEL)}
OTHERS: Final = {
    "membership": "membership",
    "collectives": "collectives",
    "ray": "ray_actors",
    "rollout": "rollout",
    "trace": "tracing",
    "deaths": "deaths",
    "events": "events",
}
"""Those with options of their own, and the modules with a SUMMARY and a `main`. Imported when they are used: some are heavy."""


def other(name: str) -> Any:
    """The module."""
    return importlib.import_module(f"scripts.benchmarks.{OTHERS[name]}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench", description="Compare aiorlinf with what the machine can do and with what else there is."
    )
    suites = parser.add_subparsers(dest="suite", title="suites", metavar="SUITE")
    for suite in SUITES.values():
        add_suite(suites.add_parser(suite.name, help=suite.summary, description=suite.summary), suite)
    given = sys.argv[1:] if arguments is None else arguments
    for name in OTHERS:
        suites.add_parser(name, help=None if given and not {"-h", "--help"} & set(given) else other(name).SUMMARY)
    asked = parser.parse_args(arguments)
    if asked.suite is None:
        parser.print_help()
        parser.exit(2)
    if asked.plot is not None and (missing := plot.missing()) is not None:
        parser.error(f"--plot needs matplotlib: {missing}")
    return asked


def add_suite(parser: argparse.ArgumentParser, suite: Suite) -> None:
    """The options, which are the same for all suites but for the names."""
    parser.add_argument("--quick", action="store_true", help="small amounts and one round: shows that all of it works, not how fast it is")
    parser.add_argument("--rounds", type=positive, metavar="N", help=f"rounds of each measurement (default {suite.rounds}, with --quick 1)")
    parser.add_argument(
        "--only", action="append", choices=[case.name for case in suite.cases], metavar="CASE",
        help=f"this case; may be repeated: {', '.join(case.name for case in suite.cases)}",
    )  # fmt: skip
    parser.add_argument(
        "--peers", nargs="+", choices=suite.contenders, metavar="NAME", help=f"run only these of: {', '.join(suite.contenders)}"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every round's figures here")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="also draw the figures (needs matplotlib)")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="write a cProfile file per process and measurement here (slow)")


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return value


def machine_facts() -> dict[str, str]:
    """What a reader has to know to place the figures."""
    versions = []
    for package in ("torch", "uvloop", "pyzmq", "ray"):
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            versions.append(f"no {package}")
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": ", ".join(versions),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print the tables, and return 1 when a measurement failed (a missed aim is printed, not a failure)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in OTHERS:
        status: int = other(given[0]).main(given[1:])
        return status
    asked = parse(given)
    suite = SUITES[asked.suite]
    effort = suite.quick if asked.quick else suite.full
    rounds = asked.rounds or (1 if asked.quick else suite.rounds)
    cases = [case for case in suite.cases if asked.only is None or case.name in asked.only]
    contenders = [name for name in suite.contenders if asked.peers is None or name in asked.peers]
    facts = {**machine_facts(), "rounds": f"{rounds}{' (quick: figures mean little)' if asked.quick else ''}"}
    profiles = None
    if asked.profile is not None:
        profiles = asked.profile.resolve()
        profiles.mkdir(parents=True, exist_ok=True)

    async def run() -> Results:
        task = asyncio.ensure_future(run_rounds(cases, contenders, effort, rounds, profiles=profiles))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await task

    try:
        results = asyncio.run(run())
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("scripts/bench: stopped", file=sys.stderr)
        return 130
    render, draw = (choice.render, choice_plot.draw) if suite is COMPRESSION else (table.render, plot.draw)
    print(render(cases, results, facts, effort), end="")
    if asked.json is not None:
        asked.json.write_text(json.dumps({"facts": facts, "effort": effort.to_json(), **results.to_json()}, indent=1) + "\n")
    if asked.plot is not None:
        draw(cases, results, facts, asked.plot)
    return 0 if results.complete else 1


if __name__ == "__main__":
    sys.exit(main())
