"""One leaf: a contiguous run of bytes that leaves the object and travels raw.

A leaf is a tensor, or any other buffer (an array, bytes, a piece of a long pickle stream). `LeafSpec` is what the other side
must know before the bytes land. Python attributes, hooks and ``grad`` of a tensor do not travel: data, class and flags do.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch.nn import Parameter

from aiorlinf.errors import UnsupportedObject, WireError
from aiorlinf.wire.dtypes import DTYPES, NAMES, NUMPY
from aiorlinf.wire.shown import shown

__all__ = [
    "ENTRY_MIN",
    "PARAMETER",
    "RAW",
    "REQUIRES_GRAD",
    "STREAM",
    "Device",
    "Leaf",
    "LeafSpec",
    "Refused",
    "known_spec",
    "raw_leaf",
    "read_spec",
    "tensor_bytes",
    "tensor_leaf",
    "tensor_over",
]

PARAMETER = 1
REQUIRES_GRAD = 2
RAW = 4
"""A buffer, not a tensor: no dtype, no shape."""
STREAM = 8
"""A long piece of the pickle stream itself, put back into the stream before unpickling. Only together with RAW."""

_ALL_FLAGS = PARAMETER | REQUIRES_GRAD | RAW | STREAM
_ENTRY = struct.Struct("<BBBBQ")
ENTRY_MIN = _ENTRY.size
_MAX_DIMS = 255
_MAX_NUMPY_DIMS = 32  # NumPy 1.x; 2.x has 64
_CACHE_MAX = 4096
_STRIDED = torch.strided


class Device(IntEnum):
    """The kind of memory that a leaf was sent from. The numbers are part of the protocol."""

    CPU = 0
    CUDA = 1
    XPU = 2
    HPU = 3
    NPU = 4
    MPS = 5
    OTHER = 6  # torch's PrivateUse1, under whatever name


_DEVICES = {device.name.lower(): device for device in Device if device.name != "OTHER"}
_DEVICE_CODES = frozenset(map(int, Device))


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """What the receiver knows of a leaf before its bytes arrive.

    Attributes:
        nbytes: exact payload size in bytes.
        dtype: torch's name of the element type; empty for a raw buffer.
        shape: of the tensor; empty for a raw buffer.
        flags: PARAMETER, REQUIRES_GRAD, RAW, STREAM.
        device: kind of memory on the sender.
        entry: the spec as it stands in a manifest.
        torch_dtype: the element type here; None for a raw buffer, and for a dtype that this process's torch does not know.
        numpy_dtype: the same for NumPy, if tensors of this dtype and number of dimensions can be made through it.
        is_complex: the values may be a lazy conjugate.
    """

    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    flags: int = 0
    device: Device = Device.CPU
    entry: bytes = field(init=False, repr=False, compare=False)
    torch_dtype: torch.dtype | None = field(init=False, repr=False, compare=False)
    numpy_dtype: np.dtype[Any] | None = field(init=False, repr=False, compare=False)
    is_complex: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        name = self.dtype.encode("ascii")
        head = _ENTRY.pack(self.flags, self.device, len(self.shape), len(name), self.nbytes)
        entry = b"".join((head, name, struct.pack(f"<{len(self.shape)}Q", *self.shape)))
        torch_dtype = DTYPES.get(self.dtype)
        numpy_dtype = NUMPY.get(self.dtype) if len(self.shape) <= _MAX_NUMPY_DIMS else None
        object.__setattr__(self, "entry", entry)
        object.__setattr__(self, "torch_dtype", torch_dtype)
        object.__setattr__(self, "numpy_dtype", numpy_dtype)
        object.__setattr__(self, "is_complex", torch_dtype is not None and torch_dtype.is_complex)

    @property
    def is_tensor(self) -> bool:
        """False for a raw buffer."""
        return not self.flags & RAW

    def __str__(self) -> str:
        if self.flags & RAW:
            return f"buffer of {self.nbytes} bytes"
        word = "parameter" if self.flags & PARAMETER else "tensor"
        place = "" if self.device is Device.CPU else f" on {self.device.name.lower()}"
        return f"{word} {self.dtype}[{','.join(map(str, self.shape))}]{place}"


class Refused(Exception):
    """A part of the object cannot travel. Whoever knows the whole object turns it into a public error with a path."""

    def __init__(self, part: object, reason: str, *, strided: bool = False) -> None:
        super().__init__(reason)
        self.part = part
        self.reason = reason
        self.strided = strided


class Leaf:
    """A leaf on its way out. It keeps the memory alive that it shows.

    Attributes:
        tensor: the tensor as the user gave it; None for a raw buffer.
        spec: its description.
    """

    __slots__ = ("_memory", "_raw", "spec", "tensor")

    def __init__(self, spec: LeafSpec, tensor: torch.Tensor | None, memory: torch.Tensor | None, raw: memoryview | None) -> None:
        self.spec: LeafSpec = spec
        self.tensor: torch.Tensor | None = tensor
        self._memory = memory
        self._raw = raw

    @property
    def nbytes(self) -> int:
        """Payload size in bytes."""
        return self.spec.nbytes

    @property
    def memory(self) -> torch.Tensor | None:
        """The tensor whose bytes travel: `tensor`, once held another on its memory, or a copy where a lazy conjugate or sign had to be
        carried out."""
        return self._memory

    @property
    def raw(self) -> memoryview | None:
        """The payload as a flat view of unsigned bytes without a copy; None while it is not in CPU memory."""
        raw = self._raw
        if raw is None and self._memory is not None and self._memory.is_cpu:
            raw = self._raw = shown(self._memory) if self.spec.nbytes else memoryview(b"")
        return raw

    def hold(self) -> None:
        """Show this memory from now on, whatever becomes of the tensor object.

        An assignment to its ``data``, `set_` or `resize_` would otherwise change what is read, in the middle of reading it.
        """
        memory = self._memory
        if memory is not None and memory is self.tensor:
            self._memory = memory.detach()

    def tobytes(self) -> bytes:
        """A copy of the payload. For small ones this is much cheaper than `raw`; it must be in CPU memory."""
        if self._memory is not None:
            return _bytes_at(self._memory.data_ptr(), self.spec.nbytes)
        return b"" if self._raw is None else bytes(self._raw)

    def __repr__(self) -> str:
        return f"<Leaf {self.spec}>"


# ctypes.string_at takes the size as a C int, which 2 GiB overflow.
_bytes_at: Callable[[int, int], bytes] = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)


# Specs of tensors in CPU memory, which is all of them in most jobs. The values are shared, so a manifest's entry is made once.
_specs: dict[tuple[torch.dtype, torch.Size, bool, type], LeafSpec] = {}


def tensor_bytes(tensor: torch.Tensor, spec: LeafSpec) -> bytes:
    """A copy of the bytes of a tensor to which `known_spec` gave `spec`."""
    return _bytes_at(tensor.data_ptr(), spec.nbytes)


def tensor_leaf(tensor: torch.Tensor) -> Leaf | None:
    """The leaf of a tensor or Parameter of exactly that class; None if its values are not one dense run of plain elements.

    Raises:
        Refused: not contiguous, or without memory that could be sent.
    """
    spec = known_spec(tensor)
    if spec is not None:
        return Leaf(spec, tensor, tensor, None)
    return _tensor_leaf_carefully(tensor)


def known_spec(tensor: torch.Tensor) -> LeafSpec | None:
    """The spec of a tensor or Parameter in CPU memory that can travel just as it lies there, if one of its form was seen before."""
    try:
        spec = _specs.get((tensor.dtype, tensor.shape, tensor.requires_grad, type(tensor)))
        if (
            spec is not None
            and tensor.is_cpu
            and tensor.layout is _STRIDED
            and tensor.is_contiguous()
            and not tensor.is_neg()
            and not (spec.is_complex and tensor.is_conj())
            and (tensor.data_ptr() or not spec.nbytes)
        ):
            return spec
    except RuntimeError:
        pass  # one of the kinds that lack such a property; the careful way tells which
    return None


def _tensor_leaf_carefully(tensor: torch.Tensor) -> Leaf | None:
    dtype = tensor.dtype
    if tensor.layout is not _STRIDED or tensor.is_nested or dtype not in NAMES:
        return None
    device = tensor.device
    shape = tensor.shape
    place = _DEVICES.get(device.type)
    if place is None and device.type == torch._C._get_privateuse1_backend_name():
        place = Device.OTHER
    if device.type == "meta":
        raise Refused(tensor, "a tensor on device 'meta' holds no values that could be sent")
    if place is None:
        raise Refused(tensor, f"tensors on device {device.type!r} are not supported")
    if len(shape) > _MAX_DIMS:
        raise Refused(tensor, f"a tensor of {len(shape)} dimensions; at most {_MAX_DIMS} can travel")
    if not tensor.is_contiguous():
        raise Refused(tensor, "not contiguous", strided=True)
    flags = (REQUIRES_GRAD if tensor.requires_grad else 0) | (PARAMETER if type(tensor) is Parameter else 0)
    spec = LeafSpec(shape.numel() * dtype.itemsize, NAMES[dtype], tuple(shape), flags, place)
    memory = tensor
    if tensor.is_conj() or tensor.is_neg():
        memory = tensor.detach().resolve_conj().resolve_neg()
    if spec.nbytes:
        try:
            address = memory.data_ptr()
        except RuntimeError as error:
            raise Refused(tensor, f"the tensor's memory cannot be read here ({error})") from error
        if not address:
            if not memory._is_zerotensor():
                raise Refused(tensor, "the tensor's storage was freed (resized to 0)")
            memory = torch.zeros(shape, dtype=dtype, device=device)
    if place is Device.CPU:
        if len(_specs) >= _CACHE_MAX:
            _specs.clear()
        _specs[(dtype, shape, tensor.requires_grad, type(tensor))] = spec
    return Leaf(spec, tensor, memory, None)


def raw_leaf(view: memoryview, flags: int = RAW) -> Leaf:
    """The leaf of a flat view of bytes. The view keeps its memory alive."""
    key = (view.nbytes, flags)
    spec = _raw_specs.get(key)
    if spec is None:
        if len(_raw_specs) >= _CACHE_MAX:
            _raw_specs.clear()
        spec = _raw_specs[key] = LeafSpec(view.nbytes, "", (), flags)
    return Leaf(spec, None, None, view)


_raw_specs: dict[tuple[int, int], LeafSpec] = {}


# Specs by their entries: most messages of a job look like one before.
_read: dict[bytes, LeafSpec] = {}


def read_spec(view: memoryview, offset: int) -> tuple[LeafSpec, int]:
    """Decode one spec at `offset`; returns it with the offset behind it.

    Raises:
        WireError: cut short, or contradicting itself.
    """
    try:
        end = offset + ENTRY_MIN + 8 * view[offset + 2] + view[offset + 3]
    except IndexError:
        raise WireError("leaf description cut short") from None
    entry = bytes(view[offset:end])
    spec = _read.get(entry)
    if spec is None:
        if offset + len(entry) != end:
            raise WireError("leaf description cut short")
        if len(_read) >= _CACHE_MAX:
            _read.clear()
        spec = _read[entry] = _parse_entry(entry)
    return spec, end


def _parse_entry(entry: bytes) -> LeafSpec:
    flags, device, dims, name_len, nbytes = _ENTRY.unpack_from(entry)
    if flags & ~_ALL_FLAGS or device not in _DEVICE_CODES:
        raise WireError(f"leaf with unknown flags {flags:#x} or device {device}")
    name = entry[ENTRY_MIN : ENTRY_MIN + name_len].decode("latin-1")
    shape = struct.unpack_from(f"<{dims}Q", entry, ENTRY_MIN + name_len)
    if flags & RAW:
        if name or shape or flags & (PARAMETER | REQUIRES_GRAD):
            raise WireError("a raw buffer with the description of a tensor")
        return LeafSpec(nbytes, "", (), flags, Device(device))
    if flags & STREAM or not (name.isascii() and name.isidentifier()):
        raise WireError(f"a tensor of dtype {name!r} and flags {flags:#x}")
    spec = LeafSpec(nbytes, name, shape, flags, Device(device))
    _check_size(spec)
    return spec


def _check_size(spec: LeafSpec) -> None:
    dtype = spec.torch_dtype
    if dtype is None:
        return  # a newer torch, not a broken stream: it fails the one message, when the tensor is to be made
    numel = 1
    for dim in spec.shape:
        numel *= dim
    if numel * dtype.itemsize != spec.nbytes:
        raise WireError(f"{spec} takes {numel * dtype.itemsize} bytes, but {spec.nbytes} are announced")
    if spec.flags & REQUIRES_GRAD and not (dtype.is_floating_point or dtype.is_complex):
        raise WireError(f"{spec} cannot require a gradient")


def tensor_over(store: Any, spec: LeafSpec) -> torch.Tensor:
    """The tensor that `spec` describes, laid over `store` without a copy; it owns `store` from then on.

    `store` is a writable buffer of ``spec.nbytes`` bytes, or a flat uint8 tensor of that size on a device. The result is no view of
    another tensor: it has a storage of its own, of just its own size.

    Raises:
        UnsupportedObject: the dtype is not known to the torch of this process.
        WireError: torch cannot make such a tensor (sizes beyond its bounds).
    """
    numpy_dtype = spec.numpy_dtype
    try:
        if type(store) is torch.Tensor:
            tensor = _tensor_on_device(store, spec)
        elif numpy_dtype is not None:
            tensor = torch.from_numpy(np.ndarray(spec.shape, numpy_dtype, store))
        else:
            tensor = _tensor_without_numpy(store, spec)
        if not spec.flags:
            return tensor
        if spec.flags & PARAMETER:
            return Parameter(tensor, requires_grad=bool(spec.flags & REQUIRES_GRAD))
        return tensor.requires_grad_()
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        if isinstance(error, UnsupportedObject):
            raise
        raise WireError(f"cannot make {spec}: {error}") from error


def _dtype_of(spec: LeafSpec) -> torch.dtype:
    dtype = spec.torch_dtype
    if dtype is None:
        raise UnsupportedObject(
            f"the sender's dtype {spec.dtype!r} is not known to torch {torch.__version__} of this process",
            hint="use one torch version on both sides",
        )
    return dtype


def _tensor_on_device(store: torch.Tensor, spec: LeafSpec) -> torch.Tensor:
    tensor = torch.empty(0, dtype=_dtype_of(spec), device=store.device)
    return tensor.set_(store.untyped_storage(), 0, spec.shape)  # type: ignore[call-overload,no-any-return]  # a form that the stubs miss


def _tensor_without_numpy(store: Any, spec: LeafSpec) -> torch.Tensor:
    dtype = _dtype_of(spec)
    if not spec.nbytes:
        store = bytearray(dtype.itemsize)  # torch takes no empty buffer
    tensor = torch.frombuffer(store, dtype=dtype)
    return tensor if len(spec.shape) == 1 and spec.nbytes else tensor.resize_(spec.shape)
