"""Traces of real workers: every message is there at both ends under one name, with its stages, and files can be merged."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch

from aiorlinf import Worker, init
from aiorlinf.errors import UsageError, WireError
from aiorlinf.link.tracing import LinkTrace
from aiorlinf.rendezvous.settings import TRACE_ENV
from aiorlinf.trace.clock import Reading
from aiorlinf.trace.events import BEGUN, LAYOUTS, LINK
from aiorlinf.trace.files import Facts, _read_part, facts_line, merge
from aiorlinf.trace.recorder import Recorder, Taken
from tests.peers import process, run_worker

__all__: list[str] = []


def config(**collective: Any) -> dict[str, Any]:
    return {"cluster": {"collective": collective}}


def slices(path: Path) -> list[dict[str, Any]]:
    """All slices of a file, each with the name of its row, and what must hold for every file."""
    events = json.loads(path.read_text())["traceEvents"]
    rows = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    found = [{**event, "row": rows[event["pid"], event["tid"]]} for event in events if event["ph"] == "X"]
    for one in found:
        assert one["dur"] > 0
        assert one["ts"] >= -1e-3
    by_row: dict[Any, list[dict[str, Any]]] = {}
    for one in found:
        by_row.setdefault((one["pid"], one["tid"]), []).append(one)
    for row in by_row.values():
        ends: list[float] = []  # of the slices that are open
        for one in sorted(row, key=lambda one: (one["ts"], -one["dur"])):
            while ends and ends[-1] <= one["ts"] + 1e-6:
                ends.pop()
            assert not ends or one["ts"] + one["dur"] <= ends[-1] + 1e-3, "slices of one row lie in each other, or apart"
            ends.append(one["ts"] + one["dur"])
    return found


def messages(found: list[dict[str, Any]], row: str) -> dict[str, dict[str, Any]]:
    """By the message's name, the slices of a row."""
    return {one["args"]["message"]: one for one in found if one["row"] == row and "message" in one.get("args", {})}


def stages(found: list[dict[str, Any]], around: dict[str, Any]) -> list[str]:
    """The names of the slices in a slice, in order."""
    inside = [
        one
        for one in found
        if (one["pid"], one["tid"]) == (around["pid"], around["tid"])
        and one.get("cat") == "stage"
        and around["ts"] <= one["ts"] < around["ts"] + around["dur"]
    ]
    return [one["name"] for one in sorted(inside, key=lambda one: one["ts"])]


@pytest.mark.parametrize("loop_back", [False, True], ids=["another worker", "to itself"])
@pytest.mark.asyncio
async def test_every_message_is_there_at_both_ends(tmp_path: Path, loop_back: bool) -> None:
    async with init("a:0", config=config(backend="stream")) as a, init("b:0", config=config(backend="stream")) as b:
        other = a if loop_back else b
        await a.send("before", other.address)
        assert await other.recv("a:0") == "before"
        async with a.trace(tmp_path / "a.json"), b.trace(tmp_path / "b.json"):
            for index in range(5):
                waiting = other.recv("a:0") if index % 2 else None
                await a.send(index, other.address)
                assert await (waiting or other.recv("a:0")) == index
            for size in (1 << 20, 0):
                sent = a.send(torch.zeros(size, dtype=torch.uint8), other.address, tag=7)
                assert (await other.recv("a:0", tag=7)).numel() == size
                await sent
            out = torch.empty(1 << 18)
            sent = a.send_tensor(torch.ones(1 << 18), other.address, tag=8)
            await other.recv_tensor(out, "a:0", tag=8)
            await sent
        await a.send("after", other.address)
        assert await other.recv("a:0") == "after"
    merge([tmp_path / "a.json", tmp_path / "b.json"], tmp_path / "all.json")
    sending = receiving = slices(tmp_path / "all.json")
    peer = "a:0#1" if loop_back else "b:0#1"
    sends, comes = messages(sending, f"to {peer}"), messages(receiving, "from a:0#1")
    assert len(sends) == 8
    assert sends.keys() == comes.keys()
    for name, send in sends.items():
        assert send["args"]["bytes"] == comes[name]["args"]["bytes"]
        assert (send["args"]["outcome"], comes[name]["args"]["outcome"]) == ("done", "taken")
        assert send["ts"] <= comes[name]["ts"] + comes[name]["dur"], "one clock for both"
    large = [name for name, send in sends.items() if send["args"]["bytes"] >= 1 << 20]
    assert len(large) == 2
    for name in large:
        assert sends[name]["args"]["way"] == "stream"
        assert "on the wire" in stages(sending, sends[name])
        assert "on the wire" in stages(receiving, comes[name])
    assert {one["args"]["tag"] for one in sends.values()} == {0, 7, 8}


