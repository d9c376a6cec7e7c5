"""What holds for every test: asyncio's debug mode everywhere, nothing left behind, and a time limit that works on uvloop too."""

from __future__ import annotations

import gc
import os
import re
import zlib
from collections import Counter

import pytest

from tests.short_stacks import shorten

__all__ = ["pytest_collection_finish", "pytest_collection_modifyitems", "pytest_plugins"]

# pytest-asyncio's own option reaches only the loops that it makes. This reaches loops in threads and child processes too.
os.environ["PYTHONASYNCIODEBUG"] = "1"
shorten()

pytest_plugins = ["aiorlinf.testing.pytest_leaks", "tests.time_limit"]

_LOOP = re.compile(r"(?<=[\[-])(asyncio|uvloop)(?=[\]-])")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With AIORLINF_LOOPS=one each test that exists for both loops runs on one of them, some on this, some on that: CI's short form."""
    if os.environ.get("AIORLINF_LOOPS") != "one":
        return
    families = Counter(_LOOP.sub("*", item.nodeid) for item in items)
    left_out = set()
    for item in items:
        family = _LOOP.sub("*", item.nodeid)
        found = _LOOP.findall(item.nodeid)
        if families[family] == 2 and len(found) == 1 and found[0] != ("asyncio", "uvloop")[zlib.crc32(family.encode()) & 1]:
            left_out.add(item)
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """What the imports have made stays: a collection, of which many a test makes one or a hundred, need not look through it, a fifth of a
    second each time."""
    gc.collect()
    gc.freeze()
