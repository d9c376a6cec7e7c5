"""``scripts/fuzz``: a million changed inputs; only this library's errors may come out, and memory must not grow."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import logging
import os
import random
import sys
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

from aiorlinf.errors import AiorlinfError
from scripts.fuzzing.links import frame_targets
from scripts.fuzzing.mutate import mutated
from scripts.fuzzing.targets import Target, all_targets

__all__ = ["Fault", "fuzz", "main"]

_LOOK_EVERY = 64
"""Allocations are counted for one input in so many: that is slow."""

_LOOK_SELDOM = 4096
"""One in so many once the process is warm: tracemalloc keeps up to 12 kB of its own each time, which would pass for what readers keep."""

_FREE_BYTES = 4 << 20
"""An input may make a reader allocate so much, and twice its own size: the limits that the targets were given."""

_WARM_INPUTS = 50_000
"""What is made once has been made by then."""

_GROWTH_BYTES = 32 << 20
"""By so much the process may have grown since it was warm, however many inputs came after that."""


class Fault(Exception):
    """An input that a reader cannot take, or the last one before memory had grown. Holds the target, the input, and what happened."""

    def __init__(self, target: Target, data: bytes, what: str) -> None:
        super().__init__(f"{target.name}: {what}")
        self.target = target
        self.data = data


def fuzz(targets: Sequence[Target], inputs: int, seed: int, *, say: bool = False) -> dict[str, tuple[int, int]]:
    """Feed `inputs` changed inputs, by the targets' shares; per target how many there were, and how many were refused.

    Raises:
        Fault: a reader raised what it must not, or allocated too much, or all of them together keep what they should let go.
    """
    source = random.Random(seed)
    names = [target.name for target in targets]
    shares = [target.share for target in targets]
    by_name = dict(zip(names, targets, strict=True))
    counts = dict.fromkeys(names, (0, 0))
    for target in targets:
        for data in target.corpus:
            _read(target, data)  # good input, and what is made once
    begin = time.monotonic()
    warm: int | None = None
    for number in range(inputs):
        target = by_name[source.choices(names, shares)[0]]
        data = mutated(source, target.corpus)
        looks = number % (_LOOK_EVERY if warm is None else _LOOK_SELDOM) == 0
        refused = _measured(target, data) if looks else _read(target, data)
        total, before = counts[target.name]
        counts[target.name] = total + 1, before + refused
        if number % _WARM_INPUTS == _WARM_INPUTS - 1:
            held = _resident()
            warm = held if warm is None else warm
            if say:
                print(f"{number + 1:>9} inputs, {time.monotonic() - begin:.0f} s, {held / 2**20:.0f} MiB", flush=True)
            if held - warm > _GROWTH_BYTES:
                raise Fault(target, data, f"the process has grown by {(held - warm) / 2**20:.0f} MiB since {_WARM_INPUTS} inputs")
    return counts


def _resident() -> int:
    """Bytes of this process in memory, without what can be let go; 0 where the system does not tell."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # of the GNU C library
        ctypes.CDLL(None).malloc_trim(0)
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _read(target: Target, data: bytes) -> bool:
    """Whether it was refused."""
    try:
        target.read(data)
    except AiorlinfError:
        return True
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise Fault(target, data, f"{type(error).__name__}: {error}") from error
    return False


def _measured(target: Target, data: bytes) -> bool:
    tracemalloc.start()
    try:
        refused = _read(target, data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    if peak > _FREE_BYTES + 2 * len(data):
        raise Fault(target, data, f"{peak} bytes were allocated for an input of {len(data)}")
    return refused


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print what was fed, and return 1 at the first fault, whose input is kept in a file."""
    with frame_targets() as frames:
        return _run([*all_targets(), *frames], arguments)


def _run(targets: Sequence[Target], arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000, metavar="N", help="how many in all (default: 1000000)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="the same seed gives the same inputs")
    parser.add_argument("--only", action="append", choices=[target.name for target in targets], metavar="TARGET", help="may be repeated")
    parser.add_argument("--replay", metavar="FILE", help="feed this file to the target named with --only, once")
    parser.add_argument("--out", default=".", metavar="DIR", help="where an input that fails is kept (default: here)")
    asked = parser.parse_args(arguments)
    logging.getLogger("aiorlinf").addHandler(logging.NullHandler())
    logging.getLogger("aiorlinf").propagate = False
    chosen = [target for target in targets if not asked.only or target.name in asked.only]
    if asked.replay is not None:
        print("refused" if _read(chosen[0], Path(asked.replay).read_bytes()) else "taken")
        return 0
    try:
        counts = fuzz(chosen, asked.inputs, asked.seed, say=True)
    except Fault as fault:
        file = Path(asked.out) / f"fuzz-{fault.target.name}.bin"
        file.write_bytes(fault.data)
        print(f"scripts/fuzz: {fault}\n  kept in {file}; again: scripts/fuzz --only {fault.target.name} --replay {file}", file=sys.stderr)
        return 1
    for name, (total, refused) in counts.items():
        print(f"{name:<18} {total:>9} inputs, {refused:>9} refused")
    return 0


if __name__ == "__main__":
    sys.exit(main())
