from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import uvloop

from aiorlinf.errors import ConfigError, DeadlineExceeded, UsageError, WouldBlockLoop
from aiorlinf.launch import WorkerFailed, launch, launch_async
from tests.launch.programs import alive, child_env, pids_in, script

JOIN = """
    import asyncio, json
    from aiorlinf.manager.client import ManagerClient

    async def main():
        token = os.environ["AIORLINF_TOKEN"].encode()
        client = await ManagerClient.connect(os.environ["AIORLINF_MANAGER"], token, worker=ME)
        registration = await client.register(ME, port=1)
        peer = await client.lookup("b:0" if ME == "a:0" else "a:0")
        print(json.dumps([str(registration.identity), sorted(registration.expected), peer.address,
                          registration.config.cluster.collective.window_bytes]), flush=True)
        while not os.path.exists(sys.argv[1] + "/seen"):
            if ME == "a:0": note("seen")
            await asyncio.sleep(0.01)
        await client.close()

    asyncio.run(main())
"""


def test_workers_find_each_other_through_the_manager(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"cluster": {"collective": {"window_bytes": 12345}}}
    result = launch(script(tmp_path, JOIN), {"a": 1, "b": 1}, args=[str(tmp_path)], config=config)
    out, err = capsys.readouterr()
    assert result.ok, err
    assert sorted(out.splitlines()) == [
        '[a:0] ["a:0#1", ["a:0", "b:0"], "b:0", 12345]',
        '[b:0] ["b:0#1", ["a:0", "b:0"], "a:0", 12345]',
    ]


ENVIRONMENT = """
    names = ["MINE", "OMP_NUM_THREADS", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "AIORLINF_ADDRESS", "AIORLINF_WORKERS"]
    print(*(f"{name}={os.environ.get(name)}" for name in names), sys.argv[2:])
"""


def test_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("PYTHONFAULTHANDLER", raising=False)
    program = script(tmp_path, ENVIRONMENT)
    many = len(os.sched_getaffinity(0)) * 2
    assert launch(program, {"a": many}, args=[tmp_path, "--help", "--"], env={"MINE": "x y"}).ok
    lines = capsys.readouterr().out.splitlines()
    rest = f"PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 AIORLINF_ADDRESS=a:0 AIORLINF_WORKERS=a={many} ['--help', '--']"
    assert f"[a:0] MINE=x y OMP_NUM_THREADS=1 {rest}" in lines
    assert launch(program, "a=1", args=[tmp_path]).ok
    assert "OMP_NUM_THREADS=None" in capsys.readouterr().out
    monkeypatch.setenv("PYTHONFAULTHANDLER", "0")
    assert launch(program, "a=2", args=[tmp_path], env={"OMP_NUM_THREADS": "7"}, prefix=False).ok
    out = capsys.readouterr().out
    assert out.count("OMP_NUM_THREADS=7 PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=0") == 2
    assert "[a:0]" not in out


def test_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = script(tmp_path, "raise ValueError('no good')")
    result = launch(program, "a=1")
    assert (result.failed, result.returncode, result.returncodes) == ("a:0", 1, {"a:0": 1})
    with pytest.raises(WorkerFailed, match=r"worker a:0 failed with exit code 1: ValueError: no good") as caught:
        launch(program, "a=1", check=True)
    assert caught.value.stderr[-1] == "ValueError: no good"
    assert "    ValueError: no good" in capsys.readouterr().err


def test_time_limit(tmp_path: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="launch: the job did not end in time"):
        launch(script(tmp_path, "time.sleep(60)"), "a=2", timeout=0.2)
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": "a"}, "is not a pair"),
        ({"args": "--steps 3"}, "args is one text"),
        ({"grace": -1}, "grace is -1"),
        ({"grace": None}, "grace is None"),
        ({"timeout": float("nan")}, "timeout is nan"),
        ({"timeout": "3"}, "timeout is '3'"),
        ({"env": {"AIORLINF_TOKEN": "x"}}, "is set by the launcher"),
        ({"target": "nowhere.py"}, "no script"),
    ],
)
def test_wrong_use_starts_nothing(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    usual: dict[str, Any] = {"target": script(tmp_path, "note('started')"), "workers": "a=1", "args": [str(tmp_path)]}
    with pytest.raises(UsageError, match=said):
        launch(**{**usual, **options})
    assert not (tmp_path / "started").exists()


def test_wrong_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.colective"):
        launch(script(tmp_path, "pass"), "a=1", config={"cluster": {"colective": {}}})


def test_from_a_thread(tmp_path: Path) -> None:
    results = []
    thread = threading.Thread(target=lambda: results.append(launch(script(tmp_path, "pass"), "a=2")))
    thread.start()
    thread.join()
    assert results[0].ok


def test_whatever_loop_policy_somebody_has_set(tmp_path: Path) -> None:
    code = f"import uvloop; uvloop.install(); import aiorlinf.launch; print(aiorlinf.launch({str(script(tmp_path, 'pass'))!r}, 'a=1').ok)"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=child_env(), capture_output=True, text=True, check=False, timeout=30
    )
    assert run.stdout == "True\n", run.stderr


