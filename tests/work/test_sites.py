"""Where works were made."""

from __future__ import annotations

import _thread
import asyncio
import time
from typing import Any

import pytest

from aiorlinf.work.base import AsyncWork
from aiorlinf.work.home import LoopHome
from aiorlinf.work.sites import _PACKAGE, INSIDE, describe_site


def here() -> int:
    import inspect

    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


@pytest.mark.asyncio
async def test_the_line_of_the_caller_outside_the_package(home: LoopHome) -> None:
    work: AsyncWork[int] = AsyncWork(home, "recv")
    line = here() - 1
    assert work.site == f"{__file__}:{line}"
    step = work.then(lambda value: value)
    line = here() - 1
    assert step.site == f"{__file__}:{line}"
    threaded = home.submit(int)
    line = here() - 1
    assert threaded.site == f"{__file__}:{line}"
    assert await threaded == 0
    work.cancel()


def test_code_that_only_the_package_has_called_is_the_outermost_frame() -> None:
    filename = f"{_PACKAGE}made_up.py"
    sites: list[str] = []
    names = {"AsyncWork": AsyncWork, "LoopHome": LoopHome, "asyncio": asyncio, "sites": sites}
    source = "loop = asyncio.new_event_loop()\nsites.append(AsyncWork(LoopHome(loop), 'x').site)\nloop.close()\n"
    exec(compile(source, filename, "exec"), names)
    assert sites == [f"{__file__}:{here() - 1}"]
    assert INSIDE[filename]


def test_a_thread_that_runs_only_package_code() -> None:
    made: list[str] = []
    filename = f"{_PACKAGE}another.py"
    names: dict[str, Any] = {"AsyncWork": AsyncWork, "made": made}
    exec(compile("def make(home):\n    made.append(AsyncWork(home, 'x').site)\n", filename, "exec"), names)
    loop = asyncio.new_event_loop()
    _thread.start_new_thread(names["make"], (LoopHome(loop),))
    deadline = time.monotonic() + 10
    while not made and time.monotonic() < deadline:
        time.sleep(0.001)
    loop.close()
    assert made == [f"{filename}:2"]


def test_file_names_do_not_pile_up() -> None:
    for number in range(5000):
        assert not INSIDE[f"<cell {number}>"]
    assert len(INSIDE) <= 4097
    assert INSIDE[AsyncWork.__init__.__code__.co_filename]


def test_an_instruction_without_a_line() -> None:
    code = compile("x = 1", "file.py", "exec")
    assert describe_site(code, 10_000) == "file.py:1"
