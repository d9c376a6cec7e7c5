"""Small messages that a channel's two ends send each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiorlinf.channel.watching import watch
from aiorlinf.errors import AiorlinfError
from aiorlinf.wire.frames import stream_key
from aiorlinf.work.base import AsyncWork

if TYPE_CHECKING:
    from aiorlinf.address import WorkerAddress
    from aiorlinf.collective.exchange import Exchange

__all__ = ["post"]


def post(exchange: Exchange, peer: WorkerAddress, context: int, body: bytes) -> None:
    """Send a small message that nobody waits for; if it cannot be delivered, the link has ended, and that is noticed elsewhere."""
    key = stream_key(context, 0)
    link = exchange.table.peek(peer)
    if link is not None and key in link.sender.flowing and link.sender.send_now(key, body):
        return
    work: AsyncWork[None] = AsyncWork(exchange.home, "send")
    watch(work, lambda _: None)
    try:
        exchange._send_small(peer, work, key, body)
    except AiorlinfError as error:
        work._fail(error)
