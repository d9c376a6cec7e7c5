"""NumPy arrays as leaves: dtype, shape, order and write permission."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from aiorlinf.wire.arrays import array_leaf, array_over, dtype_token

__all__: list[str] = []


def carried(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    leaf, order = array_leaf(array)
    token = dtype_token(array.dtype) or array.dtype
    return array_over(memoryview(bytearray(leaf.tobytes())), token, array.shape, order, array.flags.writeable)


def test_a_contiguous_array_is_not_copied() -> None:
    for array in (np.zeros((2, 3)), np.zeros((2, 3), order="F")):
        leaf, order = array_leaf(array)
        assert leaf.raw is not None
        assert order == ("F" if array.flags.f_contiguous else "C")
        array[:] = 1.0
        assert leaf.raw.tobytes() == array.tobytes(order="A")


def test_an_array_that_is_not_contiguous_arrives_in_c_order() -> None:
    base = np.arange(24).reshape(2, 3, 4)
    for array in (base[:, ::-1], base[:, :, 1], base.transpose(1, 0, 2), np.broadcast_to(np.arange(3), (2, 3)), base[::-2]):
        got = carried(array)
        assert (got == array).all()
        assert got.flags.c_contiguous


def test_order_and_write_permission_stay() -> None:
    array = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    array.flags.writeable = False
    got = carried(array)
    assert got.flags.f_contiguous
    assert not got.flags.c_contiguous
    assert not got.flags.writeable
    assert (got == array).all()
    got = carried(np.arange(3))
    got += 1


@pytest.mark.parametrize(
    "dtype",
    ["?", "<i8", ">i4", "<f2", "<c16", "<M8[ns]", "<M8[25s]", "<m8[D]", "<U3", "|S5", "|V7", [("a", "<i2"), ("b", "<f8", (2,))]],
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0), (4,), (2, 3)], ids=str)
def test_every_kind_of_dtype_in_every_shape(dtype: Any, shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    data = bytes(index % 2 for index in range(count)) if np.dtype(dtype).kind in "?U" else bytes(index % 251 for index in range(count))
    array = np.ndarray(shape, dtype, bytearray(data) if count else None)
    got = carried(array)
    assert got.dtype == array.dtype
    assert got.shape == shape
    assert got.tobytes() == array.tobytes()
    assert got.flags.writeable


def test_a_dtype_with_more_to_it_than_its_text_has_no_token() -> None:
    assert dtype_token(np.dtype("<f4")) == "<f4"
    assert dtype_token(np.dtype("<M8[ns]")) == "<M8[ns]"
    assert dtype_token(np.dtype("f4", metadata={"unit": "m"})) is None
    assert dtype_token(np.dtype([("a", "i4")])) is None
    assert dtype_token(np.dtype(("f4", (2,)))) is None


def test_pieces_that_do_not_fit() -> None:
    with pytest.raises(TypeError):
        array_over(bytearray(3), "<f4", (1,), "C", True)


def test_no_warning_about_read_only_memory() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        carried(np.frombuffer(b"12345678"))
