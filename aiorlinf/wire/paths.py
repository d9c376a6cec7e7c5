"""Where in an object the trouble sits, as text such as ``obj['a'][3].x``. Only used once something has failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["find", "narrow"]

_VISIT_MAX = 100_000


def children(obj: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a container or instance, each with what follows its owner's path."""
    if isinstance(obj, str | bytes | bytearray | int | float | complex | None):
        return
    if isinstance(obj, Mapping):
        for key in list(obj):
            yield f"[{key!r}]", obj[key]
    elif isinstance(obj, tuple) and hasattr(obj, "_fields"):
        yield from ((f".{name}", value) for name, value in zip(obj._fields, obj, strict=False))
    elif isinstance(obj, list | tuple):
        yield from ((f"[{index}]", value) for index, value in enumerate(obj))
    elif isinstance(obj, set | frozenset):
        yield from (("{...}", value) for value in obj)
    state = getattr(obj, "__dict__", None)
    if isinstance(state, dict) and not isinstance(obj, type):
        yield from ((f".{name}", value) for name, value in list(state.items()))
    for cls in type(obj).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(obj, name):
                yield f".{name}", getattr(obj, name)


def find(root: Any, wanted: Callable[[Any], bool]) -> str | None:
    """The path of the first part (the nearest to the root) for which `wanted` holds; None if there is none."""
    seen: set[int] = set()
    level: list[tuple[str, Any]] = [("obj", root)]
    while level and len(seen) < _VISIT_MAX:
        below: list[tuple[str, Any]] = []
        for path, part in level:
            if wanted(part):
                return path
            if id(part) in seen:
                continue
            seen.add(id(part))
            below += [(path + step, child) for step, child in children(part)]
        level = below
    return None


def narrow(root: Any, fails: Callable[[Any], bool]) -> str:
    """The path of the deepest part that still fails, following the first failing child from level to level."""
    path, part = "obj", root
    seen: set[int] = set()
    while id(part) not in seen and len(seen) < _VISIT_MAX:
        seen.add(id(part))
        for step, child in children(part):
            if id(child) not in seen and fails(child):
                path, part = path + step, child
                break
        else:
            break
    return path
