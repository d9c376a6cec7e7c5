"""What is compressed and what is not, why, and what the statistics say of it."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest
import torch

from aiorlinf import Worker, init
from aiorlinf.codec.codecs.lz4 import Lz4
from aiorlinf.errors import ConfigError
from aiorlinf.wire.frames import FrameType, Start, Via
from tests import peers
from tests.cases.test_addresses import TOKEN, manager_on
from tests.codec.material import MIB, dense, random_bytes
from tests.compression.conftest import Pair, all_back, compressing, config_of, link_of, pair_of, same
from tests.namespaces import two_hosts
from tests.peers import worker

EMPTY = {
    "tensors": 0,
    "bytes_before": 0,
    "bytes_after": 0,
    "ratio": 1.0,
    "compress_s": 0.0,
    "raw": {},
    "raw_bytes": 0,
    "raw_chunks": {},
    "received": 0,
    "received_before": 0,
    "received_after": 0,
    "decompress_s": 0.0,
}


def opened(pair: Pair) -> list[int]:
    """From now on counts the messages that reach `b` in another way than in one frame."""
    link: Any = link_of(pair.b)
    seen: list[int] = []
    on_frame = link.on_frame

    def watch(kind: int, flags: int, key: int, body: memoryview) -> None:
        if kind == FrameType.OPEN:
            seen.append(key)
        on_frame(kind, flags, key, body)

    link.on_frame = watch
    return seen


@pytest.mark.asyncio
async def test_the_statistics_of_links_groups_and_workers() -> None:
    async with pair_of(config_of("zstd", level=3, max_inflight=2)) as pair:
        await pair.trip("hello")
        assert pair.sent() == pair.received() == EMPTY
        await pair.trip([dense(200_000), dense(100), random_bytes(600_000)])
        sent, received = pair.sent(), pair.received()
        assert (sent["tensors"], sent["bytes_before"], sent["raw"], sent["raw_bytes"]) == (1, 200_000, {"small": 1, "random": 1}, 600_100)
        assert sent["ratio"] == sent["bytes_before"] / sent["bytes_after"] > 3
        assert 0 < sent["compress_s"] < 5
        assert (received["received"], received["received_before"], received["received_after"]) == (1, sent["bytes_after"], 200_000)
        assert 0 < received["decompress_s"] < 5
        (group_stats,) = pair.ab.stats()
        assert group_stats.compression == sent
        whole = pair.a.stats().compression
        assert whole is not None
        assert {key: whole[key] for key in EMPTY} == sent
        assert (whole["enabled"], whole["codec"], whole["contexts"]["limit"]) == (True, "zstd", 2)
        assert whole["library"].startswith("Zstandard ")


@pytest.mark.asyncio
@pytest.mark.parametrize("codec", ["lz4", "zstd", "auto"])
async def test_what_looks_random_goes_as_without_compression(codec: str) -> None:
    async with pair_of(config_of(codec)) as pair:
        await pair.trip("hello")
        ways: list[int] = []
        link: Any = link_of(pair.b)
        on_frame = link.on_frame

        def watch(kind: int, flags: int, key: int, body: memoryview) -> None:
            if kind == FrameType.START:
                ways.append(Start.decode(body).via)
            on_frame(kind, flags, key, body)

        link.on_frame = watch
        noise = random_bytes(MIB)
        for obj in (noise, [noise, noise.clone(), torch.ones(100)], [noise.clone() for _ in range(9)], [noise, dense(300_000)]):
            assert same(await pair.trip(obj), obj)
        assert ways[:2] == [Via.STREAM] * 2
        if codec != "auto":
            assert ways[2:] == [Via.CODED] * 2, "others are looked at one by one"
            assert pair.sent()["raw"] == {"random": 1 + 2 + 9 + 1, "small": 1}
            assert pair.sent()["tensors"] == 1
        await all_back(pair.a)


@pytest.mark.asyncio
async def test_without_compression_there_are_no_such_statistics() -> None:
    async with pair_of({"cluster": {"collective": {"backend": "stream"}}}) as pair:
        await pair.trip(dense(100_000))
        assert pair.a.stats().compression is None
        assert pair.a.stats().links[0].compression is None
        assert pair.a._table.coding is None


@pytest.mark.asyncio
async def test_weights_are_left_alone_unless_the_job_wants_otherwise() -> None:
    weights = torch.zeros(50_000)
    async with pair_of(config_of("lz4", excluded_dtypes=["float32", "bool"])) as pair:
        await pair.trip([weights, torch.ones(50_000, dtype=torch.bool), weights.to(torch.bfloat16)])
        assert pair.sent()["raw"] == {"dtype": 2}
        assert pair.sent()["tensors"] == 1


@pytest.mark.asyncio
async def test_memory_that_both_map_is_not_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair_of(config_of("lz4", backend="auto")) as pair:
        assert same(await pair.trip([dense(300_000), dense(10)]), [dense(300_000), dense(10)])
        assert pair.a.stats().links[0].backend == "shm"
        assert pair.sent()["raw"] == {"shared_memory": 1, "small": 1}
        assert pair.sent()["tensors"] == 0
        seen = opened(pair)
        await pair.trip(dense(30_000))
        assert seen == [], "what fits into a frame rides in it"
        slow: Any = pair.a._exchange
        with monkeypatch.context() as patch:
            patch.setattr(slow, "_encode", lambda *_args: pytest.fail("a small message takes the short way"))
            work = pair.ab.send(dense(30_000))
            assert same(await pair.ba.recv(timeout=20), dense(30_000))
            await work


@pytest.mark.asyncio
async def test_where_shared_memory_is_full_it_goes_as_it_is() -> None:
    shared = {"max_bytes": 0}
    async with pair_of(config_of("lz4", backend="auto", collective={"shared_memory": shared})) as pair:
        assert same(await pair.trip(dense(300_000)), dense(300_000))
        link = pair.a.stats().links[0]
        assert link.backend in ("shm", "stream", "gloo")
        if link.backend == "shm":
            assert pair.sent()["raw"] == {"shared_memory": 1}


@pytest.mark.asyncio
async def test_a_peer_that_does_not_know_the_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    async with init("a:0", config=config_of("lz4")) as a:
        with monkeypatch.context() as patch:
            patch.setattr("aiorlinf.link.enrolment.probe", lambda config: (2,))
            b = await init("b:0", manager=a.manager_address, token=a.token)
        async with b:
            sending = a.send([dense(100_000), dense(10)], "b:0")
            assert same(await b.recv("a:0", timeout=20), [dense(100_000), dense(10)])
            await sending
            stats = a.stats().links[0].compression
            assert stats is not None
            assert (stats["raw"], stats["tensors"]) == ({"peer": 1, "small": 1}, 0)
            back = b.send(dense(100_000), "a:0")
            assert same(await a.recv("b:0", timeout=20), dense(100_000))
            await back
            assert b.stats().links[0].compression["tensors"] == 1  # type: ignore[index]


@pytest.mark.asyncio
async def test_what_is_too_large_for_the_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lz4, "max_input", 1_000_000)
    async with compressing("lz4") as pair:
        obj = [dense(1_000_001), dense(1_000_000)]
        assert same(await pair.trip(obj), obj)
        assert pair.sent()["raw"] == {"too_large": 1}
        assert pair.sent()["tensors"] == 1


# ---- what rides in a frame


@pytest.mark.asyncio
async def test_what_a_codec_is_tried_on_does_not_ride_in_a_frame() -> None:
    async with compressing("lz4", min_bytes=5000, excluded_dtypes=["float32"]) as pair:
        await pair.trip("hello")
        seen = opened(pair)
        whole: list[Any] = [
            dense(4999),
            [dense(4999), dense(4999), dense(4999)],
            torch.zeros(10_000),
            {"a": torch.zeros(2000), "b": dense(4999)},
            {"nested": {"a": dense(6000)}},
            {"text": "x" * 10_000},
            list(range(1000)),
        ]
        for obj in whole:
            assert same(await pair.trip(obj), obj)
        assert seen == []
        tried = [dense(5000), [dense(10), dense(5000)], {"a": torch.zeros(2000), "b": dense(5000)}]
        for obj in tried:
            assert same(await pair.trip(obj), obj)
        assert len(seen) == len(tried)
        assert pair.sent()["tensors"] == len(tried)


@pytest.mark.asyncio
async def test_the_first_message_of_a_link_is_compressed_too() -> None:
    async with pair_of(config_of("zstd")) as pair:
        sends = [pair.ab.send(dense(20_000)), pair.ab.send("short"), pair.ab.send(dense(200_000))]
        assert not link_of(pair.a).codes, "it is not up yet"
        assert [type(await pair.ba.recv(timeout=20)) for _ in sends] == [torch.Tensor, str, torch.Tensor]
        await asyncio.gather(*sends)
        assert pair.sent()["tensors"] == 2


@pytest.mark.asyncio
async def test_tensors_of_this_hosts_memory_are_given_away_and_compressed() -> None:
    """From `comm.empty`: whatever way they go, the handle is empty from the call on."""
    async with compressing("lz4") as pair:
        await pair.trip("hello")
        for size in (1000, 20_000, 300_000):
            frames = pair.a.empty(size, dtype=torch.uint8)
            frames.fill_(7)
            sending = pair.ab.send(frames)
            assert frames.numel() == 0
            assert same(await pair.ba.recv(timeout=20), torch.full((size,), 7, dtype=torch.uint8))
            await sending
        assert pair.sent()["tensors"] == 2
        frames = pair.a.empty(300_000, dtype=torch.uint8)
        frames.fill_(7)
        sending = pair.ab.send(frames)
        sending.cancel()
        await pair.trip("after", tag=1)
        assert frames.numel() == 300_000
        del frames


@pytest.mark.asyncio
async def test_sends_from_another_thread_are_compressed() -> None:
    with init("t:0", loop="thread", config=config_of("lz4")) as t:
        async with init("b:0", manager=t.manager_address, token=t.token) as b:
            receiving = b.recv("t:0")
            await asyncio.to_thread(lambda: t.send(dense(200_000), "b:0").wait(20))
            assert same(await receiving, dense(200_000))
            stats = await asyncio.to_thread(t.stats)
            assert stats.links[0].compression["tensors"] == 1  # type: ignore[index]


# ---- starting


@pytest.mark.asyncio
@pytest.mark.parametrize(("codec", "module", "package"), [("lz4", "lz4.block", "lz4"), ("zstd", "zstandard", "zstandard")])
async def test_a_worker_without_the_codecs_library_does_not_join(
    codec: str, module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"needs the package {package}, which this worker cannot import") as caught:
        async with init("a:0", config=config_of(codec)):
            pass
    assert caught.value.path == "cluster.collective.tensor_compression.codec"


# ---- between hosts


async def answer(comm: Worker) -> Any:
    """In another process: send back what comes, and say what the link is like."""
    obj = await comm.recv("a:0", timeout=20)
    await comm.send(obj, "a:0", timeout=20)
    stats = comm.stats().links[0]
    obj.clear()
    await all_back(comm)
    await comm.send("done", "a:0", tag=1, timeout=20)  # the other one has not left before that
    return stats


@pytest.mark.asyncio
@pytest.mark.parametrize("codec", ["lz4", "zstd"])
async def test_between_processes(codec: str) -> None:
    async with init("a:0", config=config_of(codec)) as a, worker(a, "b:0", answer, loop="uvloop") as peer:
        obj = {"frames": dense(2_000_000), "mask": torch.ones(20_000, dtype=torch.bool)}
        await a.send(obj, "b:0", timeout=20)
        assert same(await a.recv("b:0", timeout=20), obj)
        assert await a.recv("b:0", tag=1, timeout=20) == "done"
        link = await peer.result()
        assert link.compression["tensors"] == link.compression["received"] == 2


async def ask(comm: Worker) -> Any:
    """In another process: the other side of `answer`."""
    obj = {"frames": dense(2_000_000), "mask": torch.ones(20_000, dtype=torch.bool)}
    await comm.send(obj, "b:0", timeout=20)
    assert same(await comm.recv("b:0", timeout=20), obj)
    stats = comm.stats().links[0]
    assert await comm.recv("b:0", tag=1, timeout=20) == "done"
    return stats


def test_between_hosts() -> None:
    """Gloo would carry what is large; what is compressed takes the workers' own connection."""
    collective = config_of("zstd", backend="auto")["cluster"]["collective"]
    with two_hosts() as (one, two), manager_on(one, collective=collective) as manager:
        env = {"AIORLINF_MANAGER": manager, "AIORLINF_TOKEN": TOKEN}
        with (
            peers.process(peers.run_worker, "uvloop", None, answer, (), env={**env, "AIORLINF_ADDRESS": "b:0"}, prepare=two.enter()) as b,
            peers.process(peers.run_worker, "uvloop", None, ask, (), env={**env, "AIORLINF_ADDRESS": "a:0"}, prepare=one.enter()) as a,
        ):
            links = a.wait_result(), b.wait_result()
    for link in links:
        assert link.backend == "gloo"
        assert link.around_bytes_sent == 0
        assert link.compression["tensors"] == link.compression["received"] == 2
        assert link.compression["ratio"] > 3
