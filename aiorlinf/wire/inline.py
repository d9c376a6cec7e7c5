"""Small messages as one run of bytes: the manifest, then the payload of every leaf in order, without gaps.

This is the path of most messages, so it avoids work that gives the same result every time: the manifest of a tensor, and of a
flat container of tensors, is read once per form.
"""

from __future__ import annotations

from pickle import dumps, loads
from typing import Any

import torch

from aiorlinf.errors import UnsupportedObject, WireError
from aiorlinf.wire import pickled
from aiorlinf.wire.flat import Flat, Kind
from aiorlinf.wire.leaves import Device, Leaf, LeafSpec, known_spec, tensor_bytes, tensor_over
from aiorlinf.wire.manifest import HEAD, Limits, Manifest, encode_manifest, read_manifest
from aiorlinf.wire.tree import assemble, flatten

__all__ = ["MANIFEST_MAX", "decode_inline", "encode_inline", "inline_if_small", "is_plain", "pack_inline", "tensor_manifest"]

MANIFEST_MAX = 1024 * 1024
"""A message with a larger manifest is not inline, however small its payload."""

_LIMITS = Limits(max_manifest_bytes=MANIFEST_MAX)
_IN_MEMORY = Limits(max_manifest_bytes=2**63)  # what a message says of its sizes is held against the size that it has

_TENSOR = int(Kind.TENSOR)
_DICT = int(Kind.DICT)
_OBJECT = int(Kind.OBJECT)
_HEAD_SIZE = HEAD.size
_unpack_head = HEAD.unpack_from
_CACHE_MAX = 512
_CACHED_MAX = 2048

_SHORT = 32 * 1024
"""A pickle this short has no frame that would have to travel as a leaf."""

_PLAIN = frozenset({int, float, bool, str, type(None), complex})
_SEQUENCES = frozenset({list, tuple})


def is_plain(obj: Any) -> bool:
    """Certainly only scalars and short text in at most two layers of dict, list and tuple: the pickler need not look for tensors.

    False says nothing. Large objects are not looked through.
    """
    cls = type(obj)
    if cls in _PLAIN:
        return True
    if cls is dict:
        if len(obj) > 64 or not _PLAIN.issuperset(map(type, obj)):
            return False
        values = obj.values()
    elif cls in _SEQUENCES:
        if _PLAIN.issuperset(map(type, obj)):
            return True
        if len(obj) > 64:
            return False
        values = obj
    else:
        return False
    for value in values:
        kind = type(value)
        if kind in _PLAIN:
            continue
        if kind is dict:
            if len(value) > 64 or not _PLAIN.issuperset(map(type, value)) or not _PLAIN.issuperset(map(type, value.values())):
                return False
        elif kind not in _SEQUENCES or len(value) > 256 or not _PLAIN.issuperset(map(type, value)):
            return False
    return True


# Manifests of single tensors, by their entries.
_heads: dict[bytes, bytes] = {}


def tensor_manifest(spec: LeafSpec) -> bytes:
    """The manifest of a message that is one tensor."""
    head = _heads.get(spec.entry)
    if head is None:
        if len(_heads) >= _CACHE_MAX:
            _heads.clear()
        head = _heads[spec.entry] = HEAD.pack(_TENSOR, 0, 1, 0, len(spec.entry)) + spec.entry
    return head


def encode_inline(obj: Any, limit: int, *, allow_pickle: bool = True) -> bytes | Flat:
    """The whole message as bytes if its payload is at most `limit` bytes, all in CPU memory; else the object taken apart.

    Raises:
        NonContiguousTensor, UnsupportedObject: as `flatten`.
    """
    if type(obj) is torch.Tensor:
        spec = known_spec(obj)
        if spec is not None:
            if spec.nbytes > limit:
                return Flat(Kind.TENSOR, (), [Leaf(spec, obj, obj, None)])  # as `flatten` makes it
            head = _heads.get(spec.entry)
            if head is None:
                head = tensor_manifest(spec)
            return head + tensor_bytes(obj, spec)
    elif allow_pickle and is_plain(obj):
        text = dumps(obj, 5)
        if len(text) < _SHORT:
            return HEAD.pack(_OBJECT, 0, 0, len(text), 0) + text
    return inline_if_small(flatten(obj, allow_pickle=allow_pickle), limit)


def inline_if_small(flat: Flat, limit: int) -> bytes | Flat:
    """The whole message of a flattened object as `encode_inline` gives it."""
    if not flat.leaves and not flat.flags and len(flat.skeleton) == 1:
        skeleton = flat.skeleton[0]
        return HEAD.pack(flat.kind, 0, 0, len(skeleton), 0) + skeleton
    total = 0
    for leaf in flat.leaves:
        total += leaf.spec.nbytes
        if total > limit or leaf.spec.device is not Device.CPU:
            return flat
    try:
        return pack_inline(flat)
    except UnsupportedObject:
        return flat


def pack_inline(flat: Flat) -> bytes:
    """The message of a flattened object with all its leaves in CPU memory, however large these are.

    Raises:
        UnsupportedObject: the manifest is larger than MANIFEST_MAX.
    """
    return b"".join([encode_manifest(flat, limits=_LIMITS), *[leaf.tobytes() for leaf in flat.leaves]])


# Manifests by their bytes, of the kinds that do not pickle.
_manifests: dict[bytes, Manifest] = {}


def decode_inline(body: memoryview, *, allow_pickle: bool = True) -> Any:
    """The object of a message. Everything is copied out of `body`, which may be overwritten afterwards.

    Raises:
        WireError: malformed.
        UnsupportedObject: it cannot be rebuilt here, as `rebuild`.
    """
    if len(body) < _HEAD_SIZE:
        raise WireError(f"a message of {len(body)} bytes is shorter than its head")
    kind, flags, count, skeleton_size, table_size = _unpack_head(body)
    at = _HEAD_SIZE + skeleton_size + table_size
    if kind == _OBJECT and at == len(body) and not flags and not count and not table_size and allow_pickle:
        try:
            return loads(body[_HEAD_SIZE:])
        except Exception as error:  # the classes' own code runs here and may raise anything
            raise pickled.not_rebuilt(error) from error
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return _decode_leaves(body, kind, at, allow_pickle)
    return _decode_leaves(body, kind, at, allow_pickle)


def _decode_leaves(body: memoryview, kind: int, at: int, allow_pickle: bool) -> Any:
    if kind <= _DICT and at <= _CACHED_MAX:
        form = bytes(body[:at])
        manifest = _manifests.get(form)
        if manifest is None:
            manifest, _ = read_manifest(memoryview(form))
            if len(_manifests) >= _CACHE_MAX:
                _manifests.clear()
            _manifests[form] = manifest
    else:
        manifest, at = read_manifest(body, _IN_MEMORY)
    if at + manifest.payload_bytes != len(body):
        raise WireError(f"{len(body) - at} bytes of payload where {manifest.payload_bytes} were announced")
    if kind == _TENSOR:
        return tensor_over(bytearray(body[at:]), manifest.specs[0])
    stores = []
    for spec in manifest.specs:
        end = at + spec.nbytes
        stores.append(bytearray(body[at:end]))
        at = end
    return assemble(manifest, stores, allow_pickle=allow_pickle)
