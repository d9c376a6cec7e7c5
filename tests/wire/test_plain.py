"""The codec without pickle."""

from __future__ import annotations

import dataclasses
import struct
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from aiorlinf.errors import UnsupportedObject, UsageError, WireError
from aiorlinf.wire import plain
from aiorlinf.wire.plain import DEPTH_MAX, decode, encode, register_dataclass
from aiorlinf.wire.tree import Kind, flatten
from tests.wire.carry import WAYS, same

__all__: list[str] = []

Way = Callable[..., Any]


@register_dataclass
@dataclasses.dataclass
class Step:
    obs: torch.Tensor
    reward: float
    info: Any = None
    number: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.number = 1


@register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    name: str
    unset: int = dataclasses.field(init=False, compare=False)


Pair = namedtuple("Pair", ["a", "b"])  # noqa: PYI024


@pytest.fixture(autouse=True)
def _registry_as_it_was() -> Iterator[None]:
    names, classes = dict(plain._by_name), dict(plain._by_class)
    yield
    plain._by_name.clear()
    plain._by_name.update(names)
    plain._by_class.clear()
    plain._by_class.update(classes)


def carried(obj: Any) -> Any:
    skeleton, leaves = encode(obj)
    assert leaves == []
    return decode(bytes(skeleton), [])


@pytest.mark.parametrize(
    "obj",
    [
        None,
        True,
        False,
        0,
        -1,
        2**63 - 1,
        -(2**63),
        2**63,
        -(2**63) - 1,
        255,
        256,
        10**400,
        -(10**400),
        0.0,
        -0.0,
        float("inf"),
        float("nan"),
        1e-320,
        1 - 2j,
        "",
        "é\x00\ud800",
        b"",
        b"\x00\xff",
        bytearray(b"ab"),
        [],
        (),
        {},
        set(),
        frozenset(),
        # Named: the order in which a set shows its members differs between the processes that run the tests.
        pytest.param([1, (2, [3, {"a": {4, "x"}}]), frozenset([(1, 2)])], id="nested"),
        {1: 2, None: 3, (1, "a"): [], b"k": 0.5, frozenset([1]): {}},
    ],
    ids=repr,
)
def test_plain_values(obj: Any) -> None:
    same(obj, carried(obj))


def test_dataclasses_as_keys_and_with_fields_that_were_never_set() -> None:
    got = carried({Key("a"): [Key("b")]})
    same(Key("b"), got[Key("a")][0])


@pytest.mark.parametrize("way", WAYS)
def test_tensors_arrays_and_dataclasses(way: Way) -> None:
    read_only = np.arange(3)
    read_only.flags.writeable = False
    step = Step(torch.arange(3.0), 0.5, {"a": np.asfortranarray(np.arange(6).reshape(2, 3)), "p": Parameter(torch.ones(2))})
    step.number = 9
    obj = [step, read_only, np.arange(10)[::-2], np.array("2020", "M8[D]"), np.float32(1.5), np.bool_(True), torch.ones(2).bfloat16()]
    got = way(obj, allow_pickle=False)
    same(obj, got)
    assert got[0].number == 9
    assert got[0].info["a"].flags.f_contiguous
    assert flatten(obj, allow_pickle=False).kind is Kind.PLAIN


@pytest.mark.parametrize(
    "dtype",
    [
        ">i4",
        "<f2",
        "|S5",
        "<U2",
        "|V3",
        "<m8[15us]",
        [("a", "<i4"), ("b", "<f8", (2, 3))],
        [("a", [("x", "<i2"), ("y", "?")], (2,)), ("b", "S3")],
        {"names": ["a", "b"], "formats": ["<i2", "<i8"], "offsets": [0, 8], "itemsize": 24},
    ],
    ids=str,
)
@pytest.mark.parametrize("way", WAYS)
def test_every_dtype_of_arrays(way: Way, dtype: Any) -> None:
    array = np.zeros((2, 2), dtype)
    got = way([array, array[0, 0], array[:0]], allow_pickle=False)
    assert got[0].dtype == array.dtype
    assert got[1].dtype == array[0, 0].dtype
    assert got[1] == array[0, 0]
    assert got[2].shape == (0, 2)
    assert type(got[1]) is type(array[0, 0])


