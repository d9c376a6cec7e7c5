"""Take an object apart into skeleton and leaves, and put it together again.

What arrives, in every kind: each container and tensor of the class that it was; a tensor object that occurs twice as one object; two
tensors that share memory (``t`` and ``t[:]``, or ``a[0]`` and ``a[1]``) as independent copies; a Parameter as a Parameter; a tensor
that required a gradient as a leaf that does. Hooks, ``grad``, the graph, and Python attributes of a plain tensor stay behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import Parameter

from aiorlinf.errors import AiorlinfError, InternalError, NonContiguousTensor, UnsupportedObject
from aiorlinf.wire import paths, pickled, plain
from aiorlinf.wire.containers import number, pack_keys, pack_numbers
from aiorlinf.wire.flat import INDEXED, SPLICED, Flat, Kind
from aiorlinf.wire.leaves import RAW, STREAM, Leaf, LeafSpec, Refused, raw_leaf, tensor_leaf, tensor_over
from aiorlinf.wire.manifest import Manifest

__all__ = ["Flat", "Kind", "Leaf", "LeafSpec", "Manifest", "assemble", "flatten", "rebuild"]

_ALIGNMENT = 16
_SKELETON_MAX = 64 * 1024

_TENSORS = frozenset({torch.Tensor, Parameter})
_TEXT = frozenset({str})
_LAST_OF_TENSORS = int(Kind.DICT)
_CONTAINERS: dict[type, Kind] = {list: Kind.LIST, tuple: Kind.TUPLE, dict: Kind.DICT}


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
        return _pickled(obj) if allow_pickle else _plain(obj)
    except Refused as refused:
        raise _explain(obj, refused) from refused.__cause__


def _tensors_only(obj: Any) -> Flat | None:
    """The kinds that need no codec: one tensor, or a flat list, tuple or dict (by text) of nothing else."""
    cls = type(obj)
    if cls in _TENSORS:
        single = tensor_leaf(obj)
        return None if single is None else Flat(Kind.TENSOR, [], [single])
    if cls is dict:
        if not _TENSORS.issuperset(map(type, obj.values())) or not _TEXT.issuperset(map(type, obj)):
            return None
        values = list(obj.values())
    elif cls is list or cls is tuple:
        if not _TENSORS.issuperset(map(type, obj)):
            return None
        values = obj
    else:
        return None
    skeleton = [pack_keys(obj)] if cls is dict else []
    flags = 0
    if len(set(map(id, values))) < len(values):
        values, numbers = number(values)
        skeleton.append(pack_numbers(numbers))
        flags = INDEXED
    leaves: list[Leaf] = []
    for value in values:
        leaf = tensor_leaf(value)
        if leaf is None:
            return None
        leaves.append(leaf)
    return Flat(_CONTAINERS[cls], skeleton, leaves, flags)


def _plain(obj: Any) -> Flat:
    skeleton, leaves = plain.encode(obj)
    if len(skeleton) < _SKELETON_MAX:
        return Flat(Kind.PLAIN, [skeleton], leaves)
    return Flat(Kind.PLAIN, [], [raw_leaf(memoryview(skeleton), RAW | STREAM), *leaves], SPLICED)


def _pickled(obj: Any) -> Flat:
    try:
        segments, leaves, gaps = pickled.dump(obj)
    except Refused:
        raise
    except UnsupportedObject as error:  # something in it says so of itself
        path, _ = paths.narrow(obj, _fails)
        raise UnsupportedObject(f"{path}: {error.message}", path=path, hint=error.hint) from error
    except RecursionError as error:
        raise UnsupportedObject("obj is nested too deeply to be pickled", path="obj") from error
    except Exception as error:  # the classes' own code runs here and may raise anything
        path, part = paths.narrow(obj, _fails)
        what = f"it is a {type(part).__qualname__}, which stays in its process: " if paths.stays(part) else ""
        raise UnsupportedObject(f"{path} cannot be pickled: {what}{type(error).__name__}: {error}", path=path) from error
    kind = Kind.OBJECT
    if leaves and hasattr(type(obj), "__dataclass_fields__") and any(leaf.tensor is not None for leaf in leaves):
        kind = Kind.DATACLASS
    if gaps:
        return Flat(kind, [pack_numbers([len(gaps), *gaps]), *segments], leaves, SPLICED)
    return Flat(kind, segments, leaves)


def _fails(part: Any) -> bool:
    try:
        pickled.dump(part)
    except Exception:  # any failure is the answer that is asked for
        return True
    return False


def _explain(obj: Any, refused: Refused) -> AiorlinfError:
    part = refused.part
    path = paths.find(obj, part)
    if refused.strided and isinstance(part, torch.Tensor):
        hint = None if path else "replace it by what its contiguous() returns"
        return NonContiguousTensor(path or f"a tensor inside {type(obj).__name__}", tuple(part.shape), part.stride(), hint=hint)
    return UnsupportedObject(f"{path or f'a part of {type(obj).__name__}'}: {refused.reason}", path=path)


def rebuild(manifest: Manifest, buffers: Sequence[torch.Tensor], *, allow_pickle: bool = True) -> Any:
    """Put an object together over `buffers`: one flat uint8 tensor per leaf, of just its size, filled with its payload; buffers of
    tensors may be on any device.

    The object owns the buffers from then on. Nothing is copied, unless a tensor's buffer starts at an address that is no multiple
    of 16. Everything is writable, but for arrays and views that were read-only at the sender.

    Raises:
        WireError: the skeleton is malformed.
        UnsupportedObject: the object cannot be made here: a class, registered dataclass or dtype is missing, or `allow_pickle`
            is off and the sender has pickled. The stream stays in step: only this message is lost.
    """
    if len(buffers) != len(manifest.specs):
        raise InternalError(f"{len(buffers)} buffers for {len(manifest.specs)} leaves")
    stores: list[Any] = []
    for spec, buffer in zip(manifest.specs, buffers, strict=True):
        if buffer.dtype is not torch.uint8 or buffer.shape != (spec.nbytes,) or buffer.is_meta or not buffer.is_contiguous():
            raise InternalError(f"a buffer {buffer.dtype}{list(buffer.shape)} on {buffer.device} for {spec} of {spec.nbytes} bytes")
        if not buffer.is_cpu:
            if not spec.is_tensor:
                raise InternalError(f"a buffer on {buffer.device} for {spec}")
            stores.append(buffer)
            continue
        if spec.is_tensor and buffer.data_ptr() % _ALIGNMENT:
            buffer = buffer.clone()
        stores.append(buffer.numpy())
    return assemble(manifest, stores, allow_pickle=allow_pickle)


def assemble(manifest: Manifest, stores: Sequence[Any], *, allow_pickle: bool) -> Any:
    """As `rebuild`, over any writable buffers (bytearrays, arrays of uint8), whose sizes the caller has checked."""
    if torch.is_inference_mode_enabled():
        # The mode of whoever happens to wait must not decide what kind of tensor somebody receives.
        with torch.inference_mode(False):
            return _assemble(manifest, stores, allow_pickle)
    return _assemble(manifest, stores, allow_pickle)


def _assemble(manifest: Manifest, stores: Sequence[Any], allow_pickle: bool) -> Any:
    kind = manifest.kind
    if kind > _LAST_OF_TENSORS:
        return _decode(manifest, stores, allow_pickle)
    tensors = list(map(tensor_over, stores, manifest.specs))
    if manifest.numbers is not None:
        tensors = [tensors[index] for index in manifest.numbers]
    if manifest.keys is not None:
        return dict(zip(manifest.keys, tensors, strict=True))
    if kind is Kind.LIST:
        return tensors
    return tuple(tensors) if kind is Kind.TUPLE else tensors[0]


def _decode(manifest: Manifest, stores: Sequence[Any], allow_pickle: bool) -> Any:
    if not allow_pickle and manifest.kind is not Kind.PLAIN:
        raise UnsupportedObject(
            "the peer has sent a pickled object, and unpickling is switched off here",
            hint="set cluster.collective.allow_pickle to the same value in all processes",
        )
    pieces: list[memoryview] = []
    parts: list[Any] = []
    for store, spec in zip(stores, manifest.specs):  # noqa: B905 (the caller has counted them)
        flags = spec.flags
        if not flags & RAW:
            parts.append(tensor_over(store, spec))
        elif flags & STREAM:
            pieces.append(memoryview(store))
        else:
            parts.append(memoryview(store))
    if manifest.kind is Kind.PLAIN:
        return plain.decode(pieces[0] if manifest.spliced else manifest.skeleton, parts)
    return pickled.load(manifest.skeleton, parts, list(zip(manifest.gaps, pieces, strict=True)) if pieces else ())
