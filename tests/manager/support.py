"""A running manager, clients of it, and programs that join it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiorlinf.config import ClusterConfig, JobConfig, NetworkConfig
from aiorlinf.manager.client import ManagerClient
from aiorlinf.manager.service import ManagerService
from aiorlinf.rendezvous.hosts import parse_endpoint

__all__ = ["TOKEN", "Member", "config_with", "join", "manager", "spawn", "until"]

TOKEN = b"the token of the tests"
ROOT = Path(__file__).parents[2]


def config_with(**network: Any) -> JobConfig:
    """A configuration with these network settings."""
    return JobConfig(ClusterConfig(network=NetworkConfig(**network)))


@asynccontextmanager
async def manager(
    *,
    expected: Iterable[str] | None = None,
    config: JobConfig | None = None,
    job: str | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
) -> AsyncIterator[ManagerService]:
    """A manager on loopback, closed at the end."""
    service = ManagerService(config=config or JobConfig(), token=TOKEN, job=job, expected=expected)
    try:
        await service.start(host, port)
        yield service
        service._directory.check()
    finally:
        await service.close()


class Member:
    """A client that keeps what it was told."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.lost: list[Exception] = []
        self.client: ManagerClient

    @property
    def news(self) -> list[tuple[Any, ...]]:
        """The events, short."""
        return [(event["event"], event["address"], event["incarnation"], event.get("reason")) for event in self.events]


@asynccontextmanager
async def join(service: ManagerService, address: str | None = None, *, port: int = 7000, **register: Any) -> AsyncIterator[Member]:
    """A client, registered under the address if there is one, closed at the end."""
    member = Member()
    member.client = await ManagerClient.connect(
        service.address, TOKEN, deadline=10.0, worker=address, on_event=member.events.append, on_lost=member.lost.append
    )
    try:
        if address is not None:
            await member.client.register(address, port=port, **register)
        yield member
    finally:
        await member.client.close()


async def until(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    """Let the loop run until the condition holds."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "the condition was not met in time"
        await asyncio.sleep(0.005)


async def raw_connections(service: ManagerService, count: int) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connections that say nothing."""
    host, port = parse_endpoint(service.address)
    return [await asyncio.open_connection(host, port) for _ in range(count)]


def spawn(program: str, *args: str, **options: Any) -> subprocess.Popen[str]:
    """A Python program of the tests, with pipes."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", program, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        **options,
    )
