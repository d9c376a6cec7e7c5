"""NumPy arrays as leaves: every dtype without Python objects in it, Fortran order and the read-only flag kept.

An array that is not contiguous is copied at the call and arrives in C order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorlinf.wire.leaves import Leaf, raw_leaf

__all__ = ["array_leaf", "array_over", "dtype_token"]


def dtype_token(dtype: np.dtype[Any]) -> str | None:
    """The dtype as a short text, if that text says all about it."""
    if dtype.isbuiltin == 1 or dtype.kind in "mMSU":
        return dtype.str if dtype.metadata is None else None
    return None


def array_leaf(array: NDArray[Any]) -> tuple[Leaf, str]:
    """The array's bytes as a leaf, and the order (``"C"`` or ``"F"``) in which they are to be read."""
    order = "C"
    if not array.flags.c_contiguous:
        if array.flags.f_contiguous:
            order = "F"
            array = array.T
        else:
            array = array.copy(order="C")
    nbytes = array.nbytes
    if not nbytes:
        return raw_leaf(memoryview(b"")), order
    flat: Any = array.reshape(-1).view(np.uint8)
    return raw_leaf(memoryview(flat)), order


def array_over(store: Any, dtype: Any, shape: tuple[int, ...], order: str, writeable: bool) -> NDArray[Any]:
    """The array laid over `store` (a buffer of just its size) without a copy.

    Raises:
        TypeError, ValueError: the pieces do not fit together.
    """
    array: NDArray[Any] = np.ndarray(shape, np.dtype(dtype), store if len(store) else bytearray(1), order="F" if order == "F" else "C")
    if not writeable:
        array.flags.writeable = False
    return array
