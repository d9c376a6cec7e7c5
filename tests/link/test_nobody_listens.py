"""Peers that the manager takes for alive and that do not answer: gone for certain, or only still. Whole workers, on one loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from aiorlinf import Worker, init
from aiorlinf.backends.shm.descriptors import abstract_listener, abstract_name
from aiorlinf.errors import PeerLost, RendezvousError
from aiorlinf.manager.service import ManagerService
from aiorlinf.rendezvous.hosts import host_identity
from tests.manager.support import TOKEN, Member, config_with, join, manager

__all__: list[str] = []

LIMIT_S = 15.0  # far below the time for joining and the heartbeat limit


@contextlib.asynccontextmanager
async def beside(**network: Any) -> AsyncIterator[tuple[ManagerService, Worker]]:
    async with manager(config=config_with(**network)) as service, init("a:0", manager=service.address, token=TOKEN) as a:
        yield service, a


@contextlib.asynccontextmanager
async def registered(service: ManagerService, listener: socket.socket, **details: Any) -> AsyncIterator[Member]:
    """``b:0``, which the manager takes for alive: only its listener is there, and what the test does with that."""
    async with join(service, "b:0", port=listener.getsockname()[1], **details) as member:
        yield member


@pytest.mark.asyncio
async def test_who_hangs_up_at_the_beginning_and_listens_no_more_is_gone(problems: list[dict[str, Any]]) -> None:
    """Killed while we connect: what waits ends before the manager knows."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        async with beside() as (service, a), registered(service, listener):
            works = [a.recv("b:0"), a.send(1, "b:0")]
            accepted, _ = await asyncio.get_running_loop().sock_accept(listener)
            listener.close()
            accepted.close()
            for work in works:
                with pytest.raises(PeerLost, match=r"b:0#1 is gone and nobody listens at .*its connection ended at its beginning"):
                    await asyncio.wait_for(work.async_wait(), LIMIT_S)


@pytest.mark.asyncio
async def test_a_peer_of_this_host_that_stands_still_is_not_tried_by_another_way(problems: list[dict[str, Any]]) -> None:
    """A link over TCP would stay without what the Unix socket gives, and waiting by both ways takes twice as long."""
    name = abstract_name("test")
    with abstract_listener(name, socket.SOCK_STREAM) as still, socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        async with (
            beside(connect_timeout_s=0.1, rendezvous_timeout_s=0.5) as (service, a),
            registered(service, listener, unix=name, host_id=host_identity()),
        ):
            with pytest.raises(RendezvousError, match=r"no answer within 0\.1 s"):
                await a.send(1, "b:0")
            still.accept()[0].close()
            with pytest.raises(BlockingIOError):
                listener.accept()
