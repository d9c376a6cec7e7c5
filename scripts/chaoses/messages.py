"""What the workers send each other: it says where it comes from, and shows whether it is whole. Pure."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch

__all__ = ["Head", "Stream", "look", "make", "some_size"]


class Stream(NamedTuple):
    """One life of a sender, a receiver's address, and a tag: in it messages are numbered from 0."""

    sender: str
    life: int
    receiver: str
    tag: int


class Head(NamedTuple):
    """Which message it is."""

    stream: Stream
    number: int


def some_size(chance: random.Random) -> int:
    """Bytes: mostly small; now and then more than a frame, more than a chunk."""
    kind = chance.random()
    if kind < 0.6:
        return chance.randrange(200)
    if kind < 0.85:
        return chance.randrange(2_000, 20_000)
    if kind < 0.97:
        return chance.randrange(80_000, 300_000)
    return chance.randrange(1_500_000, 5_000_000)


def make(head: Head, size: int) -> tuple[Any, ...]:
    """The message."""
    return (tuple(head.stream), head.number, size, {"payload": torch.full((size,), _value(head), dtype=torch.uint8)})


def look(message: Any) -> tuple[Head, str]:
    """Which message it is, and what is wrong with it ("" if nothing is)."""
    stream, number, size, content = message
    head = Head(Stream(*stream), number)
    payload = content["payload"]
    if payload.shape != (size,):
        return head, f"{tuple(payload.shape)} elements arrived instead of {size}"
    if size and not bool((payload == _value(head)).all()):
        return head, "it is not what was sent"
    return head, ""


def _value(head: Head) -> int:
    return (head.number * 31 + head.stream.tag * 7 + head.stream.life * 3 + sum(map(ord, head.stream.sender))) % 251
