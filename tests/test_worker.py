"""A worker's life: the ways to make one, what it is told by the environment, and every way to end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from aiorlinf import Worker, init
from aiorlinf.config import JobConfig
from aiorlinf.errors import (
    AuthenticationError,
    ClosedError,
    ConfigError,
    DeadlineExceeded,
    ForkedHandle,
    PeerLeft,
    PeerLost,
    RendezvousError,
    UsageError,
)
from aiorlinf.work.base import AsyncWork
from tests.manager.support import TOKEN, config_with, manager

__all__: list[str] = []

ROOT = Path(__file__).resolve().parent.parent
VARIABLES = ("AIORLINF_ADDRESS", "AIORLINF_MANAGER", "AIORLINF_TOKEN", "RANK")


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a job that these tests may run in."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def program(source: str, *, warnings: str = "error", **options: Any) -> subprocess.Popen[str]:
    """A program of a user."""
    return subprocess.Popen(
        [sys.executable, "-W", warnings, "-c", source],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def outcome(running: subprocess.Popen[str], limit: float = 40.0) -> tuple[int, str, str]:
    """Exit status, output, errors; within a time limit."""
    with running:
        try:
            output, errors = running.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            running.kill()
            raise
        return running.returncode, output, errors


# ---- ways to make one


@pytest.mark.asyncio
async def test_async_with_awaiting_and_plain_use() -> None:
    async with init("a:0") as a:
        b = await init("b:0")
        assert isinstance(b, Worker)
        assert (a.incarnation, b.incarnation, a.job == b.job) == (1, 1, True)
        c = init("c:0")
        assert repr(c) == "<Worker c:0 joining>"
        sent = c.send("used before it had joined", "a:0")
        assert await a.recv("c:0", timeout=20) == "used before it had joined"
        await sent
        assert repr(c) == "<Worker c:0 #1, 1 links>"
        await asyncio.gather(b.close(), c.close())
        assert repr(b) == "<Worker b:0 closed>"


def test_in_synchronous_code() -> None:
    with init("a:0") as a, init("b:0") as b:
        assert a.incarnation == 1, "it has joined when init returns"
        sent = a.send({"x": 1}, "b:0")
        assert b.recv("a:0", async_op=False, timeout=20) == {"x": 1}
        assert sent.wait(20) is None
        assert b.send(2, "a:0", async_op=False) is None
        assert a.recv("b:0").wait(20) == 2
    c = init("c:0")
    c.close().wait(20)


@pytest.mark.asyncio
async def test_a_thread_of_its_own_in_a_coroutine() -> None:
    a = init("a:0", loop="thread")
    async with a, init("b:0") as b:
        assert a.home.loop is not b.home.loop
        sent = a.send(1, "b:0")
        assert await b.recv("a:0", timeout=20) == 1
        await sent


@pytest.mark.asyncio
async def test_facts_are_there_once_it_has_joined() -> None:
    worker = init("a:0", labels={"zone": "7"})
    for name in ("incarnation", "config", "job", "token", "manager_address"):
        with pytest.raises(UsageError, match="a:0 has not joined yet"):
            getattr(worker, name)
    with pytest.raises(UsageError):
        worker.env("b:0")
    await worker
    assert worker.config == JobConfig()
    assert worker.manager_address.startswith("127.0.0.1:")
    assert worker.stats().address == "a:0"
    await worker.close()


def test_several_event_loops_in_turn() -> None:
    async def main(turn: int) -> int:
        async with init("a:0") as a, init("b:0") as b:
            sent = a.send(turn, "b:0")
            got: int = await b.recv("a:0", timeout=20)
            await sent
            return got

    assert [asyncio.run(main(turn)) for turn in range(4)] == [0, 1, 2, 3]


@pytest.mark.asyncio
async def test_two_jobs_with_the_same_names_do_not_meet() -> None:
    async with manager() as first, manager() as second:
        pairs = [[await init(name, manager=service.address, token=TOKEN) for name in ("a:0", "b:0")] for service in (first, second)]
        works = [a.send(number, "b:0") for number, (a, _) in enumerate(pairs)]
        assert [await b.recv("a:0", timeout=20) for _, b in pairs] == [0, 1]
        await asyncio.gather(*works)
        assert pairs[0][0].job != pairs[1][0].job
        for a, b in pairs:
            await asyncio.gather(a.close(), b.close())


# ---- what the environment says


@pytest.mark.asyncio
async def test_an_environment_made_by_env_is_all_that_a_child_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    async with init("a:0") as a:
        environment = a.env("b:3")
        assert sorted(environment) == ["AIORLINF_ADDRESS", "AIORLINF_MANAGER", "AIORLINF_TOKEN"]
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        async with init() as b:
            assert (b.address, b.job) == ("b:3", a.job)
        async with init("c:0") as c:
            assert (c.address, c.job) == ("c:0", a.job)
        with pytest.raises(UsageError, match="not a worker address"):
            a.env("b")


@pytest.mark.asyncio
@pytest.mark.parametrize("token", [b"\xff\xfe binary", "umlaut \u00e4"])
async def test_any_token_survives_the_environment(token: bytes | str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with init("a:0", token=token) as a:
        for name, value in a.env("b:0").items():
            monkeypatch.setenv(name, value)
        async with init() as b:
            await b.send("there", "a:0")
            assert await a.recv("b:0", timeout=20) == "there"


@pytest.mark.asyncio
async def test_torchruns_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    async with init() as worker:
        assert worker.address == "worker:5"
    monkeypatch.setenv("AIORLINF_ADDRESS", "a:1")
    async with init() as worker:
        assert worker.address == "a:1"
    async with init("b:2") as worker:
        assert worker.address == "b:2"


@pytest.mark.asyncio
async def test_the_configuration_comes_from_the_manager() -> None:
    config = config_with(close_timeout_s=3.25)
    async with manager(config=config) as service, init("a:0", manager=service.address, token=TOKEN) as worker:
        assert worker.config == config
    async with init("a:0", config={"cluster": {"collective": {"inline_max_bytes": 77}}}) as worker:
        assert worker.config.cluster.collective.inline_max_bytes == 77
        assert worker._exchange.config.inline_max_bytes == 77


# ---- errors of joining


def test_errors_at_the_call() -> None:
    with pytest.raises(UsageError, match="AIORLINF_ADDRESS"):
        init()
    with pytest.raises(UsageError, match="not a worker address"):
        init("a")
    with pytest.raises(ConfigError, match=r"cluster\.colective"):
        init("a:0", config={"cluster": {"colective": {}}})


@pytest.mark.asyncio
@pytest.mark.parametrize("style", ["await", "async with", "operation"])
async def test_an_error_of_joining_reaches_whoever_looks(style: str) -> None:
    async with manager() as service:
        worker = init("a:0", manager=service.address, token=b"another")
        with pytest.raises(AuthenticationError):
            if style == "await":
                await worker
            elif style == "async with":
                async with worker:
                    raise AssertionError("it has not joined")
            else:
                await worker.send(1, "b:0")
        await worker.close()


def test_an_error_of_joining_is_raised_by_init_in_synchronous_code() -> None:
    with pytest.raises(RendezvousError):
        init("a:0", manager="127.0.0.1:1", token="t", config={"cluster": {"network": {"rendezvous_timeout_s": 0.2}}})
    with init("a:0") as worker:
        assert worker.incarnation == 1


@pytest.mark.asyncio
async def test_an_address_that_is_taken() -> None:
    async with init("a:0"):
        with pytest.raises(RendezvousError, match="a:0"):
            await init("a:0")


@pytest.mark.asyncio
async def test_joining_can_be_given_up() -> None:
    async with manager() as service:
        worker = init("a:0", manager=service.address, token=TOKEN)
        waiting = worker.recv("b:0")
        closing = worker.close()
        with pytest.raises(ClosedError):
            await waiting
        await closing
        async with init("a:0", manager=service.address, token=TOKEN) as again:
            assert again.incarnation == 1 or again.incarnation == 2


# ---- the end


@pytest.mark.asyncio
@pytest.mark.parametrize("late", [0, 1, 2])
async def test_who_is_cancelled_in_the_turn_of_joining_leaves_no_worker_that_nobody_holds(late: int) -> None:
    async with manager() as service:
        made: list[Worker] = []

        async def start() -> Worker:
            made.append(init("a:0", manager=service.address, token=TOKEN))
            return await made[0]

        task = asyncio.create_task(start())
        while not made or made[0]._self is None:
            await asyncio.sleep(0)
        for _ in range(late):
            await asyncio.sleep(0)
        task.cancel()
        try:
            worker = await task
        except asyncio.CancelledError:
            worker = made[0]
            assert worker._closing is not None
        await worker.close()
        async with init("a:0", manager=service.address, token=TOKEN) as again:
            assert again.incarnation == 2


@pytest.mark.asyncio
async def test_what_was_sent_before_closing_arrives() -> None:
    async with init("a:0") as a:
        b = await init("b:0")
        works: list[AsyncWork[None]] = [b.send(number if number % 10 else torch.full((30_000,), number), "a:0") for number in range(100)]
        await b.close()
        for number in range(100):
            got = await a.recv("b:0")
            assert int(got[0] if isinstance(got, torch.Tensor) else got) == number
        await asyncio.gather(*works)
        with pytest.raises(PeerLeft):
            await a.recv("b:0")


@pytest.mark.asyncio
async def test_what_cannot_be_delivered_is_said_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with init("a:0") as a:
        b = await init("b:0")
        large = b.send_tensor(torch.ones(1_000_000), "a:0")
        nobody = b.send({"to": "nobody"}, "c:0")
        while not a._table.links():
            await asyncio.sleep(0.002)
        await b.close(timeout=0.1)
        for work in (large, nobody):
            with pytest.raises((ClosedError, PeerLeft)):
                await work
    lines = [record.getMessage() for record in caplog.records if "closed before it could deliver" in record.getMessage()]
    assert any(line.startswith("b:0 closed before it could deliver 1 message (4000000 bytes) to a:0") for line in lines), lines
    assert any(line.endswith("to c:0") for line in lines), lines


@pytest.mark.asyncio
async def test_closing_fails_what_is_pending_and_refuses_what_is_new() -> None:
    async with init("a:0") as a, init("b:0"):
        waiting = [a.recv("b:0"), a.inbox(tag=4).recv(), a.recv_tensor(torch.zeros(3), "b:0", tag=1)]
        await asyncio.sleep(0.02)
        closing = a.close()
        for work in waiting:
            with pytest.raises(ClosedError):
                await work
        with pytest.raises(ClosedError):
            a.send(1, "b:0")
        await closing
        await a.close()


@pytest.mark.asyncio
async def test_cancelling_stops_the_waiting_and_not_the_closing() -> None:
    a, b = await init("a:0"), await init("b:0")
    nobody = a.send(1, "c:0")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(a.close(timeout=0.3), 0.05)
    assert not a.close().cancel()
    await a.close()
    with pytest.raises(ClosedError):
        await nobody
    await asyncio.gather(b.close(), b.close())


def test_closing_twice_in_synchronous_code() -> None:
    worker = init("a:0")
    worker.close().wait(20)
    worker.close().wait(20)
    with worker:
        pass
    with pytest.raises(ClosedError):
        worker.recv("b:0")


@pytest.mark.asyncio
async def test_closing_is_quick_when_nothing_is_left() -> None:
    a, b = await init("a:0"), await init("b:0")
    await asyncio.gather(a.send(1, "b:0"), b.recv("a:0"))
    a.send(2, "never:0").cancel()
    begin = time.monotonic()
    await a.close(timeout=30)
    assert time.monotonic() - begin < 10
    await b.close()


@pytest.mark.asyncio
async def test_both_may_close_at_the_same_moment(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(10):
        a, b = await init("a:0"), await init("b:0")
        await asyncio.gather(a.send(1, "b:0"), b.recv("a:0"))
        works = [a.send(torch.ones(100_000), "b:0"), b.send(torch.ones(100_000), "a:0")]
        await asyncio.gather(a.close(), b.close())
        await asyncio.gather(*works, return_exceptions=True)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


# ---- programs


@pytest.fixture
def job() -> Iterator[Worker]:
    """A worker in a thread, whose job programs join."""
    with init("a:0") as worker:
        yield worker


SYNCHRONOUS = "import aiorlinf, sys\nb = aiorlinf.init('b:0')\n"
IN_A_LOOP = "import aiorlinf, asyncio, sys\nasync def main():\n    b = await aiorlinf.init('b:0')\n"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "source",
    [
        SYNCHRONOUS + "print('end')\nsys.exit(0)\n",
        SYNCHRONOUS + "work = b.recv('a:0')\nprint('end')\n",
        IN_A_LOOP + "    work = b.recv('a:0')\n    await asyncio.sleep(0.1)\n    print('end')\nasyncio.run(main())\n",
    ],
    ids=["thread", "thread, receiving", "loop, receiving"],
)
def test_an_exit_without_closing_is_prompt_and_the_peer_hears_of_it(job: Worker, source: str) -> None:
    quiet = {**os.environ, "PYTHONASYNCIODEBUG": "", "PYTHONWARNINGS": ""}  # asyncio warns of its own of what is not closed
    status, output, errors = outcome(program(source, warnings="default", env={**quiet, **job.env("b:0")}))
    assert (status, output) == (0, "end\n"), errors
    assert "Traceback" not in errors
    with pytest.raises((PeerLost, PeerLeft, DeadlineExceeded)):
        job.send(1, "b:0", timeout=1).wait(20)
    with init("b:0") as again:
        assert again.incarnation == 2


@pytest.mark.parametrize("style", ["thread", "loop"])
def test_ctrl_c_while_receiving(job: Worker, style: str) -> None:
    sources = {
        "thread": "import aiorlinf\nwith aiorlinf.init('b:0') as b:\n    print('ready', flush=True)\n    b.recv('a:0').wait()\n",
        "loop": "import aiorlinf, asyncio\nasync def main():\n    async with aiorlinf.init('b:0') as b:\n"
        "        print('ready', flush=True)\n        await b.recv('a:0')\nasyncio.run(main())\n",
    }
    running = program(sources[style], env={**os.environ, **job.env("b:0")})
    assert running.stdout is not None
    assert running.stdout.readline() == "ready\n"
    time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    begin = time.monotonic()
    status, _, errors = outcome(running)
    assert time.monotonic() - begin < 20
    assert status in (-signal.SIGINT, 130, 1)
    assert "KeyboardInterrupt" in errors
    assert "was never" not in errors
    with init("b:0") as again:
        assert again.incarnation == 2


FORKING = """
import json, os, sys
import torch
import aiorlinf
from aiorlinf.errors import ForkedHandle

