"""See the package."""

from __future__ import annotations

import argparse
import sys
import time

from aiorlinf.device.registry import usable_runtime
from scripts.gpuchecks.checks import CHECKS
from scripts.gpuchecks.place import KINDS
from scripts.gpuchecks.running import LIMIT_S, Outcome
from scripts.gpuchecks.speed import SPEEDS
from scripts.gpuchecks.watched import GRACE_S, Watched

__all__ = ["main"]


def main() -> int:
    """Returns the exit status: 1 if a check failed or there was no time for it, 2 if there is nothing to check.

    Takes no longer than its limit and what a process needs to end, whatever the devices do.
    """
    begin = time.perf_counter()
    parser = argparse.ArgumentParser(prog="scripts/gpu-check", description="Check aiorlinf on this machine's accelerators, and measure.")
    parser.add_argument("--kind", choices=KINDS, default="cuda", help="cuda stands for ROCm, too; fake shows that the checks work")
    parser.add_argument("--only", metavar="TEXT", action="append", help="the checks with this in their names; may be given more than once")
    parser.add_argument("--no-speed", action="store_true", help="measure nothing")
    parser.add_argument("--limit", metavar="SECONDS", type=float, default=450.0, help="begin nothing later than this (default %(default)g)")
    arguments = parser.parse_args()
    if arguments.kind == "cuda" and usable_runtime("cuda") is None:
        print("no CUDA or ROCm device here; nothing was checked", file=sys.stderr)
        return 2
    all_of_them = CHECKS if arguments.no_speed else CHECKS + SPEEDS
    checks = [check for check in all_of_them if any(text in check.name for text in arguments.only or [""])]
    failed = missed = 0
    with Watched(arguments.kind) as watched:
        print(f"{watched.describe(LIMIT_S)}\n\n| | | |\n| --- | --- | --- |", flush=True)
        for number, check in enumerate(checks, 1):
            print(f"{number} of {len(checks)}: {check.name} ...", file=sys.stderr, flush=True)
            left = arguments.limit - (time.perf_counter() - begin)
            if left <= 0:
                outcome = Outcome("skipped", f"the {arguments.limit:.0f} s are over")
                missed += 1
            else:
                outcome = watched.run(check, min(LIMIT_S, left), left + GRACE_S)
            failed += outcome.word == "FAILED"
            print(f"{number} of {len(checks)}: {outcome.word} after {outcome.seconds:.1f} s", file=sys.stderr, flush=True)
            print(f"| {check.name} | {outcome.word} | {outcome.text} |", flush=True)
        trouble = watched.end()
    if trouble is not None:
        failed += 1
        print(f"\n{trouble}")
    took = f"in {time.perf_counter() - begin:.0f} s"
    if missed:
        print(f"\nthere was no time for {missed}; run them with --only, or give more with --limit")
    print(f"\n{failed} failed {took}" if failed else f"\nall {'that ran ' if missed else ''}passed {took}")
    return 1 if failed or missed else 0


if __name__ == "__main__":
    sys.exit(main())
