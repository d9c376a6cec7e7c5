"""Coroutine tests here run on asyncio's own loop and on uvloop. What reaches the loop's exception handler fails the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest_asyncio
import uvloop

from aiorlinf.work.home import LoopHome

__all__ = ["home", "problems", "pytest_asyncio_loop_factories"]

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.SelectorEventLoop, "uvloop": uvloop.new_event_loop}


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loops that each coroutine test is run on."""
    return LOOPS


@pytest_asyncio.fixture
async def problems() -> AsyncIterator[list[dict[str, Any]]]:
    """What reached the exception handler of the loop; a test that means to cause some clears the list."""
    found: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: found.append(context))
    yield found
    assert found == []


@pytest_asyncio.fixture
async def home(problems: list[dict[str, Any]]) -> AsyncIterator[LoopHome]:
    """A home on the loop of the test."""
    home = LoopHome(asyncio.get_running_loop(), name="test")
    yield home
    await home.close()