with aiorlinf.init("a:0") as a, aiorlinf.init("b:0") as b:
    tensor = torch.arange(16_000_000, dtype=torch.float32)
    sent = a.send(tensor, "b:0")
    group = a.collective.create_collective_group(["a:0", "b:0"])
    received = b.recv("a:0")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        outcomes = []
        calls = [
            lambda: a.send(1, "b:0"),
            lambda: b.recv("a:0"),
            lambda: group.send_tensor(torch.ones(1)),
            lambda: group.recv_tensor(torch.ones(1)),
            lambda: a.inbox(),
            lambda: sent.wait(1),
            lambda: a.close().wait(1),
        ]
        for call in calls:
            try:
                call()
                outcomes.append("nothing")
            except BaseException as error:
                outcomes.append(type(error).__name__)
        os.write(write, json.dumps(outcomes).encode())
        os._exit(0)
    os.waitpid(child, 0)
    print(os.read(read, 10000).decode())
    print(torch.equal(received.wait(30), tensor), sent.wait(30))
    b.send("goes on", "a:0").wait(20)
    print(a.recv("b:0").wait(20))
"""


def test_a_fork_during_a_large_send_has_no_handles_and_does_no_harm() -> None:
    status, output, errors = outcome(program(FORKING))
    assert status == 0, errors
    in_the_child, whole, after = output.splitlines()
    assert set(json.loads(in_the_child)) <= {ForkedHandle.__name__}, in_the_child
    assert whole == "True None"
    assert after == "goes on"
