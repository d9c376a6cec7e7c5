"""Workers that run a function, in real processes with real workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aiorlinf.errors import UsageError
from aiorlinf.launch import WorkerFailed, launch
from aiorlinf.launch.child import load_function
from tests.launch.programs import child_env, cli

PROGRAM = """
import asyncio, functools, os, signal, sys, time
from dataclasses import dataclass
import aiorlinf

@dataclass
class Note:
    text: str

async def talk(comm, note, times):
    if comm.address == "a:0":
        for number in range(times):
            await comm.send(Note(f"{note.text} {number}"), "b:0")
    else:
        got = [await comm.recv("a:0") for _ in range(times)]
        assert all(isinstance(one, Note) for one in got)
        print(got[-1], type(asyncio.get_running_loop()).__module__)

def wrapped(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args)
    inner.__wrapped__ = None
    return inner

@wrapped
async def looks_plain(comm):
    print("awaited", comm.address)

def plain(comm):
    comm.send("hello", comm.address).wait(30)
    print(comm.recv(comm.address).wait(30), "AIORLINF_LAUNCH_CALL" in os.environ)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    finally:
        print("cleaned up")

async def clean_up(comm):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(0)
        print("cleaned up")

if __name__ == "__main__":
    function = globals()[sys.argv[1]]
    if function is talk:
        result = aiorlinf.launch(function, "a=1,b=1", args=(Note("n"), 3))
    else:
        result = aiorlinf.launch(function, "a=1")
    print(result.returncodes)
"""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("function", "printed"),
    [
        ("talk", ["[b:0] Note(text='n 2') uvloop", "{'a:0': 0, 'b:0': 0}"]),
        ("plain", ["[a:0] cleaned up", "[a:0] hello False", "{'a:0': -15}"]),
        ("clean_up", ["[a:0] cleaned up", "{'a:0': -15}"]),
    ],
)
def test_functions_of_the_main_program(tmp_path: Path, function: str, printed: list[str]) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    run = subprocess.run(
        [sys.executable, "program.py", function], cwd=tmp_path, env=child_env(), capture_output=True, text=True, check=False, timeout=50
    )
    assert sorted(run.stdout.splitlines()) == printed, run.stderr


async def fails(comm: Any, text: str) -> None:
    """Found by the child under this module's name."""
    raise ValueError(f"{text} at {comm.address}")


def test_a_function_that_fails() -> None:
    with pytest.raises(WorkerFailed, match="worker a:0 failed with exit code 1: ValueError: no good at a:0"):
        launch(fails, "a=1", args=["no good"], check=True)


def test_a_program_that_launches_while_it_is_loaded(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import aiorlinf\ndef main(comm): pass\naiorlinf.launch(main, 'a=1', check=True)\n")
    run = subprocess.run([sys.executable, str(program)], env=child_env(), capture_output=True, text=True, check=False, timeout=50)
    assert run.returncode == 1
    hint = 'hint: call it under: if __name__ == "__main__":'
    assert (
        f"[a:0] aiorlinf.errors.UsageError: launch: launch was called while a worker loads this program to find its function ({hint})"
        in run.stderr
    )


def test_a_script_that_joins_by_itself(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        """
import asyncio
import torch
import aiorlinf

async def main():
    async with aiorlinf.init() as comm:
        if comm.address == "trainer:0":
            parts = [await comm.recv(f"rollout:{rank}") for rank in range(1)]
            print(torch.cat(parts).tolist())
        else:
            await comm.send(torch.full((2,), float(comm.address[-1])), "trainer:0")

asyncio.run(main())
"""
    )
    run = cli("run", "--workers", "rollout=1,trainer=1", "script.py", cwd=tmp_path, timeout=50)
    assert (run.returncode, run.stdout) == (0, "[trainer:0] [0.0, 0.0]\n"), run.stderr


def test_by_hand(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    run = subprocess.run(
        [sys.executable, "-m", "aiorlinf.launch.child", "program:looks_plain"],
        cwd=tmp_path,
        env=child_env(AIORLINF_ADDRESS="a:0"),
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert (run.returncode, run.stdout) == (0, "awaited a:0\n"), run.stderr


def test_names() -> None:
    assert load_function("os:path.join", None) is os.path.join
    for bad in ("os", "os:", ":join", ""):
        with pytest.raises(UsageError, match="does not name a function"):
            load_function(bad, None)
    with pytest.raises(UsageError, match="os has no function nothing"):
        load_function("os:nothing", None)
    with pytest.raises(ModuleNotFoundError):
        load_function("no_such_module:main", None)
