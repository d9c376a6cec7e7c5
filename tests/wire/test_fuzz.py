"""Random objects come back as they were; random bytes give the documented errors, and no more memory than was sent."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import Parameter

from aiorlinf.errors import UnsupportedObject, WireError
from aiorlinf.wire.dtypes import NAMES
from aiorlinf.wire.inline import decode_inline, pack_inline
from aiorlinf.wire.leaves import LeafSpec, tensor_over
from aiorlinf.wire.manifest import Limits, decode_manifest, encode_manifest
from aiorlinf.wire.plain import decode
from aiorlinf.wire.tensor_header import decode_tensor_spec, encode_tensor_spec
from aiorlinf.wire.tree import flatten, rebuild
from tests.wire.carry import by_inline, by_rebuild, same

__all__: list[str] = []

COMMON = settings(max_examples=120, deadline=None, database=None, suppress_health_check=list(HealthCheck))

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(sorted((dtype for dtype in NAMES if dtype is not torch.complex32), key=str)))
    shape = draw(SHAPES)
    size = torch.Size(shape).numel() * dtype.itemsize
    data = draw(st.binary(min_size=size, max_size=size))
    if dtype is torch.bool:
        data = bytes(byte & 1 for byte in data)
    tensor = tensor_over(bytearray(data), LeafSpec(size, NAMES[dtype], shape))
    if draw(st.booleans()):
        differentiable = dtype.is_floating_point or dtype.is_complex
        return Parameter(tensor, requires_grad=differentiable and draw(st.booleans()))
    return tensor


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    dtype = draw(st.sampled_from(["?", "<i4", ">i8", "<f2", "<c8", "|S3", "<U2", "<M8[s]", "|V5"]))
    shape = draw(SHAPES)
    array: np.ndarray[Any, Any] = np.zeros(shape, dtype, order=draw(st.sampled_from("CF")))
    if dtype in ("<i4", ">i8"):
        array[...] = draw(st.integers(-1000, 1000))
    if array.ndim and draw(st.booleans()):
        array = array[::-1]
    array.flags.writeable = draw(st.booleans())
    return array


KEYS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(max_size=5), st.binary(max_size=5), st.tuples(st.integers(), st.text(max_size=2))
)
SIMPLE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=20),
    st.binary(max_size=20),
    st.binary(max_size=20).map(bytearray),
    st.sets(KEYS, max_size=3),
    st.frozensets(KEYS, max_size=3),
)
LEAVES = st.one_of(tensors(), arrays())
OBJECTS = st.recursive(
    st.one_of(SIMPLE, LEAVES),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(st.text(max_size=3), inner, max_size=4),
    ),
    max_leaves=12,
)
OF_TENSORS = st.one_of(
    tensors(),
    st.lists(tensors(), max_size=4),
    st.lists(tensors(), max_size=4).map(tuple),
    st.dictionaries(st.text(max_size=4), tensors(), max_size=4),
    tensors().map(lambda tensor: [tensor, tensor, tensor]),
)


@given(obj=st.one_of(OBJECTS, OF_TENSORS))
@COMMON
def test_objects_come_back_as_they_were(obj: Any) -> None:
    for allow_pickle in (True, False):
        same(obj, by_inline(obj, allow_pickle=allow_pickle))
        same(obj, by_rebuild(obj, allow_pickle=allow_pickle))


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """A few bytes changed, numbers made huge, a piece cut out, doubled or added."""
    got = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(got)))
        how = draw(st.sampled_from(["byte", "byte", "number", "cut", "double", "add"]))
        if how == "byte" and at < len(got):
            got[at] = draw(st.integers(0, 255))
        elif how == "number":
            number = draw(st.sampled_from([0, 1, 2**16, 2**31, 2**32 - 1]))
            got[at : at + 4] = struct.pack("<I", number)
        elif how == "cut":
            del got[at : at + draw(st.integers(1, 20))]
        elif how == "double":
            got[at:at] = got[at : at + draw(st.integers(1, 20))]
        else:
            got[at:at] = draw(st.binary(max_size=8))
    return bytes(got)


@given(obj=st.one_of(OBJECTS, OF_TENSORS), data=st.data())
@COMMON
def test_damaged_manifests(obj: Any, data: st.DataObject) -> None:
    manifest = data.draw(damaged(encode_manifest(flatten(obj, allow_pickle=False))))
    try:
        got = decode_manifest(manifest, limits=Limits(max_message_bytes=1 << 20))
        buffers = [torch.zeros(spec.nbytes, dtype=torch.uint8) for spec in got.specs]
        rebuild(got, buffers, allow_pickle=False)
    except (WireError, UnsupportedObject):
        pass


@given(obj=st.one_of(OBJECTS, OF_TENSORS), data=st.data())
@COMMON
def test_damaged_manifests_of_pickled_objects(obj: Any, data: st.DataObject) -> None:
    manifest = data.draw(damaged(encode_manifest(flatten([obj, "pickled"]))))
    try:
        decode_manifest(manifest, limits=Limits(max_message_bytes=1 << 20))
    except WireError:
        pass


@given(obj=st.one_of(OBJECTS, OF_TENSORS), data=st.data())
@COMMON
def test_damaged_messages(obj: Any, data: st.DataObject) -> None:
    message = data.draw(damaged(pack_inline(flatten(obj, allow_pickle=False))))
    try:
        decode_inline(memoryview(message), allow_pickle=False)
    except (WireError, UnsupportedObject):
        pass


@given(tensor=tensors(), data=st.data())
@COMMON
def test_damaged_tensor_headers(tensor: torch.Tensor, data: st.DataObject) -> None:
    try:
        decode_tensor_spec(data.draw(damaged(encode_tensor_spec(tensor))))
    except WireError:
        pass


@given(noise=st.binary(max_size=200))
@COMMON
def test_noise(noise: bytes) -> None:
    for attempt in (
        decode_manifest,
        decode_tensor_spec,
        lambda data: decode(data, []),
        lambda data: decode_inline(memoryview(data), allow_pickle=False),
    ):
        try:
            attempt(noise)
        except (WireError, UnsupportedObject):
            pass


@given(obj=OBJECTS, data=st.data())
@settings(COMMON, max_examples=60)
def test_memory_is_bounded_by_what_was_sent(obj: Any, data: st.DataObject) -> None:
    manifest = data.draw(damaged(encode_manifest(flatten(obj, allow_pickle=False))))
    tracemalloc.start()
    try:
        got = decode_manifest(manifest)
        if got.payload_bytes == 0:
            rebuild(got, [torch.zeros(0, dtype=torch.uint8) for _ in got.specs], allow_pickle=False)
    except (WireError, UnsupportedObject):
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 200_000 + 200 * len(manifest)
