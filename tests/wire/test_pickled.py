"""Odd tensors, arrays, buffers and ordinary objects through pickle."""

from __future__ import annotations

import array
import datetime
import enum
import pathlib
import pickle
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from aiorlinf.errors import NonContiguousTensor, UnsupportedObject, WireError
from aiorlinf.wire import pickled
from aiorlinf.wire.leaves import STREAM
from aiorlinf.wire.tree import Kind, flatten
from tests.wire.carry import WAYS, bits, by_inline, same

__all__: list[str] = []

Way = Callable[..., Any]

# What torch says about its own kinds of tensor.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse (CSR|CSC|BSR|BSC) tensor support", "ignore:torch.quantize_per", "ignore:The PyTorch API of nested tensors"
)


def stream_of(obj: Any) -> bytes:
    return b"".join(flatten(obj).skeleton)


# ---- sparse, quantised, nested


def sparse(layout: torch.layout, *, requires_grad: bool = False) -> torch.Tensor:
    dense = torch.tensor([[0.0, 1.0, 0.0, 2.0], [0.0, 0.0, 0.0, 0.0], [3.0, 0.0, 0.0, 4.0], [0.0, 5.0, 6.0, 7.0]])
    if layout is torch.sparse_coo:
        got = dense.to_sparse()
    elif layout in (torch.sparse_bsr, torch.sparse_bsc):
        got = dense.to_sparse(layout=layout, blocksize=(2, 2))
    else:
        got = dense.to_sparse(layout=layout)
    return got.requires_grad_(requires_grad)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc], ids=str)
def test_sparse(way: Way, layout: torch.layout, requires_grad: bool) -> None:
    sent = sparse(layout, requires_grad=requires_grad)
    for obj in (sent, [sent], {"a": (sent, 1)}):
        assert flatten(obj).kind is Kind.OBJECT
        got = way(obj)
        while not isinstance(got, torch.Tensor):
            got = next(iter(got.values() if isinstance(got, dict) else got))
        assert got.layout is layout
        assert got.requires_grad == requires_grad
        assert torch.equal(got.detach().to_dense(), sent.detach().to_dense())
        gone = weakref.ref(got)
        del got
        assert gone() is None


def test_parts_of_a_sparse_tensor_are_leaves() -> None:
    size = 10_000
    sent = torch.sparse_coo_tensor(
        torch.arange(size).repeat(2, 1), torch.arange(size, dtype=torch.float32), (size, size), check_invariants=True
    )
    flat = flatten({"a": sent})
    assert sorted(leaf.nbytes for leaf in flat.leaves) == [4 * size, 16 * size]
    got = by_inline({"a": sent})["a"]
    assert not got.is_coalesced()
    assert torch.equal(got._values(), sent._values())


@pytest.mark.parametrize("way", WAYS)
def test_sparse_with_parts_that_are_not_contiguous(way: Way) -> None:
    sent = torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0], [1, 1]]).t(), torch.arange(6.0)[::2], (2, 2), check_invariants=True)
    assert torch.equal(way([sent])[0].to_dense(), sent.to_dense())


@pytest.mark.parametrize("way", WAYS)
def test_quantised(way: Way) -> None:
    values = torch.linspace(-1, 1, 12).reshape(3, 4)
    tensors = [
        torch.quantize_per_tensor(values, 0.1, 3, torch.quint8),
        torch.quantize_per_tensor(values, 0.1, 0, torch.qint32),
        torch.quantize_per_channel(values, torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2]), 0, torch.qint8),
    ]
    for sent in tensors:
        got = way({"q": sent})["q"]
        assert got.qscheme() == sent.qscheme()
        assert got.dtype == sent.dtype
        assert torch.equal(got.int_repr(), sent.int_repr())
        assert torch.equal(got.dequantize(), sent.dequantize())
        assert any(leaf.tensor is not None for leaf in flatten(sent).leaves)
    with pytest.raises(NonContiguousTensor, match=r"obj\[0\]"):
        flatten([tensors[0].t()])


