"""One leaf: a contiguous run of bytes that leaves the object and travels raw.

A leaf is a tensor, or any other buffer (an array, bytes, a piece of a long pickle stream). `LeafSpec` is what the other side
must know before the bytes land. Python attributes, hooks and ``grad`` of a tensor do not travel: data, class and flags do.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch.nn import Parameter

from aiorlinf.errors import UnsupportedObject, WireError
from aiorlinf.wire.dtypes import DTYPES, NAMES, NUMPY

__all__ = [
    "PARAMETER",
    "RAW",
    "REQUIRES_GRAD",
    "STREAM",
    "Device",
    "Leaf",
    "LeafSpec",
    "Refused",
    "raw_leaf",
    "read_spec",
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


class Device(IntEnum):
    """The kind of memory that a leaf was sent from. The numbers are part of the protocol."""

    CPU = 0
    CUDA = 1
    XPU = 2
    HPU = 3
    NPU = 4
    MPS = 5


_DEVICES = {device.name.lower(): device for device in Device}


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
    """

    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    flags: int = 0
    device: Device = Device.CPU
    entry: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        name = self.dtype.encode("ascii")
        head = _ENTRY.pack(self.flags, self.device, len(self.shape), len(name), self.nbytes)
        object.__setattr__(self, "entry", b"".join((head, name, struct.pack(f"<{len(self.shape)}Q", *self.shape))))

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
        nbytes: payload size.
    """

    __slots__ = ("_memory", "_raw", "spec", "tensor")

    def __init__(self, spec: LeafSpec, tensor: torch.Tensor | None, memory: torch.Tensor | None, raw: memoryview | None) -> None:
        self.spec = spec
        self.tensor = tensor
        self._memory = memory
        self._raw = raw

    @property
    def nbytes(self) -> int:
        return self.spec.nbytes

    @property
    def memory(self) -> torch.Tensor | None:
        """The tensor whose bytes travel: `tensor`, or a copy of it where a lazy conjugate or sign had to be carried out."""
        return self._memory

    @property
    def raw(self) -> memoryview | None:
        """The payload as a flat view of unsigned bytes without a copy; None while it is not in CPU memory."""
        raw = self._raw
        if raw is None and self.spec.device is Device.CPU and self._memory is not None:
            raw = self._raw = _bytes_of(self._memory) if self.spec.nbytes else memoryview(b"")
        return raw

    def __repr__(self) -> str:
        return f"<Leaf {self.spec}>"


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


_specs: dict[tuple[torch.dtype, torch.Size, int, torch.device], LeafSpec] = {}


def _spec_of(dtype: torch.dtype, shape: torch.Size, flags: int, device: torch.device) -> LeafSpec:
    key = (dtype, shape, flags, device)
    spec = _specs.get(key)
    if spec is None:
        spec = LeafSpec(shape.numel() * dtype.itemsize, NAMES[dtype], tuple(shape), flags, _DEVICES[device.type])
        if len(_specs) >= _CACHE_MAX:
            _specs.clear()
        _specs[key] = spec
    return spec


def tensor_leaf(tensor: torch.Tensor) -> Leaf | None:
    """The leaf of a tensor or Parameter of exactly that class; None if its values are not one dense run of plain elements.

    Raises:
        Refused: not contiguous, or without memory that could be sent.
    """
    dtype = tensor.dtype
    if tensor.layout is not torch.strided or tensor.is_nested or dtype not in NAMES:
        return None
    device = tensor.device
    shape = tensor.shape
    if device.type not in _DEVICES:
        raise Refused(tensor, f"a tensor on device {device.type!r} holds no values that could be sent")
    if len(shape) > _MAX_DIMS:
        raise Refused(tensor, f"a tensor of {len(shape)} dimensions; at most {_MAX_DIMS} can travel")
    if not tensor.is_contiguous():
        raise Refused(tensor, "not contiguous", strided=True)
    memory = tensor
    if tensor.is_conj() or tensor.is_neg():
        memory = tensor.detach().resolve_conj().resolve_neg()
    flags = (REQUIRES_GRAD if tensor.requires_grad else 0) | (PARAMETER if type(tensor) is Parameter else 0)
    spec = _spec_of(dtype, shape, flags, device)
    if spec.nbytes:
        try:
            address = memory.data_ptr()
        except RuntimeError as error:
            raise Refused(tensor, f"the tensor's memory cannot be read here ({error})") from error
        if not address:
            if not memory._is_zerotensor():
                raise Refused(tensor, "the tensor's storage was freed (resized to 0)")
            memory = torch.zeros(shape, dtype=dtype, device=device)
    return Leaf(spec, tensor, memory, None)


def raw_leaf(view: memoryview, flags: int = RAW) -> Leaf:
    """The leaf of a flat view of bytes. The view keeps its memory alive."""
    return Leaf(LeafSpec(view.nbytes, "", (), flags), None, None, view)


def read_spec(view: memoryview, offset: int) -> tuple[LeafSpec, int]:
    """Decode one spec at `offset`; returns it with the offset behind it.

    Raises:
        WireError: cut short, or contradicting itself.
    """
    try:
        flags, device, dims, name_len, nbytes = _ENTRY.unpack_from(view, offset)
        offset += _ENTRY.size
        name = str(view[offset : offset + name_len], "ascii")
        offset += name_len
        shape = struct.unpack_from(f"<{dims}Q", view, offset)
        offset += 8 * dims
        spec = LeafSpec(nbytes, name, shape, flags, Device(device))
    except (struct.error, ValueError) as error:
        raise WireError(f"malformed leaf description: {error}") from None
    if flags & ~_ALL_FLAGS:
        raise WireError(f"leaf with unknown flags {flags:#x}")
    if flags & RAW:
        if name or shape or flags & (PARAMETER | REQUIRES_GRAD):
            raise WireError("a raw buffer with the description of a tensor")
    else:
        if not name.isidentifier() or flags & STREAM:
            raise WireError(f"a tensor of dtype {name!r} and flags {flags:#x}")
        _check_size(spec)
    return spec, offset


def _check_size(spec: LeafSpec) -> None:
    numel = 1
    for dim in spec.shape:
        numel *= dim
    dtype = DTYPES.get(spec.dtype)
    # An unknown dtype is a newer torch, not a broken stream: it fails the one message, when the tensor is made.
    if dtype is not None and numel * dtype.itemsize != spec.nbytes:
        raise WireError(f"{spec} takes {numel * dtype.itemsize} bytes, but {spec.nbytes} are announced")
    if dtype is not None and spec.flags & REQUIRES_GRAD and not (dtype.is_floating_point or dtype.is_complex):
        raise WireError(f"{spec} cannot require a gradient")


def tensor_over(store: Any, spec: LeafSpec) -> torch.Tensor:
    """The tensor that `spec` describes, laid over `store` without a copy; it owns `store` from then on.

    `store` is a writable buffer of ``spec.nbytes`` bytes. The result is no view of another tensor: it has a storage of its own, of
    just its own size.

    Raises:
        UnsupportedObject: the dtype is not known to the torch of this process.
        WireError: torch cannot make such a tensor (sizes beyond its bounds).
    """
    dtype = DTYPES.get(spec.dtype)
    if dtype is None:
        raise UnsupportedObject(
            f"the sender's dtype {spec.dtype!r} is not known to torch {torch.__version__} of this process",
            hint="use one torch version on both sides",
        )
    numpy_dtype = NUMPY.get(dtype)
    try:
        if numpy_dtype is not None and len(spec.shape) <= _MAX_NUMPY_DIMS:
            tensor = torch.from_numpy(np.ndarray(spec.shape, numpy_dtype, store))
        elif spec.nbytes:
            tensor = torch.frombuffer(store, dtype=dtype).resize_(spec.shape)
        else:
            tensor = torch.frombuffer(bytearray(dtype.itemsize), dtype=dtype).resize_(spec.shape)
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        raise WireError(f"cannot make {spec}: {error}") from error
    if spec.flags & PARAMETER:
        return Parameter(tensor, requires_grad=bool(spec.flags & REQUIRES_GRAD))
    if spec.flags & REQUIRES_GRAD:
        tensor.requires_grad_()
    return tensor