@pytest.mark.parametrize("way", WAYS)
def test_identity(way: Way) -> None:
    tensor, array, items = torch.ones(2), np.ones(2), [1]
    got = way([tensor, array, items, {"t": tensor, "a": array, "i": items}, tensor[:]], allow_pickle=False)
    assert got[3]["t"] is got[0]
    assert got[3]["a"] is got[1]
    assert got[3]["i"] is got[2]
    assert got[4] is not got[0]


def test_an_object_that_contains_itself() -> None:
    loop: list[Any] = [1]
    loop.append({"loop": loop})
    got = carried(loop)
    assert got[1]["loop"] is got
    through_a_tuple: list[Any] = []
    through_a_tuple.append((through_a_tuple,))
    got = carried(through_a_tuple)
    assert got[0][0] is got


@pytest.mark.parametrize(
    ("obj", "reason"),
    [
        (object(), "type object cannot travel without pickle"),
        ([1, {"a": object()}], r"obj\[1\]\['a'\]: something of type object"),
        (OrderedDict(a=1), "OrderedDict"),
        (defaultdict(list), "defaultdict"),
        (Pair(1, 2), "Pair"),
        ([lambda: None], "function"),
        (len, "builtin_function"),
        (np.array([None], dtype=object), "dtype object"),
        ([np.zeros(1, [("a", "O")])], r"obj\[0\]: NumPy's dtype"),
        (np.zeros(1, np.dtype("f4", metadata={"unit": "m"})), "NumPy's dtype float32"),
        (np.zeros(1, np.dtype({"names": ["a", "b"], "formats": ["<i4", "<i4"], "offsets": [0, 2]})), "NumPy's dtype"),
        (np.zeros(1, np.dtype([(("title", "a"), "<i4")])), "NumPy's dtype"),
        (np.ma.masked_array([1.0]), "MaskedArray"),
        (torch.eye(2).to_sparse(), "sparse_coo"),
        (memoryview(b"x"), "memoryview"),
        (torch.float32, "torch.dtype"),
    ],
)
def test_anything_else_is_refused_with_its_path(obj: Any, reason: str) -> None:
    with pytest.raises(UnsupportedObject, match=reason):
        flatten(obj, allow_pickle=False)


def test_subclasses_are_not_taken_for_their_bases() -> None:
    class MyInt(int):
        pass

    class MyStr(str):
        __slots__ = ()

    for obj in (MyInt(1), MyStr("x")):
        with pytest.raises(UnsupportedObject, match="My"):
            flatten([obj], allow_pickle=False)


def test_depth() -> None:
    obj: Any = []
    for _ in range(DEPTH_MAX - 1):
        obj = [obj]
    same(obj, carried(obj))
    with pytest.raises(UnsupportedObject, match="nested deeper than"):
        flatten([obj], allow_pickle=False)
    with pytest.raises(WireError, match="nested deeper than"):
        decode((b"t" + struct.pack("<I", 1)) * (DEPTH_MAX + 1) + b"N", [])


def test_a_class_must_be_registered_on_both_sides() -> None:
    @dataclasses.dataclass
    class Mine:
        x: int

    with pytest.raises(UnsupportedObject, match="Mine cannot travel without pickle"):
        flatten(Mine(1), allow_pickle=False)
    register_dataclass(Mine, name="mine")
    skeleton, _ = encode([Mine(1)])
    assert decode(skeleton, []) == [Mine(1)]
    del plain._by_name["mine"]
    with pytest.raises(UnsupportedObject, match="'mine' arrived that is not registered here"):
        decode(skeleton, [])


def test_a_class_with_other_fields_here() -> None:
    @dataclasses.dataclass
    class Then:
        gone: int

    @dataclasses.dataclass
    class Now:
        x: int

    register_dataclass(Then, name="it")
    skeleton, _ = encode(Then(1))
    plain._by_name["it"] = Now
    with pytest.raises(UnsupportedObject, match="has no field 'gone' here"):
        decode(skeleton, [])


def test_a_class_defined_again_takes_its_name_over() -> None:
    def define() -> type:
        @register_dataclass
        @dataclasses.dataclass
        class Cell:
            x: int

        return Cell

    old, new = define(), define()
    assert old is not new
    assert type(decode(encode(new(1))[0], [])) is new


