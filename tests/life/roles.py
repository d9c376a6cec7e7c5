"""What runs in the other processes of these tests."""

from __future__ import annotations

from aiorlinf import Worker

__all__ = ["echo"]


async def echo(comm: Worker) -> str:
    """Send back what `a:0` sends, until that ends; how it ended."""
    try:
        while True:
            await comm.send(await comm.recv("a:0"), "a:0")
    except Exception as error:  # whatever it is: the test looks at it
        return f"{type(error).__name__}: {error}"
