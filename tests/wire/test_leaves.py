"""Single tensors and buffers: what travels, what is refused, what arrives."""

from __future__ import annotations

import dataclasses
import gc
import struct
import weakref

import pytest
import torch
from torch.nn import Parameter

from aiorlinf.errors import UnsupportedObject, WireError
from aiorlinf.wire.dtypes import NAMES
from aiorlinf.wire.leaves import (
    PARAMETER,
    RAW,
    REQUIRES_GRAD,
    STREAM,
    Device,
    Leaf,
    LeafSpec,
    Refused,
    known_spec,
    raw_leaf,
    read_spec,
    tensor_leaf,
    tensor_over,
)
from tests.wire.carry import bits

__all__: list[str] = []


def leaf_of(tensor: torch.Tensor) -> Leaf:
    leaf = tensor_leaf(tensor)
    assert leaf is not None
    return leaf


def test_a_leaf_shows_the_tensors_own_memory() -> None:
    tensor = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    leaf = leaf_of(tensor)
    assert leaf.spec == LeafSpec(24, "int32", (2, 3))
    raw = leaf.raw
    assert raw is not None
    tensor[0, 0] = 7
    assert raw[0] == 7
    assert leaf.tobytes() == raw.tobytes()


def test_a_leaf_keeps_its_memory_alive() -> None:
    tensor = torch.ones(1000)
    gone = weakref.ref(tensor)
    leaf = leaf_of(tensor)
    del tensor
    gc.collect()
    assert gone() is not None
    assert leaf.tobytes() == bits(torch.ones(1000))
    del leaf
    assert gone() is None


@pytest.mark.parametrize("dtype", sorted(NAMES, key=str), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (0, 3), (3, 0), (2, 3), (2, 1, 4)], ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_every_dtype_in_every_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = torch.Size(shape).numel() * dtype.itemsize
    payload = bytes((37 * index + 11) % 256 for index in range(count))
    store = bytearray(payload)
    tensor = tensor_over(store, LeafSpec(count, NAMES[dtype], shape))
    assert tensor.dtype is dtype
    assert tuple(tensor.shape) == shape
    assert tensor.is_contiguous()
    leaf = leaf_of(tensor)
    assert leaf.tobytes() == payload
    assert leaf.spec.entry == LeafSpec(count, NAMES[dtype], shape).entry
    assert read_spec(memoryview(leaf.spec.entry), 0) == (leaf.spec, len(leaf.spec.entry))


def test_a_tensor_over_memory_is_no_view_and_has_a_storage_of_its_size() -> None:
    for spec in (LeafSpec(16, "float32", (2, 2)), LeafSpec(16, "bfloat16", (2, 4)), LeafSpec(2, "bfloat16", ())):
        tensor = tensor_over(bytearray(spec.nbytes), spec)
        assert not tensor._is_view()
        assert tensor.storage_offset() == 0
        assert tensor.untyped_storage().nbytes() == spec.nbytes
        tensor.zero_()


@pytest.mark.parametrize(
    "payload",
    [struct.pack("<2I", 0x7FC12345, 0x80000000), struct.pack("<2I", 0xFFA00001, 0x00000001)],
    ids=["quiet NaN and minus zero", "signalling NaN and denormal"],
)
def test_odd_bit_patterns_stay(payload: bytes) -> None:
    tensor = tensor_over(bytearray(payload), LeafSpec(8, "float32", (2,)))
    assert leaf_of(tensor).tobytes() == payload


def test_a_view_is_its_own_bytes_only() -> None:
    big = torch.arange(1_000_000, dtype=torch.float32)
    leaf = leaf_of(big[10:12])
    assert leaf.nbytes == 8
    assert leaf.tobytes() == struct.pack("<2f", 10, 11)


def test_flags_of_a_parameter_and_of_gradients() -> None:
    assert leaf_of(Parameter(torch.ones(1))).spec.flags == PARAMETER | REQUIRES_GRAD
    assert leaf_of(Parameter(torch.ones(1, dtype=torch.int64), requires_grad=False)).spec.flags == PARAMETER
    assert leaf_of(torch.ones(1, requires_grad=True) * 2).spec.flags == REQUIRES_GRAD
    assert leaf_of(torch.ones(1)).spec.flags == 0


def test_lazy_conjugate_and_sign_are_carried_out() -> None:
    conjugate = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert leaf_of(conjugate).tobytes() == bits(torch.tensor([1 - 2j, 3 + 4j]))
    negative = torch.tensor([1 + 2j]).conj().imag
    assert negative.is_neg()
    for _ in range(2):  # the second time the form is known
        assert leaf_of(negative).tobytes() == bits(torch.tensor([-2.0]))
        assert leaf_of(conjugate).tensor is conjugate
    assert known_spec(negative) is None


def test_zeros_without_memory_are_sent_as_zeros() -> None:
    lazy = torch._efficientzerotensor((3,))
    assert leaf_of(lazy).tobytes() == bytes(12)


