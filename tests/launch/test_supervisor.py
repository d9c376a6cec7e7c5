from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from aiorlinf.launch import supervisor
from aiorlinf.launch.job import Stop
from aiorlinf.launch.printer import Sink
from aiorlinf.launch.result import LaunchResult, WorkerFailed
from aiorlinf.launch.supervisor import TAIL_LINES, Supervisor, WorkerCommand
from tests.launch.programs import alive, pids_in, script


class Job:
    """A job with its output in memory."""

    def __init__(
        self, folder: Path, text: str, workers: Sequence[str] = ("a:0",), env: dict[str, str] | None = None, **options: Any
    ) -> None:
        self.out, self.err = io.StringIO(), io.StringIO()
        program = str(script(folder, text))
        commands = [
            WorkerCommand(worker, [sys.executable, program, str(folder)], {**os.environ, "AIORLINF_ADDRESS": worker, **(env or {})})
            for worker in workers
        ]
        self.supervisor = Supervisor(commands, (Sink(self.out, None), Sink(self.err, None)), **{"grace": 5.0, "prefix": True, **options})

    async def run(self) -> LaunchResult:
        return await asyncio.wait_for(self.supervisor.run(), 30)


@pytest.mark.asyncio
async def test_all_do_well(tmp_path: Path) -> None:
    job = Job(tmp_path, "print('hello'); print('oops', file=sys.stderr)", ["a:0", "b:0"])
    result = await job.run()
    assert result.ok
    assert result.returncodes == {"a:0": 0, "b:0": 0}
    assert sorted(job.out.getvalue().splitlines()) == ["[a:0] hello", "[b:0] hello"]
    assert sorted(job.err.getvalue().splitlines()) == ["[a:0] oops", "[b:0] oops"]


@pytest.mark.asyncio
async def test_a_failure_ends_the_others_and_is_told_again_at_the_end(tmp_path: Path) -> None:
    program = """
        note(ME)
        if ME == "b:0":
            while not os.path.exists(sys.argv[1] + "/a:0"): time.sleep(0.01)
            raise ValueError("no good")
        print("waiting", flush=True)
        time.sleep(60)
    """
    job = Job(tmp_path, program, ["a:0", "b:0"])
    result = await job.run()
    assert (result.failed, result.returncode) == ("b:0", 1)
    assert result.returncodes == {"a:0": -signal.SIGTERM, "b:0": 1}
    assert result.stderr[-1] == "ValueError: no good"
    assert not any(alive(pid) for pid in pids_in(tmp_path, ["a:0", "b:0"]))
    lines = job.err.getvalue().splitlines()
    assert "aiorlinf: worker b:0 failed with exit code 1; ending a:0" in lines
    report = next(index for index, line in enumerate(lines) if "the other worker was ended" in line)
    assert re.fullmatch(r"aiorlinf: worker b:0 failed with exit code 1 after \d+\.\d s; the other worker was ended", lines[report])
    assert lines[report + 1 :] == ["    ValueError: no good"], "the traceback stands right above"
    assert lines.index("[b:0] ValueError: no good") < report


@pytest.mark.asyncio
async def test_the_cause_is_named_though_it_needs_longer_to_end(tmp_path: Path) -> None:
    program = """
        if ME == "b:0":
            print("aiorlinf.errors.PeerLost: recv: a:0#1 is gone", file=sys.stderr)
            note("lost")
            sys.exit(1)
        while not os.path.exists(sys.argv[1] + "/lost"): time.sleep(0.01)
        time.sleep(0.2)
        sys.exit(7)
    """
    job = Job(tmp_path, program, ["a:0", "b:0"])
    result = await job.run()
    assert (result.failed, result.returncode, result.returncodes) == ("a:0", 7, {"a:0": 7, "b:0": 1})
    assert "worker b:0 failed with exit code 1; it had lost another one; waiting a moment for a:0" in job.err.getvalue()


@pytest.mark.asyncio
async def test_a_lost_one_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_HOLD_S", 0.1)
    program = """
        if ME == "a:0": time.sleep(60)
        print("aiorlinf.errors.PeerLost: recv: a:0#1 is gone", file=sys.stderr)
        sys.exit(1)
    """
    result = await Job(tmp_path, program, ["a:0", "b:0"]).run()
    assert (result.failed, result.returncodes) == ("b:0", {"a:0": -15, "b:0": 1})


@pytest.mark.asyncio
async def test_killed_by_a_signal(tmp_path: Path) -> None:
    job = Job(tmp_path, "os.kill(os.getpid(), signal.SIGSEGV) if ME == 'a:0' else time.sleep(60)", ["a:0", "b:0"])
    result = await job.run()
    assert (result.failed, result.returncode) == ("a:0", 139)
    assert "aiorlinf: worker a:0 was killed by SIGSEGV (11)" in job.err.getvalue()


