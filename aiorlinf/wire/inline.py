"""Small messages as one run of bytes: the manifest, then the payload of every leaf in order, without gaps.

This is the path of most messages, so it avoids work that gives the same result every time: the manifest of a tensor is made and
read once per dtype, shape and flags.
"""

from __future__ import annotations

from ctypes import string_at
from typing import Any

import torch

from aiorlinf.errors import WireError
from aiorlinf.wire.flat import Flat
from aiorlinf.wire.leaves import Device, Leaf
from aiorlinf.wire.manifest import encode_manifest, read_manifest
from aiorlinf.wire.tree import assemble, flatten

__all__ = ["decode_inline", "encode_inline", "pack_inline"]


def encode_inline(obj: Any, limit: int, *, allow_pickle: bool = True) -> bytes | Flat:
    """The whole message as bytes if its payload is at most `limit` bytes, all in CPU memory; else the object taken apart.

    Raises:
        NonContiguousTensor, UnsupportedObject: as `flatten`.
    """
    flat = flatten(obj, allow_pickle=allow_pickle)
    total = 0
    for leaf in flat.leaves:
        total += leaf.spec.nbytes
        if total > limit or leaf.spec.device is not Device.CPU:
            return flat
    return pack_inline(flat)


def pack_inline(flat: Flat) -> bytes:
    """The message of a flattened object, whatever its size; all leaves must be in CPU memory."""
    return b"".join((encode_manifest(flat), *map(_payload, flat.leaves)))


def _payload(leaf: Leaf) -> bytes | memoryview:
    memory = leaf.memory
    if memory is not None:
        return string_at(memory.data_ptr(), leaf.spec.nbytes)
    raw = leaf.raw
    assert raw is not None, "a leaf outside CPU memory"
    return raw


def decode_inline(body: memoryview, *, allow_pickle: bool = True) -> Any:
    """The object of a message. Everything is copied out of `body`, which may be overwritten afterwards.

    Raises:
        WireError: malformed.
        UnsupportedObject: it cannot be rebuilt here, as `rebuild`.
    """
    manifest, at = read_manifest(body)
    if at + manifest.payload_bytes != len(body):
        raise WireError(f"{len(body) - at} bytes of payload where {manifest.payload_bytes} were announced")
    stores = []
    for spec in manifest.specs:
        end = at + spec.nbytes
        stores.append(bytearray(body[at:end]))
        at = end
    return assemble(manifest, stores, allow_pickle=allow_pickle)