def test_a_view_of_a_quantised_tensor_sends_its_own_bytes() -> None:
    big = torch.quantize_per_tensor(torch.zeros(100_000), 0.1, 0, torch.qint8)
    assert flatten(big[:10]).payload_bytes < 100


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested(way: Way, layout: torch.layout) -> None:
    parts = [torch.arange(3.0), torch.arange(5.0)]
    sent = torch.nested.nested_tensor(parts, layout=layout)
    for obj in (sent, [sent, 1]):
        got = way(obj)
        got = got[0] if isinstance(got, list) else got
        assert got.layout is layout
        for one, other in zip(got.unbind(), parts, strict=True):
            assert torch.equal(one, other)
        assert all(leaf.tensor is not None for leaf in flatten(obj).leaves)


def test_what_torch_itself_cannot_take_apart_is_refused() -> None:
    with pytest.raises(UnsupportedObject, match=r"obj\['a'\]\[0\] cannot be pickled"):
        flatten({"a": [torch.ones(2).to_mkldnn()]})
    with pytest.raises(UnsupportedObject, match=r"obj\[0\]: a torch.sparse_coo tensor on device 'meta'"):
        flatten([torch.eye(3).to_sparse().to("meta")])
    with pytest.raises(UnsupportedObject, match="quint4x2"):
        flatten([torch.quantize_per_channel(torch.zeros(2, 4), torch.ones(2), torch.zeros(2), 0, torch.quint4x2)])


def test_odd_tensors_need_pickle() -> None:
    for sent in (sparse(torch.sparse_coo), sparse(torch.sparse_csr)):
        for obj, path in ((sent, "obj"), ([sent], r"obj\[0\]")):
            with pytest.raises(UnsupportedObject, match=f"{path}: a tensor of layout .* cannot travel without pickle"):
                flatten(obj, allow_pickle=False)


# ---- classes of tensors


class Named(torch.Tensor):
    label: str


class SlottedTensor(torch.Tensor):
    __slots__ = ("unit",)
    unit: str


class MyParameter(Parameter):
    pass


class OwnReduce(torch.Tensor):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return (own_reduce, (self.detach().as_subclass(torch.Tensor).tolist(),))


def own_reduce(values: list[float]) -> OwnReduce:
    return torch.tensor(values).as_subclass(OwnReduce)


@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_subclass_keeps_its_class_and_attributes(way: Way) -> None:
    sent = torch.arange(1000.0)[1:4].as_subclass(Named)
    sent.label = "speed"
    flat = flatten([sent, {"again": sent}])
    assert flat.payload_bytes == 12
    got = way([sent, {"again": sent}])
    assert type(got[0]) is Named
    assert got[0].label == "speed"
    assert got[1]["again"] is got[0]
    assert got[0].as_subclass(torch.Tensor).tolist() == [1, 2, 3]
    slotted = torch.ones(2).as_subclass(SlottedTensor)
    slotted.unit = "m"
    got = way(slotted)
    assert (type(got), got.unit) == (SlottedTensor, "m")
    assert way(torch.ones(2).as_subclass(Named).requires_grad_()).requires_grad


@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_subclass_keeps_its_class(way: Way) -> None:
    for requires_grad in (True, False):
        sent = MyParameter(torch.ones(3), requires_grad)
        got = way({"p": sent})["p"]
        assert type(got) is MyParameter
        assert got.requires_grad == requires_grad
        assert torch.equal(got, sent)


@pytest.mark.parametrize("way", WAYS)
def test_a_class_with_its_own_reduction_keeps_it(way: Way) -> None:
    got = way([torch.ones(2).as_subclass(OwnReduce)])[0]
    assert type(got) is OwnReduce
    assert got.tolist() == [1, 1]


def test_a_strided_subclass_is_refused_with_its_path() -> None:
    with pytest.raises(NonContiguousTensor, match=r"obj\[1\]"):
        flatten([1, torch.ones(2, 3).as_subclass(Named).t()])


class Wrapper(torch.Tensor):
    """Holds two tensors and behaves as their sum."""

    halves: tuple[torch.Tensor, torch.Tensor]

    @staticmethod
    def __new__(cls, one: torch.Tensor, two: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, one.shape, dtype=one.dtype)
        made.halves = (one, two)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        plain = [arg.halves[0] + arg.halves[1] if isinstance(arg, Wrapper) else arg for arg in args]
        return func(*plain, **(kwargs or {}))


