"""``scripts/torture all_to_all``: ragged, nested objects among eight workers, in random cases, against a model.

The model is that what member `i` gives for member `j` is what `j` gets from `i`. Every object comes from a random generator that is seeded
with the case and with who gives it to whom, so each worker knows by itself what it must get. The workers are processes of their own, half
of them on another host, as far as they know: both shared memory and the network are used. Up to three cases are under way at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
import uvloop

from aiorlinf import Worker
from aiorlinf.testing.spawned import spawned_cluster

__all__ = ["Exchanges", "differs", "random_object", "render_exchanges", "run_exchanges"]

_WORKERS: Final = 8
_MEMBERS: Final = [f"w:{rank}" for rank in range(_WORKERS)]
_AT_ONCE: Final = 3
_LIMIT_S: Final = 60.0
_DEPTH: Final = 3
_DTYPES: Final = (torch.uint8, torch.int64, torch.float32, torch.bfloat16, torch.bool)
_SIZES: Final = (0, 1, 7, 300, 5_000, 70_000, 600_000)
_WEIGHTS: Final = (4, 8, 8, 8, 6, 3, 1)


@dataclass
class Row:
    """One of a user's own classes."""

    name: str
    data: Any


@dataclass(slots=True)
class Exchanges:
    """What was found.

    Attributes:
        cases: that every worker has taken part in.
        kinds: how many objects of each type were compared, at the top.
        tensor_bytes: in the tensors and arrays that were compared.
        wrong: which object of which case was not what it should have been, and where.
    """

    cases: int
    kinds: Counter[str] = field(default_factory=Counter)
    tensor_bytes: int = 0
    wrong: list[str] = field(default_factory=list)


def run_exchanges(cases: int, seed: int) -> Exchanges:
    """Do them, and add up what the workers have found."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(cases, seed))


def render_exchanges(found: Exchanges, seed: int) -> str:
    """A table, and what was wrong."""
    rows = [
        ("cases", f"{found.cases} (seed {seed})"),
        ("objects compared", ", ".join(f"{kind} {count:,}" for kind, count in sorted(found.kinds.items()))),
        ("in their tensors and arrays", f"{found.tensor_bytes / (1 << 20):,.0f} MiB"),
        ("wrong", str(len(found.wrong) or "nothing")),
    ]
    lines = [
        f"# All to all among {_WORKERS} workers",
        "",
        "| what | |",
        "| --- | --- |",
        *(f"| {what} | {value} |" for what, value in rows),
    ]
    return "\n".join([*lines, *([""] if found.wrong else []), *found.wrong]) + "\n"


async def _run(cases: int, seed: int) -> Exchanges:
    async with spawned_cluster(loop="uvloop") as cluster:
        workers = [
            await cluster.start(member, _take_part, rank, cases, seed, host="left" if 2 * rank < _WORKERS else "right")
            for rank, member in enumerate(_MEMBERS)
        ]
        total = Exchanges(cases)
        for worker in workers:
            part: Exchanges = await worker.result(_LIMIT_S + cases)
            assert part.cases == cases
            total.kinds += part.kinds
            total.tensor_bytes += part.tensor_bytes
            total.wrong += part.wrong
        return total


async def _take_part(comm: Worker, rank: int, cases: int, seed: int) -> Exchanges:
    found = Exchanges(0)
    chance = random.Random(f"{seed} {rank}")  # of what nobody else has to know
    for first in range(0, cases, _AT_ONCE):
        works = []
        for case in range(first, min(first + _AT_ONCE, cases)):
            given = [_object(seed, case, rank, other) for other in range(_WORKERS)]
            works.append((case, comm.all_to_all(given, members=_MEMBERS)))
            if chance.random() < 0.3:
                await asyncio.sleep(chance.random() * 0.003)
        for case, work in works:
            for other, got in enumerate(await work):
                wanted = _object(seed, case, other, rank)
                found.kinds[type(wanted).__name__] += 1
                found.tensor_bytes += _bytes_in(wanted)
                where = differs(got, wanted)
                if where is not None:
                    found.wrong.append(f"case {case}: what w:{other} gave for w:{rank} differs at {where}")
            found.cases += 1
    await comm.gather(None, members=_MEMBERS)  # all have heard of everything
    return found


# ---- the objects


def _object(seed: int, case: int, source: int, target: int) -> Any:
    return random_object(random.Random(f"{seed} {case} {source} {target}"))


def random_object(chance: random.Random, depth: int = 0) -> Any:
    """Plain values, text, bytes, tensors and arrays of any shape, and whatever holds such."""
    kind = chance.randrange(6 if depth >= _DEPTH else 11)
    if kind == 0:
        return chance.choice([None, True, chance.randrange(-(10**12), 10**12), chance.random(), 2**70])
    if kind == 1:
        return "ä" * chance.choice(_SIZES[:4])
    if kind == 2:
        return chance.randbytes(chance.choice(_SIZES[:6]))
    if kind == 3:
        return torch.full([chance.randrange(4) for _ in range(chance.randrange(4))], chance.randrange(9), dtype=chance.choice(_DTYPES))
    if kind in (4, 5):
        (size,) = chance.choices(_SIZES, _WEIGHTS)
        first = chance.randrange(200)
        made = torch.arange(first, first + size)
        return made.to(chance.choice(_DTYPES)) if kind == 4 else made.numpy().astype(chance.choice(["u1", "i4", "f8"]))
    inside = [random_object(chance, depth + 1) for _ in range(chance.randrange(5))]
    if kind == 6:
        return tuple(inside)
    if kind == 7:
        return Row("x" * chance.randrange(9), inside)
    if kind == 8:
        return {chance.choice(["k", "name", 7]): inside, "n": len(inside)}
    if kind == 9:
        return {f"k{number}": each for number, each in enumerate(inside)}
    return inside


def differs(got: Any, wanted: Any, where: str = "it") -> str | None:
    """Where the first difference is, None if there is none: types, values, shapes, dtypes, to any depth."""
    if type(got) is not type(wanted):
        return f"{where}: {type(got).__name__} instead of {type(wanted).__name__}"
    if isinstance(wanted, torch.Tensor):
        return None if got.dtype is wanted.dtype and torch.equal(got, wanted) else where
    if isinstance(wanted, np.ndarray):
        return None if got.dtype == wanted.dtype and np.array_equal(got, wanted) else where
    if dataclasses.is_dataclass(wanted):
        return differs(vars(got), vars(wanted), where)
    if isinstance(wanted, dict):
        if list(got) != list(wanted):
            return f"the keys of {where}"
        return next(filter(None, (differs(got[key], each, f"{where}[{key!r}]") for key, each in wanted.items())), None)
    if isinstance(wanted, (list, tuple)):
        if len(got) != len(wanted):
            return f"the length of {where}"
        return next(filter(None, (differs(got[index], each, f"{where}[{index}]") for index, each in enumerate(wanted))), None)
    return None if got == wanted else where


def _bytes_in(obj: Any) -> int:
    if isinstance(obj, (torch.Tensor, np.ndarray)):
        return int(obj.nbytes)
    if dataclasses.is_dataclass(obj):
        return _bytes_in(vars(obj))
    if isinstance(obj, dict):
        return sum(map(_bytes_in, obj.values()))
    return sum(map(_bytes_in, obj)) if isinstance(obj, (list, tuple)) else 0
