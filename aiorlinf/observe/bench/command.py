"""``aiorlinf bench``: two workers measure what is between them."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from aiorlinf.config import load_config
from aiorlinf.errors import UsageError
from aiorlinf.launch import launch

if TYPE_CHECKING:
    from aiorlinf.observe.bench.measuring import Wishes

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Measure how fast two workers exchange messages: the round trip of a small dict, how many of them go one way in a second, and tensors of
several sizes. The two are started on this machine, with the configuration that is given, so it also shows what a setting is worth."""

_EPILOG = """\
Between two machines, start `aiorlinf manager --host 0.0.0.0` on one of them, and this command on both, as two workers of that job: with
AIORLINF_ADDRESS=bench:0 and bench:1, AIORLINF_MANAGER and AIORLINF_TOKEN in the environment. The first one prints.

examples:
  aiorlinf bench
  aiorlinf bench --backend gloo --sizes 1MiB,256MiB
  aiorlinf bench --config job.yaml --json | jq .round_trip_us_median

exit codes: 0 all went well, 1 an error, 2 wrong usage or configuration, 130 Ctrl-C."""

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the ``bench`` command."""
    parser = subparsers.add_parser(
        "bench",
        help="measure how fast two workers exchange messages",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="YAML", help="the job's configuration (default: the defaults)")
    parser.add_argument("--backend", choices=("auto", "stream", "shm", "gloo"), help="of large payloads (default: the configuration's)")
    parser.add_argument("--sizes", default="64KiB,1MiB,64MiB", metavar="SIZE,...", help="of the tensors (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure, about (default: %(default)g)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure and print; the exit code. Errors are for the command line to show."""
    if not 0.01 <= args.seconds <= 600:
        raise UsageError(f"--seconds is {args.seconds:g}", hint="from 0.01 to 600")
    sizes = [_size(each) for each in args.sizes.split(",")]
    from aiorlinf.observe.bench.measuring import Wishes, measure

    wishes = Wishes(args.backend, tuple(sizes), args.seconds, args.json)
    if os.environ.get("AIORLINF_MANAGER") and os.environ.get("AIORLINF_ADDRESS"):
        asyncio.run(_join(wishes))
        return 0
    config = load_config(args.config)
    if args.backend is not None:
        collective = replace(config.cluster.collective, backend=args.backend)
        config = replace(config, cluster=replace(config.cluster, collective=collective))
    result = launch(measure, "bench=2", args=(wishes,), config=config, prefix=False)
    return 0 if result.failed is None else 1


async def _join(wishes: Wishes) -> None:
    """As one of two workers that somebody else has brought together."""
    from aiorlinf.observe.bench.measuring import measure
    from aiorlinf.worker import init

    async with init(backend=wishes.backend) as comm:
        await measure(comm, wishes)


def _size(text: str) -> int:
    """Bytes of ``64KiB`` and the like."""
    found = re.fullmatch(r"(\d+) ?([kmg]i)?b?", text.strip(), re.IGNORECASE)
    if found is None or int(found[1]) < 1:
        raise UsageError(f"--sizes: {text!r}", hint="numbers of bytes, such as 4096, 64KiB, 1MiB or 1GiB, separated by commas")
    return int(found[1]) * _UNITS[f"{found[2] or ''}B".upper()]
