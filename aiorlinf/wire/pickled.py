"""Any object by pickle protocol 5, with the bytes of tensors, arrays and other large buffers kept out of the stream.

A tensor is pickled as a call of an identity function on an out-of-band buffer. At the other end pickle takes the objects that
stand for those buffers from a list and puts them in place as they are, so the list holds finished tensors. Pickle's own memo
keeps the identity of an object that occurs twice.

The pickler hands long pieces of its output (at least 64 KiB: a frame, or one large bytes, bytearray or str) to `_Sink.write`
without copying bytes and bytearray. They become leaves as well: the skeleton stays small whatever the object's size.
"""

from __future__ import annotations

import array
import pickle
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import Parameter

from aiorlinf.errors import UnsupportedObject, WireError
from aiorlinf.wire.arrays import array_leaf, array_over, dtype_token
from aiorlinf.wire.leaves import RAW, STREAM, Leaf, Refused, raw_leaf, tensor_leaf

__all__ = ["dump", "load", "not_rebuilt"]

_SPLICE_MIN = 64 * 1024
_KEEP_MAX = 4096

# Writable, so that pickle hands over the object that stands for it without wrapping it as read-only.
_PLACE = pickle.PickleBuffer(bytearray(1))


class _Sink:
    """Where one pickler writes: small pieces become the skeleton, long ones and out-of-band buffers become leaves."""

    __slots__ = ("leaves", "pending", "segments", "size", "splices")

    def __init__(self) -> None:
        self.pending: Leaf | None = None  # the leaf that the next _PLACE stands for
        self.reset()

    def reset(self) -> None:
        self.segments: list[bytes] = []
        self.size = 0  # of the segments together
        self.splices: list[int] = []  # offsets in the skeleton at which the STREAM leaves belong, ascending
        self.leaves: list[Leaf] = []

    def write(self, piece: Any) -> None:
        size = len(piece)
        if size < _SPLICE_MIN:
            self.segments.append(piece)
            self.size += size
            return
        if type(piece) is memoryview:
            piece = bytes(piece)  # a str's own memory, which this view does not keep alive
        self.splices.append(self.size)
        self.leaves.append(raw_leaf(memoryview(piece), RAW | STREAM))

    def buffer(self, buffer: pickle.PickleBuffer) -> None:
        if buffer is _PLACE and self.pending is not None:
            self.leaves.append(self.pending)
            self.pending = None
        else:  # some other class's own out-of-band buffer
            self.leaves.append(raw_leaf(buffer.raw()))


class _Pickler(pickle.Pickler):
    sink: _Sink

    def reducer_override(self, obj: Any) -> Any:
        reduce = _REDUCERS.get(type(obj))
        if reduce is not None:
            return reduce(obj, self.sink)
        if isinstance(obj, torch.Tensor):
            return _reduce_subclass(obj, self.sink)
        return NotImplemented


def _same(leaf: Any) -> Any:
    return leaf


def _reduce_tensor(tensor: torch.Tensor, sink: _Sink) -> Any:
    leaf = tensor_leaf(tensor)
    if leaf is None:
        return _reduce_odd(tensor)
    sink.pending = leaf
    return _same, (_PLACE,)


def _reduce_odd(tensor: torch.Tensor) -> Any:
    """Sparse, quantised, nested: taken apart into ordinary tensors, which come back to this pickler one by one."""
    if tensor.is_meta:
        raise Refused(tensor, f"a {tensor.layout} tensor on device 'meta' holds no values that could be sent")
    if tensor.is_quantized:
        return _reduce_quantised(tensor)
    join, parts = _sparse_parts(tensor) if tensor.layout in _SPARSE else _other_parts(tensor)
    return _join, (join, _contiguous(parts), tensor.requires_grad, type(tensor) is Parameter)


def _other_parts(tensor: torch.Tensor) -> Any:
    bare: Any = tensor.detach()
    return bare.__reduce_ex__(5)  # torch knows the parts, and how to join them


_COMPRESSED_ROWS = frozenset({torch.sparse_csr, torch.sparse_bsr})
_SPARSE = frozenset({torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})


def _sparse_parts(tensor: torch.Tensor) -> Any:
    # Torch's own function for the other end keeps every tensor that it has made in a list, until the next torch.load.
    bare = tensor.detach()
    if bare.layout is torch.sparse_coo:
        return _sparse_coo, (bare._indices(), bare._values(), tuple(bare.shape), bare.is_coalesced())
    rows = bare.layout in _COMPRESSED_ROWS
    compressed = bare.crow_indices() if rows else bare.ccol_indices()
    plain = bare.col_indices() if rows else bare.row_indices()
    return _sparse_compressed, (compressed, plain, bare.values(), tuple(bare.shape), bare.layout)


