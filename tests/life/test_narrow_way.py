"""A way between two hosts that lets small packets through and drops large ones: a wrong MTU somewhere, and nobody who says so."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from aiorlinf import init
from aiorlinf.config import JobConfig, load_config
from aiorlinf.errors import PeerError, PeerLost
from aiorlinf.link import resume
from tests import peers
from tests.manager.support import TOKEN, manager
from tests.namespaces import two_hosts
from tests.peers import Pipe

__all__: list[str] = []

TRIED_S = 3.0


def config() -> JobConfig:
    return load_config({"cluster": {"network": {"reconnect_timeout_s": TRIED_S}, "collective": {"backend": "stream"}}})


def run_sender(pipe: Pipe) -> Any:
    async def main() -> Any:
        resume._FUTILE_TRIES = 2  # a second or so; by default it is some more
        async with (
            manager(config=config(), host="10.77.0.1", job="j") as service,
            init("a:0", manager=service.address, token=TOKEN) as a,
        ):
            pipe.say(service.address)
            assert await a.recv("b:0", timeout=20) == "here"
            pipe.say("narrow")
            await asyncio.to_thread(pipe.hear)
            waiting = a.recv("b:0", tag=1)
            with pytest.raises(PeerLost) as caught:
                await a.send(torch.ones(1 << 20), "b:0").async_wait(25)
            with pytest.raises(PeerLost):
                await waiting.async_wait(5)
            pipe.say("wide")
            await asyncio.to_thread(pipe.hear)
            await a.send(torch.ones(1 << 20), "b:0", timeout=20)
            return str(caught.value), [peer.incarnation for peer in await a.peers()]

    return asyncio.run(main())


def run_receiver(pipe: Pipe, address: str) -> None:
    async def main() -> None:
        resume._FUTILE_TRIES = 2
        async with init("b:0", manager=address, token=TOKEN) as b:
            await b.send("here", "a:0")
            while True:
                try:
                    assert (await b.recv("a:0")).sum() == 1 << 20
                    return
                except PeerError:
                    await asyncio.sleep(0.05)

    asyncio.run(main())


@pytest.mark.asyncio
async def test_large_messages_fail_by_name_and_the_next_ones_arrive_once_the_way_is_mended() -> None:
    with two_hosts() as (one, two), peers.process(run_sender, prepare=one.enter()) as a:
        address = await a.hear()
        with peers.process(run_receiver, address, prepare=two.enter()) as b:
            assert await a.hear() == "narrow"
            one.run("ip link set eth0 gso_max_segs 1")  # so that the kernel hands over what would be on the wire
            # It goes on to say that it takes large ones, as a host behind a narrow router does.
            two.run("ip link set eth0 mtu 1400 && ip route replace 10.77.0.0/24 dev eth0 src 10.77.0.2 advmss 1460")
            a.say("go on")
            assert await a.hear() == "wide"
            two.run("ip link set eth0 mtu 1500")
            a.say("go on")
            text, lives = await a.result()
            await b.result()
    assert "b:0#1 cannot be reached: its connection was restored" in text
    assert "nothing that was sent got through" in text
    assert "MTU" in text
    assert lives == [1], "the worker lives on: it is the way that is wrong"
