from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aiorlinf.errors import AiorlinfError
from aiorlinf.launch.guard import Guard, helper
from tests.launch.programs import alive, child_env, pids_in, script, wait_until

LAUNCHER = """
    from aiorlinf.launch.guard import Guard
    from aiorlinf.launch.process import signal_group
    guard = Guard()
    for name, program in (("plain", "pass"), ("deaf", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"), ("spared", "pass")):
        code = f"import signal, time; {program}; print('up', flush=True); time.sleep(60)"
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
        child.stdout.readline()
        note(name, child.pid)
        guard.add(child.pid)
    guard.remove(child.pid)
    if "forked" in sys.argv:
        fork = os.fork()  # holds the pipe of the guard open
        if fork:
            note("fork", fork)
    note("launcher")
    time.sleep(60)
"""


@pytest.mark.parametrize("how", ["alone", "forked"])
def test_a_killed_launcher(tmp_path: Path, how: str) -> None:
    launcher = subprocess.Popen([sys.executable, str(script(tmp_path, LAUNCHER)), str(tmp_path), how], env=child_env())
    pids_in(tmp_path, ["launcher"])
    plain, deaf, spared = pids_in(tmp_path, ["plain", "deaf", "spared"])
    launcher.kill()
    launcher.wait()
    wait_until(lambda: not alive(plain) and not alive(deaf), "the end of both groups")
    assert alive(spared)
    os.kill(spared, signal.SIGKILL)
    if how == "forked":
        os.kill(pids_in(tmp_path, ["fork"])[0], signal.SIGKILL)


def test_closing_leaves_the_groups_alone() -> None:
    guard = Guard()
    with subprocess.Popen(["/bin/sleep", "60"], start_new_session=True) as child:
        guard.add(child.pid)
        guard.close()
        time.sleep(0.05)
        assert child.poll() is None
        child.kill()


def test_a_guard_that_somebody_killed_does_no_harm() -> None:
    guard = Guard()
    guard._popen.kill()
    guard._popen.wait()
    guard.add(1)
    guard.remove(1)
    guard.close()


def test_no_more_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(AiorlinfError, match="no process can be started"):
        Guard()


def test_isolation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHOME", raising=False)
    assert "-I" in helper("_boot.py")
    monkeypatch.setenv("PYTHONHOME", sys.prefix)
    assert "-I" not in helper("_boot.py")
