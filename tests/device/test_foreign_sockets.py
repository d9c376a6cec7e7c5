"""NCCL's sockets know neither the token nor TLS nor a range of ports: where these are asked for, tensors go another way."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from aiorlinf import init
from aiorlinf.backends.device_pairs import register_pairs, unregister_pairs
from aiorlinf.errors import BackendUnavailable
from aiorlinf.rendezvous.hosts import bind_listener
from aiorlinf.testing.fake import FakeAccelerator
from aiorlinf.testing.fake.pairs import FakeMaker

__all__: list[str] = []

VALUES = torch.arange(100_000, dtype=torch.int32)


@pytest.fixture
def fake() -> Iterator[FakeAccelerator]:
    with FakeAccelerator(2, seed=0, ticks=(1, 9)) as fake:
        yield fake


@pytest.fixture
def maker(fake: FakeAccelerator) -> Iterator[FakeMaker]:
    maker = FakeMaker(fake)
    register_pairs("fake", maker)
    yield maker
    unregister_pairs("fake")


def range_of_ports() -> list[int]:
    with bind_listener("127.0.0.1") as listener:
        port = listener.getsockname()[1]
    return [max(1024, port - 200), min(65_535, port + 200)]


@pytest.mark.asyncio
@pytest.mark.parametrize("hosts", [1, 2])
async def test_a_range_of_ports_leaves_no_room_for_nccl(
    fake: FakeAccelerator, maker: FakeMaker, monkeypatch: pytest.MonkeyPatch, hosts: int
) -> None:
    numbers = itertools.cycle(range(hosts))
    monkeypatch.setattr("aiorlinf.link.enrolment.host_identity", lambda: f"host {next(numbers)}")
    config: dict[str, Any] = {"cluster": {"network": {"port_range": range_of_ports()}}}
    async with init("a:0", backend="nccl", config=config) as a, init("b:0", device="fake:1") as b:
        sent = a.send(fake.late(VALUES), "b:0")
        assert torch.equal((await b.recv("a:0")).cpu(), VALUES)
        await sent
        (stats,) = a.stats().links
        if hosts == 1:
            assert (stats.device_backend, maker.made) == ("nccl", 1)
        else:
            assert (stats.device_backend, maker.made) == ("staging", 0)
            assert "NCCL listens on ports of its own choice" in stats.device_reason


@pytest.mark.asyncio
async def test_where_nccl_must_be_used_and_may_not_that_is_an_error(
    fake: FakeAccelerator, maker: FakeMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = itertools.count()
    monkeypatch.setattr("aiorlinf.link.enrolment.host_identity", lambda: f"host {next(numbers)}")
    config: dict[str, Any] = {"cluster": {"collective": {"fallback": False}, "network": {"port_range": range_of_ports()}}}
    async with init("a:0", backend="nccl", config=config) as a, init("b:0", device="fake:1") as b:
        receiving = b.recv("a:0")
        with pytest.raises(BackendUnavailable, match="ports of its own choice"):
            await a.send(fake.late(VALUES), "b:0")
        receiving.cancel()
    assert maker.made == 0
