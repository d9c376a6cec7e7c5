"""The memory of a tensor as a buffer, without a mark on the tensor.

`Tensor.numpy` marks the tensor's storage as one that cannot be resized, for good. Programs that free the memory of their parameters and
take it again by ``untyped_storage().resize_`` (FSDP does) would fail after the first send. So NumPy is told of the address instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

__all__ = ["shown"]


class _Shown:
    """NumPy's array interface over a storage, which it keeps."""

    __slots__ = ("__array_interface__", "_storage")

    def __init__(self, tensor: torch.Tensor) -> None:
        # The storage and not the tensor: an assignment to the tensor's `data` gives that another storage, and would free this one.
        self._storage = tensor.untyped_storage()
        self.__array_interface__ = {"data": (tensor.data_ptr(), False), "shape": (tensor.nbytes,), "typestr": "|u1", "version": 3}


def shown(tensor: torch.Tensor) -> memoryview:
    """All bytes of a contiguous tensor in CPU memory, flat and writable, without a copy. The view keeps the storage.

    Who resizes the storage meanwhile takes the memory away from under the view: neither a reference nor torch's mark on the storage, which
    would last for good, could allow that again later.

    Raises:
        BufferError: it is not contiguous, or not in CPU memory.
    """
    if not tensor.is_cpu or not tensor.is_contiguous():
        raise BufferError(f"a tensor on {tensor.device} with strides {tuple(tensor.stride())} cannot be seen as bytes")
    if not tensor.nbytes:
        return memoryview(bytearray())
    array: Any = np.asarray(_Shown(tensor))
    return memoryview(array)
