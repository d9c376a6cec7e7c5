"""Who keeps an object alive: chains of those that refer to it, for the message of a test that finds it alive."""

from __future__ import annotations

import gc
import sys
from collections import deque
from types import FrameType, ModuleType

__all__ = ["who_holds"]

_DEEPEST, _MOST_CHAINS, _MOST_SEEN = 12, 8, 2000


def who_holds(target: object) -> str:
    """Chains from those that refer to the object outwards, one on a line. They end at modules and at frames that run."""
    ignored = {id(target)}
    running = _running()
    chains: list[str] = []
    queue: deque[tuple[object, str, int]] = deque([(target, _name(target), 0)])
    ignored |= {id(queue), id(ignored), id(chains)}
    while queue and len(chains) < _MOST_CHAINS and len(ignored) < _MOST_SEEN:
        obj, chain, depth = queue.popleft()
        holders = [holder for holder in gc.get_referrers(obj) if id(holder) not in ignored and not _ours(holder)]
        ignored.add(id(holders))
        if not holders or depth == _DEEPEST:
            chains.append(f"{chain} <- {'...' if holders else 'nobody that the collector knows'}")
            continue
        for holder in holders:
            longer = f"{chain} <- {_name(holder)}{_where(holder, obj)}"
            if id(holder) in running or isinstance(holder, ModuleType) or _module_of(holder) is not None:
                chains.append(longer)
            else:
                ignored.add(id(holder))
                queue.append((holder, longer, depth + 1))
    return "\n".join(chains) or f"{_name(target)}: chains of more than {_MOST_SEEN} objects"


def _running() -> set[int]:
    found = set()
    frame: FrameType | None
    for frame in sys._current_frames().values():
        while frame is not None:
            found.add(id(frame))
            frame = frame.f_back
    return found


def _ours(holder: object) -> bool:
    """The search itself."""
    return isinstance(holder, FrameType) and holder.f_code.co_filename == __file__


def _module_of(holder: object) -> str | None:
    name = holder.get("__name__") if type(holder) is dict and "__spec__" in holder else None
    return name if isinstance(name, str) else None


def _name(obj: object) -> str:
    if isinstance(obj, FrameType):
        return f"frame of {obj.f_code.co_qualname} line {obj.f_lineno}"
    module = _module_of(obj)
    if module is not None:
        return f"module {module}"
    kind = type(obj)
    named = getattr(obj, "__qualname__", None) if callable(obj) or kind.__name__ == "coroutine" else None
    return f"{kind.__module__}.{kind.__qualname__}" + (f" {named}" if isinstance(named, str) else "")


def _where(holder: object, held: object) -> str:
    """The key or the attribute."""
    if type(holder) is dict:
        return next((f"[{key!r:.60}]" for key, value in holder.items() if value is held), "")
    names = getattr(holder, "__dict__", None)
    if type(names) is dict:
        return next((f".{name}" for name, value in names.items() if value is held), "")
    return ""
