"""Every coroutine test here runs on asyncio's own loop and on uvloop; nothing may reach the loop's exception handler or the log unasked."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import pytest
import pytest_asyncio
import uvloop

from aiorlinf.work.home import LoopHome
from tests.work.helpers import LoopThread

__all__ = ["home", "home_thread", "logged", "loop_thread", "problems", "pytest_asyncio_loop_factories"]

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.SelectorEventLoop, "uvloop": uvloop.new_event_loop}


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loops that each coroutine test is run on."""
    return LOOPS


@pytest.fixture(autouse=True)
def logged() -> Iterator[list[logging.LogRecord]]:
    """What went to the log of aiorlinf as an error; a test that means to cause some clears the list."""
    records: list[logging.LogRecord] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler = Handler(logging.ERROR)
    logger = logging.getLogger("aiorlinf")
    logger.addHandler(handler)
    yield records
    gc.collect()
    logger.removeHandler(handler)
    assert [record.getMessage() for record in records] == []


@pytest.fixture
def problems() -> Iterator[list[dict[str, Any]]]:
    """What reached the exception handler of the home loop; a test that means to cause some clears the list."""
    found: list[dict[str, Any]] = []
    yield found
    assert found == []


@pytest_asyncio.fixture
async def home(problems: list[dict[str, Any]]) -> AsyncIterator[LoopHome]:
    """A home on the loop of the test."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: problems.append(context))
    home = LoopHome(loop, name="test")
    yield home
    await home.close()


@pytest.fixture(params=sorted(LOOPS))
def home_thread(request: pytest.FixtureRequest, problems: list[dict[str, Any]]) -> Iterator[LoopThread]:
    """A loop in a thread of its own, with a home on it; of each kind in turn."""
    with LoopThread(LOOPS[request.param], problems) as thread:
        yield thread


@pytest.fixture
def loop_thread(problems: list[dict[str, Any]]) -> Iterator[LoopThread]:
    """Another loop in another thread."""
    with LoopThread(uvloop.new_event_loop, problems) as thread:
        yield thread
