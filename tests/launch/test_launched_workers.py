"""What workers of `aiorlinf run` get of its signals: an orderly end, and a dump; and their traces."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest

from aiorlinf.cli import main
from aiorlinf.link.launched import Terminated, ending, heed_launcher
from aiorlinf.rendezvous.settings import LAUNCHER_ENV
from tests.launch.programs import cli, pids_in, script, start_cli

__all__: list[str] = []

PROGRAM = """
    if ME == "deaf:0":
        note(ME)
        time.sleep(60)
    import asyncio, aiorlinf, uvloop

    def own_handler(number, frame):
        print(ME, "has a handler of its own", flush=True)
        os._exit(0)

    async def waits():
        async with aiorlinf.init() as comm:
            try:
                waiting = comm.recv("deaf:0", tag=5)
                note(ME)
                await waiting
            finally:
                print(ME, "cleans up", flush=True)

    if ME == "loop:0":
        asyncio.run(waits())
    elif ME == "uvloop:0":
        uvloop.run(waits())
    else:
        if ME == "own:0":
            signal.signal(signal.SIGTERM, own_handler)
        with aiorlinf.init() as comm:
            try:
                waiting = comm.recv("deaf:0", tag=5)
                note(ME)
                waiting.wait()
            finally:
                print(ME, "cleans up", flush=True)
"""
WORKERS = ["deaf:0", "loop:0", "own:0", "plain:0", "uvloop:0"]


def test_a_dump_for_sigusr1_and_an_orderly_end_for_sigterm(tmp_path: Path) -> None:
    script(tmp_path, PROGRAM)
    counts = ",".join(name.replace(":0", "=1") for name in WORKERS)
    with start_cli("run", "--workers", counts, "--grace", "20", "worker.py", tmp_path, cwd=tmp_path) as running:
        pids_in(tmp_path, WORKERS)
        os.kill(running.pid, signal.SIGUSR1)
        assert running.stderr is not None
        seen = ""
        while seen.count("recv <- deaf:0, tag 5") < 4 or "SIGUSR1" not in seen:
            line = running.stderr.readline()
            assert line, seen
            seen += line
        assert "SIGUSR1: passed on to loop:0, own:0, plain:0, uvloop:0; not to deaf:0, which do not listen for it" in seen
        assert running.poll() is None, "nobody has ended of it"
        os.kill(running.pid, signal.SIGTERM)
        out, err = running.communicate(timeout=40)
    for worker in ("loop:0", "plain:0", "uvloop:0"):
        assert f"{worker} cleans up" in out, err
    assert "own:0 has a handler of its own" in out
    assert "Traceback" not in err
    assert "killed" not in err
    assert running.returncode == 128 + signal.SIGTERM


def test_traces_of_all_workers_become_one_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script(
        tmp_path,
        """
        import aiorlinf
        with aiorlinf.init() as comm:
            if ME == "a:0":
                comm.send({"x": 1}, "b:0").wait()
                comm.recv("b:0").wait()
            else:
                comm.recv("a:0").wait()
                comm.send("done", "a:0").wait()
        """,
    )
    run = cli("run", "--workers", "a=1,b=1", "--trace", "traces", "worker.py", tmp_path, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    traces, merged = tmp_path / "traces", tmp_path / "all.json"
    assert sorted(file.name for file in traces.iterdir()) == ["a-0.1.json", "b-0.1.json"]
    (traces / "a-0.1.json.part").write_text("of a file that is finished")
    assert main(["trace", "merge", str(traces), "-o", str(merged)]) == 0
    assert "a:0#1 (process " in capsys.readouterr().out
    ends = [event["id"] for event in json.loads(merged.read_text())["traceEvents"] if event["ph"] in "sf"]
    assert (len(ends), len(set(ends))) == (4, 2), "two messages, and each arrow has two ends"
    assert main(["trace", "merge", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_only_children_of_the_launcher_listen_and_only_in_their_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiorlinf.link.launched._ending", False)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        for number in before:
            signal.signal(number, signal.SIG_DFL)
        heed_launcher()
        monkeypatch.setenv(LAUNCHER_ENV, str(os.getpid()))
        heed_launcher()
        monkeypatch.setenv(LAUNCHER_ENV, str(os.getppid()))
        elsewhere = threading.Thread(target=heed_launcher)
        elsewhere.start()
        elsewhere.join()
        assert all(signal.getsignal(number) is signal.SIG_DFL for number in before)
        heed_launcher()
        handler = signal.getsignal(signal.SIGTERM)
        assert callable(handler)
        assert callable(signal.getsignal(signal.SIGUSR1))
        with pytest.raises(Terminated) as caught:
            handler(signal.SIGTERM, None)
        assert caught.value.code == 143
        assert ending()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "the second one means it"
    finally:
        for number, old in before.items():
            signal.signal(number, old)
