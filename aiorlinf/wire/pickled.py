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
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import Parameter

from aiorlinf.errors import AiorlinfError, UnsupportedObject
from aiorlinf.wire.arrays import array_leaf, array_over, dtype_token
from aiorlinf.wire.leaves import RAW, STREAM, Leaf, Refused, raw_leaf, tensor_leaf

__all__ = ["Pickled", "dump", "load"]

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
            return _reduce_odd_tensor(obj, self.sink)
        return NotImplemented


def _same(leaf: Any) -> Any:
    return leaf


def _reduce_tensor(tensor: torch.Tensor, sink: _Sink) -> Any:
    leaf = tensor_leaf(tensor)
    if leaf is None:
        return _reduce_odd_tensor(tensor, sink)
    sink.pending = leaf
    return _same, (_PLACE,)


def _reduce_odd_tensor(tensor: torch.Tensor, sink: _Sink) -> Any:
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    if tensor.is_meta or (fake is not None and isinstance(tensor, fake.FakeTensor)):
        raise Refused(tensor, f"a {type(tensor).__name__} on device {tensor.device.type!r} holds no values that could be sent")
    return NotImplemented


def _reduce_array(array: np.ndarray[Any, Any], sink: _Sink) -> Any:
    dtype = array.dtype
    if dtype.hasobject or not dtype.itemsize:
        return NotImplemented
    leaf, order = array_leaf(array)
    sink.pending = leaf
    return array_over, (_PLACE, dtype_token(dtype) or dtype, array.shape, order, array.flags.writeable)


def _reduce_memoryview(view: memoryview, sink: _Sink) -> Any:
    if view.c_contiguous and view.ndim == 1 and len(view.format) == 1:
        sink.pending = raw_leaf(view.cast("B"))
        return _memoryview_over, (_PLACE, view.format, view.readonly)
    # Any other layout: NumPy knows how to describe it, and keeps the shape.
    return memoryview, (np.asarray(view),)


def _memoryview_over(store: memoryview, format: str, readonly: bool) -> memoryview:
    view = store.cast(format) if format != "B" else store
    return view.toreadonly() if readonly else view


def _reduce_array_array(values: array.array[Any], sink: _Sink) -> Any:
    sink.pending = raw_leaf(memoryview(values).cast("B"))
    return _array_array_from, (values.typecode, _PLACE)


def _array_array_from(typecode: str, store: memoryview) -> array.array[Any]:
    values: array.array[Any] = array.array(typecode)
    values.frombytes(store)
    return values


_REDUCERS: dict[type, Callable[[Any, _Sink], Any]] = {
    torch.Tensor: _reduce_tensor,
    Parameter: _reduce_tensor,
    np.ndarray: _reduce_array,
    memoryview: _reduce_memoryview,
    array.array: _reduce_array_array,
}


# Idle picklers. Making one costs more than a small message; taking one from a list is atomic, so any thread may.
_idle: list[_Pickler] = []


class Pickled:
    """An object's pickle stream: segments with gaps at `splices`, where the STREAM leaves belong in order."""

    __slots__ = ("leaves", "segments", "splices")

    def __init__(self, segments: list[bytes], leaves: list[Leaf], splices: list[int]) -> None:
        self.segments = segments
        self.leaves = leaves
        self.splices = splices


def dump(obj: Any) -> Pickled:
    """Pickle `obj`.

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
    pickled = Pickled(sink.segments, sink.leaves, sink.splices)
    if sink.size < _KEEP_MAX and not sink.splices:
        # Clearing takes time by the largest memo ever held, so only those that stayed small are kept.
        pickler.clear_memo()
        sink.reset()
        _idle.append(pickler)
    return pickled


class _Reader:
    """The stream put together again for the unpickler, without joining it."""

    __slots__ = ("_at", "_parts")

    def __init__(self, parts: list[memoryview]) -> None:
        self._parts = parts
        self._at = 0

    def read(self, size: int) -> bytes | memoryview:
        part = self._parts[0] if self._parts else memoryview(b"")
        if self._at + size <= len(part):
            self._at += size
            return part[self._at - size : self._at]
        out = bytearray(min(size, sum(map(len, self._parts)) - self._at))
        self.readinto(memoryview(out))
        return memoryview(out)

    def readinto(self, out: memoryview) -> int:
        done = 0
        while done < len(out) and self._parts:
            piece = self._parts[0][self._at : self._at + len(out) - done]
            out[done : done + len(piece)] = piece
            done += len(piece)
            self._at += len(piece)
            if self._at == len(self._parts[0]):
                del self._parts[0]
                self._at = 0
        return done

    def readline(self) -> bytes:
        raise pickle.UnpicklingError("an opcode of an older pickle protocol")


def load(stream: memoryview | bytes, buffers: list[Any], splices: list[tuple[int, memoryview]]) -> Any:
    """The object of a stream. `buffers` stand for the out-of-band ones in order: tensors as they are, others as memoryviews.

    Raises:
        UnsupportedObject: it cannot be rebuilt in this process.
    """
    try:
        if not splices:
            return pickle.loads(stream, buffers=buffers)
        parts: list[memoryview] = []
        view = memoryview(stream)
        at = 0
        for offset, piece in splices:
            parts += (view[at:offset], piece)
            at = offset
        parts.append(view[at:])
        return pickle.Unpickler(_Reader([part for part in parts if len(part)]), buffers=buffers).load()
    except AiorlinfError:
        raise
    except Exception as error:  # the classes' own code runs here and may raise anything
        raise UnsupportedObject(
            f"the object cannot be rebuilt here: {type(error).__name__}: {error}",
            hint="its classes must be importable under the same names in both processes",
        ) from error
