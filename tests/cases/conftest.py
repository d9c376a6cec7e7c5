"""Every coroutine test here runs on asyncio's own loop and on uvloop. `pair` gives two workers on it, for each way a payload can go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import pytest_asyncio
import uvloop

from aiorlinf import CollectiveGroup, Worker, init

__all__ = [
    "BACKENDS",
    "CARRIERS",
    "Pair",
    "carried_by",
    "complaints",
    "pair",
    "pytest_asyncio_loop_factories",
    "pytest_collection_modifyitems",
    "stream_pair",
]

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.SelectorEventLoop, "uvloop": uvloop.new_event_loop}

CARRIERS = ("frame", "stream", "shm", "gloo")
"""Ways of a payload: inside its message's frame, in chunks on the stream, around the stream in shared memory or through Gloo."""

BACKENDS: dict[str, Literal["stream", "shm", "gloo"]] = {"frame": "stream", "stream": "stream", "shm": "shm", "gloo": "gloo"}


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loops that each coroutine test is run on."""
    return LOOPS


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Not every way on both loops: uvloop is tried where the payload goes through sockets outside the frames, which is where it differs."""
    left_out = [item for item in items if "/cases/" in item.nodeid and item.nodeid.endswith(("[uvloop-frame]", "[uvloop-shm]"))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


@dataclass(frozen=True)
class Pair:
    """Two workers of one job, each with its group of the two."""

    a: Worker
    b: Worker
    ab: CollectiveGroup
    ba: CollectiveGroup
    carrier: str

    async def trip(self, obj: Any, tag: int = 0) -> Any:
        """Send from `a` to `b`; what arrives."""
        work = self.ab.send(obj, tag=tag)
        got = await self.ba.recv(tag=tag, timeout=20)
        await work
        return got


def carried_by(carrier: str, **collective: Any) -> dict[str, Any]:
    """The configuration with which every payload goes this way."""
    if carrier != "frame":
        collective.setdefault("inline_max_bytes", 0)
    if carrier == "shm":
        collective.setdefault("shared_memory", {"segment_bytes": 1 << 20})  # the default takes a while to be made
    return {"cluster": {"collective": {"backend": BACKENDS[carrier], **collective}}}


async def _pair(carrier: str) -> AsyncIterator[Pair]:
    config = carried_by(carrier)
    async with init("a:0", config=config) as a, init("b:0", config=config) as b:
        members = ["a:0", "b:0"]
        yield Pair(a, b, a.collective.create_collective_group(members), b.collective.create_collective_group(members), carrier)


@pytest_asyncio.fixture(params=CARRIERS)
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    """Two workers on the loop of the test, whose payloads go each way in turn."""
    async for made in _pair(request.param):
        yield made


@pytest_asyncio.fixture
async def stream_pair() -> AsyncIterator[Pair]:
    """Two workers with the default configuration, for what does not depend on how the payload goes."""
    async for made in _pair("frame"):
        yield made


@pytest.fixture(autouse=True)
def complaints() -> Iterator[list[str]]:
    """Warnings and worse in the logs of aiorlinf and asyncio. A test that means to cause some clears the list."""
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if not record.getMessage().startswith("Executing "):  # asyncio's debug mode: a slow callback, on a busy machine
                found.append(record.getMessage())

    handler = Handler(logging.WARNING)
    loggers = [logging.getLogger("aiorlinf"), logging.getLogger("asyncio")]
    for logger in loggers:
        logger.addHandler(handler)
    yield found
    for logger in loggers:
        logger.removeHandler(handler)
    assert found == []
