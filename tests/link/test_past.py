"""The counters of links that have ended are kept, for each peer."""

from __future__ import annotations

import pytest
import torch

from aiorlinf.link.past import EndedLinks, Past
from aiorlinf.testing.cluster import local_cluster
from aiorlinf.worker import Worker

__all__: list[str] = []


async def _pass(sender: Worker, receiver: Worker, obj: object) -> None:
    work = sender.send(obj, str(receiver.address))
    await receiver.recv(str(sender.address), timeout=20)
    await work


@pytest.mark.asyncio
@pytest.mark.parametrize("end", ["close", "kill"])
async def test_all_lives_of_a_peer_are_one_sum(end: str) -> None:
    async with local_cluster() as cluster:
        a = await cluster.join("a:0")
        for life in (1, 2):
            b = await cluster.join("b:0")
            await _pass(a, b, torch.zeros(1000))
            await _pass(b, a, "back")
            (link,) = a.stats().links
            assert (link.messages_sent, link.incarnation) == (1, life)
            if end == "close":
                await b.close()
            else:
                await cluster.kill("b:0")
            while a.stats().links:
                await a.peers()
        (ended,) = a.stats().ended_links
        assert (ended.remote, ended.links, ended.messages_sent, ended.messages_received) == ("b:0", 2, 2, 2)
        assert ended.bytes_sent >= 2 * 4000
        assert "b:0, 2 ended links: sent 2 messages" in str(a.stats())


def test_there_is_a_bound_on_those_that_are_told_apart() -> None:
    past = Past()
    for number in range(1500):
        past.add(EndedLinks(f"a:{number}", links=1, messages_sent=2, bytes_sent=number))
    sums = past.all()
    assert len(sums) == 1025
    assert sums[0].remote == "*"
    assert sums[-1] == EndedLinks("a:1499", links=1, messages_sent=2, bytes_sent=1499)
    assert sum(each.links for each in sums) == 1500
    assert sum(each.bytes_sent for each in sums) == sum(range(1500))