@pytest.mark.asyncio
async def test_the_stages_of_shared_memory_and_of_compression(tmp_path: Path) -> None:
    async with init("a:0") as a, init("b:0") as b, a.trace(tmp_path / "a.json"), b.trace(tmp_path / "b.json"):
        sent = a.send(torch.zeros(4 << 20, dtype=torch.uint8), "b:0")
        await b.recv("a:0")
        await sent
    found = slices(tmp_path / "a.json")
    (send,) = messages(found, "to b:0#1").values()
    assert send["args"]["way"] == "shm"
    assert "copied" in stages(found, send)
    coded = config(backend="stream", tensor_compression={"codec": "lz4", "min_bytes": 1})
    async with (
        init("a:0", config=coded) as a,
        init("b:0", config=coded) as b,
        a.trace(tmp_path / "a.json"),
        b.trace(tmp_path / "b.json"),
    ):
        sent = a.send(torch.zeros(8 << 20, dtype=torch.uint8), "b:0")
        await b.recv("a:0")
        await sent
    found, other = slices(tmp_path / "a.json"), slices(tmp_path / "b.json")
    (send,) = messages(found, "to b:0#1").values()
    (came,) = messages(other, "from a:0#1").values()
    assert send["args"]["compress_ms"] > 0
    assert came["args"]["decompress_ms"] > 0
    assert [one["name"] for one in found if one["row"] == "codecs"].count("compress") >= 1
    assert [one["name"] for one in other if one["row"] == "codecs"].count("decompress") >= 1


@pytest.mark.asyncio
async def test_then_steps_know_their_message_and_each_other(tmp_path: Path) -> None:
    def double(value: int) -> int:
        return 2 * value

    async def later(value: int) -> int:
        await asyncio.sleep(0)
        return value + 1

    def fails(value: int) -> None:
        raise ValueError(value)

    async with init("a:0") as a, a.trace(tmp_path / "a.json"):
        await a.send(20, "a:0")
        assert await a.recv("a:0").then(double).then(later) == 41
        await a.send(1, "a:0")
        with pytest.raises(ValueError, match="1"):
            await a.recv("a:0").then(fails)
        await a.send(1, "a:0")
        assert await a.recv("a:0").then_in_thread(double) == 2
    steps = {one["name"]: one["args"] for one in slices(tmp_path / "a.json") if one["row"] == "then-steps"}
    assert set(steps) == {"double", "later", "fails"}
    assert steps["later"]["after step"] == 1
    assert steps["fails"]["outcome"] == "failed"
    assert steps["fails"]["of message"] == "a:0#1>a:0#1/0:2"
    assert __file__ in steps["fails"]["attached at"]


@pytest.mark.asyncio
async def test_calls_of_channels_and_collectives(tmp_path: Path) -> None:
    async with init("channel.c:0") as held, init("a:0") as a, init("b:0") as b:
        held.hold_channels()
        async with a.trace(tmp_path / "a.json"):
            channel = await a.create_channel("c")
            await channel.put("x")
            assert await channel.get() == "x"
            await channel.put("y")
            await channel.put("z")
            async with channel.prefetch(2) as items:
                assert [await anext(items), await anext(items)] == ["y", "z"]
            works = [each.gather(each.address, root="a:0", members=["a:0", "b:0"]) for each in (a, b)]
            assert await works[0] == ["a:0", "b:0"]
            await works[1]
    found = slices(tmp_path / "a.json")
    assert [one["name"] for one in found if one["row"] == "collectives"] == ["gather of 2 workers"]
    calls = [one["name"] for one in found if one["row"] == "channels"]
    assert {"put channel 'c'", "get channel 'c'"} <= set(calls)
    assert calls.count("prefetched get channel 'c'") == 2, "met by prefetch, which makes no work for each"


