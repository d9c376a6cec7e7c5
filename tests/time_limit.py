"""Makes pytest-timeout's limit reach a test that hangs on uvloop.

pytest-timeout raises its failure from a signal handler. uvloop runs signal handlers inside a loop callback, where it logs
and drops whatever they raise, except KeyboardInterrupt and SystemExit: the test would go on hanging. So the handler
here raises a KeyboardInterrupt of its own, which leaves any loop, and it becomes a failure of the test further out.
"""

from __future__ import annotations

import asyncio
import faulthandler
import signal
import sys
from collections.abc import Generator
from typing import Any

import pytest

__all__ = [
    "OverTime",
    "pytest_runtest_call",
    "pytest_runtest_setup",
    "pytest_runtest_teardown",
    "pytest_timeout_cancel_timer",
    "pytest_timeout_set_timer",
]

_LIMIT = pytest.StashKey[float]()
_AGAIN_AFTER = 10.0  # seconds after which a teardown that hangs as well is ended


class OverTime(KeyboardInterrupt):
    """The test has used up its time."""


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Start the clock in our way instead of pytest-timeout's."""

    def on_alarm(number: int, frame: object) -> None:
        item.stash[_LIMIT] = settings.timeout
        sys.stderr.write(f"\n{item.nodeid} is over its limit of {settings.timeout:g} s.\n")
        _show_tasks()
        faulthandler.dump_traceback(file=2, all_threads=True)  # not sys.stderr: pytest's stand-in has no descriptor
        raise OverTime

    signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout, _AGAIN_AFTER)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> bool:
    """Stop the clock."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    """Fail a set-up that is over the limit."""
    return (yield from _fail_when_over(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Fail a test that is over the limit."""
    return (yield from _fail_when_over(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """Fail a teardown that is over the limit."""
    return (yield from _fail_when_over(item))


def _show_tasks() -> None:
    """Where the coroutines wait; the stack of a thread that runs a loop shows only the loop."""
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:
        return  # no loop runs in this thread
    for task in tasks:
        task.print_stack(file=sys.stderr)


def _fail_when_over(item: pytest.Item) -> Generator[None, None, None]:
    try:
        yield
    except OverTime:
        pass  # reported below, also when something on the way swallowed it
    if _LIMIT in item.stash:
        limit = item.stash[_LIMIT]
        del item.stash[_LIMIT]
        pytest.fail(f"over its time limit of {limit:g} s", pytrace=False)
