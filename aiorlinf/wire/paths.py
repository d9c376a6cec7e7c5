"""Where in an object the trouble sits, as text such as ``obj['a'][3].x``. Only used once something has failed."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["find", "narrow", "stays"]

_VISITS_MAX = 100_000
_TRIALS_MAX = 10_000
_DEPTH_MAX = 50
_SIMPLE = (str, bytes, bytearray, int, float, complex, type(None))
_INTERNAL = (sys.stdlib_module_names | {"aiorlinf", "uvloop"}) - {"argparse", "builtins", "collections", "functools", "types"}
"""Packages whose objects have insides that mean nothing to a user, without those that hold what users put into them."""


def stays(part: Any) -> bool:
    """Whether it is something that lives in its process: an event loop, a thread, a channel, and not what a user has put together."""
    return not isinstance(part, Mapping | list | tuple | deque | set | frozenset) and type(part).__module__.partition(".")[0] in _INTERNAL


def _children(obj: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a container or instance, each with what follows its owner's path."""
    if isinstance(obj, Mapping):
        for key in list(obj):
            yield f"[{key!r}]", obj[key]
    elif isinstance(obj, tuple) and hasattr(obj, "_fields"):
        yield from ((f".{name}", value) for name, value in zip(obj._fields, obj, strict=False))
    elif isinstance(obj, list | tuple | deque):
        yield from ((f"[{index}]", value) for index, value in enumerate(obj))
    elif isinstance(obj, set | frozenset):
        yield from (("{...}", value) for value in obj)
    if isinstance(obj, type):
        return
    state = getattr(obj, "__dict__", None)
    if isinstance(state, dict):
        yield from ((f".{name}", value) for name, value in list(state.items()))
    for cls in type(obj).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(obj, name):
                yield f".{name}", getattr(obj, name)


def _parts(obj: Any) -> list[tuple[str, Any]]:
    try:
        return list(_children(obj))
    except Exception:  # foreign mappings and attributes run foreign code; then the path ends at their owner
        return []


def find(root: Any, wanted: object) -> str | None:
    """The path of the very object `wanted`, the one nearest to the root; None if it is not found."""
    seen: set[int] = set()
    waiting: deque[tuple[str, Any]] = deque([("obj", root)])
    while waiting and len(seen) < _VISITS_MAX:
        path, part = waiting.popleft()
        if part is wanted:
            return path
        if id(part) in seen or isinstance(part, _SIMPLE):
            continue
        seen.add(id(part))
        waiting.extend((path + step, child) for step, child in _parts(part))
    return None


def narrow(root: Any, fails: Callable[[Any], bool]) -> tuple[str, Any]:
    """The deepest part that still fails by itself, and its path, following the first failing one from level to level. It does not go into
    what stays in its process: nobody knows its own program in there."""
    path, part = "obj", root
    seen: set[int] = {id(root)}
    trials = 0
    for _ in range(_DEPTH_MAX):
        for step, child in () if stays(part) else _parts(part):
            trials += 1
            if trials > _TRIALS_MAX:
                return path, part
            if id(child) not in seen and fails(child):
                path, part = path + step, child
                seen.add(id(child))
                break
        else:
            return path, part
    return path, part
