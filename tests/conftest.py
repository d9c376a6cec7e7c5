"""What holds for every test: asyncio's debug mode everywhere, nothing left behind, and a time limit that works on uvloop too."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import subprocess
import zlib
from collections import Counter

import pytest

from tests.short_stacks import shorten

__all__ = ["pytest_collection_finish", "pytest_collection_modifyitems", "pytest_configure", "pytest_plugins"]

# pytest-asyncio's own option reaches only the loops that it makes. This reaches loops in threads and child processes too.
os.environ["PYTHONASYNCIODEBUG"] = "1"
shorten()
multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.shortened"])  # others add to it, or bring it along

pytest_plugins = ["aiorlinf.testing.pytest_leaks", "tests.time_limit"]

_LOOP = re.compile(r"(?<=[\[-])(asyncio|uvloop)(?=[\]-])")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line(
        "markers", "sampled(every, family=None): in the short form one of so many cases of this test, or of all tests of the family, runs"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With AIORLINF_SHORT set, CI's short form; without it all of them run.

    Each test that exists for both loops runs on one of them, some on this, some on that. Of those that are `sampled`, which take seconds
    each and differ in little, some run: other ones for each commit, so that all have their turn, and the same for who tries it again.
    """
    if not os.environ.get("AIORLINF_SHORT"):
        return
    left_out = _of_the_other_loop(items)
    left_out |= _not_in_the_sample([item for item in items if item not in left_out])
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def _of_the_other_loop(items: list[pytest.Item]) -> set[pytest.Item]:
    families = Counter(_LOOP.sub("*", item.nodeid) for item in items)
    left_out = set()
    for item in items:
        family = _LOOP.sub("*", item.nodeid)
        found = _LOOP.findall(item.nodeid)
        if families[family] == 2 and len(found) == 1 and found[0] != ("asyncio", "uvloop")[zlib.crc32(family.encode()) & 1]:
            left_out.add(item)
    return left_out


def _not_in_the_sample(items: list[pytest.Item]) -> set[pytest.Item]:
    families: dict[str, tuple[int, list[pytest.Item]]] = {}
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker is not None:
            (every,) = marker.args
            family = marker.kwargs.get("family") or item.nodeid.partition("[")[0]
            families.setdefault(family, (every, []))[1].append(item)
    commit = _commit()
    left_out: set[pytest.Item] = set()
    for family, (every, members) in families.items():
        members.sort(key=lambda item: item.nodeid)
        turn = zlib.crc32(f"{commit} {family}".encode()) % every
        left_out.update(item for index, item in enumerate(members) if index % every != turn % len(members))
    return left_out


def _commit() -> str:
    """Which one this is; "" where git does not say."""
    command = ["git", "-C", os.path.dirname(__file__), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def pytest_collection_finish() -> None:
    """What the imports have made stays: a collection, of which many a test makes one or a hundred, need not look through it, a fifth of a
    second each time."""
    gc.collect()
    gc.freeze()
