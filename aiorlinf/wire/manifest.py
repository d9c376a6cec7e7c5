"""The manifest: kind, skeleton and leaf table of one message, as bytes.

Layout, little-endian: kind u8, flags u8, leaf count u32, skeleton size u32, table size u32, skeleton, table. The table is one
entry per leaf, each at least 12 bytes, so a hostile count cannot make us allocate more than a small multiple of what was sent.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from aiorlinf.errors import UnsupportedObject, WireError
from aiorlinf.wire.containers import unpack_gaps, unpack_keys, unpack_numbers
from aiorlinf.wire.flat import INDEXED, SPLICED, Flat, Kind
from aiorlinf.wire.leaves import ENTRY_MIN, RAW, STREAM, LeafSpec, read_spec

__all__ = ["HEAD", "Limits", "Manifest", "decode_manifest", "describe_manifest", "encode_manifest", "known_manifest", "read_manifest"]

HEAD = struct.Struct("<BBIII")

_KINDS = {int(kind): kind for kind in Kind}
_FLAGS = {
    Kind.TENSOR: 0,
    Kind.LIST: INDEXED,
    Kind.TUPLE: INDEXED,
    Kind.DICT: INDEXED,
    Kind.DATACLASS: SPLICED,
    Kind.OBJECT: SPLICED,
    Kind.PLAIN: SPLICED,
}


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds in bytes, named as in the configuration. Checked before anything is allocated."""

    max_manifest_bytes: int = 16 * 1024 * 1024
    max_message_bytes: int = 1024**4


_DEFAULT = Limits()
_UNLIMITED = Limits(2**32 - 1, 2**64 - 1)


@dataclass(slots=True)
class Manifest:
    """What the receiver knows before the payload lands. It is consistent in itself.

    Attributes:
        kind: how the skeleton is to be read.
        specs: the leaves, in order.
        skeleton: what is not a leaf, without the tables below; shows the memory that it was decoded from.
        payload_bytes: sum of the leaves' sizes; `sizes` has each of them.
        on_devices: some of the tensors were on accelerators at the sender.
        keys: of a DICT.
        numbers: the leaf of each element of a LIST, TUPLE or DICT; None if each has its own.
        gaps: offsets in the skeleton of the pickled kinds at which the STREAM leaves belong, in order.
        spliced: some of the skeleton travels as leaves.
    """

    kind: Kind
    specs: tuple[LeafSpec, ...]
    skeleton: memoryview
    payload_bytes: int
    sizes: list[int]
    on_devices: bool = False
    keys: tuple[str, ...] | None = None
    numbers: tuple[int, ...] | None = None
    gaps: tuple[int, ...] = ()
    spliced: bool = False

    @property
    def codec_bytes(self) -> int:
        """How much `rebuild` has to read and interpret; the rest of the payload is only laid under tensors and arrays."""
        return len(self.skeleton) + sum(spec.nbytes for spec in self.specs if spec.flags & STREAM)


def encode_manifest(flat: Flat, *, limits: Limits = _UNLIMITED) -> bytes:
    """The manifest of a flattened object.

    Raises:
        UnsupportedObject: the message exceeds `limits`.
    """
    leaves = flat.leaves
    table = leaves[0].spec.entry if len(leaves) == 1 else b"".join([leaf.spec.entry for leaf in leaves])
    skeleton = b"".join(flat.skeleton)
    size = HEAD.size + len(skeleton) + len(table)
    if size > limits.max_manifest_bytes:
        raise UnsupportedObject(
            f"the description of the object ({len(flat.leaves)} tensors and buffers) takes {size} bytes;"
            f" at most {limits.max_manifest_bytes} are allowed",
            hint="put small tensors together, or raise cluster.collective.max_manifest_bytes",
        )
    if flat.payload_bytes > limits.max_message_bytes:
        raise UnsupportedObject(
            f"the object takes {flat.payload_bytes} bytes; at most {limits.max_message_bytes} are allowed",
            hint="send it in parts, or raise cluster.collective.max_message_bytes",
        )
    return HEAD.pack(flat.kind, flat.flags, len(leaves), len(skeleton), len(table)) + skeleton + table


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
    if kind is None or flags & ~_FLAGS[kind]:
        raise WireError(f"unknown kind of message {kind_code} with flags {flags:#x}")
    table = view[HEAD.size + skeleton_size : size]
    specs = []
    sizes = []
    offset = 0
    on_devices = False
    for _ in range(count):
        spec, offset = read_spec(table, offset)
        specs.append(spec)
        sizes.append(spec.nbytes)
        if spec.device:
            on_devices = True
    total = sum(sizes)
    if offset != table_size:
        raise WireError(f"{table_size - offset} bytes behind the last leaf of the table")
    if total > limits.max_message_bytes:
        raise WireError(f"a payload of {total} bytes; at most {limits.max_message_bytes} are accepted")
    manifest = Manifest(kind, tuple(specs), view[HEAD.size : HEAD.size + skeleton_size], total, sizes, on_devices)
    if kind <= Kind.DICT:
        _read_container(manifest, flags)
    else:
        _read_stream(manifest, flags)
    return manifest, size


