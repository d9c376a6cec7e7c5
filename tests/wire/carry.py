"""Carry an object through the wire's two forms inside one process, and compare what arrives bit for bit."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any

import numpy as np
import torch

from aiorlinf.wire.inline import decode_inline, encode_inline, pack_inline
from aiorlinf.wire.manifest import decode_manifest, encode_manifest
from aiorlinf.wire.tree import Flat, flatten, rebuild

__all__ = ["WAYS", "bits", "buffers_of", "by_inline", "by_rebuild", "same"]

UNLIMITED = 1 << 60


def by_inline(obj: Any, *, allow_pickle: bool = True) -> Any:
    """As a small message: encode, decode from memory that is overwritten at once."""
    body = encode_inline(obj, UNLIMITED, allow_pickle=allow_pickle)
    if isinstance(body, Flat):
        body = pack_inline(body)
    memory = bytearray(body)
    result = decode_inline(memoryview(memory), allow_pickle=allow_pickle)
    memory[:] = b"\xaa" * len(memory)
    return result


def by_rebuild(obj: Any, *, allow_pickle: bool = True) -> Any:
    """As a large message: manifest, then each leaf into a buffer of its own."""
    flat = flatten(obj, allow_pickle=allow_pickle)
    manifest = decode_manifest(bytearray(encode_manifest(flat)))
    assert manifest.payload_bytes == flat.payload_bytes
    return rebuild(manifest, buffers_of(flat), allow_pickle=allow_pickle)


WAYS = [by_inline, by_rebuild]


def buffers_of(flat: Flat) -> list[torch.Tensor]:
    buffers = []
    for leaf in flat.leaves:
        assert leaf.raw is not None
        assert leaf.raw.format == "B"
        assert leaf.raw.ndim == 1
        assert leaf.raw.nbytes == leaf.nbytes
        assert leaf.tobytes() == leaf.raw.tobytes()
        buffer = torch.empty(leaf.nbytes, dtype=torch.uint8, device="cpu")
        if leaf.nbytes:
            memoryview(buffer.numpy())[:] = leaf.raw  # type: ignore[arg-type]
        buffers.append(buffer)
    return buffers


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(sent: Any, got: Any) -> None:
    """Assert equal classes and equal bits, all the way down."""
    assert type(got) is type(sent)
    if isinstance(sent, torch.Tensor):
        assert got.dtype == sent.dtype
        assert got.shape == sent.shape
        assert got.requires_grad == sent.requires_grad
        assert got.is_leaf
        assert bits(got) == bits(sent)
    elif isinstance(sent, np.ndarray):
        assert got.dtype == sent.dtype
        assert got.shape == sent.shape
        assert got.flags.writeable == sent.flags.writeable
        if sent.dtype.hasobject:
            for one, other in zip(sent.reshape(-1).tolist(), got.reshape(-1).tolist(), strict=True):
                same(one, other)
        else:
            assert got.tobytes() == sent.tobytes()
    elif isinstance(sent, memoryview):
        assert (got.format, got.shape, got.readonly) == (sent.format, sent.shape, sent.readonly)
        assert got.tobytes() == sent.tobytes()
    elif isinstance(sent, dict):
        assert list(map(repr, got)) == list(map(repr, sent))
        for one, other in zip(sent.values(), got.values(), strict=True):
            same(one, other)
    elif isinstance(sent, list | tuple | deque):
        assert len(got) == len(sent)
        for one, other in zip(sent, got, strict=True):
            same(one, other)
    elif dataclasses.is_dataclass(sent):
        for field in dataclasses.fields(sent):
            assert hasattr(got, field.name) == hasattr(sent, field.name)
            if hasattr(sent, field.name):
                same(getattr(sent, field.name), getattr(got, field.name))
    elif isinstance(sent, float | complex):
        assert repr(got) == repr(sent)
    else:
        assert got == sent
