"""The state of a whole job: everybody answers, but for who is frozen, and what they say shows who waits for whom."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable

import pytest

from aiorlinf import Worker, init
from aiorlinf.manager.client import ManagerClient
from aiorlinf.observe.job import JobState, WorkerState, ask_job
from aiorlinf.observe.waiting import Wait
from tests.observe.job_roles import blocks, waits_for
from tests.peers import worker

__all__: list[str] = []


@contextlib.asynccontextmanager
async def tool(comm: Worker) -> AsyncIterator[ManagerClient]:
    """A connection as `aiorlinf top` has it."""
    client = await ManagerClient.connect(comm.manager_address, comm.token)
    try:
        yield client
    finally:
        await client.close()


async def look(client: ManagerClient, until: Callable[[JobState], bool], timeout: float = 5.0) -> JobState:
    """Ask until it holds."""
    for _ in range(200):
        state = await ask_job(client, timeout)
        if until(state):
            return state
        await asyncio.sleep(0.02)
    raise AssertionError("it never came")


def of(state: JobState, name: str) -> WorkerState:
    return next(worker for worker in state.workers if worker.name == name)


@pytest.mark.asyncio
async def test_everybody_tells_what_it_does() -> None:
    async with init("a:0") as a, init("b:0") as b, tool(a) as client:
        await a.send("hello", "b:0")
        assert await b.recv("a:0") == "hello"
        receiving = a.recv("b:0", tag=3)
        state = await ask_job(client)
        assert [(each.name, each.problem) for each in state.workers] == [("a:0", None), ("b:0", None)]
        report = of(state, "a:0").report
        assert report is not None
        assert not report["loop_blocked"]
        (link,) = report["links"]
        assert (link["remote"], link["state"], link["messages_sent"]) == ("b:0", "up", 1)
        (operation,) = report["pending"]
        assert (operation["operation"], operation["peer"], operation["tag"]) == ("recv", "b:0", 3)
        assert __file__ in operation["site"]
        assert [(wait.worker, wait.targets, wait.text) for wait in state.waits] == [("a:0", ("b:0",), "recv from b:0 tag 3")]
        assert state.circles == ()
        receiving.cancel()


@pytest.mark.asyncio
async def test_a_message_under_another_tag_is_told() -> None:
    async with init("a:0") as a, init("b:0") as b, tool(a) as client:
        await a.send("hello", "b:0", tag=3)
        receiving = b.recv("a:0")
        of_no_interest = a.broadcast("has tags of its own", root="a:0", members=["a:0", "b:0"])
        async with asyncio.timeout(10):
            while (
                sum(link.stats().unread_messages for link in b._table.links()) < 2
            ):  # also of a collective that has not been called here yet
                await asyncio.sleep(0.01)
        state = await look(client, lambda state: bool((report := of(state, "b:0").report) and report["links"][0]["unread_tags"]))
        assert [wait.text for wait in state.waits if wait.worker == "b:0"] == ["recv from a:0 tag 0, unread is tag 3"]
        report = of(state, "b:0").report
        assert report is not None
        assert report["links"][0]["unread_tags"] == [3]
        receiving.cancel()
        await b.recv("a:0", tag=3)
        await b.broadcast(root="a:0", members=["a:0", "b:0"])
        await of_no_interest


@pytest.mark.asyncio
async def test_two_that_wait_for_each_other_are_a_circle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiorlinf.observe.job._MIN_AGE_S", 0.0)
    async with init("a:0") as a, tool(a) as client, worker(a, "b:0", waits_for, "a:0", 2), worker(a, "c:0", waits_for, "a:0", 1):
        receiving = a.recv("b:0", tag=1)
        state = await look(client, lambda state: bool(state.circles) and len(state.waits) == 3)
        (circle,) = state.circles
        assert circle.path == ("a:0", "b:0")
        assert [wait.text for wait in circle.waits] == ["recv from b:0 tag 1", "recv from a:0 tag 2"]
        await a.send("wakes it", "b:0", tag=2)
        await look(client, lambda state: not state.circles)
        receiving.cancel()


@pytest.mark.asyncio
async def test_a_blocked_loop_answers_and_a_frozen_process_does_not() -> None:
    async with (
        init("a:0") as a,
        tool(a) as client,
        worker(a, "b:0", blocks, 20.0) as blocked,
        worker(a, "c:0", waits_for, "a:0", 0) as frozen,
    ):
        await a.recv("b:0")
        await a.send("hello", "c:0", tag=7)
        state = await look(client, lambda state: bool((report := of(state, "b:0").report) and report["loop_blocked"]))
        report = of(state, "b:0").report
        assert report is not None
        assert any("hold_the_loop_up" in line for line in report["busy_at"])
        os.kill(frozen.pid, signal.SIGSTOP)
        state = await ask_job(client, 0.5)
        os.kill(frozen.pid, signal.SIGCONT)
        assert of(state, "c:0").problem == "does not answer within 0.5 s"
        assert of(state, "a:0").report is not None, "it holds up nobody else"
        blocked.kill()
        await a.send("done", "c:0")
        await frozen.result()
        state = await look(client, lambda state: [each.name for each in state.workers] == ["a:0"])


@pytest.mark.asyncio
async def test_a_collective_is_named_and_says_who_is_missing() -> None:
    async with init("a:0") as a, init("b:0") as b, init("c:0") as c, tool(a) as client:
        members = ["a:0", "b:0", "c:0"]
        works = [each.gather(1, root="a:0", members=members) for each in (a, b)]
        state = await look(client, lambda state: any(wait.worker == "a:0" and wait.targets == ("c:0",) for wait in state.waits))
        mine = next(wait for wait in state.waits if wait.worker == "a:0")
        assert mine.text == "gather of a:0, b:0, c:0"
        assert __file__ in mine.site
        text = a.dump()
        assert "gather of a:0, b:0, c:0, waits for c:0" in text
        assert "inbox" not in text, "what it is made of is nobody's business"
        assert {each.operation for each in a.pending()} == {"gather"}
        works.append(c.gather(1, root="a:0", members=members))
        assert [await work for work in works] == [[1, 1, 1], None, None]
        assert (await ask_job(client)).waits == ()


@pytest.mark.asyncio
async def test_a_get_waits_for_any_producer_and_a_put_for_any_consumer() -> None:
    async with init("channel.c:0") as held, init("a:0") as a, init("b:0") as b, init("c:0") as c, tool(a) as client:
        held.hold_channels()
        getting = await a.create_channel("c", maxsize=1, producers=2)
        putting = [await each.connect_channel("c", producer=True) for each in (b, c)]
        waiting = getting.get()
        state = await look(client, lambda state: bool(state.waits) and bool(state.waits[0].targets))
        (wait,) = state.waits
        assert (wait.worker, wait.targets, wait.any_of, wait.text) == ("a:0", ("b:0", "c:0"), True, "get of channel 'c'")
        assert "get of channel 'c', waits for an item" in a.dump()
        (channel,) = state.channels()
        assert channel["workers"]["producers"] == {"b:0": "b:0", "c:0": "c:0"}
        await putting[0].put(1)
        assert await waiting == 1
        await putting[0].put(2)
        full = putting[1].put(3)
        state = await look(client, lambda state: any(wait.worker == "c:0" for wait in state.waits))
        assert [(wait.worker, wait.targets) for wait in state.waits] == [("c:0", ("a:0",))]
        assert [await getting.get(), await getting.get()] == [2, 3]
        await full


@pytest.mark.asyncio
async def test_a_put_waits_for_who_takes_the_keys_that_fill_the_channel() -> None:
    async with init("channel.c:0") as held, init("a:0") as a, init("b:0") as b, init("c:0") as c, tool(a) as client:
        held.hold_channels()
        putting = await a.create_channel("c", maxsize=2)
        takes, others = await b.connect_channel("c"), await c.connect_channel("c")
        strange = b"\xff" + bytes(3)
        for key, channel in (("a", takes), (strange, others)):
            await putting.put(1, key=key)
            assert await channel.get(key=key) == 1
        await putting.put(2, key="a")
        await putting.put(3, key="a")
        full = putting.put(4, key="a")
        state = await look(client, lambda state: bool(state.waits) and bool(state.waits[0].targets))
        (wait,) = state.waits
        assert (wait.worker, wait.targets) == ("a:0", ("b:0",))
        (channel_seen,) = state.channels()
        assert [(each["key"], each["length"]) for each in channel_seen["keys"] if each["length"]] == [("a", 2)]
        assert sorted(channel_seen["takes"].values()) == [["a"], [repr(strange)]]
        assert [await takes.get(key="a") for _ in range(3)] == [2, 3, 4]
        await full


@pytest.mark.asyncio
async def test_what_is_on_its_way_waits_for_nobody() -> None:
    facts = {"operation": "recv", "peer": "b:0", "tag": 0, "context": 0, "subject": "", "channel": "", "waits_for": ["b:0"], "site": None}
    async with init("a:0") as a, tool(a) as client:
        (record,) = await client.workers()
        moving = {
            "pending": [{**facts, "moving": True, "elapsed_s": 1.0}, {**facts, "moving": False, "elapsed_s": None}],
            "channels": [],
            "links": [],
            "ended_links": [],
        }
        state = JobState.of("m", "j", [WorkerState(record, moving)])
        assert state.waits == (Wait("a:0", ("b:0",), text="recv from b:0", age_s=None),)


@pytest.mark.asyncio
async def test_a_report_is_bounded() -> None:
    async with init("a:0") as a, tool(a) as client:
        works = [a.recv("nobody:0", tag=tag) for tag in range(5000)]
        state = await ask_job(client)
        report = of(state, "a:0").report
        assert report is not None
        assert report["pending_total"] == 5000
        assert 0 < len(report["pending"]) < 5000
        for work in works:
            work.cancel()