def test_a_strided_tensor_is_refused() -> None:
    for tensor in (
        torch.ones(2, 3).t(),
        torch.ones(4)[::2],
        torch.ones(1).expand(3),
        torch.ones(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    ):
        with pytest.raises(Refused) as caught:
            tensor_leaf(tensor)
        assert caught.value.strided
        assert caught.value.part is tensor


def test_a_tensor_without_memory_is_refused() -> None:
    freed = torch.ones(4)
    leaf_of(torch.ones(4))  # the form is known
    freed.untyped_storage().resize_(0)
    with pytest.raises(Refused, match="freed"):
        tensor_leaf(freed)
    with pytest.raises(Refused, match="'meta'"):
        tensor_leaf(torch.empty(4, device="meta"))


def test_a_tensor_inside_vmap_is_refused() -> None:
    def body(tensor: torch.Tensor) -> torch.Tensor:
        with pytest.raises(Refused, match="cannot be read here"):
            tensor_leaf(tensor)
        return tensor

    torch.vmap(body)(torch.ones(2, 3))


def test_tensors_that_are_no_single_run_of_bytes() -> None:
    coo = torch.eye(2).to_sparse()
    assert tensor_leaf(coo) is None


def test_raw_leaves() -> None:
    leaf = raw_leaf(memoryview(b"abc"))
    assert leaf.tensor is None
    assert leaf.memory is None
    assert leaf.tobytes() == b"abc"
    assert not leaf.spec.is_tensor
    assert str(leaf.spec) == "buffer of 3 bytes"
    assert read_spec(memoryview(leaf.spec.entry), 0)[0] == leaf.spec
    assert raw_leaf(memoryview(b""), RAW | STREAM).spec.flags == RAW | STREAM


def test_specs_in_words() -> None:
    assert str(LeafSpec(16, "float32", (4,))) == "tensor float32[4]"
    assert str(LeafSpec(4, "float32", ())) == "tensor float32[]"
    assert str(LeafSpec(48, "int64", (2, 3), PARAMETER, Device.CUDA)) == "parameter int64[2,3] on cuda"
    assert repr(leaf_of(torch.ones(2))) == "<Leaf tensor float32[2]>"


def entry(flags: int, device: int, dims: tuple[int, ...], name: bytes, nbytes: int) -> memoryview:
    return memoryview(struct.pack(f"<BBBBQ{len(name)}s{len(dims)}Q", flags, device, len(dims), len(name), nbytes, name, *dims))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (entry(0, 0, (4,), b"float32", 15), "15 are announced"),
        (entry(0, 0, (2**62, 2**62), b"float32", 0), "0 are announced"),
        (entry(16, 0, (4,), b"float32", 16), "unknown flags"),
        (entry(0, 99, (4,), b"float32", 16), "device 99"),
        (entry(0, 0, (4,), b"float 32", 16), "'float 32'"),
        (entry(0, 0, (4,), b"fl\xffat", 16), "a tensor of dtype"),
        (entry(0, 0, (4,), b"", 16), "a tensor of dtype ''"),
        (entry(RAW, 0, (4,), b"", 16), "description of a tensor"),
        (entry(RAW | PARAMETER, 0, (), b"", 16), "description of a tensor"),
        (entry(STREAM, 0, (4,), b"float32", 16), "flags 0x8"),
        (entry(REQUIRES_GRAD, 0, (4,), b"int32", 16), "require a gradient"),
        (entry(0, 0, (4,), b"float32", 16)[:-1], "cut short"),
        (entry(0, 0, (4,), b"float32", 16)[:3], "cut short"),
        (memoryview(b""), "cut short"),
    ],
)
def test_malformed_entries(data: memoryview, text: str) -> None:
    for _ in range(2):
        with pytest.raises(WireError, match=text):
            read_spec(data, 0)


def test_a_dtype_of_a_newer_torch_fails_only_when_the_tensor_is_made() -> None:
    spec, _ = read_spec(entry(0, 0, (4,), b"float3", 99), 0)
    assert spec.dtype == "float3"
    with pytest.raises(UnsupportedObject, match=r"'float3' is not known to torch"):
        tensor_over(bytearray(99), spec)


def test_a_shape_beyond_torchs_bounds() -> None:
    for name in (b"float32", b"bfloat16"):
        spec, _ = read_spec(entry(0, 0, (0, 2**63, 2**63), name, 0), 0)
        with pytest.raises(WireError, match="cannot make"):
            tensor_over(bytearray(0), spec)


def test_many_dimensions() -> None:
    tensor = torch.ones((1,) * 60)
    spec = leaf_of(tensor).spec
    assert tensor_over(bytearray(leaf_of(tensor).tobytes()), spec).shape == tensor.shape


def test_a_spec_is_a_value() -> None:
    spec = LeafSpec(16, "float32", (4,))
    assert hash(spec) == hash(LeafSpec(16, "float32", (4,)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.nbytes = 1  # type: ignore[misc]
