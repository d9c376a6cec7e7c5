"""What workers of a job that is looked at do."""

from __future__ import annotations

import asyncio
import time

from aiorlinf import Worker

__all__ = ["blocks", "waits_for"]


async def waits_for(comm: Worker, peer: str, tag: int) -> None:
    """Receive from a worker, as long as it takes."""
    try:
        await comm.recv(peer, tag=tag)
    except asyncio.CancelledError:
        raise
    except Exception:  # the test is over
        pass


async def blocks(comm: Worker, seconds: float) -> None:
    """Hold the loop up."""
    await comm.send("about to block", "a:0")
    hold_the_loop_up(seconds)


def hold_the_loop_up(seconds: float) -> None:
    """By its name it is found."""
    time.sleep(seconds)
