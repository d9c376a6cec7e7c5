"""``codec: auto`` on real links: it finds out what pays, says so, and whatever it chooses arrives."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch

from aiorlinf import init
from aiorlinf.codec.choosing import RAW, Chooser
from aiorlinf.codec.trial import Measured
from aiorlinf.config import load_config
from aiorlinf.errors import ConfigError
from aiorlinf.link.selecting import Quickest, kind_of
from tests.codec.material import MIB, dense, random_bytes
from tests.compression.conftest import Pair, all_back, compressing, config_of, link_of, pair_of, pool_of, same


def slow(mbps: float) -> dict[str, Any]:
    """A job on an emulated network of this bandwidth."""
    config = config_of("auto")
    config["cluster"]["net_emulation"] = {"bandwidth_groups": [{"members": "a:0", "bandwidth_mbps": mbps}]}
    return config


def chooser_of(pair: Pair) -> Chooser:
    """Of what `a` sends."""
    for way in link_of(pair.a).sender.ways:
        selector = getattr(way, "_selector", None)
        if isinstance(selector, Quickest):
            return selector.chooser
    raise AssertionError("it does not choose")


async def until_sampled(pair: Pair) -> None:
    """Until no samples are being looked at."""
    while any(kind.sampling for kind in chooser_of(pair)._kinds.values()):
        await asyncio.sleep(0.002)


@pytest.mark.asyncio
async def test_on_a_slow_link_what_gets_smaller_is_compressed() -> None:
    async with pair_of(slow(20)) as pair:
        frames = dense(300_000)
        for _ in range(10):
            assert same(await pair.trip(frames), frames)
            await until_sampled(pair)
        before = pair.sent()
        for _ in range(5):
            assert same(await pair.trip(frames), frames)
        after = pair.sent()
        auto = after["auto"]
        assert 3e5 < auto["link_rate"] < 6e6
        (kind,) = auto["kinds"].values()
        assert list(auto["kinds"]) == ["uint8, up to 1 MiB, up to 8 times as small"]
        assert kind["choice"] != RAW
        known = {label: facts["seconds_per_gb"] for label, facts in kind["choices"].items()}
        assert known[RAW] is None or known[kind["choice"]] < known[RAW], "where messages suddenly take far longer, others are forgotten"
        assert "against" in kind["why"]
        assert after["tensors"] - before["tensors"] >= 4
        assert after["raw"]["slower"] >= 1
        await all_back(pair.a)


@pytest.mark.asyncio
async def test_what_does_not_get_smaller_goes_as_it_is() -> None:
    async with pair_of(slow(400)) as pair:
        noise = random_bytes(600_000)
        for _ in range(12):
            assert same(await pair.trip(noise), noise)
            await until_sampled(pair)
        (kind,) = pair.sent()["auto"]["kinds"].values()
        assert kind["choice"] == RAW
        assert kind["choices"]["lz4"]["ratio"] == 1.0
        assert pair.sent()["raw"]["slower"] >= 8
        assert pair.sent()["tensors"] == 0


@pytest.mark.asyncio
async def test_kinds_are_told_apart() -> None:
    async with pair_of(slow(60)) as pair:
        frames, noise, numbers = dense(300_000), random_bytes(600_000), random_bytes(600_000).view(torch.int64)
        for _ in range(12):
            for obj in (frames, noise, numbers):
                assert same(await pair.trip(obj), obj)
            await until_sampled(pair)
        choices = {key: kind["choice"] for key, kind in pair.sent()["auto"]["kinds"].items()}
        assert choices.pop("uint8, up to 1 MiB, up to 8 times as small") != RAW
        assert choices == {"uint8, up to 1 MiB, hardly smaller": RAW, "int64, up to 1 MiB, hardly smaller": RAW}


@pytest.mark.asyncio
async def test_whatever_is_chosen_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """At random, message for message, many at a time."""
    rng = random.Random(3)
    choose = Chooser._choose

    def any_of(chooser: Chooser, *args: Any) -> str:
        choose(chooser, *args)
        return rng.choice([RAW, *chooser._labels])

    monkeypatch.setattr(Chooser, "_choose", any_of)
    async with compressing("auto") as pair:
        objects: list[Any] = [[dense(rng.choice([20_000, 300_000, 2 * MIB]), seed=index), torch.zeros(5000)] for index in range(40)]
        sends = [pair.ab.send(obj) for obj in objects]
        for obj in objects:
            assert same(await pair.ba.recv(timeout=30), obj)
        await asyncio.gather(*sends)
        await until_sampled(pair)
        assert pair.sent()["tensors"] > 10
        assert pair.sent()["raw"]["slower"] > 2
        described = pair.a.stats().compression
        assert described is not None
        assert set(described["choices"]) == {"lz4", "zstd 1", "zstd 3", "zstd 9"}


@pytest.mark.asyncio
async def test_sends_that_do_not_arrive_teach_nothing() -> None:
    async with compressing("auto") as pair:
        await pair.trip("hello")
        sending = pair.ab.send(dense(300_000))
        sending.cancel()
        await pair.trip("after", tag=1)
        chooser = chooser_of(pair)
        assert not chooser._probing
        assert chooser.rate(0) is None
        data = dense(300_000)
        changed = pair.ab.send(data)
        receiving = pair.ba.recv(timeout=20)
        data.add_(1)
        for work in (changed, receiving):
            with pytest.raises(Exception, match="written to"):
                await work
        assert not chooser._probing
        assert chooser.rate(0) is None
        assert same(await pair.trip(dense(300_000)), dense(300_000))
        assert chooser.rate(0) is not None
        await until_sampled(pair)


@pytest.mark.asyncio
async def test_a_parcel_that_is_sent_on_is_empty_when_it_has_arrived() -> None:
    async with compressing("auto") as pair:
        sending = pair.ab.send(dense(300_000))
        parcel = await pair.b._exchange.recv_parcel(pair.a.address, 0, 0)
        await sending
        on = pair.b._exchange.send_parcel(pair.a.address, 0, 0, parcel)
        assert same(await pair.ab.recv(timeout=30), dense(300_000))
        await on
        assert parcel.closed
        del parcel
        await until_sampled(pair)


@pytest.mark.asyncio
async def test_it_knows_what_the_peer_knows(monkeypatch: pytest.MonkeyPatch) -> None:

    async with init("a:0", config=config_of("auto")) as a:
        with monkeypatch.context() as patch:
            patch.setattr("aiorlinf.link.enrolment.probe", lambda config: (1,))
            b = await init("b:0", manager=a.manager_address, token=a.token)
        async with b:
            for _ in range(4):
                sending = a.send(dense(300_000), "b:0")
                assert same(await b.recv("a:0", timeout=20), dense(300_000))
                await sending
                await asyncio.sleep(0.02)
            (kind,) = a.stats().links[0].compression["auto"]["kinds"].values()  # type: ignore[index]
            assert set(kind["choices"]) == {"raw", "lz4"}


@pytest.mark.asyncio
async def test_a_worker_that_closes_while_samples_are_looked_at() -> None:
    async with pair_of(config_of("auto")) as pair:
        await pair.trip("hello")
        sending = pair.ab.send(dense(4 * MIB))
        await pair.ba.recv(timeout=20)
        await sending
        await pair.a.close()
        await all_back(pair.a)
        assert pool_of(pair.a).stats().leased_bytes == 0


def test_what_kinds_are_called() -> None:
    assert kind_of(["uint8"], 12 * MIB) == "uint8, up to 16 MiB"
    assert kind_of(["int64", "bool", "int64"], 20_000) == "bool+int64, up to 64 KiB"
    assert kind_of(["uint8"], 5) == "uint8, up to 1 KiB"
    assert kind_of(["uint8"], 16 * MIB) != kind_of(["uint8"], 16 * MIB - 1)


def test_it_has_no_keys_of_its_own() -> None:
    with pytest.raises(ConfigError, match="level"):
        load_config(config_of("auto", level=3))


def test_nothing_is_measured_of_what_is_not_there() -> None:
    chooser = Chooser(["lz4"], threads=2)
    chooser.sampled("unknown", {"lz4": Measured(1, 1, 1)}, 0.0)
    assert chooser.describe(0.0) == {"link_rate": None, "kinds": {}}
