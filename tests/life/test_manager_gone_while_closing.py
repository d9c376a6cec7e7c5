"""A worker that is being closed when its manager goes says nothing of that: it will not come back to it."""

from __future__ import annotations

import asyncio

import pytest

from aiorlinf import init

__all__: list[str] = []


@pytest.mark.asyncio
async def test_the_log_has_what_was_not_delivered_and_nothing_of_the_manager(caplog: pytest.LogCaptureFixture) -> None:
    async with init("a:0") as a:
        b = await init("b:0", manager=a.manager_address, token=a.token)
        sent = b.send("for somebody who never comes", "c:0")
        closing = b.close(1.0)
        await asyncio.sleep(0)  # it has begun, and waits for c:0
    assert not closing.done()
    await closing
    assert sent.exception() is not None
    (said,) = [record.message for record in caplog.records if record.name.startswith("aiorlinf")]
    assert "b:0 closed before it could deliver 1 message" in said
