"""A frame that makes no sense ends the link, and with it everybody who waits: nobody is left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aiorlinf.config import CollectiveConfig
from aiorlinf.errors import AiorlinfError, WireError
from aiorlinf.link.placement import PLACE
from aiorlinf.wire.frames import PLACED_PREFIX, Flag, FrameType, frame
from aiorlinf.wire.manifest import encode_manifest
from aiorlinf.wire.tree import flatten
from aiorlinf.work.base import AsyncWork
from tests.link.stage import Side, StepHome, StepLoop, join

__all__: list[str] = []

_FLAT = flatten(torch.zeros(3))
_MANIFEST = encode_manifest(_FLAT)
_TENSOR = _FLAT.leaves[0].spec.entry

_BAD = {
    "a tensor without a description": frame(FrameType.DATA, 0, b"\xff" * 40, Flag.TENSOR),
    "a tensor with too few bytes": frame(FrameType.DATA, 0, b"", Flag.TENSOR),
    "an answer wanted, and no number": frame(FrameType.DATA, 0, b"", Flag.WANT_REPLY),
    "an OPEN cut short": frame(FrameType.OPEN, 0, b"\x01"),
    "an OPEN whose manifest is nonsense": frame(FrameType.OPEN, 0, b"\x01" * 80),
    "a START of nothing": frame(FrameType.START, 7, bytes(16)),
    "a PLACED cut short": frame(FrameType.PLACED, 0, bytes(19)),
    "a PLACED whose place is cut short": frame(FrameType.PLACED, 0, PLACED_PREFIX.pack(1, 0, 13) + bytes(12)),
    "a PLACED whose manifest is nonsense": frame(FrameType.PLACED, 0, PLACED_PREFIX.pack(1, 80, 12) + b"\x01" * 92),
    "a PLACED where no memory is shared": frame(FrameType.PLACED, 0, PLACED_PREFIX.pack(1, 12, 12) + PLACE.pack(1, 0) + _MANIFEST),
    "a PLACED of a tensor where no memory is shared": frame(
        FrameType.PLACED, 1, PLACED_PREFIX.pack(1, 12, 12) + PLACE.pack(1, 0) + _TENSOR, Flag.TENSOR | Flag.WANT_REPLY
    ),
    "a RELEASE of nothing": frame(FrameType.RELEASE, 0, bytes(16)),
    "an unknown type": frame(200, 0),
    **{
        f"more than the window, {what}": frame(FrameType.DATA, 5, bytes(20_000)) * 3 + frame(FrameType.DATA, tag, bytes(20_000), flags)
        for what, tag, flags in (
            ("where somebody waits for it", 0, 0),
            ("where somebody waits and an answer is wanted", 0, Flag.WANT_REPLY),
            ("where somebody waits for a tensor", 1, 0),
            ("where nobody waits", 5, 0),
        )
    },
}


@pytest.mark.parametrize("what", _BAD)
def test_whoever_waits_is_told(what: str) -> None:
    loop = StepLoop()
    config = CollectiveConfig(backend="stream", window_bytes=1 << 16, max_message_bytes=1 << 16, inline_max_bytes=1 << 15)
    one, two = Side(StepHome(loop), "a:0", "b:0", config), Side(StepHome(loop), "b:0", "a:0", config)
    join(loop, one, two)
    one.up()
    waiting: list[AsyncWork[Any]] = [
        one.exchange.recv(two.address, 0, 0, None),
        one.exchange.recv(two.address, 0, 0, None),
        one.exchange.recv_tensor(two.address, 0, torch.zeros(3), 1, None),
    ]
    two.socket.write(_BAD[what])
    for _ in range(5):
        one.socket.read(1 << 20)
        loop.turn()
    for work in waiting:
        assert work.done(), f"{work!r} waits for ever"
        assert isinstance(work.exception(), WireError)
    two.link.end(lambda: AiorlinfError("over"))
    loop.turn()
    assert loop.problems == []
    loop.close()
