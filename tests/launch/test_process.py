from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from aiorlinf.launch.process import Stream, WorkerProcess, group_alive, signal_group
from aiorlinf.launch.result import UNKNOWN_EXIT
from tests.launch.programs import alive, pids_in, script, wait_until


class Started:
    """A worker's process with what it wrote so far."""

    def __init__(self, folder: Path, text: str) -> None:
        self.written: dict[Stream, bytes] = {"out": b"", "err": b""}
        self.process = WorkerProcess([sys.executable, str(script(folder, text)), str(folder)], os.environ, self._on_output)

    def _on_output(self, stream: Stream, data: bytes) -> None:
        self.written[stream] += data

    async def end(self, grace: float = 5.0) -> int:
        returncode = await self.process.wait()
        assert await self.process.end_group(grace)
        self.process.finish_output()
        return returncode


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("text", "returncode"),
    [("pass", 0), ("sys.exit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", -9), ("os.abort()", -6), ("1/0", 1)],
)
async def test_return_codes(tmp_path: Path, text: str, returncode: int) -> None:
    started = Started(tmp_path, text)
    assert await started.end() == returncode
    assert started.process.ended


@pytest.mark.asyncio
async def test_without_pidfd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    assert await Started(tmp_path, "sys.exit(4)").end() == 4


@pytest.mark.asyncio
async def test_a_status_that_somebody_else_collected_is_not_a_success(tmp_path: Path) -> None:
    started = Started(tmp_path, "pass")
    os.waitpid(started.process.pid, 0)
    assert await started.end() == UNKNOWN_EXIT


@pytest.mark.asyncio
async def test_output_is_complete_and_needs_no_newline(tmp_path: Path) -> None:
    started = Started(tmp_path, "os.write(1, b'x' * 3_000_000); os.write(2, b'last words')")
    assert await started.end() == 0
    assert started.written == {"out": b"x" * 3_000_000, "err": b"last words"}


@pytest.mark.asyncio
async def test_paused_output_holds_the_worker_and_is_not_lost(tmp_path: Path) -> None:
    started = Started(tmp_path, "os.write(1, b'x' * 1_000_000)")
    started.process.pause()
    await asyncio.sleep(0.2)
    assert started.written["out"] == b""
    assert not started.process.ended
    started.process.resume()
    assert await started.end() == 0
    assert len(started.written["out"]) == 1_000_000


@pytest.mark.asyncio
async def test_ended_while_paused(tmp_path: Path) -> None:
    started = Started(tmp_path, "os.write(1, b'x' * 1000)")
    started.process.pause()
    assert await started.end() == 0
    assert len(started.written["out"]) == 1000


@pytest.mark.asyncio
async def test_a_session_of_its_own_and_no_input(tmp_path: Path) -> None:
    started = Started(tmp_path, "print(os.getsid(0) == os.getpgrp() == os.getpid(), repr(sys.stdin.read()))")
    assert await started.end() == 0
    assert started.written["out"] == b"True ''\n"


@pytest.mark.asyncio
async def test_a_blocked_or_ignored_request_to_end_is_not_inherited(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1])
    try:
        started = Started(tmp_path, "note('up'); time.sleep(60)")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGTERM, before)
    await asyncio.to_thread(pids_in, tmp_path, ["up"])
    started.process.signal(signal.SIGTERM)
    assert await started.end() == -signal.SIGTERM


GRANDCHILD = """
    code = "import signal, time; {ignore}; print('up', flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    child.stdout.readline()
    note("child", child.pid)
"""


@pytest.mark.asyncio
async def test_what_it_left_behind_is_asked_to_end(tmp_path: Path) -> None:
    started = Started(tmp_path, GRANDCHILD.format(ignore="pass"))
    begun = time.monotonic()
    assert await started.end(grace=30.0) == 0
    assert time.monotonic() - begun < 20
    assert not alive(*pids_in(tmp_path, ["child"]))


@pytest.mark.asyncio
async def test_what_it_left_behind_is_killed_if_it_must_be(tmp_path: Path) -> None:
    started = Started(tmp_path, GRANDCHILD.format(ignore="signal.signal(signal.SIGTERM, signal.SIG_IGN)"))
    assert await started.end(grace=0.1) == 0
    assert not alive(*pids_in(tmp_path, ["child"]))


@pytest.mark.asyncio
async def test_a_process_that_left_the_group_and_holds_the_pipe_is_not_waited_for(tmp_path: Path) -> None:
    started = Started(
        tmp_path,
        """
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
        note("child", child.pid)
        print("last words", flush=True)
        """,
    )
    assert await started.end() == 0
    assert started.written["out"] == b"last words\n"
    (child,) = pids_in(tmp_path, ["child"])
    assert alive(child)
    os.kill(child, signal.SIGKILL)


@pytest.mark.asyncio
async def test_a_program_that_cannot_be_started() -> None:
    with pytest.raises(OSError, match="too long"):
        WorkerProcess([sys.executable, "-c", "pass"], {"LONG": "x" * 300_000}, lambda stream, data: None)


def test_groups(tmp_path: Path) -> None:
    child = os.posix_spawn("/bin/sleep", ["sleep", "60"], os.environ, setpgroup=0)
    assert group_alive(child)
    assert signal_group(child, signal.SIGKILL)
    wait_until(lambda: not alive(child), "the end of the process")
    assert signal_group(child, 0), "the zombie still holds the group"
    assert not group_alive(child)
    os.waitpid(child, 0)
    assert not signal_group(child, 0)
    assert not group_alive(child)
