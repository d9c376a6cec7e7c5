"""Element types by name, as they stand on the wire.

A dtype travels as torch's own name for it, so a newer torch on one side adds names without changing the protocol. The payload
is always plain bytes; nothing here converts an element.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["DTYPES", "NAMES", "NUMPY", "dtype_name"]

# Their bytes mean nothing without a quantizer, so these tensors are taken apart in wire/pickled.py instead.
_QUANTISED = frozenset({"qint8", "quint8", "qint32", "quint4x2", "quint2x4"})


def dtype_name(dtype: torch.dtype) -> str:
    """Torch's canonical name, without the module: ``float32`` for both ``torch.float`` and ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def _every_dtype() -> dict[torch.dtype, str]:
    found = {value: dtype_name(value) for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return {dtype: name for dtype, name in found.items() if name not in _QUANTISED}


NAMES: dict[torch.dtype, str] = _every_dtype()
"""Every dtype of this torch whose elements are plain bytes."""

DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in NAMES.items()}

_NUMPY_TOO = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)

NUMPY: dict[str, np.dtype[Any]] = {name: np.dtype(name) for name in _NUMPY_TOO}
"""Those that NumPy knows under the same name: such a tensor can be laid over memory of any shape in one step."""