def test_what_cannot_be_registered() -> None:
    @dataclasses.dataclass
    class Other:
        x: int

    @dataclasses.dataclass
    class Mapping(dict[str, int]):
        x: int

    class NoDataclass:
        pass

    with pytest.raises(UsageError, match="already belongs"):
        register_dataclass(Other, name=f"{Step.__module__}.{Step.__qualname__}")
    with pytest.raises(UsageError, match="from their fields alone"):
        register_dataclass(Mapping)
    with pytest.raises(UsageError, match="not a dataclass"):
        register_dataclass(NoDataclass)


COUNT = struct.Struct("<I").pack


@pytest.mark.parametrize(
    ("skeleton", "leaves", "text"),
    [
        (b"", [], "cut short"),
        (b"?", [], "unknown tag"),
        (b"NN", [], "left over"),
        (b"N", [torch.ones(1)], "left over"),
        (b"i1234567", [], "cut short"),
        (b"l" + COUNT(2**32 - 1), [], "4294967295 items announced in 0 bytes"),
        (b"s" + COUNT(5) + b"abc", [], "announced"),
        (b"s" + COUNT(1) + b"\xff", [], "UnicodeDecodeError"),
        (b"x", [], "wants more tensors"),
        (b"x", [memoryview(b"")], "wants more tensors"),
        (b"B", [torch.ones(1)], "another buffer"),
        (b"r" + COUNT(0), [], "a reference to part 0"),
        (b"d" + COUNT(1) + b"l" + COUNT(0) + b"N", [], "unhashable"),
        (b"S" + COUNT(1) + b"l" + COUNT(0), [], "unhashable"),
        (b"g" + b"s" + COUNT(1) + b"O" + b"b" + COUNT(0), [], "Python objects"),
        (b"g" + b"s" + COUNT(3) + b"<f4" + b"b" + COUNT(2) + b"ab", [], "wrong size"),
        (b"g" + b"s" + COUNT(5) + b"f4,f4" + b"b" + COUNT(2) + b"ab", [], "is not a dtype"),
        (b"g" + b"N" + b"b" + COUNT(0), [], "is not a dtype"),
    ],
)
def test_malformed(skeleton: bytes, leaves: list[Any], text: str) -> None:
    with pytest.raises(WireError, match=text):
        decode(skeleton, leaves)


def array_skeleton(descr: Any, rest: Any) -> bytes:
    return b"a" + bytes(encode(descr)[0]) + bytes(encode(rest)[0])


@pytest.mark.parametrize(
    ("descr", "rest"),
    [
        ("<f4", ("C", True, 3)),
        ("<f4", ("C", True, -2)),
        ("<f4", ("C", True, 2.0)),
        ("<f4", ("C",)),
        ("<f4", None),
        ("|O8", ("C", True, 1)),
        ("|V8", ("C", True, 2**62, 0)),
        ([("a", "<f8", 1)], ("C", True, 1)),
        ([("a", "<f8", (-1,))], ("C", True, 1)),
        ([(1, "<f8")], ("C", True, 1)),
        ([("a", "<f4"), ("a", "<f4")], ("C", True, 1)),
        (("<f8", (2**31,)), ("C", True, 1)),
        ([("a",)], ("C", True, 1)),
    ],
    ids=repr,
)
def test_malformed_arrays(descr: Any, rest: Any) -> None:
    with pytest.raises(WireError):
        decode(array_skeleton(descr, rest), [memoryview(bytearray(8))])


def test_no_more_is_allocated_than_was_sent() -> None:
    for tag in b"lltdSZsbyID":
        with pytest.raises(WireError):
            decode(bytes([tag]) + COUNT(2**31) + b"N" * 100, [])


def test_hash_functions_of_registered_classes_may_fail() -> None:
    @register_dataclass
    @dataclasses.dataclass
    class Odd:
        x: int

        def __hash__(self) -> int:
            raise ZeroDivisionError

    skeleton = b"S" + COUNT(1) + bytes(encode(Odd(1))[0])
    with pytest.raises(WireError, match="ZeroDivisionError"):
        decode(skeleton, [])
