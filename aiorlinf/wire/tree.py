"""Take an object apart into skeleton and leaves, and put it together again.

Identity inside one message is kept, in every kind: a tensor object that occurs twice arrives as one object. Two tensors that
share memory (``t`` and ``t[:]``) arrive as independent copies.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import Parameter

from aiorlinf.errors import AiorlinfError, InternalError, NonContiguousTensor, UnsupportedObject, WireError
from aiorlinf.wire import paths, pickled, plain
from aiorlinf.wire.flat import INDEXED, SPLICED, Flat, Kind
from aiorlinf.wire.leaves import RAW, STREAM, Device, Leaf, LeafSpec, Refused, tensor_leaf, tensor_over
from aiorlinf.wire.manifest import Manifest

__all__ = ["Flat", "Kind", "Leaf", "LeafSpec", "Manifest", "assemble", "flatten", "rebuild"]

_U32 = struct.Struct("<I")
_ALIGNMENT = 16


def flatten(obj: Any, *, allow_pickle: bool = True) -> Flat:
    """Take `obj` apart. Nothing is copied but arrays that are not contiguous and tensors with a lazy conjugate or sign.

    Raises:
        NonContiguousTensor: names where in the object the tensor sits.
        UnsupportedObject: a part cannot travel; names which.
    """
    try:
        flat = _tensors_only(obj)
        if flat is not None:
            return flat
        if not allow_pickle:
            skeleton, leaves = plain.encode(obj)
            return Flat(Kind.PLAIN, [skeleton], leaves)
        return _pickled(obj)
    except Refused as refused:
        raise _explain(obj, refused) from (refused.__cause__ or None)


def _tensors_only(obj: Any) -> Flat | None:
    """The kinds that need neither pickle nor the plain codec: one tensor, or a flat list, tuple or dict of nothing else."""
    cls = type(obj)
    if cls is torch.Tensor or cls is Parameter:
        leaf = tensor_leaf(obj)
        return None if leaf is None else Flat(Kind.TENSOR, [], [leaf])
    if cls is dict:
        for key, value in obj.items():
            if type(key) is not str or type(value) not in _TENSOR_CLASSES:
                return None
        found = _leaves(list(obj.values()))
        if found is None:
            return None
        leaves, indexes = found
        flags = INDEXED if indexes else 0
        return Flat(Kind.DICT, [_pack_keys(obj), indexes], leaves, flags)
    if cls is list or cls is tuple:
        for value in obj:
            if type(value) not in _TENSOR_CLASSES:
                return None
        found = _leaves(obj)
        if found is None:
            return None
        leaves, indexes = found
        kind = Kind.LIST if cls is list else Kind.TUPLE
        return Flat(kind, [indexes], leaves, INDEXED if indexes else 0)
    return None


_TENSOR_CLASSES = frozenset({torch.Tensor, Parameter})


def _leaves(values: Sequence[torch.Tensor]) -> tuple[list[Leaf], bytes] | None:
    """One leaf per tensor object; and the leaf of each element, if a tensor occurs twice."""
    number: dict[int, int] = {}
    leaves = []
    for value in values:
        if id(value) not in number:
            leaf = tensor_leaf(value)
            if leaf is None:
                return None
            number[id(value)] = len(leaves)
            leaves.append(leaf)
    if len(leaves) == len(values):
        return leaves, b""
    return leaves, struct.pack(f"<{len(values)}I", *[number[id(value)] for value in values])


def _pack_keys(keys: dict[str, Any]) -> bytes:
    parts = [_U32.pack(len(keys))]
    for key in keys:
        data = key.encode("utf-8", "surrogatepass")
        parts += (_U32.pack(len(data)), data)
    return b"".join(parts)


def _unpack_keys(view: memoryview) -> tuple[list[str], memoryview]:
    try:
        (count,) = _U32.unpack_from(view)
        if count * 4 > len(view):
            raise WireError(f"{count} keys announced in {len(view)} bytes")
        at = 4
        keys = []
        for _ in range(count):
            (size,) = _U32.unpack_from(view, at)
            at += 4
            if at + size > len(view):
                raise WireError("a key cut short")
            keys.append(str(view[at : at + size], "utf-8", "surrogatepass"))
            at += size
    except (struct.error, UnicodeDecodeError) as error:
        raise WireError(f"malformed keys: {error}") from None
    return keys, view[at:]


def _pickled(obj: Any) -> Flat:
    try:
        result = pickled.dump(obj)
    except Refused:
        raise
    except Exception as error:  # the classes' own code runs here and may raise anything
        raise _unpicklable(obj, error) from error
    leaves = result.leaves
    kind = Kind.OBJECT
    if hasattr(type(obj), "__dataclass_fields__") and any(leaf.tensor is not None for leaf in leaves):
        kind = Kind.DATACLASS
    skeleton = result.segments
    if not result.splices:
        return Flat(kind, skeleton, leaves)
    gaps = struct.pack(f"<{1 + len(result.splices)}I", len(result.splices), *result.splices)
    return Flat(kind, [gaps, *skeleton], leaves, SPLICED)


def _explain(obj: Any, refused: Refused) -> AiorlinfError:
    part = refused.part
    path = paths.find(obj, lambda candidate: candidate is part)
    if refused.strided and isinstance(part, torch.Tensor):
        return NonContiguousTensor(path or f"a tensor inside {type(obj).__name__}", tuple(part.shape), part.stride())
    return UnsupportedObject(f"{path or 'a part of obj'}: {refused.reason}", path=path)


def _unpicklable(obj: Any, error: Exception) -> UnsupportedObject:
    path = paths.narrow(obj, _fails)
    return UnsupportedObject(f"{path} cannot be pickled: {type(error).__name__}: {error}", path=path)


def _fails(part: Any) -> bool:
    try:
        pickled.dump(part)
    except Exception:  # any failure is the answer that is asked for
        return True
    return False


def rebuild(manifest: Manifest, buffers: Sequence[torch.Tensor], *, allow_pickle: bool = True) -> Any:
    """Put an object together over `buffers`: one flat uint8 tensor per leaf, of just its size, filled with its payload.

    The object owns the buffers from then on; nothing is copied unless a buffer starts at an address that its dtype does not allow.
    Everything in it is writable, but for arrays and views that were read-only at the sender.

    Raises:
        WireError: the skeleton is malformed.
        UnsupportedObject: the object cannot be made here: a class, registered dataclass or dtype is missing, or `allow_pickle`
            is off and the sender has pickled. The stream stays in step: only this message is lost.
    """
    if len(buffers) != len(manifest.specs):
        raise InternalError(f"{len(buffers)} buffers for {len(manifest.specs)} leaves")
    stores = []
    for spec, buffer in zip(manifest.specs, buffers, strict=True):
        if buffer.dtype is not torch.uint8 or buffer.ndim != 1 or buffer.numel() != spec.nbytes or not buffer.is_contiguous():
            raise InternalError(f"a buffer {buffer.dtype}{list(buffer.shape)} for {spec} of {spec.nbytes} bytes")
        if spec.nbytes and buffer.data_ptr() % _ALIGNMENT and spec.is_tensor:
            buffer = buffer.clone()
        stores.append(buffer.numpy())
    return assemble(manifest, stores, allow_pickle=allow_pickle)


def assemble(manifest: Manifest, stores: Sequence[Any], *, allow_pickle: bool) -> Any:
    """As `rebuild`, over any writable buffers (bytearrays, arrays of uint8), whose sizes the caller has checked."""
    if torch.is_inference_mode_enabled():
        # The mode of whoever waits must not decide what kind of tensor somebody else receives.
        with torch.inference_mode(False):
            return _assemble(manifest, stores, allow_pickle)
    return _assemble(manifest, stores, allow_pickle)


def _assemble(manifest: Manifest, stores: Sequence[Any], allow_pickle: bool) -> Any:
    kind = manifest.kind
    specs = manifest.specs
    if kind is Kind.TENSOR:
        if len(specs) != 1 or specs[0].flags & RAW or len(manifest.skeleton):
            raise WireError("a single tensor with other than one tensor leaf")
        return tensor_over(stores[0], specs[0])
    if kind is Kind.PLAIN:
        return plain.decode(manifest.skeleton, [_leaf_over(store, spec) for store, spec in zip(stores, specs, strict=True)])
    if kind is Kind.OBJECT or kind is Kind.DATACLASS:
        if not allow_pickle:
            raise UnsupportedObject(
                "the peer has sent a pickled object, and unpickling is switched off here",
                hint="set cluster.collective.allow_pickle to the same value in all processes",
            )
        return _unpickle(manifest, stores)
    return _container(manifest, stores)


def _container(manifest: Manifest, stores: Sequence[Any]) -> Any:
    specs = manifest.specs
    rest = memoryview(manifest.skeleton)
    keys: list[str] | None = None
    if manifest.kind is Kind.DICT:
        keys, rest = _unpack_keys(rest)
    if any(spec.flags & RAW for spec in specs):
        raise WireError("a raw buffer in a container of tensors")
    tensors = [tensor_over(store, spec) for store, spec in zip(stores, specs, strict=True)]
    if manifest.flags & INDEXED:
        if len(rest) % 4:
            raise WireError("malformed leaf numbers")
        try:
            tensors = [tensors[number] for number in struct.unpack(f"<{len(rest) // 4}I", rest)]
        except IndexError:
            raise WireError("an element names a leaf that was not sent") from None
    elif len(rest):
        raise WireError("bytes left over behind a container of tensors")
    if keys is not None:
        if len(keys) != len(tensors):
            raise WireError(f"{len(keys)} keys for {len(tensors)} tensors")
        return dict(zip(keys, tensors, strict=True))
    return tuple(tensors) if manifest.kind is Kind.TUPLE else tensors


def _leaf_over(store: Any, spec: LeafSpec) -> Any:
    return memoryview(store) if spec.flags & RAW else tensor_over(store, spec)


def _unpickle(manifest: Manifest, stores: Sequence[Any]) -> Any:
    stream = memoryview(manifest.skeleton)
    buffers: list[Any] = []
    pieces: list[memoryview] = []
    for store, spec in zip(stores, manifest.specs, strict=True):
        if spec.flags & STREAM:
            pieces.append(memoryview(store))
        else:
            buffers.append(_leaf_over(store, spec))
    offsets: tuple[int, ...] = ()
    if manifest.flags & SPLICED:
        try:
            (count,) = _U32.unpack_from(stream)
            offsets = struct.unpack_from(f"<{count}I", stream, 4) if count * 4 <= len(stream) else ()
            stream = stream[4 + 4 * count :]
        except struct.error:
            raise WireError("malformed table of stream pieces") from None
        if list(offsets) != sorted(offsets) or (offsets and offsets[-1] > len(stream)):
            raise WireError("stream pieces out of order")
    if len(offsets) != len(pieces):
        raise WireError(f"{len(pieces)} stream pieces for {len(offsets)} gaps")
    return pickled.load(stream, buffers, list(zip(offsets, pieces, strict=True)))