@pytest.mark.parametrize("way", WAYS)
def test_a_wrapper_goes_by_its_own_parts(way: Way) -> None:
    sent = Wrapper(torch.ones(3), torch.arange(3.0))
    assert flatten([sent]).payload_bytes == 24
    got = way([sent])[0]
    assert type(got) is Wrapper
    assert got.halves[1].tolist() == [0, 1, 2]
    assert (got + 0).tolist() == [1, 2, 3]


@pytest.mark.parametrize("way", WAYS)
def test_storages(way: Way) -> None:
    storage = torch.arange(5, dtype=torch.uint8).untyped_storage()
    got: Any = way([storage])[0]
    assert type(got) is torch.UntypedStorage
    assert list(got) == [0, 1, 2, 3, 4]
    assert flatten([storage]).payload_bytes == 5
    assert way([torch.empty(0).untyped_storage()])[0].nbytes() == 0


@pytest.mark.parametrize("way", WAYS)
def test_torchs_small_things(way: Way) -> None:
    obj = [torch.float32, torch.strided, torch.device("cpu"), torch.Size([1, 2]), torch.contiguous_format]
    assert way(obj) == obj


# ---- arrays and buffers


@pytest.mark.parametrize("way", WAYS)
def test_arrays_of_every_make(way: Way) -> None:
    base = np.arange(24.0).reshape(4, 6)
    fortran = np.asfortranarray(base)
    read_only = base.copy()
    read_only.flags.writeable = False
    structured = np.array([(1, 2.5, b"x"), (3, 4.5, b"y")], dtype=[("a", "<i4"), ("b", "<f8"), ("c", "S3")])
    nothing: list[Any] = [None, "x"]
    frozen_objects = np.array([1, "a", nothing], dtype=object)
    frozen_objects.flags.writeable = False
    arrays = [
        base,
        fortran,
        read_only,
        base[::-1, ::-2],
        base[:, 1],
        np.broadcast_to(np.float32(1), (2, 3)),
        structured,
        structured[::-1],
        np.array(["2020-01-01", "NaT"], dtype="M8[us]"),
        np.array([1, "a", nothing, np.arange(3)], dtype=object),
        np.array([[1, None], ["b", 2.0]], dtype=object),
        frozen_objects,
        np.array(5),
        np.array("text"),
        np.empty((0, 3), np.int8),
        np.arange(3, dtype=">i4"),
        np.array([1.5, -0.0, np.nan], dtype=np.float16),
        np.array([True, False]),
    ]
    for sent in arrays:
        same([sent], way([sent]))
        same(sent, way(sent))
    got = way({"f": fortran, "r": read_only})
    assert got["f"].flags.f_contiguous
    with pytest.raises(ValueError, match="read-only"):
        got["r"] += 1


@pytest.mark.skipif(not hasattr(np, "dtypes") or not hasattr(np.dtypes, "StringDType"), reason="NumPy 2 has this dtype")
def test_an_array_of_texts_of_any_length() -> None:
    sent = np.array(["a", "b" * 100], dtype=np.dtypes.StringDType())
    got = by_inline([sent])[0]
    assert got.dtype == sent.dtype
    assert got.tolist() == sent.tolist()


@pytest.mark.parametrize("way", WAYS)
def test_numpy_scalars_and_subclasses(way: Way) -> None:
    masked = np.ma.masked_array(np.arange(3.0), [False, True, False])
    records: Any = np.rec
    got = way({"s": np.float32(1.5), "t": np.datetime64("2020-01-01"), "m": masked, "r": records.array([(1, 2)], names="a,b")})
    assert type(got["s"]) is np.float32
    assert got["t"] == np.datetime64("2020-01-01")
    assert got["m"].mask.tolist() == [False, True, False]
    assert got["r"].b.tolist() == [2]


