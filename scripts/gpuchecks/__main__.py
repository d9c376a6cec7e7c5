"""See the package."""

from __future__ import annotations

import argparse
import sys

from aiorlinf.device.registry import usable_runtime
from scripts.gpuchecks.checks import CHECKS
from scripts.gpuchecks.place import KINDS, place
from scripts.gpuchecks.running import run_check
from scripts.gpuchecks.speed import SPEEDS

__all__ = ["main"]


def main() -> int:
    """Returns the exit status: 1 if a check failed, 2 if there is nothing to check."""
    parser = argparse.ArgumentParser(prog="scripts/gpu-check", description="Check aiorlinf on this machine's accelerators, and measure.")
    parser.add_argument("--kind", choices=KINDS, default="cuda", help="cuda stands for ROCm, too; fake shows that the checks work")
    parser.add_argument("--only", metavar="TEXT", default="", help="the checks with this in their names")
    parser.add_argument("--no-speed", action="store_true", help="measure nothing")
    arguments = parser.parse_args()
    if arguments.kind == "cuda" and usable_runtime("cuda") is None:
        print("no CUDA or ROCm device here; nothing was checked", file=sys.stderr)
        return 2
    failed = 0
    with place(arguments.kind) as where:
        print(f"{where.describe()}\n\n| | | |\n| --- | --- | --- |", flush=True)
        for check in CHECKS if arguments.no_speed else CHECKS + SPEEDS:
            if arguments.only in check.name:
                word, text = run_check(check, arguments.kind, where)
                failed += word == "FAILED"
                print(f"| {check.name} | {word} | {text} |", flush=True)
    print(f"\n{failed} failed" if failed else "\nall passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
