"""The few bytes that travel ahead of a tensor sent by ``send_tensor``, and what they must agree with.

The two sides agree when dtype and shape are equal. Equal size is not enough: neither another dtype of the same width, nor
another shape of as many elements (``[1]`` is not the 0-dimensional ``[]``).
"""

from __future__ import annotations

import torch

from aiorlinf.errors import NonContiguousTensor, UnsupportedObject, WireError
from aiorlinf.wire.dtypes import dtype_name
from aiorlinf.wire.leaves import Leaf, LeafSpec, Refused, read_spec, tensor_leaf

__all__ = ["check_tensor_fits", "decode_tensor_spec", "describe_spec", "describe_tensor", "encode_tensor_spec", "sendable_leaf"]


def sendable_leaf(tensor: torch.Tensor, *, name: str = "tensor", hint: str | None = None) -> Leaf:
    """The leaf of a tensor given to ``send_tensor``. ``hint`` is what to do about strides, if that is not to send another tensor.

    Raises:
        NonContiguousTensor, UnsupportedObject: at the call, before anything is sent.
    """
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedObject(f"{name} is a {type(tensor).__name__}, not a torch.Tensor", path=name)
    try:
        leaf = tensor_leaf(tensor)
    except Refused as refused:
        if refused.strided:
            raise NonContiguousTensor(name, tuple(tensor.shape), tensor.stride(), hint=hint) from None
        raise UnsupportedObject(f"{name}: {refused.reason}", path=name) from None
    if leaf is None:
        raise UnsupportedObject(f"{name} of layout {tensor.layout} and dtype {tensor.dtype} has no plain bytes", path=name)
    return leaf


def encode_tensor_spec(tensor: torch.Tensor) -> bytes:
    """Dtype, shape and size of a tensor, about 30 bytes.

    Raises:
        NonContiguousTensor, UnsupportedObject: it cannot be sent.
    """
    return sendable_leaf(tensor).spec.entry


def decode_tensor_spec(view: memoryview | bytes) -> LeafSpec:
    """Raises WireError if malformed."""
    view = memoryview(view)
    spec, size = read_spec(view, 0)
    if size != len(view) or not spec.is_tensor:
        raise WireError("malformed tensor header")
    return spec


def describe_spec(spec: LeafSpec) -> str:
    """For error messages, such as ``tensor float32[4]``."""
    return str(spec)


def describe_tensor(tensor: torch.Tensor) -> str:
    """The same words for a tensor of this side."""
    word = "parameter" if isinstance(tensor, torch.nn.Parameter) else "tensor"
    place = "" if tensor.device.type == "cpu" else f" on {tensor.device.type}"
    return f"{word} {dtype_name(tensor.dtype)}[{','.join(map(str, tensor.shape))}]{place}"


def check_tensor_fits(spec: LeafSpec, out: torch.Tensor) -> str | None:
    """Why `out` cannot take the tensor that `spec` announces, or None if it can. Nothing is written."""
    if dtype_name(out.dtype) != spec.dtype:
        return f"dtype {dtype_name(out.dtype)} is not {spec.dtype}"
    if tuple(out.shape) != spec.shape:
        return f"shape {tuple(out.shape)} is not {spec.shape}"
    if out.nbytes != spec.nbytes:
        return f"{out.nbytes} bytes are not {spec.nbytes}"
    return None
