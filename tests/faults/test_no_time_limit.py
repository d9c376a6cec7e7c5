"""A time limit that is none is refused at the call, before anything has begun: nothing is sent, put, or taken from those who come next."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from aiorlinf import init
from aiorlinf.errors import UsageError
from tests.faults.conftest import Pair

__all__: list[str] = []

NONE_OF_THEM = [math.nan, "1", [1.0], object()]


def refused(call: Callable[[Any], object]) -> None:
    for limit in NONE_OF_THEM:
        with pytest.raises(UsageError, match=r"^(\w+: )?timeout=.*a number of seconds"):
            call(limit)


@pytest.mark.asyncio
async def test_messages(stream_pair: Pair) -> None:
    pair = stream_pair
    await pair.trip("they have met")
    a, b = pair.a, pair.b
    inbox = b.inbox(tag=3)
    refused(lambda limit: b.recv("a:0", timeout=limit))
    refused(lambda limit: pair.ba.recv_tensor(torch.zeros(3), tag=1, timeout=limit))
    refused(lambda limit: a.send("never", "b:0", timeout=limit))
    refused(lambda limit: pair.ab.send_tensor(torch.ones(3), tag=1, timeout=limit))
    refused(lambda limit: inbox.recv(timeout=limit))
    refused(lambda limit: pair.ab.broadcast(1, root=0, timeout=limit))
    refused(lambda limit: b.wait_for("c:0", timeout=limit))
    refused(lambda limit: b.peers(timeout=limit))
    refused(lambda limit: b.membership().next(timeout=limit))
    assert not a.pending()
    assert not b.pending()
    sent = [a.send("first", "b:0"), pair.ab.send_tensor(torch.ones(3), tag=1), a.send("third", "b:0", tag=3)]
    assert await b.recv("a:0", timeout=20) == "first"
    assert (await pair.ba.recv_tensor(torch.zeros(3), tag=1, timeout=20)).sum() == 3
    assert await inbox.recv(timeout=20) == ("a:0", "third")
    for work in sent:
        await work


@pytest.mark.asyncio
async def test_channels() -> None:
    async with init("a:0") as a:
        refused(lambda limit: a.create_channel("traj", timeout=limit))
        refused(lambda limit: a.connect_channel("traj", timeout=limit))
        channel = await a.create_channel("traj")
        refused(lambda limit: channel.put("never", timeout=limit))
        refused(lambda limit: channel.get(timeout=limit))
        refused(lambda limit: channel.get_batch(1, timeout=limit))
        refused(lambda limit: channel.lease(timeout=limit))
        await channel.put("first")
        assert await channel.get(timeout=20) == "first"
        assert await channel.qsize() == 0


@pytest.mark.parametrize("labels", ["rack", 5, [("a",)]])
def test_labels_are_a_table(labels: Any) -> None:
    with pytest.raises(UsageError, match="labels is a table of texts"):
        init("a:0", labels=cast(Any, labels))