def _read_container(manifest: Manifest, flags: int) -> None:
    kind = manifest.kind
    specs = manifest.specs
    rest = manifest.skeleton
    if any(spec.flags & RAW for spec in specs):
        raise WireError("a raw buffer in a message of tensors")
    elements = 1 if kind is Kind.TENSOR else len(specs)
    if kind is Kind.DICT:
        manifest.keys, rest = unpack_keys(rest)
    if flags & INDEXED:
        manifest.numbers = unpack_numbers(rest, len(specs))
        elements = len(manifest.numbers)
        if set(manifest.numbers) != set(range(len(specs))):
            raise WireError("a tensor that is no element")
    elif len(rest) or elements != len(specs):
        raise WireError(f"a {kind.name.lower()} of {elements} tensors with {len(specs)} leaves and {len(rest)} bytes too many")
    if manifest.keys is not None and len(manifest.keys) != elements:
        raise WireError(f"{len(manifest.keys)} keys for {elements} tensors")


def _read_stream(manifest: Manifest, flags: int) -> None:
    pieces = sum(1 for spec in manifest.specs if spec.flags & STREAM)
    manifest.spliced = bool(flags & SPLICED)
    if manifest.kind is Kind.PLAIN:
        # The whole skeleton is the first leaf, or none of it is.
        if pieces != manifest.spliced or (pieces and (len(manifest.skeleton) or not manifest.specs[0].flags & STREAM)):
            raise WireError("an object whose skeleton is in two places")
        return
    if manifest.spliced:
        manifest.gaps, manifest.skeleton = unpack_gaps(manifest.skeleton)
    if len(manifest.gaps) != pieces:
        raise WireError(f"{pieces} pieces of a stream for {len(manifest.gaps)} gaps")


def decode_manifest(view: memoryview | bytes | bytearray, *, limits: Limits = _DEFAULT) -> Manifest:
    """Decode a manifest that fills `view`. Its skeleton shows `view`'s memory, which must stay unchanged until `rebuild`.

    Raises:
        WireError: malformed, or beyond `limits`.
    """
    view = memoryview(view)
    manifest, size = read_manifest(view, limits)
    if size != len(view):
        raise WireError(f"{len(view) - size} bytes behind the manifest")
    return manifest


# Of the kinds that do not pickle, by their bytes: most messages of a job look like one before.
_known: dict[bytes, Manifest] = {}
_KNOWN_MAX = 512
_KNOWN_BYTES = 2048


def known_manifest(head: bytes, limits: Limits) -> Manifest:
    """As `decode_manifest`. Who gets it shares it with others."""
    manifest = _known.get(head)
    if manifest is None or len(head) > limits.max_manifest_bytes or manifest.payload_bytes > limits.max_message_bytes:
        manifest = decode_manifest(head, limits=limits)
        if manifest.kind <= Kind.DICT and len(head) <= _KNOWN_BYTES:
            if len(_known) >= _KNOWN_MAX:
                _known.clear()
            _known[head] = manifest
    return manifest


def describe_manifest(manifest: Manifest | Flat) -> str:
    """For error messages, such as ``dict of 3 leaves, 49152 bytes``."""
    specs = manifest.specs if isinstance(manifest, Manifest) else tuple(leaf.spec for leaf in manifest.leaves)
    if manifest.kind is Kind.TENSOR and specs:
        return str(specs[0])
    word = "object" if manifest.kind is Kind.PLAIN else manifest.kind.name.lower()
    return f"{word} of {len(specs)} {'leaf' if len(specs) == 1 else 'leaves'}, {manifest.payload_bytes} bytes"
