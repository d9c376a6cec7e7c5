"""``scripts/bench ray``: between two Ray actors, aiorlinf against Ray's own calls and object store, in the same run.

The object has ten tensors of different sizes. Through Ray it is the argument of an actor's call, which puts it in the store; the answer
says what came. Through aiorlinf it is sent, received, and answered. Ray shows NumPy arrays, but not tensors, in the store's own memory
without a copy, read-only; so there is a line for the same bytes as arrays. Small: a dict to and fro. All take turns; medians are printed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any, Final

from scripts.benchmarks.ray_cluster import connected

__all__ = ["SUMMARY", "main"]

SUMMARY = "objects and small messages between two Ray actors"

AIM: Final = 5.0
MIB: Final = 1 << 20
WARM_UP: Final = 3
SMALL: Final = {"step": 1, "reward": 0.5, "name": "x", "ids": [1, 2, 3]}
SHARES: Final = (30, 20, 15, 10, 8, 6, 5, 3, 2, 1)
"""Of the ten tensors, in percent."""


def main(arguments: Sequence[str]) -> int:
    """Run and print; 0 also where Ray is not installed, which is said."""
    parser = argparse.ArgumentParser(prog="scripts/bench ray", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small amounts: shows that all of it works, not how fast it is")
    parser.add_argument("--mib", type=int, default=64, help="size of the object (default 64)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each measurement (default 5)")
    asked = parser.parse_args(arguments)
    try:
        importlib.import_module("ray")
    except ImportError as error:
        print(f"skipped: Ray is not installed: {error}")
        return 0
    size, rounds, transfers, trips = (1, 1, 3, 20) if asked.quick else (asked.mib, asked.rounds, 5, 300)
    took = _measure(size * MIB, rounds, transfers, trips)
    print(_table(took, size))
    return 0


def _measure(nbytes: int, rounds: int, transfers: int, trips: int) -> dict[str, list[float]]:
    """Seconds by name of measurement, one per round."""
    # The actors find this module.
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    import aiorlinf.ray

    found: dict[str, list[float]] = {}
    with connected() as ray, aiorlinf.ray.start() as job:
        taker = ray.remote(num_cpus=0)(_Taker).remote()
        answering = job.worker(_Answerer, "b:0", num_cpus=0).remote()
        leading = job.worker(_Leader, "a:0", num_cpus=0).remote(nbytes)
        for _ in range(rounds):
            answers = answering.answer.remote(trips + WARM_UP, transfers + WARM_UP)
            for name, seconds in ray.get(leading.ours.remote(trips, transfers)).items():
                found.setdefault(name, []).append(seconds)
            ray.get(answers)
            for name, seconds in ray.get(leading.rays.remote(taker, trips, transfers)).items():
                found.setdefault(name, []).append(seconds)
        del answering, leading, taker
    return found


class _Taker:
    """A plain actor, which answers sooner than an async one."""

    def echo(self, obj: Any) -> Any:
        return obj

    def take(self, obj: Any) -> int:
        return _look(obj)


class _Answerer:
    """The other end of aiorlinf's."""

    comm: Any

    async def answer(self, trips: int, transfers: int) -> None:
        for _ in range(trips):
            await self.comm.send(await self.comm.recv("a:0"), "a:0")
        for _ in range(transfers):
            got = await self.comm.recv("a:0")
            await self.comm.send(_look(got), "a:0")
            del got


class _Leader:
    """Takes the time."""

    comm: Any

    def __init__(self, nbytes: int) -> None:
        self._object = _ten_tensors(nbytes)
        self._nbytes = sum(tensor.nbytes for tensor in self._object.values())

    async def ours(self, trips: int, transfers: int) -> dict[str, float]:
        small, large = [], []
        back = None
        for _ in range(trips + WARM_UP):
            begin = time.perf_counter()
            self.comm.send(SMALL, "b:0")
            back = await self.comm.recv("b:0")
            small.append(time.perf_counter() - begin)
        assert back == SMALL
        for _ in range(transfers + WARM_UP):
            begin = time.perf_counter()
            self.comm.send(self._object, "b:0")
            seen = await self.comm.recv("b:0")
            large.append(time.perf_counter() - begin)
            assert seen == self._nbytes
        return {"ours small": median(small[WARM_UP:]), "ours tensors": median(large[WARM_UP:])}

    async def rays(self, taker: Any, trips: int, transfers: int) -> dict[str, float]:
        small = []
        back = None
        for _ in range(trips + WARM_UP):
            begin = time.perf_counter()
            back = await taker.echo.remote(SMALL)
            small.append(time.perf_counter() - begin)
        assert back == SMALL
        arrays = {name: tensor.numpy() for name, tensor in self._object.items()}
        took = {"ray small": median(small[WARM_UP:])}
        for name, obj in (("ray tensors", self._object), ("ray arrays", arrays)):
            large = []
            for _ in range(transfers + WARM_UP):
                begin = time.perf_counter()
                seen = await taker.take.remote(obj)
                large.append(time.perf_counter() - begin)
                assert seen == self._nbytes
            took[name] = median(large[WARM_UP:])
        return took


def _ten_tensors(nbytes: int) -> dict[str, Any]:
    import torch

    return {f"tensor {place}": torch.arange(nbytes * share // 400, dtype=torch.float32) for place, share in enumerate(SHARES)}


def _look(obj: Any) -> int:
    """Bytes that came; each tensor or array is looked at by its ends."""
    for value in obj.values():
        assert (float(value[0]), float(value[-1])) == (0, len(value) - 1)
    return sum(int(value.nbytes) for value in obj.values())


def _table(took: dict[str, list[float]], mib: int) -> str:
    lines = []
    for title, ours, theirs in (
        (f"ten tensors, {mib} MiB", "ours tensors", {"Ray, tensors": "ray tensors", "Ray, as NumPy arrays": "ray arrays"}),
        ("small dict, there and back", "ours small", {"Ray, an actor's call": "ray small"}),
    ):
        mine = median(took[ours])
        lines += [title, f"  {'aiorlinf':24} {_time(mine):>12}"]
        for name, key in theirs.items():
            other = median(took[key])
            aim = "" if key == "ray arrays" else f", aim ≥ {AIM:g}: {'met' if other / mine >= AIM else 'missed'}"
            lines.append(f"  {name:24} {_time(other):>12}   aiorlinf is {other / mine:.1f} times as fast{aim}")
    return "\n".join(lines)


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms" if seconds > 1e-3 else f"{1e6 * seconds:.0f} us"