def test_arrays_stay_out_of_the_stream() -> None:
    sent: Any = np.frombuffer(b"needle" * 100, dtype=np.uint8)
    for obj in (
        [sent],
        [sent[::-1]],
        {"a": Holder(sent)},
        np.array(b"needle" * 100),
        [memoryview(sent)],
        [array.array("b", sent.tobytes())],
    ):
        assert b"needle" not in stream_of(obj)
        assert flatten(obj).payload_bytes == 600


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.mark.parametrize("way", WAYS)
def test_an_array_twice_is_one_object(way: Way) -> None:
    sent = np.arange(3)
    got = way([sent, sent, sent[:]])
    assert got[0] is got[1]
    got[0][0] = 9
    assert got[2][0] == 0


def view_of(array: Any) -> memoryview:
    return memoryview(array)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "make",
    [
        lambda: memoryview(b""),
        lambda: memoryview(b"abc"),
        lambda: memoryview(bytearray(b"abc")),
        lambda: view_of(np.arange(6.0).reshape(2, 3)),
        lambda: view_of(np.arange(6.0)),
        lambda: view_of(np.arange(6.0))[::2],
        lambda: view_of(np.arange(3, dtype=np.float16)),
        lambda: view_of(np.arange(6.0).reshape(2, 3)).toreadonly(),
        lambda: memoryview(array.array("q", [1, 2])),
        lambda: view_of(np.array(1.5)),
        lambda: memoryview(b"abcdef").cast("c"),
    ],
)
def test_memoryviews(way: Way, make: Callable[[], memoryview]) -> None:
    sent = make()
    same([sent], way([sent]))


@pytest.mark.parametrize("way", WAYS)
def test_buffers_of_the_standard_library(way: Way) -> None:
    obj = [b"", b"abc", bytearray(b""), bytearray(b"abc"), array.array("d"), array.array("d", [1, 2]), array.array("u", "héllo")]
    got = way(obj)
    same(obj, got)
    got[3].append(1)
    got[5].append(3)


