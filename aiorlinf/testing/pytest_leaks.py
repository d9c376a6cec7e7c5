"""A pytest plugin: each test must leave behind nothing that was not there before it.

Switch it on in the ``conftest.py`` at the root of your tests::

    pytest_plugins = ["aiorlinf.testing.pytest_leaks"]

`aiorlinf.testing.leaks` says what counts. The fixtures of the test belong to it and are torn down before the look;
those of wider scope (class, module, session) are set up before and stay. Unfinished tasks are looked for in tests that
pytest-asyncio runs, on the loop that they run on. A test that fails by itself is not looked at.

A test that means to leave something says so::

    @pytest.mark.allow_leaks("threads", reason="the pool of that library is never shut down")

The ini option ``leak_grace`` is how many seconds things are given to go away by themselves (2 unless set).
A child process left behind is killed after it has been reported, so that it does not disturb the tests that follow.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any, Final

import pytest
import pytest_asyncio

from aiorlinf.testing.leaks import DEFAULT_GRACE, KINDS, LeakError, check_leaks

__all__ = [
    "leaks_of_test",
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_runtest_makereport",
    "tasks_of_class_loop",
    "tasks_of_function_loop",
    "tasks_of_module_loop",
    "tasks_of_package_loop",
    "tasks_of_session_loop",
]

_FAILED: Final = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare ``leak_grace``."""
    parser.addini("leak_grace", "seconds that what a test leaves behind is given to go away", default=str(DEFAULT_GRACE))


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line(
        "markers", f"allow_leaks(*kinds, reason): what this test may leave behind ({', '.join(KINDS)}; all of them if none is named)"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each coroutine test the fixture that looks at the tasks of its loop."""
    for item in items:
        marker = item.get_closest_marker("asyncio")
        if marker is not None and isinstance(item, pytest.Function):
            scope = marker.kwargs.get("loop_scope") or item.config.getini("asyncio_default_test_loop_scope")
            # Both are set up before the fixtures of the test, so torn down after them. Everything else is looked at when the
            # loop of one test is closed; a loop that is shared was there before and stays.
            ours = item.fixturenames.index(leaks_of_test.__name__)
            item.fixturenames.insert(ours + 1 if scope == "function" else ours, f"tasks_of_{scope}_loop")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember that the test failed by itself."""
    report = yield
    if report.failed or report.outcome == "skipped":
        item.stash[_FAILED] = True
    return report


@pytest.fixture(autouse=True)
def leaks_of_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything but tasks."""
    checker = check_leaks(grace=_grace(request), ignore={"tasks"} | _allowed(request))
    checker.__enter__()
    yield
    if not request.node.stash.get(_FAILED, False):
        with _as_failure():
            checker.__exit__(None, None, None)


def _tasks_of_loop(scope: Any) -> Callable[..., Any]:
    @pytest_asyncio.fixture(loop_scope=scope, name=f"tasks_of_{scope}_loop")
    async def tasks_of_loop(request: pytest.FixtureRequest) -> AsyncIterator[None]:
        checker = check_leaks(grace=_grace(request), ignore={*KINDS} - {"tasks"} | _allowed(request))
        await checker.__aenter__()
        yield
        if not request.node.stash.get(_FAILED, False):
            with _as_failure():
                await checker.__aexit__(None, None, None)

    return tasks_of_loop


tasks_of_function_loop: Any = _tasks_of_loop("function")
tasks_of_class_loop: Any = _tasks_of_loop("class")
tasks_of_module_loop: Any = _tasks_of_loop("module")
tasks_of_package_loop: Any = _tasks_of_loop("package")
tasks_of_session_loop: Any = _tasks_of_loop("session")


def _grace(request: pytest.FixtureRequest) -> float:
    return float(request.config.getini("leak_grace"))


def _allowed(request: pytest.FixtureRequest) -> set[str]:
    marker = request.node.get_closest_marker("allow_leaks")
    if marker is None:
        return set()
    if not marker.kwargs.get("reason"):
        pytest.fail("allow_leaks needs a reason", pytrace=False)
    return set(marker.args) or set(KINDS)


@contextlib.contextmanager
def _as_failure() -> Iterator[None]:
    """Turn a `LeakError` into a failure that shows its text and no traceback."""
    try:
        yield
    except LeakError as error:
        _end_children(error)
        raise pytest.fail.Exception(f"this test {error}", pytrace=False) from None


def _end_children(error: LeakError) -> None:
    for leak in error.leaks:
        if leak.pid is not None:
            try:
                os.kill(leak.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it ended by itself after all
