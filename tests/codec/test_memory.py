"""Memory as flat bytes and addresses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from aiorlinf.codec.memory import address_of, byte_view, writable_view


def test_tensors_arrays_and_bytes_without_a_copy() -> None:
    tensor = torch.arange(10, dtype=torch.uint8)
    view = byte_view(tensor)
    assert bytes(view) == bytes(range(10))
    assert address_of(view) == tensor.data_ptr()
    assert address_of(view[3:]) == tensor.data_ptr() + 3
    tensor[0] = 7
    assert view[0] == 7
    writable_view(tensor[2:4])[0] = 9
    assert tensor[2] == 9
    array: Any = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert byte_view(memoryview(array)).nbytes == 24
    assert byte_view(b"ab").tolist() == [97, 98]
    assert byte_view(bytearray(b"ab")).readonly is False


def test_nothing() -> None:
    array: Any = np.empty((0, 3), dtype=np.int64)
    for empty in (torch.empty(0, dtype=torch.uint8), b"", memoryview(array)):
        view = byte_view(empty)
        assert view.nbytes == 0
        assert address_of(view) == 0


def test_what_is_refused() -> None:
    with pytest.raises(BufferError, match="strides"):
        byte_view(torch.zeros(4, 4, dtype=torch.uint8)[:, :2])
    with pytest.raises(BufferError, match="read-only"):
        writable_view(b"abc")
    assert byte_view(b"abc").readonly
