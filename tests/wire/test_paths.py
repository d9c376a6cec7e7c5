"""Finding the part of an object that causes trouble."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import threading
import types
from collections import OrderedDict, deque, namedtuple
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import uvloop

from aiorlinf.wire import paths
from aiorlinf.wire.paths import find, narrow, stays

__all__: list[str] = []

Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Any


class Free:
    def __init__(self, x: Any) -> None:
        self.x = x


class Hostile(Mapping[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise RuntimeError("no")

    def __iter__(self) -> Iterator[str]:
        yield "a"

    def __len__(self) -> int:
        return 1


WANTED = object()


@pytest.mark.parametrize(
    ("obj", "path"),
    [
        (WANTED, "obj"),
        ({"a": [0, 1, {"b": WANTED}]}, "obj['a'][2]['b']"),
        (OrderedDict({(1, 2): WANTED}), "obj[(1, 2)]"),
        (Pair(1, [WANTED]), "obj.right[0]"),
        (Slotted(Free((WANTED,))), "obj.x.x[0]"),
        (deque([0, WANTED]), "obj[1]"),
        ({"a": {WANTED}}, "obj['a']{...}"),
        ([[[[WANTED]]], WANTED], "obj[1]"),
        ([Hostile(), WANTED], "obj[1]"),
    ],
)
def test_find(obj: Any, path: str) -> None:
    assert find(obj, WANTED) == path


def test_find_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "_VISITS_MAX", 1000)
    loop: list[Any] = []
    loop.append(loop)
    assert find(loop, WANTED) is None
    assert find([[index] for index in range(2000)] + [WANTED], WANTED) is None
    assert find([[index] for index in range(500)] + [WANTED], WANTED) == "obj[500]"


def contains(part: Any) -> bool:
    return part is WANTED or (isinstance(part, list | tuple) and any(map(contains, part)))


def test_narrow_follows_the_failing_part() -> None:
    assert narrow([1, (2, [WANTED])], contains) == ("obj[1][1][0]", WANTED)
    assert narrow(WANTED, contains) == ("obj", WANTED)


def test_narrow_ends() -> None:
    deep: Any = WANTED
    for _ in range(200):
        deep = [deep]
    assert narrow(deep, contains)[0] == "obj" + "[0]" * 50
    assert narrow([*range(20_000), WANTED], contains)[0] == "obj"
    loop: list[Any] = []
    loop.append(loop)
    assert narrow(loop, lambda part: True)[0] == "obj"


def test_narrow_does_not_go_into_what_lives_in_its_process() -> None:
    """An event loop has handles of the program's own callbacks in it, a thread has locks."""
    for alive in (asyncio.new_event_loop(), uvloop.new_event_loop(), threading.Thread()):
        assert narrow({"a": Free([1, alive])}, lambda part: part != 1) == ("obj['a'].x[1]", alive)
        assert stays(alive)
        if isinstance(alive, asyncio.AbstractEventLoop):
            alive.close()
    for holds in (types.SimpleNamespace(x=WANTED), argparse.Namespace(x=WANTED), Free(WANTED), Slotted(WANTED)):
        assert narrow([holds], lambda part: part is not None) == ("obj[0].x", WANTED)