def test_ctrl_c(tmp_path: Path) -> None:
    worker = script(tmp_path, "note(ME); time.sleep(60)")
    program = tmp_path / "program.py"
    program.write_text(
        f"""
import aiorlinf.launch
try:
    aiorlinf.launch({str(worker)!r}, "a=2", args=[{str(tmp_path)!r}])
except KeyboardInterrupt:
    print("interrupted")
"""
    )
    with subprocess.Popen([sys.executable, str(program)], env=child_env(), stdout=subprocess.PIPE, text=True) as running:
        pids = pids_in(tmp_path, ["a:0", "a:1"])
        running.send_signal(signal.SIGINT)
        assert running.communicate(timeout=20)[0] == "interrupted\n"
    assert not any(alive(pid) for pid in pids)


class TestInsideALoop:
    @pytest.mark.asyncio
    async def test_the_blocking_one_refuses(self, tmp_path: Path) -> None:
        with pytest.raises(WouldBlockLoop, match=r"hint: use: result = await aiorlinf\.launch_async"):
            launch(script(tmp_path, "pass"), "a=1")

    @pytest.mark.asyncio
    async def test_the_other_leaves_the_loop_free(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        job = asyncio.create_task(launch_async(script(tmp_path, "note(ME); time.sleep(0.2); print('done')"), "a=2", args=[tmp_path]))
        turns = 0
        while not job.done():
            await asyncio.sleep(0.01)
            turns += 1
        assert (await job).ok
        assert turns > 10
        assert sorted(capsys.readouterr().out.splitlines()) == ["[a:0] done", "[a:1] done"]

    @pytest.mark.asyncio
    async def test_a_busy_loop_does_not_stop_the_job(self, tmp_path: Path) -> None:
        job = asyncio.create_task(launch_async(script(tmp_path, "note('up'); print('x' * 500_000); note('done')"), "a=1", args=[tmp_path]))
        await asyncio.to_thread(pids_in, tmp_path, ["up"])
        pids_in(tmp_path, ["done"])  # blocks the loop until the worker got rid of its output
        assert (await job).ok

    def test_on_uvloop(self, tmp_path: Path) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            assert runner.run(launch_async(script(tmp_path, "pass"), "a=2")).ok

    @pytest.mark.asyncio
    async def test_cancelling(self, tmp_path: Path) -> None:
        job = asyncio.create_task(launch_async(script(tmp_path, "note(ME); time.sleep(60)"), "a=2", args=[tmp_path]))
        pids = await asyncio.to_thread(pids_in, tmp_path, ["a:0", "a:1"])
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        assert not any(alive(pid) for pid in pids)

    @pytest.mark.asyncio
    async def test_cancelling_twice(self, tmp_path: Path) -> None:
        text = "signal.signal(signal.SIGTERM, signal.SIG_IGN); note(ME); time.sleep(60)"
        job = asyncio.create_task(launch_async(script(tmp_path, text), "a=1", args=[tmp_path], grace=60.0))
        pids = await asyncio.to_thread(pids_in, tmp_path, ["a:0"])
        job.cancel()
        await asyncio.sleep(0.1)
        assert not job.done()
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        assert not any(alive(pid) for pid in pids)

    @pytest.mark.asyncio
    @pytest.mark.parametrize("delay", [0.0, 0.001, 0.01, 0.05])
    async def test_cancelled_early(self, tmp_path: Path, delay: float) -> None:
        job = asyncio.create_task(launch_async(script(tmp_path, "time.sleep(60)"), "a=2"))
        await asyncio.sleep(delay)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job

    @pytest.mark.asyncio
    async def test_errors_arrive(self, tmp_path: Path) -> None:
        with pytest.raises(DeadlineExceeded):
            await launch_async(script(tmp_path, "time.sleep(60)"), "a=1", timeout=0.1)
        with pytest.raises(WorkerFailed):
            await launch_async(script(tmp_path, "sys.exit(3)"), "a=1", check=True)

    def test_a_coroutine_that_is_closed_ends_its_job(self, tmp_path: Path) -> None:
        coroutine = launch_async(script(tmp_path, "note(ME); time.sleep(60)"), "a=1", args=[tmp_path])
        loop = asyncio.new_event_loop()
        task = loop.create_task(asyncio.sleep(0))

        async def begin() -> None:
            coroutine.send(None)

        loop.run_until_complete(begin())
        (pid,) = pids_in(tmp_path, ["a:0"])
        coroutine.close()
        loop.run_until_complete(task)
        loop.close()
        end = time.monotonic() + 20
        while alive(pid):
            assert time.monotonic() < end
            time.sleep(0.01)
