"""The header of send_tensor, and what it must agree with."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from aiorlinf.errors import NonContiguousTensor, UnsupportedObject, WireError
from aiorlinf.wire.leaves import raw_leaf
from aiorlinf.wire.tensor_header import (
    check_tensor_fits,
    decode_tensor_spec,
    describe_spec,
    describe_tensor,
    encode_tensor_spec,
    sendable_leaf,
)

__all__: list[str] = []


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(4), "tensor float32[4]"),
        (torch.zeros(()), "tensor float32[]"),
        (torch.zeros(0, 3, dtype=torch.bfloat16), "tensor bfloat16[0,3]"),
        (Parameter(torch.zeros(2, 3)), "parameter float32[2,3]"),
    ],
)
def test_a_header_says_what_comes(tensor: torch.Tensor, words: str) -> None:
    header = encode_tensor_spec(tensor)
    assert len(header) < 50
    spec = decode_tensor_spec(header)
    assert (spec.nbytes, spec.shape) == (tensor.nbytes, tuple(tensor.shape))
    assert describe_spec(spec) == describe_tensor(tensor) == words
    assert check_tensor_fits(spec, tensor) is None
    assert check_tensor_fits(spec, torch.empty_like(tensor)) is None


@pytest.mark.parametrize(
    ("out", "reason"),
    [
        (torch.zeros(4, dtype=torch.float16), "dtype float16 is not bfloat16"),
        (torch.zeros(4, dtype=torch.int16), "dtype int16 is not bfloat16"),
        (torch.zeros(3, dtype=torch.bfloat16), r"shape \(3,\) is not \(4,\)"),
        (torch.zeros(2, 2, dtype=torch.bfloat16), r"shape \(2, 2\) is not \(4,\)"),
        (torch.zeros(1, 4, dtype=torch.bfloat16), r"shape \(1, 4\) is not \(4,\)"),
    ],
)
def test_dtype_and_shape_must_be_equal(out: torch.Tensor, reason: str) -> None:
    spec = decode_tensor_spec(encode_tensor_spec(torch.zeros(4, dtype=torch.bfloat16)))
    got = check_tensor_fits(spec, out)
    assert got is not None
    assert re.fullmatch(reason, got)


def test_one_element_is_not_a_scalar() -> None:
    assert check_tensor_fits(decode_tensor_spec(encode_tensor_spec(torch.zeros(()))), torch.zeros(1)) is not None


def test_the_device_does_not_need_to_be_equal() -> None:
    spec = decode_tensor_spec(encode_tensor_spec(torch.zeros(2)))
    assert check_tensor_fits(spec, torch.zeros(2, device="meta")) is None
    assert describe_tensor(torch.zeros(2, device="meta")) == "tensor float32[2] on meta"


def test_what_cannot_be_sent() -> None:
    with pytest.raises(NonContiguousTensor, match=r"send tensor\.contiguous"):
        encode_tensor_spec(torch.zeros(2, 3).t())
    with pytest.raises(NonContiguousTensor, match="out is not contiguous"):
        sendable_leaf(torch.zeros(2, 3).t(), name="out")
    with pytest.raises(UnsupportedObject, match="sparse_coo"):
        encode_tensor_spec(torch.eye(2).to_sparse())
    with pytest.raises(UnsupportedObject, match="meta"):
        encode_tensor_spec(torch.zeros(2, device="meta"))
    not_a_tensor: Any = [1]
    with pytest.raises(UnsupportedObject, match=r"is a list, not a torch\.Tensor"):
        encode_tensor_spec(not_a_tensor)


def test_malformed_headers() -> None:
    header = encode_tensor_spec(torch.zeros(4))
    for data in (b"", header[:-1], header + b"x", raw_leaf(memoryview(b"x")).spec.entry):
        with pytest.raises(WireError):
            decode_tensor_spec(data)