@pytest.mark.asyncio
async def test_one_trace_at_a_time_bounded_in_events_and_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with init("a:0") as a:
        trace = a.trace(tmp_path / "a.json", events=10)
        with pytest.raises(UsageError, match="being recorded"):
            a.trace(tmp_path / "b.json")
        for index in range(50):
            await a.send(index, "a:0")
            assert await a.recv("a:0") == index
        assert await trace == tmp_path / "a.json"
        assert await trace == tmp_path / "a.json", "again"
        assert "beyond the limit of 10" in caplog.text
        assert len(messages(slices(tmp_path / "a.json"), "to a:0#1")) < 10
        assert await a.trace(tmp_path / "c.json", seconds=0.05) == tmp_path / "c.json"
        for wrong in ({"events": 0}, {"seconds": 0.0}, {"seconds": -1.0}):
            with pytest.raises(UsageError, match="above 0"):
                a.trace(tmp_path / "d.json", **wrong)
        with pytest.raises(OSError, match="nowhere"):
            a.trace(tmp_path / "nowhere" / "d.json")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.json", "c.json"], "nothing else is left"


def test_from_synchronous_code_and_when_the_worker_is_closed(tmp_path: Path) -> None:
    with init("a:0", loop="thread") as a:
        with a.trace(tmp_path / "a.json"):
            a.send(1, "a:0").wait()
            assert a.recv("a:0").wait() == 1
        assert len(messages(slices(tmp_path / "a.json"), "to a:0#1")) == 1
        a.trace(tmp_path / "b.json")
        a.send(2, "a:0").wait()
        assert a.recv("a:0").wait() == 2
    assert len(messages(slices(tmp_path / "b.json"), "to a:0#1")) == 1


@pytest.mark.asyncio
async def test_a_file_that_cannot_be_written_any_more_is_an_error_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(recorder: Recorder, taken: Taken) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr("aiorlinf.trace.recorder._SPILL_S", 0.01)
    monkeypatch.setattr(Recorder, "write", full)
    async with init("a:0") as a:
        trace = a.trace(tmp_path / "a.json")
        for index in range(20):
            await a.send(index, "a:0")
            assert await a.recv("a:0") == index
            await asyncio.sleep(0.005)
        with pytest.raises(OSError, match="no space left"):
            await trace
        assert a.home.trace is None
        await a.send("it goes on", "a:0")
        assert await a.recv("a:0") == "it goes on"


@pytest.mark.asyncio
async def test_what_is_written_in_between_stays_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiorlinf.trace.recorder._SPILL_S", 0.001)
    async with init("a:0", config=config(backend="stream")) as a, a.trace(tmp_path / "a.json"):
        for index in range(100):
            await asyncio.gather(a.send(torch.zeros(100_000), "a:0"), a.recv("a:0"))
            if index % 10 == 0:
                await asyncio.sleep(0.002)
    found = slices(tmp_path / "a.json")
    sends = messages(found, "to a:0#1")
    assert len(sends) == 100
    assert {send["args"]["outcome"] for send in sends.values()} == {"done"}
    assert {send["args"]["way"] for send in sends.values()} == {"stream"}


@pytest.mark.asyncio
async def test_off_again_costs_nothing_more(tmp_path: Path) -> None:
    async with init("a:0") as a, init("b:0") as b:
        await a.send(1, "b:0")
        await b.recv("a:0")
        await a.trace(tmp_path / "a.json")
        for comm in (a, b):
            assert comm.home.trace is None
            assert [(link.sender.trace, link.receiver.trace) for link in comm._table.links()] == [(None, None)]


@pytest.mark.asyncio
async def test_what_waits_unread_is_shown_so_however_often_it_was_written_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spills = 0
    write = Recorder.write

    def counted(recorder: Recorder, taken: Taken) -> None:
        nonlocal spills
        write(recorder, taken)
        spills += 1

    async def spilled() -> None:
        seen = spills
        while spills == seen:
            await asyncio.sleep(0.001)

    monkeypatch.setattr("aiorlinf.trace.recorder._SPILL_S", 0.001)
    monkeypatch.setattr(Recorder, "write", counted)
    async with init("a:0", config=config(backend="stream")) as a, init("b:0") as b:
        for index in range(2):  # the first waits for an answer; from then on they flow
            await a.send(index, "b:0")
            assert await b.recv("a:0") == index
        async with b.trace(tmp_path / "b.json"):
            for index in range(4):
                await a.send(index, "b:0")
            await spilled()
            for index in range(2):
                assert await b.recv("a:0") == index
            await spilled()
            assert await b.recv("a:0") == 2
        assert await b.recv("a:0") == 3
    found = slices(tmp_path / "b.json")
    comes = messages(found, "from a:0#1").values()
    assert Counter(one["args"]["outcome"] for one in comes) == {"taken": 3, "unread": 1}
    assert all("unread" in stages(found, one) for one in comes)
    assert len(messages(found, "receives from a:0#1")) == 3


async def sends_and_waits(comm: Worker, count: int) -> None:
    for index in range(count):
        await comm.send(index, "a:0")
    await comm.recv("a:0")
    await asyncio.sleep(60)


