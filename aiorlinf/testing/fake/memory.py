"""Tensors of any device type over memory of ours, made through DLPack."""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Memory", "cpu_alias", "device_tensor"]

_EXTENSION_DEVICE = 12
_UNSIGNED = 1
_POISON = 0xA5
_ALIGNMENT = 512


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("index", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_new_capsule: Callable[..., Any] = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)

_living: dict[int, tuple[Any, ...]] = {}
"""What torch refers to by address, until it says that it is done with it."""

_retired: deque[tuple[Any, ...]] = deque(maxlen=64)
"""Torch looks at these once more when it drops a storage."""

_numbers = itertools.count(1)


class Memory:
    """A piece of CPU memory that starts at a multiple of 512 bytes. New memory is full of a pattern that no test sends.

    Args:
        there: a writable buffer that starts at such an address, None: new memory.

    Attributes:
        address, nbytes: where it is.
    """

    def __init__(self, nbytes: int, there: Any = None) -> None:
        self.nbytes = nbytes
        if there is not None:
            self._raw = (ctypes.c_uint8 * max(1, nbytes)).from_buffer(there)
            self.address: int = ctypes.addressof(self._raw)
            return
        self._raw = (ctypes.c_uint8 * (nbytes + _ALIGNMENT))()
        start = ctypes.addressof(self._raw)
        self.address = start + -start % _ALIGNMENT
        self.spoil()

    def spoil(self) -> None:
        """Fill it with the pattern: it is somebody else's now."""
        ctypes.memset(self.address, _POISON, self.nbytes)

    def bytes(self, freed: Callable[[], None]) -> torch.Tensor:
        """All of it, as a tensor on the CPU; `freed` is called when its storage is gone."""
        view = (ctypes.c_uint8 * max(self.nbytes, 1)).from_buffer(self._raw, self.address - ctypes.addressof(self._raw))
        weakref.finalize(view, freed).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)[: self.nbytes]


def device_tensor(memory: Memory, index: int, freed: Callable[[], None]) -> torch.Tensor:
    """A one-dimensional uint8 tensor of device type PrivateUse1 over this memory; `freed` is called when its storage is gone.

    By a weak reference to the storage, not by DLPack's own deleter: that would be called in the middle of an exception, too (a value that
    is dropped because a test has failed), where code in Python must not run. A weak reference's call puts the exception aside.
    """
    number = next(_numbers)
    sizes = (ctypes.c_int64 * 1)(memory.nbytes)
    strides = (ctypes.c_int64 * 1)(1)
    what = _Tensor(memory.address, _Device(_EXTENSION_DEVICE, index), 1, _DataType(_UNSIGNED, 8, 1), sizes, strides, 0)
    managed = _Managed(what, None, None)
    make: Any = torch._C._from_dlpack  # the public function asks the device for things it has not got
    tensor: torch.Tensor = make(_new_capsule(ctypes.addressof(managed), b"dltensor", None))

    def gone(_storage: Any) -> None:
        _, *rest = _living.pop(number)  # the memory itself may go
        _retired.append(tuple(rest))
        freed()

    _living[number] = (memory, sizes, strides, managed, weakref.ref(tensor.untyped_storage(), gone))
    return tensor


def cpu_alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, shape and strides on the CPU. The caller keeps the memory."""
    itemsize = tensor.element_size()
    storage = tensor.untyped_storage()
    elements = storage.nbytes() // itemsize
    if not elements:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    raw = (ctypes.c_uint8 * (elements * itemsize)).from_address(storage.data_ptr())
    flat = torch.frombuffer(raw, dtype=tensor.dtype)
    return torch.as_strided(flat, tensor.shape, tensor.stride(), tensor.storage_offset())
