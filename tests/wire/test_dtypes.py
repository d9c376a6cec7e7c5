"""One name per dtype."""

from __future__ import annotations

import torch

from aiorlinf.wire.dtypes import DTYPES, NAMES, NUMPY, dtype_name

__all__: list[str] = []


def test_a_dtype_has_one_name() -> None:
    assert dtype_name(torch.float) == dtype_name(torch.float32) == "float32"
    assert DTYPES["bfloat16"] is torch.bfloat16
    assert all(DTYPES[name] is dtype for dtype, name in NAMES.items())


def test_quantised_dtypes_have_no_plain_bytes() -> None:
    assert torch.qint8 not in NAMES


def test_numpy_means_the_same_by_each_name() -> None:
    for name, dtype in NUMPY.items():
        assert torch.from_numpy(torch.zeros(1, dtype=DTYPES[name]).numpy()).dtype is DTYPES[name]
        assert dtype.itemsize == DTYPES[name].itemsize