class Foreign:
    """A class that keeps its memory out of band by itself."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Foreign, (pickle.PickleBuffer(self.memory),)


@pytest.mark.parametrize("way", WAYS)
def test_foreign_out_of_band_buffers(way: Way) -> None:
    got = way([Foreign(bytearray(b"abc")), torch.ones(1), Foreign(b"xyz"), Foreign(np.arange(2.0))])
    assert bytes(got[0].memory) == b"abc"
    got[0].memory[0] = 1
    assert bytes(got[2].memory) == b"xyz"
    assert memoryview(got[2].memory).readonly
    assert bytes(got[3].memory) == np.arange(2.0).tobytes()


def test_a_foreign_buffer_with_holes_is_refused() -> None:
    with pytest.raises(UnsupportedObject, match="contiguous"):
        flatten([Foreign(np.arange(6)[::2])])


# ---- ordinary objects


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize("way", WAYS)
def test_ordinary_objects(way: Way) -> None:
    shared = [1]
    obj: list[Any] = [
        None,
        True,
        1 << 100,
        1.5,
        2j,
        "é\ud800",
        b"x",
        {1, 2},
        frozenset([3]),
        Colour.RED,
        range(3),
        datetime.date(2020, 1, 2),
    ]
    obj += [pathlib.PurePosixPath("/a"), slice(1, 2), Ellipsis, int, len, shared, shared, ValueError("x").args]
    got = way(obj)
    assert got == obj
    assert got[-2] is got[-3]


@pytest.mark.parametrize("way", WAYS)
def test_an_object_that_contains_itself(way: Way) -> None:
    loop: list[Any] = [torch.ones(1)]
    loop.append(loop)
    got = way(loop)
    assert got[1] is got


def test_no_tensors_bytes_in_the_stream() -> None:
    needle = torch.frombuffer(bytearray(b"needle" * 100), dtype=torch.uint8)
    for obj in ({"a": [needle]}, Holder(needle), [needle.as_subclass(Named)], [needle.untyped_storage()], [needle.to_sparse()]):
        assert b"needle" not in stream_of(obj)


def test_a_large_stream_is_cut_into_pieces_in_order() -> None:
    obj = [[bytes([index]) * 20_000 * index for index in range(20)], torch.ones(2), "x" * 70_000, list(range(30_000)), torch.zeros(3), b""]
    flat = flatten(obj)
    assert sum(1 for leaf in flat.leaves if leaf.spec.flags & STREAM) > 10
    assert [leaf.spec.is_tensor for leaf in flat.leaves if not leaf.spec.flags & STREAM] == [True, True]
    same(obj, by_inline(obj))


@pytest.mark.parametrize("size", [65_535, 65_536, 65_537, 200_000])
def test_sizes_around_the_cut(size: int) -> None:
    for obj in (b"b" * size, bytearray(size), "t" * size, "ü" * (size // 2), [b"b" * size, b"c" * size], [None] * size):
        same(obj, by_inline(obj))


# ---- what goes wrong


def test_a_class_that_is_missing_here_fails_only_this_message() -> None:
    module = types.ModuleType("only_at_the_sender")
    exec("class Thing: pass", module.__dict__)
    sys.modules[module.__name__] = module
    try:
        flat = flatten([module.Thing(), torch.ones(1)])
    finally:
        del sys.modules[module.__name__]
    stream = memoryview(b"".join(flat.skeleton))
    with pytest.raises(UnsupportedObject, match="ModuleNotFoundError: No module named 'only_at_the_sender'") as caught:
        pickled.load(stream, [torch.ones(1)], ())
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert "importable" in str(caught.value)


class TwoArguments(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


def test_an_exception_that_cannot_be_rebuilt() -> None:
    with pytest.raises(UnsupportedObject, match="cannot be rebuilt here: TypeError") as caught:
        by_inline([TwoArguments("a", "b")])
    assert caught.value.hint is None


def test_buffers_and_stream_that_do_not_belong_together() -> None:
    segments, _, _ = pickled.dump([torch.ones(1)])
    stream = memoryview(b"".join(segments))
    with pytest.raises(UnsupportedObject, match="not enough out-of-band buffers"):
        pickled.load(stream, [], ())
    with pytest.raises(WireError, match="left over"):
        pickled.load(stream, [torch.ones(1), torch.ones(1)], ())
    with pytest.raises(UnsupportedObject, match="cannot be rebuilt"):
        pickled.load(stream[:10], [torch.ones(1)], ())
    for protocol in (0, 1):
        old = memoryview(pickle.dumps([1, "text"], protocol))
        with pytest.raises(UnsupportedObject, match="older pickle protocol"):
            pickled.load(memoryview(b""), [], [(0, memoryview(b"I1\n" + old))])


def test_a_message_within_a_message() -> None:
    class Nested:
        def __reduce__(self) -> Any:
            assert by_inline([torch.ones(2), 1])[1] == 1
            return (list, ([torch.zeros(1)],))

    got = by_inline([Nested(), torch.ones(3), Nested()])
    assert [bits(part if isinstance(part, torch.Tensor) else part[0]) for part in got] == [bytes(4), bits(torch.ones(3)), bytes(4)]


def test_many_threads_at_once() -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for index in range(200):
                obj = {"n": number, "t": torch.full((3,), float(number)), "i": [index, str(number)]}
                same(obj, by_inline(obj))
        except BaseException as error:  # handed to the test
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_pickler_that_has_failed_or_grown_is_not_used_again() -> None:
    pickled._idle.clear()
    by_inline(set(range(100)))  # a plain list would need no pickler of ours
    assert len(pickled._idle) == 1
    with pytest.raises(UnsupportedObject):
        flatten(lambda: None)
    assert pickled._idle == []
    flatten([str(index) for index in range(5000)])
    assert pickled._idle == []
    by_inline([torch.ones(1), 1])
    assert len(pickled._idle) == 1
    assert pickled._idle[0].sink.leaves == []


@pytest.mark.parametrize("way", WAYS)
def test_tensordicts(way: Way) -> None:
    tensordict = pytest.importorskip("tensordict", reason="an optional guest: it travels by its own reduction")
    stack = tensordict.lazy_stack(
        [tensordict.TensorDict({"x": torch.ones(2), "s": "one"}), tensordict.TensorDict({"x": torch.ones(3), "s": "two"})]
    )
    assert [leaf.spec.shape for leaf in flatten(stack).leaves] == [(2,), (3,)]
    got = way({"stack": stack, "n": 1})["stack"]
    assert type(got) is type(stack)
    assert got[1]["s"] == "two"
    assert torch.equal(got[1]["x"], torch.ones(3))