@pytest.mark.asyncio
async def test_one_that_does_not_want_to_end(tmp_path: Path) -> None:
    program = """
        if ME == "b:0":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            note("deaf")
            time.sleep(60)
        while not os.path.exists(sys.argv[1] + "/deaf"): time.sleep(0.01)
        sys.exit(7)
    """
    job = Job(tmp_path, program, ["a:0", "b:0"], grace=0.2)
    result = await job.run()
    assert result.returncodes == {"a:0": 7, "b:0": -signal.SIGKILL}
    assert result.returncode == 7
    assert "aiorlinf: not ended 0.2 s after SIGTERM, and killed: b:0" in job.err.getvalue()


@pytest.mark.asyncio
async def test_a_stopped_worker_is_ended_gently_too(tmp_path: Path) -> None:
    program = """
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
        note(ME)
        time.sleep(60)
    """
    job = Job(tmp_path, program)
    running = asyncio.create_task(job.run())
    (pid,) = await asyncio.to_thread(pids_in, tmp_path, ["a:0"])
    os.kill(pid, signal.SIGSTOP)
    job.supervisor.stop(Stop("signal", signal.SIGINT))
    result = await running
    assert result.returncodes == {"a:0": 5}
    assert (result.failed, result.returncode) == (None, 130)
    assert "aiorlinf: SIGINT: ending a:0" in job.err.getvalue()


@pytest.mark.asyncio
async def test_asked_twice_to_stop(tmp_path: Path) -> None:
    job = Job(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN); note(ME); time.sleep(60)", grace=60.0)
    running = asyncio.create_task(job.run())
    await asyncio.to_thread(pids_in, tmp_path, ["a:0"])
    job.supervisor.stop(Stop("signal", signal.SIGTERM))
    await asyncio.sleep(0.05)
    assert not running.done()
    job.supervisor.stop(Stop("signal", signal.SIGTERM))
    result = await running
    assert result.returncodes == {"a:0": -signal.SIGKILL}
    assert result.returncode == 143


@pytest.mark.asyncio
async def test_a_time_limit(tmp_path: Path) -> None:
    job = Job(tmp_path, "time.sleep(60)", timeout=0.2)
    result = await job.run()
    assert result.stopped == Stop("timeout")
    assert result.returncode == 124
    assert "the time limit of 0.2 s is over" in job.err.getvalue()


@pytest.mark.asyncio
async def test_cancelling_waits_for_the_end_and_stays_a_cancellation(tmp_path: Path) -> None:
    job = Job(tmp_path, "note(ME); time.sleep(60)", ["a:0", "b:0"])
    running = asyncio.create_task(job.supervisor.run())
    pids = await asyncio.to_thread(pids_in, tmp_path, ["a:0", "b:0"])
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert running.cancelled()
    assert not any(alive(pid) for pid in pids)


@pytest.mark.asyncio
async def test_cancelling_twice_does_not_wait_for_the_grace(tmp_path: Path) -> None:
    job = Job(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN); note(ME); time.sleep(60)", grace=60.0)
    running = asyncio.create_task(job.supervisor.run())
    (pid,) = await asyncio.to_thread(pids_in, tmp_path, ["a:0"])
    running.cancel()
    await asyncio.sleep(0.05)
    assert not running.done()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not alive(pid)


@pytest.mark.asyncio
async def test_cancelled_before_anything_started(tmp_path: Path) -> None:
    job = Job(tmp_path, "time.sleep(60)", [f"a:{rank}" for rank in range(5)])
    running = asyncio.create_task(job.supervisor.run())
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


@pytest.mark.asyncio
async def test_one_that_cannot_be_started_ends_those_that_were(tmp_path: Path) -> None:
    job = Job(tmp_path, "note(ME); time.sleep(60)", ["a:0", "b:0", "c:0"])
    commands = list(job.supervisor._commands)
    commands[1] = WorkerCommand("b:0", commands[1].argv, {"LONG": "x" * 300_000})
    job.supervisor._commands = commands
    with pytest.raises(WorkerFailed, match=r"launch: worker b:0 could not be started: .*too long") as caught:
        await job.run()
    assert caught.value.returncode is None
    assert not (tmp_path / "c:0").exists()


@pytest.mark.asyncio
async def test_twenty_workers_and_no_torn_line(tmp_path: Path) -> None:
    program = """
        for number in range(300):
            os.write(1, f"{ME} {number} ".encode())
            os.write(1, ("x" * (number % 50) + "\\n").encode())
            os.write(2, f"{ME} error {number}\\n".encode())
    """
    workers = [f"w:{rank}" for rank in range(20)]
    job = Job(tmp_path, program, workers)
    assert (await job.run()).ok
    lines = job.out.getvalue().splitlines()
    for worker in workers:
        mine = [line for line in lines if line.startswith(f"[{worker}] ")]
        assert mine == [f"[{worker}] {worker} {number} {'x' * (number % 50)}" for number in range(300)]
    assert len(lines) == 20 * 300
    assert len(job.err.getvalue().splitlines()) == 20 * 300


@pytest.mark.asyncio
async def test_much_output_arrives_whole(tmp_path: Path) -> None:
    job = Job(tmp_path, "for number in range(100): sys.stdout.write(f'{number:06} {\"y\" * 992}\\n' * 100)", ["a:0", "b:0"])
    assert (await job.run()).ok
    assert len(job.out.getvalue()) == 2 * 10_000 * (1000 + len("[a:0] "))


