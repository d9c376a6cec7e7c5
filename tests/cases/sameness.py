"""Two objects are the same: types, values, shapes, dtypes and bits, to any depth."""

from __future__ import annotations

import array
import dataclasses
import warnings
from collections import deque
from typing import Any

import numpy as np
import torch

__all__ = ["all_dtypes", "assert_same", "raw", "sample"]


def raw(tensor: torch.Tensor) -> bytes:
    """The values of a tensor, as bytes."""
    plain: Any = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
    return bytes(plain) if tensor.numel() else b""


def all_dtypes() -> list[torch.dtype]:
    """Every dtype that this torch knows, but the old quantised ones."""
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    usable = []
    for dtype in sorted(found, key=str):
        if str(dtype).startswith(("torch.q", "torch.bits")):
            continue
        try:
            with warnings.catch_warnings(action="ignore"):  # complex32 is experimental, torch says
                torch.empty(2, dtype=dtype).view(torch.uint8)
        except (RuntimeError, TypeError):  # named by torch, but without values of whole bytes
            continue
        usable.append(dtype)
    assert len(usable) > 15
    return usable


def sample(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor with different bytes everywhere that are valid for the dtype."""
    out = torch.empty(shape, dtype=dtype)
    count = out.numel() * out.element_size()
    data = torch.arange(1, count + 1, dtype=torch.int64) * 37 % 251
    if dtype is torch.bool:
        data %= 2
    out.view(-1).view(torch.uint8).copy_(data.to(torch.uint8))
    return out


def assert_same(got: Any, sent: Any, where: str = "obj") -> None:
    """Raise an AssertionError that says where the two differ."""
    assert type(got) is type(sent), f"{where}: {type(got)} is not {type(sent)}"
    if isinstance(sent, torch.Tensor):
        assert (got.dtype, got.shape, got.device) == (sent.dtype, sent.shape, sent.device), where
        assert raw(got) == raw(sent), where
    elif isinstance(sent, np.ma.MaskedArray):
        assert_same(got.data, sent.data, f"{where}.data")
        assert_same(got.mask, sent.mask, f"{where}.mask")
    elif isinstance(sent, np.ndarray):
        assert (got.dtype, got.shape) == (sent.dtype, sent.shape), where
        assert got.tolist() == sent.tolist() if sent.dtype.hasobject else got.tobytes() == sent.tobytes(), where
    elif dataclasses.is_dataclass(sent):
        for field in dataclasses.fields(sent):
            assert_same(getattr(got, field.name), getattr(sent, field.name), f"{where}.{field.name}")
    elif isinstance(sent, dict):
        assert list(got) == list(sent), where
        for key, value in sent.items():
            assert_same(got[key], value, f"{where}[{key!r}]")
    elif isinstance(sent, (list, tuple, deque)):
        assert len(got) == len(sent), where
        for index, (one, other) in enumerate(zip(got, sent, strict=True)):
            assert_same(one, other, f"{where}[{index}]")
    elif isinstance(sent, array.array):
        assert (got.typecode, got.tolist()) == (sent.typecode, sent.tolist()), where
    else:
        assert got == sent, where
