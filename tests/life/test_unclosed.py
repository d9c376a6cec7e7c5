"""A worker that is never closed: who is told of it, and who is not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.programs import child_env

__all__: list[str] = []


def run(folder: Path, text: str) -> str:
    """A program, with the warnings that asyncio users switch on; what it said on stderr about aiorlinf."""
    path = folder / "program.py"
    path.write_text(text)
    command = [sys.executable, "-W", "default::ResourceWarning", str(path)]
    done = subprocess.run(command, cwd=folder, env=child_env(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "done" in done.stdout, done.stderr
    return "\n".join(line for line in done.stderr.splitlines() if "never closed" in line)


UNTIL_THE_END = """
import asyncio, aiorlinf

async def main():
    comm = await aiorlinf.init("a:0")
    await comm.send(1, "a:0")
    await comm.recv("a:0")
    print("done")

asyncio.run(main())
"""

FORGOTTEN = """
import asyncio, gc, time, weakref, warnings, aiorlinf

async def main():
    comm = await aiorlinf.init("a:0")
    return weakref.ref(comm)

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", ResourceWarning)
    comm = asyncio.run(main())
    end = time.monotonic() + 30
    while comm() is not None and time.monotonic() < end:  # its heartbeats notice that the loop is gone
        gc.collect()
        time.sleep(0.05)
    told = [str(each.message) for each in caught if "never closed" in str(each.message)]
    assert comm() is None, "whoever keeps the warning keeps no worker"
    assert len(told) == 1, told
    assert "a:0, made at" in told[0]
print("done")
"""

CLOSED = """
import asyncio, aiorlinf

async def main():
    async with aiorlinf.init("a:0"):
        pass
    comm = await aiorlinf.init("b:0")
    await comm.close()
    comm.close()
    other = aiorlinf.init("c:0")
    closing = other.close()  # before it has joined
    await closing
    print("done")

asyncio.run(main())
"""

IN_A_THREAD = """
import aiorlinf

comm = aiorlinf.init("a:0")
comm.send(1, "a:0").wait()
print("done")
"""

JOINING_FAILED = """
import asyncio, aiorlinf

async def main():
    try:
        limits = {"connect_timeout_s": 0.1, "rendezvous_timeout_s": 0.2}
        await aiorlinf.init("a:0", manager="127.0.0.1:1", token="t", config={"cluster": {"network": limits}})
    except aiorlinf.errors.AiorlinfError:
        print("done")

asyncio.run(main())
"""


@pytest.mark.parametrize("program", [UNTIL_THE_END], ids=["at the end of the program"])
def test_it_is_told_once(program: str, tmp_path: Path) -> None:
    (line,) = run(tmp_path, program).splitlines()
    assert re.search(r"ResourceWarning: a:0, made at .*program\.py:5, was never closed: use `async with aiorlinf\.init", line)


def test_when_it_is_collected_and_then_nothing_keeps_it(tmp_path: Path) -> None:
    assert run(tmp_path, FORGOTTEN) == ""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("program", [CLOSED, IN_A_THREAD, JOINING_FAILED], ids=["closed", "in a thread", "joining failed"])
def test_those_that_need_no_close_are_not_told_of(program: str, tmp_path: Path) -> None:
    assert run(tmp_path, program) == ""