@pytest.mark.asyncio
async def test_a_program_killed_in_the_middle_of_a_line(tmp_path: Path) -> None:
    job = Job(tmp_path, "os.write(2, b'almost'); os.write(1, b'half a li'); os.kill(os.getpid(), signal.SIGKILL)")
    result = await job.run()
    assert result.stderr == ("almost",)
    assert job.out.getvalue() == "[a:0] half a li\n"


@pytest.mark.asyncio
@pytest.mark.parametrize("others", [0, 30])
async def test_a_traceback_is_printed_again_only_when_much_came_after_it(tmp_path: Path, others: int) -> None:
    program = """
        def after(other):
            while not os.path.exists(f"{sys.argv[1]}/{other}"): time.sleep(0.01)
            time.sleep(0.3)  # the launcher has read by now what that one had printed
        if ME == "b:0":
            print("the trouble", file=sys.stderr, flush=True)
            note(ME)
            after("a:0")
            sys.exit(1)
        after("b:0")
        for number in range(OTHERS):
            print(number, flush=True)
        note(ME)
        time.sleep(60)
    """
    job = Job(tmp_path, program.replace("OTHERS", str(others)), ["a:0", "b:0"])
    await job.run()
    assert job.err.getvalue().count("the trouble") == 2, "as it came, and at the end"
    assert ("the last lines of its stderr" in job.err.getvalue()) == bool(others)


@pytest.mark.asyncio
async def test_the_tail_is_short(tmp_path: Path) -> None:
    job = Job(tmp_path, "[print(number, file=sys.stderr) for number in range(1000)]; print('z' * 100_000, file=sys.stderr); sys.exit(1)")
    result = await job.run()
    assert len(result.stderr) == TAIL_LINES
    assert all(len(line) <= 2000 for line in result.stderr)
    assert len(job.err.getvalue()) > 100_000


@pytest.mark.asyncio
async def test_a_prompt_is_seen_while_the_worker_waits(tmp_path: Path) -> None:
    job = Job(tmp_path, "os.write(1, b'password? '); note(ME); time.sleep(60)")
    running = asyncio.create_task(job.run())
    async with asyncio.timeout(20):
        while "[a:0] password? \n" not in job.out.getvalue():
            await asyncio.sleep(0.02)
    job.supervisor.stop(Stop("signal", signal.SIGTERM))
    await running


@pytest.mark.asyncio
async def test_without_prefix_and_with_colour(tmp_path: Path) -> None:
    job = Job(tmp_path, "print('plain')", prefix=False)
    assert (await job.run()).ok
    assert job.out.getvalue() == "plain\n"
    job = Job(tmp_path, "print('bright'); print('dull', file=sys.stderr)", colours=(True, False))
    assert (await job.run()).ok
    assert job.out.getvalue() == "\x1b[36m[a:0]\x1b[0m bright\n"
    assert job.err.getvalue() == "[a:0] dull\n"


@pytest.mark.asyncio
async def test_a_grandchild_that_holds_the_pipe(tmp_path: Path) -> None:
    program = """
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        note("child", child.pid)
        sys.exit(3 if ME == "a:0" else 0)
    """
    begun = time.monotonic()
    result = await Job(tmp_path, program, ["a:0"]).run()
    assert result.returncode == 3
    assert time.monotonic() - begun < 20
    assert not alive(pids_in(tmp_path, ["child"])[0])


@pytest.mark.asyncio
async def test_nobody_reads_the_output_and_the_job_is_stopped(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    stream = io.TextIOWrapper(os.fdopen(writer, "wb"), encoding="utf-8")
    job = Job(tmp_path, "note(ME); os.write(1, (b'x' * 99 + b'\\n') * 100_000); time.sleep(60)")
    job.supervisor._printer._sinks["out"] = Sink(stream, stream)
    running = asyncio.create_task(job.run())
    (pid,) = await asyncio.to_thread(pids_in, tmp_path, ["a:0"])
    await asyncio.sleep(0.2)
    job.supervisor.stop(Stop("signal", signal.SIGINT))
    while alive(pid):
        await asyncio.sleep(0.01)
    while not running.done():
        job.supervisor.stop(Stop("signal", signal.SIGINT))
        await asyncio.sleep(0.01)
    assert (await running).returncode == 130
    os.close(reader)  # lets the printer's thread go
    await job.supervisor._printer.close(None)
    stream.close()


@pytest.mark.asyncio
async def test_a_reader_that_went_away_does_not_end_the_job(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = io.TextIOWrapper(os.fdopen(writer, "wb"), encoding="utf-8")
    job = Job(tmp_path, "print('x', flush=True); time.sleep(0.2); note('done')")
    job.supervisor._printer._sinks["out"] = Sink(stream, stream)
    assert (await job.run()).ok
    assert (tmp_path / "done").exists()
    assert "aiorlinf: stdout could not be written any more, and what followed is lost: BrokenPipeError" in job.err.getvalue()
    stream.close()