def _sparse_coo(indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], coalesced: bool) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=coalesced, check_invariants=False)


def _sparse_compressed(
    compressed: torch.Tensor, plain: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], layout: torch.layout
) -> torch.Tensor:
    return torch.sparse_compressed_tensor(compressed, plain, values, shape, layout=layout, check_invariants=False)


def _reduce_quantised(tensor: torch.Tensor) -> Any:
    if not tensor.is_contiguous():
        raise Refused(tensor, "not contiguous", strided=True)
    scheme = tensor.qscheme()
    if tensor.dtype in _WHOLE_NUMBERS and scheme is torch.per_tensor_affine:
        return torch._make_per_tensor_quantized_tensor, (tensor.int_repr(), tensor.q_scale(), tensor.q_zero_point())
    if tensor.dtype in _WHOLE_NUMBERS and scheme is torch.per_channel_affine:
        channels = (tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points(), tensor.q_per_channel_axis())
        return torch._make_per_channel_quantized_tensor, (tensor.int_repr(), *channels)
    raise Refused(tensor, f"a tensor of dtype {tensor.dtype} and scheme {scheme} cannot travel")


# By name, because torch means to give up quantised tensors of this kind.
_WHOLE_NUMBERS = frozenset(getattr(torch, name, None) for name in ("qint8", "quint8", "qint32"))


def _contiguous(parts: Any) -> Any:
    if isinstance(parts, torch.Tensor):
        return parts.contiguous() if parts.layout is torch.strided else parts
    return tuple(map(_contiguous, parts)) if type(parts) is tuple else parts


def _join(join: Callable[..., torch.Tensor], parts: tuple[Any, ...], requires_grad: bool, parameter: bool) -> torch.Tensor:
    tensor = join(*parts)
    if parameter:
        return Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor


_ORDINARY_REDUCTIONS = (torch.Tensor.__reduce_ex__, Parameter.__reduce_ex__)


def _reduce_subclass(tensor: torch.Tensor, sink: _Sink) -> Any:
    """A class of its own keeps its reduction, if it has one. Otherwise: its values as a leaf, its class, its attributes."""
    cls = type(tensor)
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    if fake is not None and isinstance(tensor, fake.FakeTensor):
        raise Refused(tensor, "a FakeTensor holds no values that could be sent")
    if cls.__reduce_ex__ not in _ORDINARY_REDUCTIONS or cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        try:
            leaf = tensor_leaf(tensor.detach().as_subclass(torch.Tensor))
        except Refused as refused:
            raise Refused(tensor, refused.reason, strided=refused.strided) from refused.__cause__
        requires_grad = tensor.requires_grad
    if leaf is None:
        return NotImplemented
    sink.pending = Leaf(leaf.spec, tensor, leaf.memory, None)
    return _as_subclass, (_PLACE, cls, requires_grad, object.__getstate__(tensor))


def _as_subclass(values: torch.Tensor, cls: type[torch.Tensor], requires_grad: bool, state: Any) -> torch.Tensor:
    tensor = values.as_subclass(cls)
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    for name, value in {**(attributes or {}), **(slots or {})}.items():
        setattr(tensor, name, value)
    return tensor.requires_grad_() if requires_grad else tensor


def _reduce_untyped_storage(storage: torch.UntypedStorage, sink: _Sink) -> Any:
    values = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    sink.pending = tensor_leaf(values)
    return _storage_of, (_PLACE,)


def _storage_of(values: torch.Tensor) -> torch.UntypedStorage:
    return values.untyped_storage()


def _reduce_typed_storage(storage: torch.TypedStorage, sink: _Sink) -> Any:
    return _typed_storage, (storage._untyped_storage, storage.dtype)


def _typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    make: Any = torch.TypedStorage
    typed: torch.TypedStorage = make(wrap_storage=storage, dtype=dtype, _internal=True)
    return typed


def _reduce_array(array: np.ndarray[Any, Any], sink: _Sink) -> Any:
    dtype = array.dtype
    if dtype.hasobject or not dtype.itemsize:
        # NumPy's own way, element by element; it forgets the read-only flag.
        return NotImplemented if array.flags.writeable else (_read_only, (array.copy(order="K"),))
    leaf, order = array_leaf(array)
    sink.pending = leaf
    return array_over, (_PLACE, dtype_token(dtype) or dtype, array.shape, order, array.flags.writeable)


def _read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


def _reduce_memoryview(view: memoryview, sink: _Sink) -> Any:
    if view.ndim == 1 and view.nbytes and view.c_contiguous and view.format in _CASTABLE:
        sink.pending = raw_leaf(view.cast("B"))
        return _memoryview_over, (_PLACE, view.format, view.readonly)
    # Any other layout: NumPy knows how to describe it, and keeps the shape.
    return memoryview, (np.asarray(view),)


