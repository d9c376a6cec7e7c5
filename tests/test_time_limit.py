"""The time limit itself: pytest runs in a process of its own on tests that hang."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from tests.inner_pytest import run_pytest

__all__: list[str] = []

_SOURCE = """
    import asyncio, threading, time
    import pytest, uvloop

    async def sleep_for_ever():
        await asyncio.get_running_loop().create_future()

    def test_hangs_in_plain_code():
        threading.Event().wait()

    @pytest.mark.asyncio
    async def test_hangs_in_a_coroutine():
        await sleep_for_ever()

    def test_hangs_on_uvloop():
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(sleep_for_ever())

    def test_swallows_the_interruption():
        try:
            time.sleep(100)
        except KeyboardInterrupt:
            pass

    @pytest.fixture
    def hanging():
        yield
        time.sleep(100)

    def test_hangs_in_teardown(hanging):
        pass

    def test_is_quick():
        pass
"""


def test_each_hang_ends_as_a_failure_and_the_run_goes_on(tmp_path: Path) -> None:
    inner = run_pytest(tmp_path, _SOURCE, "-p", "tests.time_limit", "-p", "no:randomly", "-o", "timeout=0.5")
    assert inner.outcomes == {
        "test_hangs_in_plain_code": "failure",
        "test_hangs_in_a_coroutine": "failure",
        "test_hangs_on_uvloop": "failure",
        "test_swallows_the_interruption": "failure",
        "test_hangs_in_teardown": "error",
        "test_is_quick": "passed",
    }, inner.output
    assert all(text == "" or "over its time limit of 0.5 s" in text for text in inner.texts.values())
    assert "in sleep_for_ever" in inner.output
    assert inner.output.rstrip().splitlines()[-1].strip("= ").startswith("4 failed, 2 passed, 1 error in")


_HANGS_IN_C = """
    import ctypes

    def test_hangs_in_c_code():
        lock = ctypes.create_string_buffer(64)
        ctypes.CDLL(None).pthread_mutex_lock(lock)
        ctypes.CDLL(None).pthread_mutex_lock(lock)

    def test_is_quick():
        pass
"""


def test_a_hang_in_c_code_costs_its_process_and_the_run_goes_on(tmp_path: Path) -> None:
    # No signal handler of Python's ever runs there. Under xdist, as in scripts/test, another process takes the rest of the tests.
    limits = ("-o", "timeout=0.5", "-o", "faulthandler_timeout=1", "-o", "faulthandler_exit_on_timeout=true")
    inner = run_pytest(tmp_path, _HANGS_IN_C, "-p", "tests.time_limit", "-p", "no:randomly", "-n", "1", *limits)
    assert "crashed while running 'test_inner.py::test_hangs_in_c_code'" in inner.output
    assert inner.output.rstrip().splitlines()[-1].strip("= ").startswith("1 failed, 1 passed in")


def test_no_test_may_take_longer_than_the_limit_that_ends_its_process() -> None:
    root = Path(__file__).parents[1]
    last = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["faulthandler_timeout"]
    limits = [int(limit) for path in (root / "tests").rglob("*.py") for limit in re.findall(r"mark\.timeout\((\d+)", path.read_text())]
    assert limits
    assert max(limits) < last
