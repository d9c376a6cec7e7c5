"""``aiorlinf top``: what a running job is doing."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from typing import TYPE_CHECKING

from aiorlinf.errors import AiorlinfError, RendezvousError, UsageError
from aiorlinf.observe.manager import Access, connect, find_access, manager_options

if TYPE_CHECKING:
    from aiorlinf.observe.job import JobState
    from aiorlinf.observe.top.screen import Screen

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Show the workers of a running job and what each is doing. First of all what stands out, in words: who does not receive what is sent to
him, which port does not answer, which channel is uneven, full or empty. Then links with their way and throughput, channels with depth,
age, rates and how evenly their consumers are kept at work, pending operations, and who waits for whom; workers that wait for each other in
a circle are red.

Workers are asked through the manager. One whose event loop is blocked answers all the same, and says where it is; one that is frozen is
shown as not answering."""

_EPILOG = """\
On a terminal, and with rich (pip install 'aiorlinf[observe]'), it is a live view, until Ctrl-C. Otherwise it prints the tables one after
the other. --json prints an object per line.

examples:
  aiorlinf top                              the job that `aiorlinf run` runs on this machine
  aiorlinf top --manager 10.0.0.1:4711      any job; AIORLINF_TOKEN is its token
  aiorlinf top --once                       one look
  aiorlinf top --once --json | jq '.remarks, .circles'

exit codes: 0 all went well, or the job has ended meanwhile, 1 the manager was not reached, 2 wrong usage, 130 Ctrl-C."""

_AGAIN_S = 3.0
"""So long a manager that was lost may take to be back; after that, the job has ended."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the ``top`` command."""
    parser = subparsers.add_parser(
        "top",
        help="show what a running job is doing, and who waits for whom",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    manager_options(parser)
    parser.add_argument("--once", action="store_true", help="look once (twice, an interval apart, to have rates), print, and end")
    parser.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help="between looks (default: %(default)g)")
    parser.add_argument("--json", action="store_true", help="print JSON, one object for each look")
    parser.add_argument("--rows", type=int, default=40, metavar="N", help="at most so many rows of each table (default: %(default)d)")
    parser.add_argument("--plain", action="store_true", help="plain text, also on a terminal")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Look and show; the exit code. Errors are for the command line to show."""
    if not 0.05 <= args.interval <= 3600:
        raise UsageError(f"--interval is {args.interval:g}", hint="from 0.05 to 3600 seconds")
    if args.rows < 1:
        raise UsageError(f"--rows is {args.rows}", hint="at least 1")
    access = find_access(args.manager, args.pid)
    with contextlib.ExitStack() as stack:
        screen = None if args.json or args.plain or args.once else _screen(stack)
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            goes_on = runner.run(_watch(args, access, screen))
    if not goes_on:
        print("aiorlinf top: the job has ended", file=sys.stderr)
    return 0


def _screen(stack: contextlib.ExitStack) -> Screen | None:
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        return None
    try:
        from aiorlinf.observe.top.screen import open_screen
    except ImportError:
        print("aiorlinf top: plain text, for rich is not installed: pip install 'aiorlinf[observe]'", file=sys.stderr)
        return None
    return stack.enter_context(open_screen())


async def _watch(args: argparse.Namespace, access: Access, screen: Screen | None) -> bool:
    """Whether the job goes on."""
    from aiorlinf.observe.job import ask_job

    client = await connect(access)
    try:
        before = await ask_job(client)
        if not args.once:
            _show(args, screen, before, None)
        while True:
            await asyncio.sleep(args.interval)
            try:
                now = await ask_job(client)
            except AiorlinfError as error:
                _tell(screen, f"{error.message}; trying to reach it again")
                await client.close()
                try:
                    client = await connect(access, client.job, _AGAIN_S)
                except AiorlinfError as lost:
                    # Nobody listens there any more, or somebody else does. Otherwise the network may be at fault.
                    if isinstance(lost, RendezvousError) and "refused" not in lost.message:
                        raise
                    if args.once:
                        _show(args, screen, before, None)
                    return False
                continue
            _show(args, screen, now, before)
            if args.once:
                return True
            before = now
    finally:
        await client.close()


def _tell(screen: Screen | None, text: str) -> None:
    if screen is not None:
        screen.show(text, [], "")
    else:
        print(f"aiorlinf top: {text}", file=sys.stderr)


def _show(args: argparse.Namespace, screen: Screen | None, now: JobState, before: JobState | None) -> None:
    from aiorlinf.observe.top.plain import plain_lines
    from aiorlinf.observe.top.view import as_json, heading, sections

    if args.json:
        print(json.dumps(as_json(now, before)), flush=True)
    elif screen is not None:
        rows = min(args.rows, max(3, screen.rows // 4))
        screen.show(heading(now), sections(now, before, rows), f"{time.strftime('%H:%M:%S')}, every {args.interval:g} s; Ctrl-C ends")
    else:
        for line in plain_lines(heading(now), sections(now, before, args.rows)):
            print(line)
        print("" if args.once else "-" * 40, flush=True)
