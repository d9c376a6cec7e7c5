"""`aiorlinf top`: the tables, and the command against a job that runs."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from aiorlinf import init
from aiorlinf.cli import main
from aiorlinf.errors import RendezvousError, UsageError
from aiorlinf.manager import client as manager_client
from aiorlinf.manager.protocol import WorkerRecord
from aiorlinf.observe.job import JobState, WorkerState
from aiorlinf.observe.manager import connect, find_access
from aiorlinf.observe.top import command
from aiorlinf.observe.top.plain import plain_lines
from aiorlinf.observe.top.rates import channel_figures, flows
from aiorlinf.observe.top.view import as_json, heading, sections
from tests.launch.programs import child_env, script, start_cli

__all__: list[str] = []


def record(address: str) -> WorkerRecord:
    facts = {"address": address, "incarnation": 1, "host": "10.0.0.1", "port": 1, "devices": [], "labels": {"host": "node"}}
    return WorkerRecord.from_dict({**facts, "host_id": "h", "pid": 4711, "unix": "", "process": ""})


def link(remote: str, sent: int, received: int, nbytes: int, **more: Any) -> dict[str, Any]:
    facts = {"remote": remote, "incarnation": 1, "state": "up", "backend": "shm", "reason": "", "device_backend": "", "pending_sends": 1}
    counts = {"messages_sent": sent, "messages_received": received, "bytes_sent": nbytes, "bytes_received": 0, "around_bytes_sent": 0}
    return {**facts, **counts, "unread_messages": 2, "unread_tags": [], "mismatches": 0, "reconnects": 0, **more}


def wait(peer: str, age: float) -> dict[str, Any]:
    facts = {"operation": "recv", "peer": peer, "tag": 1, "context": 0, "subject": "", "channel": "", "moving": False}
    return {**facts, "waits_for": [peer], "elapsed_s": age, "site": "/a/train.py:7"}


def channel() -> dict[str, Any]:
    of_each = {"waiting_gets": 1, "pending": 0, "queued": 0}
    consumers = [{"name": name, "items_per_second": float(taken), "taken": taken, **of_each} for name, taken in (("x", 9), ("y", 1))]
    keys = [{"key": key, "length": 2, "bytes": 9, "oldest_age_seconds": 3.0, "waiting_gets": 0} for key in ("a", None)]
    facts: dict[str, Any] = {"name": "traj", "worker": "channel.traj:0", "length": 4, "maxsize": 4, "held_bytes": 5_000_000, "ended": False}
    facts["policy"] = "shortest_queue"
    rates = {"puts_per_second": 12.0, "gets_per_second": 10.0, "waiting_puts": 3}
    producers = [{"name": "p", "state": "open"}, {"name": "q", "state": "lost"}]
    workers = {"producers": {"p": "a:0"}, "consumers": {"x": "b:0"}}
    return {
        **facts,
        **rates,
        "takes": {"x": ["a"], "y": None},
        "keys": keys,
        "consumers": consumers,
        "producers": producers,
        "workers": workers,
    }


def report(clock: float, links: list[Any], pending: list[Any], **more: Any) -> dict[str, Any]:
    totals = {"pending_total": len(pending), "links_total": len(links), "channels_total": 0}
    nothing: dict[str, list[Any]] = {"ended_links": [], "channels": [], "busy_at": []}
    return {"clock": clock, "links": links, "pending": pending, "loop_blocked": False, **nothing, **totals, **more}


def state(clock: float, messages: int) -> JobState:
    workers = [
        WorkerState(record("a:0"), report(clock, [link("b:0", messages, 1, messages * 1000)], [wait("b:0", 5.0)])),
        WorkerState(record("b:0"), report(clock, [link("a:0", 1, messages, 7)], [wait("a:0", 4.0)], channels=[channel()])),
        WorkerState(record("c:0"), None, "does not answer within 2 s"),
        WorkerState(record("d:0"), report(clock, [], [wait("c:0", 3.0)], loop_blocked=True, busy_at=["sim.py:3 in step"])),
    ]
    return JobState.of("10.0.0.1:4711", "j", workers)


def test_rates_are_of_the_time_between() -> None:
    found = {(flow.source, flow.target): flow for flow in flows(state(12.0, 300), state(10.0, 100))}
    assert set(found) == {("a:0", "b:0"), ("b:0", "a:0")}
    flow = found["a:0", "b:0"]
    assert (flow.messages_per_s, flow.bytes_per_s, flow.unread, flow.pending) == (100.0, 100_000.0, 2, 1)
    first = {(flow.source, flow.target): flow for flow in flows(state(12.0, 300), None)}
    assert first["a:0", "b:0"].messages_per_s is None


def test_balance_and_depth_of_a_channel() -> None:
    (figures,) = map(channel_figures, state(0.0, 1).channels())
    assert (figures.length, figures.maxsize, figures.oldest_s, figures.producers, figures.consumers) == (4, 4, 3.0, 1, 2)
    assert figures.balance == pytest.approx(5 / 9)


def test_plain_tables_show_who_waits_for_whom() -> None:
    now = state(12.0, 300)
    text = "\n".join(plain_lines(heading(now), sections(now, state(10.0, 100), 40)))
    assert text.startswith("job j at 10.0.0.1:4711, 4 workers, 1 do not answer, 1 with a blocked loop, 1 circle of workers")
    for part in (
        "a:0 -> b:0 -> a:0",
        "recv from b:0 tag 1",
        "does not answer within 2 s",
        "blocked at sim.py:3 in step",
        "c:0 (does not answer)",
    ):
        assert part in text, text
    for part in ("100 kB/s", "traj", "4/4", "5.0 MB", "56%", "train.py:7", "1 (3 wait)", "2 (2 wait)"):
        assert part in text, text
    lines = [line.split() for line in text.splitlines()]
    assert ["traj", "a", "2", "9", "B", "3.0", "s", "0", "x,", "y"] in lines
    assert ["traj", "x", "b:0", "90%", "9", "9.0", "0"] in lines


def test_what_is_unread_is_shown_with_its_tags() -> None:
    receiver = report(0.0, [link("b:0", 1, 1, 1, unread_tags=[3, 4])], [{**wait("b:0", 5.0), "tag": 0}])
    sender = report(0.0, [link("a:0", 1, 1, 1)], [])
    now = JobState.of("m", "j", [WorkerState(record("a:0"), receiver), WorkerState(record("b:0"), sender)])
    text = "\n".join(plain_lines("", sections(now, None, 10)))
    assert "2 (tags 3, 4)" in text
    assert "recv from b:0 tag 0, unread is tag 3, 4" in text
    (flow,) = (flow for flow in as_json(now, None)["links"] if flow["source"] == "b:0")
    assert flow["unread_tags"] == (3, 4)


def test_what_ended_links_carried_is_shown() -> None:
    ended = {"remote": "b:0", "links": 2, "messages_sent": 7, "bytes_sent": 2_000_000, "messages_received": 3, "bytes_received": 40}
    now = JobState.of("m", "j", [WorkerState(record("a:0"), report(0.0, [], [], ended_links=[ended]))])
    lines = [line.split() for line in plain_lines("", sections(now, None, 10))]
    assert ["a:0", "b:0", "2", "7", "2.0", "MB", "3", "40", "B"] in lines
    assert as_json(now, None)["ended_links"][0]["bytes_sent"] == 2_000_000


def test_a_large_job_is_cut_and_says_so() -> None:
    workers = [WorkerState(record(f"w:{index}"), report(0.0, [], [])) for index in range(50)]
    text = "\n".join(plain_lines("", sections(JobState.of("m", "j", workers), None, 10)))
    assert "and 40 more" in text


def test_json_has_all_of_it() -> None:
    told = json.loads(json.dumps(as_json(state(12.0, 300), state(10.0, 100))))
    assert [worker["address"] for worker in told["workers"]] == ["a:0", "b:0", "c:0", "d:0"]
    assert told["circles"][0]["path"] == ["a:0", "b:0"]
    assert told["channels"][0]["details"]["producers"][1]["state"] == "lost"


def test_circles_are_red_on_a_terminal() -> None:
    console = pytest.importorskip("rich.console")
    from aiorlinf.observe.top.screen import rendered

    now = state(12.0, 300)
    shown = console.Console(force_terminal=True, width=200, color_system="standard", record=True)
    with shown.capture() as captured:
        shown.print(rendered(heading(now), sections(now, None, 40)))
    assert "\x1b[1;31ma:0 -> b:0 -> a:0" in captured.get()


def test_no_manager_is_wrong_use(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiorlinf.observe.manager.jobs_here", dict)
    monkeypatch.delenv("AIORLINF_MANAGER", raising=False)
    assert main(["top", "--once"]) == 2
    assert "no manager" in capsys.readouterr().err
    assert main(["top", "--once", "--interval", "0"]) == 2
    assert main(["top", "--once", "--rows", "0"]) == 2


def test_which_job_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    def job(address: str, *workers: str) -> tuple[dict[str, str], list[str]]:
        return {"AIORLINF_MANAGER": address, "AIORLINF_TOKEN": f"of {address}"}, list(workers)

    jobs = {"m:1": job("m:1", "a:0"), "m:2": job("m:2", "channel.left:0")}
    monkeypatch.setattr("aiorlinf.observe.manager.jobs_here", lambda: jobs)
    for name in ("AIORLINF_MANAGER", "AIORLINF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    assert find_access(None, None) == {"AIORLINF_MANAGER": "m:1", "AIORLINF_TOKEN": "of m:1"}, "what has only channel workers is over"
    assert find_access("m:2", None)["AIORLINF_TOKEN"] == "of m:2"
    assert find_access("m:3", None) == {"AIORLINF_MANAGER": "m:3"}
    jobs["m:4"] = job("m:4", "b:0")
    with pytest.raises(UsageError, match=r"m:1 \(a:0\); m:4 \(b:0\)"):
        find_access(None, None)
    monkeypatch.setenv("AIORLINF_TOKEN", "own")
    monkeypatch.setenv("AIORLINF_MANAGER", "m:5")
    assert find_access(None, None) == {"AIORLINF_MANAGER": "m:5", "AIORLINF_TOKEN": "own"}
    with pytest.raises(UsageError, match="no worker of a job"):
        find_access(None, 1 << 30)


def test_against_a_worker_of_this_process(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with init("a:0", loop="thread") as comm:
        monkeypatch.setenv("AIORLINF_MANAGER", comm.manager_address)
        monkeypatch.setenv("AIORLINF_TOKEN", comm.token.decode())
        receiving = comm.recv("b:0", tag=9)
        assert main(["top", "--once", "--interval", "0.05"]) == 0
        assert "recv from b:0 tag 9" in capsys.readouterr().out
        assert main(["top", "--once", "--interval", "0.05", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["waits"][0]["targets"] == ["b:0"]
        monkeypatch.setenv("AIORLINF_TOKEN", "another")
        assert main(["top", "--once"]) == 1
        assert "token" in capsys.readouterr().err
        receiving.cancel()


def test_it_finds_the_job_that_runs_on_this_machine(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        """
        import aiorlinf
        with aiorlinf.init() as comm:
            print("joined", flush=True)
            comm.recv("b:0" if comm.address == "a:0" else "a:0", tag=5).wait()
        """,
    )
    job = start_cli("run", "--workers", "a=1,b=1", program, cwd=tmp_path)
    try:
        assert job.stdout is not None
        for _ in range(2):
            assert "joined" in job.stdout.readline()
        workers = subprocess.run(["ps", "-o", "pid=", "--ppid", str(job.pid)], capture_output=True, text=True, check=True).stdout.split()
        for pid in (workers[-1], str(job.pid)):
            line = [sys.executable, "-m", "aiorlinf", "top", "--once", "--interval", "1.1", "--pid", pid]
            found = subprocess.run(line, capture_output=True, text=True, timeout=30, check=False, env=child_env())
            assert found.returncode == 0, found.stderr
            assert "a:0 -> b:0 -> a:0" in found.stdout
    finally:
        job.terminate()
        job.communicate(timeout=20)


@pytest.mark.parametrize("once", [True, False])
def test_a_job_that_ends_meanwhile_is_no_error(once: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_AGAIN_S", 0.5)
    with init("a:0", loop="thread") as comm:
        access = {"AIORLINF_MANAGER": comm.manager_address, "AIORLINF_TOKEN": comm.token.decode()}
        monkeypatch.setattr(command, "find_access", lambda manager, pid: access)
        codes: list[int] = []
        options = ["--plain", "--interval", "0.5", *(["--once"] if once else [])]
        watching = threading.Thread(target=lambda: codes.append(main(["top", *options])))
        looked = threading.Event()
        really = manager_client.ManagerClient.inspect

        async def inspect(*args: Any) -> Any:
            answer = await really(*args)
            looked.set()
            return answer

        monkeypatch.setattr(manager_client.ManagerClient, "inspect", inspect)
        watching.start()
        assert looked.wait(20)
    watching.join(20)
    shown = capsys.readouterr()
    assert codes == [0], shown.err
    assert "a:0" in shown.out
    assert shown.err.splitlines()[-1] == "aiorlinf top: the job has ended"


def test_a_command_that_reaches_no_manager_has_no_name(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiorlinf.manager.dial._SILENCE_S", 0.05)
    with socket.socket() as idle:
        idle.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{idle.getsockname()[1]}"
        with pytest.raises(RendezvousError, match="as given or from AIORLINF_MANAGER"):
            asyncio.run(connect({"AIORLINF_MANAGER": where, "AIORLINF_TOKEN": "t"}, limit=0.3))
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == ["the manager is not reached yet"]
