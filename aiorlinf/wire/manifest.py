"""The manifest: kind, skeleton and leaf table of one message, as bytes.

Layout, little-endian: kind u8, flags u8, leaf count u32, skeleton size u32, table size u32, skeleton, table. The table is one
entry per leaf, each at least 12 bytes, so a hostile count cannot make us allocate more than a small multiple of what was sent.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from aiorlinf.errors import UnsupportedObject, WireError
from aiorlinf.wire.flat import Flat, Kind
from aiorlinf.wire.leaves import ENTRY_MIN, LeafSpec, read_spec

__all__ = ["HEAD", "Limits", "Manifest", "decode_manifest", "describe_manifest", "encode_manifest", "read_manifest"]

HEAD = struct.Struct("<BBIII")
_U32_MAX = 2**32 - 1
_KINDS = {int(kind): kind for kind in Kind}


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds, in bytes, that are checked before anything is allocated."""

    max_manifest_bytes: int = 16 * 1024 * 1024
    max_message_bytes: int = 1024**4


_DEFAULT = Limits()


@dataclass(slots=True)
class Manifest:
    """What the receiver knows before the payload lands.

    Attributes:
        kind: how the skeleton is to be read.
        flags: INDEXED, SPLICED.
        specs: the leaves, in order.
        skeleton: what is not a leaf; shows the memory that it was decoded from.
        payload_bytes: sum of the leaves' sizes.
    """

    kind: Kind
    flags: int
    specs: tuple[LeafSpec, ...]
    skeleton: memoryview | bytes
    payload_bytes: int


def encode_manifest(flat: Flat) -> bytes:
    """The manifest of a flattened object.

    Raises:
        UnsupportedObject: skeleton or table of 4 GiB or more.
    """
    table = [leaf.spec.entry for leaf in flat.leaves]
    skeleton_size = sum(map(len, flat.skeleton))
    table_size = sum(map(len, table))
    if skeleton_size > _U32_MAX or table_size > _U32_MAX:
        raise UnsupportedObject(f"the description of the object takes {skeleton_size + table_size} bytes")
    return b"".join((HEAD.pack(flat.kind, flat.flags, len(table), skeleton_size, table_size), *flat.skeleton, *table))


def read_manifest(view: memoryview, limits: Limits = _DEFAULT) -> tuple[Manifest, int]:
    """Decode the manifest at the start of `view`; returns it with its size.

    Raises:
        WireError: malformed, cut short, or beyond `limits`.
    """
    try:
        kind_code, flags, count, skeleton_size, table_size = HEAD.unpack_from(view)
    except struct.error:
        raise WireError(f"a manifest of {len(view)} bytes is shorter than its head") from None
    size = HEAD.size + skeleton_size + table_size
    if size > limits.max_manifest_bytes:
        raise WireError(f"a manifest of {size} bytes; at most {limits.max_manifest_bytes} are accepted")
    if size > len(view):
        raise WireError(f"a manifest of {size} bytes is cut short after {len(view)}")
    if count * ENTRY_MIN > table_size:
        raise WireError(f"{count} leaves in a table of {table_size} bytes")
    kind = _KINDS.get(kind_code)
    if kind is None:
        raise WireError(f"unknown kind of message {kind_code}")
    table = view[HEAD.size + skeleton_size : size]
    specs = []
    offset = 0
    total = 0
    for _ in range(count):
        spec, offset = read_spec(table, offset)
        total += spec.nbytes
        specs.append(spec)
    if offset != table_size:
        raise WireError(f"{table_size - offset} bytes behind the last leaf of the table")
    if total > limits.max_message_bytes:
        raise WireError(f"a payload of {total} bytes; at most {limits.max_message_bytes} are accepted")
    return Manifest(kind, flags, tuple(specs), view[HEAD.size : HEAD.size + skeleton_size], total), size


def decode_manifest(view: memoryview | bytes, *, limits: Limits = _DEFAULT) -> Manifest:
    """Decode a manifest that fills `view`. Its skeleton shows `view`'s memory, which must stay unchanged until `rebuild`.

    Raises:
        WireError: malformed, or beyond `limits`.
    """
    view = memoryview(view)
    manifest, size = read_manifest(view, limits)
    if size != len(view):
        raise WireError(f"{len(view) - size} bytes behind the manifest")
    return manifest


def describe_manifest(manifest: Manifest | Flat) -> str:
    """For error messages, such as ``dict of 3 tensors, 49152 bytes``."""
    specs = manifest.specs if isinstance(manifest, Manifest) else tuple(leaf.spec for leaf in manifest.leaves)
    if manifest.kind is Kind.TENSOR and specs:
        return str(specs[0])
    word = "object" if manifest.kind is Kind.PLAIN else manifest.kind.name.lower()
    return f"{word} of {len(specs)} {'leaf' if len(specs) == 1 else 'leaves'}, {manifest.payload_bytes} bytes"
