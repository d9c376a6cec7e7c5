"""Coroutine tests here run on asyncio's own loop and on uvloop. Each begins without the garbage of those before it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import pytest_asyncio
import uvloop

from aiorlinf.work.home import LoopHome

__all__ = ["home", "no_garbage", "pytest_asyncio_loop_factories"]

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.SelectorEventLoop, "uvloop": uvloop.new_event_loop}


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loops that each coroutine test is run on."""
    return LOOPS


@pytest.fixture(autouse=True)
def no_garbage() -> None:
    """Tests look at the mappings of the whole process."""
    gc.collect()


@pytest_asyncio.fixture
async def home() -> AsyncIterator[LoopHome]:
    """The loop of the test as a home."""
    made = LoopHome(asyncio.get_running_loop(), name="test")
    yield made
    await made.close()
