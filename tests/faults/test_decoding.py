"""Unpickled code may raise anything, or end the program: that concerns its message only."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aiorlinf.errors import RemoteError, UnsupportedObject
from tests.faults.conftest import Pair

KINDS: dict[str, BaseException] = {
    "cancelled": asyncio.CancelledError("by the object"),
    "exit": SystemExit("by the object"),
    "generator": GeneratorExit("by the object"),
    "error": ValueError("by the object"),
}


class Raises:
    """Raises when it is rebuilt."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __reduce__(self) -> Any:
        return _raise, (self.kind,)


def _raise(kind: str) -> None:
    raise KINDS[kind]


PARTS: dict[str, Callable[[], Any]] = {
    "small": lambda: None,
    "with a payload": lambda: torch.zeros(200_000),
    "heavy": lambda: [str(number) for number in range(60_000)],  # rebuilt in a private thread
}


@pytest.mark.asyncio
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("kind", KINDS)
async def test_whatever_rebuilding_raises_ends_both_works_and_nothing_else(
    stream_pair: Pair, complaints: list[str], kind: str, parts: str
) -> None:
    pair = stream_pair
    obj = [Raises(kind), PARTS[parts]()]
    for posted in (True, False):
        receiving = pair.ba.recv() if posted else None
        sending = pair.ab.send(obj)
        if receiving is None:
            await asyncio.sleep(0.05)
            receiving = pair.ba.recv()
        with pytest.raises(UnsupportedObject, match="by the object"):
            await receiving.async_wait(10)
        (failed,) = await asyncio.gather(sending.async_wait(10), return_exceptions=True)
        assert failed is None or (isinstance(failed, RemoteError) and "by the object" in str(failed))
        assert await pair.trip("next") == "next"
    complaints.clear()  # where the send was done already, both sides say so


@pytest.mark.asyncio
async def test_ctrl_c_while_an_object_is_rebuilt_ends_its_receive(stream_pair: Pair, complaints: list[str]) -> None:
    pair = stream_pair
    KINDS["interrupt"] = KeyboardInterrupt("by the object")
    try:
        await pair.trip("first")
        await pair.ab.send(Raises("interrupt"))
        await asyncio.sleep(0.05)
        with pytest.raises(KeyboardInterrupt):
            pair.ba.recv()
        assert await pair.trip("next") == "next"
    finally:
        del KINDS["interrupt"]
    await asyncio.sleep(0.05)
    gc.collect()
    complaints.clear()  # nobody has looked at the work, for there is none