_CASTABLE = frozenset("cbB?hHiIlLqQfd")


def _memoryview_over(store: memoryview, format: Any, readonly: bool) -> memoryview[Any]:
    view: memoryview[Any] = store.cast(format)
    return view.toreadonly() if readonly else view


def _reduce_array_array(values: array.array[Any], sink: _Sink) -> Any:
    if values.typecode in "uw":
        return NotImplemented  # text: its items have no fixed size between systems
    sink.pending = raw_leaf(memoryview(values).cast("B") if len(values) else memoryview(b""))
    return _array_array_from, (values.typecode, _PLACE)


def _array_array_from(typecode: Any, store: memoryview) -> array.array[Any]:
    values: array.array[Any] = array.array(typecode)
    values.frombytes(store)
    return values


_REDUCERS: dict[type, Callable[[Any, _Sink], Any]] = {
    torch.Tensor: _reduce_tensor,
    Parameter: _reduce_tensor,
    torch.UntypedStorage: _reduce_untyped_storage,
    torch.TypedStorage: _reduce_typed_storage,
    np.ndarray: _reduce_array,
    memoryview: _reduce_memoryview,
    array.array: _reduce_array_array,
}


# Idle picklers. Making one costs more than a small message; taking one from a list is atomic, so any thread may.
_idle: list[_Pickler] = []


def dump(obj: Any) -> tuple[list[bytes], list[Leaf], list[int]]:
    """Pickle `obj`: the stream in segments, the leaves, and the offsets in the stream where the STREAM leaves belong in order.

    Raises:
        Refused: a tensor in it cannot travel.
        Exception: whatever a class's own reduction raises, and pickle's own errors.
    """
    try:
        pickler = _idle.pop()
    except IndexError:
        sink = _Sink()
        pickler = _Pickler(sink, 5, buffer_callback=sink.buffer)
        pickler.sink = sink
    sink = pickler.sink
    pickler.dump(obj)
    result = sink.segments, sink.leaves, sink.splices
    if sink.size < _KEEP_MAX and not sink.splices:
        # Clearing takes time by the largest memo ever held, so only those that stayed small are kept.
        pickler.clear_memo()
        sink.reset()
        _idle.append(pickler)
    return result


class _Reader:
    """The stream put together again for the unpickler, without joining it."""

    __slots__ = ("_at", "_left", "_parts")

    def __init__(self, parts: list[memoryview]) -> None:
        self._parts = deque(parts)  # none of them empty
        self._at = 0  # in the first of them
        self._left = sum(map(len, parts))

    def read(self, size: int) -> Any:
        """A view where the unpickler wants bytes; it accepts any buffer, and copies what it keeps."""
        if self._parts and self._at + size < len(self._parts[0]):
            self._at += size
            self._left -= size
            return self._parts[0][self._at - size : self._at]
        out = bytearray(min(size, self._left))
        self.readinto(memoryview(out))
        return out

    def readinto(self, out: memoryview) -> int:
        done = 0
        while done < len(out) and self._parts:
            first = self._parts[0]
            piece = first[self._at : self._at + len(out) - done]
            out[done : done + len(piece)] = piece
            done += len(piece)
            self._at += len(piece)
            if self._at == len(first):
                self._parts.popleft()
                self._at = 0
        self._left -= done
        return done

    def readline(self) -> Any:
        raise pickle.UnpicklingError("an opcode of an older pickle protocol")


def not_rebuilt(error: Exception) -> UnsupportedObject:
    """What is raised for an error of unpickling."""
    not_found = isinstance(error, (ImportError, AttributeError))
    return UnsupportedObject(
        f"the object cannot be rebuilt here: {type(error).__name__}: {error}",
        hint="its classes must be importable under the same names in both processes" if not_found else None,
    )


def load(stream: memoryview, buffers: Sequence[Any], splices: Sequence[tuple[int, memoryview]]) -> Any:
    """The object of a stream, with pieces of it to be put in at offsets.

    `buffers` stand for the out-of-band ones in order: tensors as they are, others as memoryviews.

    Raises:
        UnsupportedObject: it cannot be rebuilt in this process.
    """
    left = iter(buffers)
    try:
        if not splices:
            obj = pickle.loads(stream, buffers=left)
        else:
            parts: list[memoryview] = []
            at = 0
            for offset, piece in splices:
                parts += (stream[at:offset], piece)
                at = offset
            parts.append(stream[at:])
            obj = pickle.Unpickler(_Reader([part for part in parts if len(part)]), buffers=left).load()
    except Exception as error:  # the classes' own code runs here and may raise anything
        raise not_rebuilt(error) from error
    if next(left, None) is not None:
        raise WireError("buffers left over behind a pickled object")
    return obj
