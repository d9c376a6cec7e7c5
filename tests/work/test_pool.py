"""The private threads."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

from aiorlinf.errors import ClosedError
from aiorlinf.work.pool import ThreadPool

ROOT = Path(__file__).resolve().parent.parent.parent


class Reports(queue.Queue[tuple[Any, BaseException | None]]):
    def report(self, value: Any, error: BaseException | None) -> None:
        self.put((value, error))


def test_threads_are_started_when_needed_and_reused() -> None:
    pool = ThreadPool("pool", 2)
    reports = Reports()
    assert pool.alive() == 0
    for number in range(5):
        pool.submit(lambda number=number: number, reports.report)  # type: ignore[misc]
        assert reports.get(timeout=10) == (number, None)
        time.sleep(0.002)
    assert pool.alive() == 1
    gate = threading.Barrier(3)
    for _ in range(2):
        pool.submit(gate.wait, reports.report)
    gate.wait(10)
    assert pool.alive() == 2
    pool.close()
    assert pool.join(10)


def test_never_more_than_the_limit_and_nothing_is_lost() -> None:
    pool = ThreadPool("pool", 2)
    reports = Reports()
    names = set()
    for _ in range(200):
        pool.submit(lambda: threading.current_thread().name, reports.report)
    for _ in range(200):
        name, error = reports.get(timeout=10)
        assert error is None
        names.add(name)
    assert names <= {"pool-0", "pool-1"}
    pool.close()
    assert pool.join(10)


def test_errors_are_reported_without_our_frames() -> None:
    pool = ThreadPool("pool", 1)
    reports = Reports()

    def bad() -> None:
        raise SystemExit(3)

    pool.submit(bad, reports.report)
    _, error = reports.get(timeout=10)
    assert isinstance(error, SystemExit)
    assert error.__traceback__ is not None
    assert error.__traceback__.tb_frame.f_code.co_name == "bad"
    pool.submit(int, reports.report)
    assert reports.get(timeout=10) == (0, None)
    pool.close()
    assert pool.join(10)


def test_a_job_can_be_withdrawn_before_it_starts() -> None:
    pool = ThreadPool("pool", 1)
    reports = Reports()
    gate = threading.Event()
    began = threading.Event()

    def hold() -> None:
        began.set()
        gate.wait(10)

    running = pool.submit(hold, reports.report)
    began.wait(10)
    waiting = pool.submit(int, reports.report)
    waiting.withdraw()
    running.withdraw()
    gate.set()
    assert reports.get(timeout=10) == (None, None)
    pool.close()
    assert pool.join(10)
    assert reports.empty()


def test_closing_refuses_what_has_not_started() -> None:
    pool = ThreadPool("pool", 1)
    reports = Reports()
    gate = threading.Event()
    began = threading.Event()

    def hold() -> None:
        began.set()
        gate.wait(10)

    pool.submit(hold, reports.report)
    began.wait(10)
    pool.submit(int, reports.report)
    pool.close()
    pool.close()
    _, error = reports.get(timeout=10)
    assert isinstance(error, ClosedError)
    with pytest.raises(ClosedError):
        pool.submit(int, reports.report)
    assert not pool.join(0.001)
    gate.set()
    assert pool.join(10)
    assert reports.get(timeout=10) == (None, None)


def test_an_idle_thread_keeps_nothing_alive() -> None:
    class Big:
        pass

    pool = ThreadPool("pool", 1)
    done = threading.Event()
    references: list[weakref.ref[Big]] = []

    def make() -> Big:
        big = Big()
        references.append(weakref.ref(big))
        return big

    pool.submit(make, lambda _value, _error: done.set())
    done.wait(10)
    deadline = time.monotonic() + 10
    while references[0]() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert references[0]() is None
    pool.close()
    assert pool.join(10)


def test_a_stuck_call_does_not_keep_the_interpreter_from_ending() -> None:
    program = (
        "import time\n"
        "from aiorlinf.work.pool import ThreadPool\n"
        "pool = ThreadPool('pool', 2)\n"
        "pool.submit(lambda: time.sleep(60), print)\n"
        "pool.submit(lambda: 1, print)\n"
        "time.sleep(0.1)\n"
        "print('end')\n"
    )
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.splitlines() == ["1 None", "end"]
    assert done.stderr == ""
    assert time.monotonic() - begin < 20
