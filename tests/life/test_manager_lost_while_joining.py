"""A manager that is lost in the middle of a join is waited for, as one that is not there yet; within the same time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from aiorlinf import init
from aiorlinf.errors import RendezvousError
from aiorlinf.manager.requests import AskJob, Register
from aiorlinf.manager.service import ManagerService
from aiorlinf.rendezvous.hosts import parse_endpoint
from tests.manager.support import TOKEN, config_with, manager
from tests.system import soon

__all__: list[str] = []


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Callable[[type, int], list[object]]:
    """Have managers cut the connection of the first so many that ask this; those that were cut."""

    def arm(kind: type, times: int) -> list[object]:
        asked: list[object] = []
        handle: Callable[..., None] = ManagerService._handle

        def limited(service: ManagerService, session: Any, request: Any) -> None:
            if isinstance(request, kind) and len(asked) < times:
                asked.append(request)
                session.connection.abort()
            else:
                handle(service, session, request)

        monkeypatch.setattr(ManagerService, "_handle", limited)
        return asked

    return arm


@pytest.mark.asyncio
async def test_joining_goes_on_with_the_next_connection(cut: Callable[[type, int], list[object]], caplog: pytest.LogCaptureFixture) -> None:
    asked = cut(Register, 3)
    async with manager() as service, init("a:0", manager=service.address, token=TOKEN) as a:
        assert len(asked) == 3
        assert a.incarnation == 1
        sent = a.send(1, "a:0")
        assert await a.recv("a:0", timeout=20) == 1
        await sent
    assert caplog.text.count("a:0 lost the manager while it joined") == 1


@pytest.mark.asyncio
async def test_one_that_asks_for_the_configuration_goes_on_too(cut: Callable[[type, int], list[object]]) -> None:
    asked = cut(AskJob, 2)
    service = ManagerService(config=None, token=TOKEN, job="j", recover=True)
    await service.start()
    try:
        async with init("a:0", manager=service.address, token=TOKEN):
            assert len(asked) == 2
    finally:
        await service.close()


@pytest.mark.asyncio
async def test_another_manager_in_its_place_will_do(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    first = ManagerService(config=config_with(), token=TOKEN, job="j")
    await first.start()
    host, port = parse_endpoint(first.address)
    registering = asyncio.Event()
    first._handle = lambda session, request: registering.set()  # type: ignore[method-assign]  # it answers nothing any more
    worker = init("a:0", manager=first.address, token=TOKEN)
    await registering.wait()
    await first.close()
    async with manager(host=host, port=port, job="j"):
        await worker
        assert worker.incarnation == 1
        await worker.close()


@pytest.mark.asyncio
async def test_not_for_longer_than_for_any_other(cut: Callable[[type, int], list[object]]) -> None:
    asked = cut(Register, 1 << 30)
    async with manager(config=config_with(rendezvous_timeout_s=1.0)) as service:
        with pytest.raises(RendezvousError, match=r"the connection to the manager is lost|the manager was not reached"):
            await init("a:0", manager=service.address, token=TOKEN)
        assert len(asked) > 2
        # It says goodbye in the background, for two seconds at most: as long as the leak check waits.
        await soon(lambda: all(task.get_name() != "close a:0" for task in asyncio.all_tasks()))
