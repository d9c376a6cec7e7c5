"""Whoever adds an operation that can be awaited adds its walk: every one of them is cancelled at each step somewhere here."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from aiorlinf import Channel, CollectiveGroup, Inbox, Membership, Worker

__all__: list[str] = []

WALKS = (
    "".join(path.read_text() for path in Path(__file__).parent.glob("test_cancel_walk_*.py"))
    + (Path(__file__).parent / "test_cancel_walk.py").read_text()
)

AT_ONCE = {"CollectiveGroup.stats", "Worker.stats"}
"""Their values are there at once."""


def awaitable(cls: type) -> list[str]:
    """Public methods that return something to await, to iterate or to enter."""
    found = []
    for name, method in inspect.getmembers(cls, inspect.isfunction):
        returned = str(inspect.signature(method).return_annotation)
        waits = re.search(r"^Any$|AsyncWork|Awaitable|Coroutine|AsyncIterator|Prefetch|Lease|Inbox|Membership|AbstractAsync", returned)
        if not name.startswith("_") and (waits or inspect.iscoroutinefunction(method)) and f"{cls.__name__}.{name}" not in AT_ONCE:
            found.append(name)
    return found


@pytest.mark.parametrize("cls", [Worker, CollectiveGroup, Channel, Inbox, Membership])
def test_every_operation_has_its_walk(cls: type) -> None:
    operations = awaitable(cls)
    assert operations
    assert [name for name in operations if not re.search(rf"\b{name}\b", WALKS)] == []


def test_the_operations_are_seen() -> None:
    assert {"send", "recv", "recv_tensor", "inbox", "broadcast", "close", "peers", "wait_for", "membership"} <= set(awaitable(Worker))
    assert {"put", "get", "get_batch", "lease", "prefetch", "batches", "stats", "shutdown", "peek_all"} <= set(awaitable(Channel))