def sends_in(part: Path) -> int:
    """How many a raw file has so far; 0 as long as it does not say whose it is."""
    try:
        return len(_read_part(part)[0]._out)
    except (FileNotFoundError, WireError):
        return 0


@pytest.mark.asyncio
async def test_files_of_several_processes_are_merged_also_of_one_that_was_killed(tmp_path: Path) -> None:
    async with init("a:0", config=config(backend="stream")) as a:
        trace = a.trace(tmp_path / "a-0.1.json")
        env = {**a.env("b:0"), TRACE_ENV: str(tmp_path)}
        with process(run_worker, "asyncio", None, sends_and_waits, (10,), env=env) as peer:
            for index in range(10):
                assert await a.recv("b:0") == index
            await a.send("go on", "b:0")
            while sends_in(tmp_path / "b-0.1.json.part") < 10:
                await asyncio.sleep(0.02)
            peer.kill()
        await trace
    facts = merge(sorted(tmp_path.iterdir()), tmp_path / "all.json")
    assert [each.worker for each in facts] == ["a:0#1", "b:0#1"]
    assert all(each.error_us == 0.0 for each in facts), "one host has one clock"
    shown = slices(tmp_path / "all.json")
    sends, comes = messages(shown, "to a:0#1"), messages(shown, "from b:0#1")
    assert len(sends) == 10
    assert sends.keys() == comes.keys()
    for name, send in sends.items():
        assert send["ts"] <= comes[name]["ts"]
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    arrows = Counter(event["id"] for event in events if event["ph"] in "sf")
    assert {arrows[name] for name in sends} == {2}, "an arrow has two ends"
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"a:0#1", "b:0#1"}


@pytest.mark.asyncio
async def test_beyond_the_limit_is_what_came_last(tmp_path: Path) -> None:
    """Packed events and others are one sequence, however they are kept."""

    async with init("a:0") as a:
        for limit in range(1, 9):
            recorder = Recorder(a.home, tmp_path / "a.part", limit)
            part = LinkTrace(recorder, 1)
            kept: list[int] = []
            for piece in ((0, 1, 2, 3), (4, 5, 6)):
                for count in piece:
                    if count % 3 == 0:
                        recorder.record((BEGUN, 1, count, 0.0))
                    elif count % 3 == 1:
                        part.small(count, 1, 0)
                    else:
                        part.picked(count)
                    before = monotonic()
                    while monotonic() == before:
                        pass
                taken = recorder.take()
                kept += [event[2] for event in taken.events]
                kept += [fields[1] for kind, data in taken.packed.items() for fields in LAYOUTS[kind].iter_unpack(data)]
            recorder.stop()
            recorder.close()
            assert sorted(kept) == list(range(min(limit, 7))), limit
            assert recorder.dropped == max(0, 7 - limit)


@pytest.mark.asyncio
async def test_a_raw_file_that_ends_anywhere_gives_what_was_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json.part"
    async with init("a:0") as a:
        recorder = Recorder(a.home, path, 100)
        recorder.stop()
        facts = facts_line(Facts("a:0#1", 1, "host", (Reading(0.0, 0, 0),)))
        recorder.write_line(facts)
        sent = b"".join(LAYOUTS["sent"].pack(1.0, count, 0, 1, 1) for count in range(3))
        recorder.write(Taken({"sent": sent}, [(LINK, 1, "a:0#1", "b:0#1", 0)], [1.0]))
        recorder.close()
    whole = path.read_bytes()
    for length in range(len(facts), len(whole) + 1):
        path.write_bytes(whole[:length])
        assert sends_in(path) == min(3, max(0, length - len(facts) - len(b'"sent %d"\n' % len(sent))) // LAYOUTS["sent"].size)
        merge([path], tmp_path / "all.json")
    path.write_bytes(facts + b'"sent ' + b"9" * 18 + b'"\n')
    merge([path], tmp_path / "all.json")


def test_what_is_no_trace_is_not_merged(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no traces"):
        merge([], tmp_path / "all.json")
    texts = {
        "a.json": "{}",
        "b.json": "[1",
        "c.json.part": "[[99]]\n",
        "d.json.part": "",
        "e.json.part": "7\n",
        "f.json.part": '"gone 0"\n',
    }
    for name, text in texts.items():
        file = tmp_path / name
        file.write_text(text)
        with pytest.raises(UsageError, match="no trace of aiorlinf"):
            merge([file], tmp_path / "all.json")
