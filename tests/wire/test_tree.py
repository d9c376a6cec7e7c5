"""Whole objects: kinds, identity, refusals, rebuilding over buffers."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import Parameter

from aiorlinf import init
from aiorlinf.errors import InternalError, NonContiguousTensor, UnsupportedObject
from aiorlinf.wire.manifest import decode_manifest, encode_manifest
from aiorlinf.wire.tree import Kind, flatten, rebuild
from tests.wire.carry import WAYS, bits, buffers_of, by_inline, by_rebuild, same

__all__: list[str] = []

Way = Callable[..., Any]

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")


class Point(NamedTuple):
    x: torch.Tensor
    label: str


Old = namedtuple("Old", ["a", "b"])  # noqa: PYI024


@dataclasses.dataclass
class Batch:
    runs: ClassVar[int] = 0

    obs: torch.Tensor
    rewards: list[float]
    size: int = dataclasses.field(init=False)
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        type(self).runs += 1
        self.size = len(self.rewards)


@dataclasses.dataclass(frozen=True)
class Frozen:
    t: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    t: torch.Tensor
    n: int = 1


@dataclasses.dataclass(slots=True)
class Slots:
    t: torch.Tensor
    unset: int = dataclasses.field(init=False)


class MyList(list[Any]):
    note = ""


class MyDict(dict[str, Any]):
    pass


class Holder:
    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


KINDS: list[tuple[Any, Kind, Kind]] = [
    (zeros(3), Kind.TENSOR, Kind.TENSOR),
    (Parameter(zeros(3)), Kind.TENSOR, Kind.TENSOR),
    ([], Kind.LIST, Kind.LIST),
    ([zeros(2), Parameter(zeros(0))], Kind.LIST, Kind.LIST),
    ((), Kind.TUPLE, Kind.TUPLE),
    ((zeros(),), Kind.TUPLE, Kind.TUPLE),
    ({}, Kind.DICT, Kind.DICT),
    ({"a": zeros(2), "": zeros(1)}, Kind.DICT, Kind.DICT),
    ({1: zeros(2)}, Kind.OBJECT, Kind.PLAIN),
    ({"a": 1}, Kind.OBJECT, Kind.PLAIN),
    ([zeros(2), [zeros(1)]], Kind.OBJECT, Kind.PLAIN),
    (None, Kind.OBJECT, Kind.PLAIN),
]


@pytest.mark.parametrize(("obj", "kind", "plain_kind"), KINDS, ids=lambda value: value.name if isinstance(value, Kind) else None)
@pytest.mark.parametrize("way", WAYS)
def test_the_kinds(obj: Any, kind: Kind, plain_kind: Kind, way: Way) -> None:
    assert flatten(obj).kind is kind
    assert flatten(obj, allow_pickle=False).kind is plain_kind
    same(obj, way(obj))
    same(obj, way(obj, allow_pickle=False))


def test_tensor_kinds_have_no_pickle_in_them() -> None:
    for obj, kind, _ in KINDS:
        if kind <= Kind.DICT:
            assert b"".join(flatten(obj).skeleton).count(b"\x80\x05") == 0


@pytest.mark.parametrize("way", WAYS)
def test_containers_keep_their_class_three_levels_deep(way: Way) -> None:
    default: defaultdict[str, list[Any]] = defaultdict(list)
    default["x"].append(zeros(1))
    listed = MyList([zeros(2), (zeros(3),)])
    listed.note = "kept"
    obj = {
        "point": Point(zeros(2), "p"),
        "old": Old(1, Old(zeros(1), Old((), []))),
        "ordered": OrderedDict(b=zeros(1), a=OrderedDict()),
        "default": default,
        "deque": deque([zeros(2), 1], maxlen=5),
        "frozen": (Frozen(zeros(2)), FrozenSlots(zeros(2)), Slots(zeros(1))),
        "list": listed,
        "dict": MyDict(a=MyDict(b=MyList([zeros(1)]))),
        "batch": Batch(zeros(2, 2), [1.0, 2.0]),
    }
    got = way(obj)
    same(obj, got)
    assert got["list"].note == "kept"
    assert got["default"].default_factory is list
    assert got["deque"].maxlen == 5
    assert got["old"].b.b.a == ()


@pytest.mark.parametrize("way", WAYS)
def test_a_dataclass_is_not_initialised_again(way: Way) -> None:
    batch = Batch(zeros(4), [1.0], {"t": zeros(1)})
    batch.size = 77
    before = Batch.runs
    got = way(batch)
    assert Batch.runs == before
    assert got.size == 77
    same(batch, got)
    assert flatten(batch).kind is Kind.DATACLASS
    assert flatten(Slots(zeros(1))).kind is Kind.DATACLASS
    assert flatten(Batch(None, [])).kind is Kind.OBJECT  # type: ignore[arg-type]
    assert not hasattr(way(Slots(zeros(1))), "unset")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("allow_pickle", [True, False])
@pytest.mark.parametrize("wrap", [list, tuple, lambda pair: {"a": pair[0], "b": pair[1]}, lambda pair: [pair, 1]])
def test_identity_is_kept_and_shared_memory_is_not(way: Way, allow_pickle: bool, wrap: Callable[[Any], Any]) -> None:
    def pair(obj: Any) -> list[torch.Tensor]:
        obj = obj[0] if isinstance(obj[0] if isinstance(obj, list) else None, list) else obj
        return list(obj.values()) if isinstance(obj, dict) else list(obj)

    tensor = torch.arange(4.0)
    one, two = pair(way(wrap([tensor, tensor]), allow_pickle=allow_pickle))
    assert one is two
    one, two = pair(way(wrap([tensor, tensor[:]]), allow_pickle=allow_pickle))
    assert one is not two
    one += 1
    assert two.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("way", WAYS)
def test_identity_in_dataclasses_and_modules(way: Way) -> None:
    tensor = zeros(2)
    got = way(Batch(tensor, [], {"again": tensor, "view": tensor[:]}))
    assert got.obs is got.extra["again"]
    assert got.obs.data_ptr() != got.extra["view"].data_ptr()
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    got = way(model)
    assert got[1].weight is got[0].weight
    assert isinstance(got[0].weight, Parameter)
    same(dict(model.state_dict()), dict(got.state_dict()))


def test_an_element_twice_travels_once() -> None:
    flat = flatten([zeros(100)] * 5)
    assert len(flat.leaves) == 5 - 4
    assert flat.payload_bytes == 400


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("allow_pickle", [True, False])
def test_gradients_and_parameters(way: Way, allow_pickle: bool) -> None:
    leaf = torch.ones(2, requires_grad=True)
    obj = {
        "leaf": leaf,
        "non-leaf": leaf * 2,
        "parameter": Parameter(zeros(2)),
        "frozen": Parameter(zeros(2), requires_grad=False),
        "integer": Parameter(torch.arange(3), requires_grad=False),
        "plain": zeros(1),
        "half": torch.ones(2, dtype=torch.bfloat16, requires_grad=True),
        "complex": torch.ones(2, dtype=torch.complex64, requires_grad=True),
    }
    for sent in (obj, [obj]):
        got = way(sent, allow_pickle=allow_pickle)
        same(sent, got)
    got = got[0]
    assert got["non-leaf"].is_leaf
    got["leaf"].sum().backward()
    assert got["leaf"].grad.tolist() == [1, 1]


@pytest.mark.parametrize("way", WAYS)
def test_grad_hooks_and_attributes_stay_behind(way: Way) -> None:
    tensor = torch.ones(2, requires_grad=True)
    tensor.sum().backward()  # type: ignore[no-untyped-call]
    tensor.register_hook(lambda grad: grad)  # type: ignore[no-untyped-call]
    tensor.note = "mine"  # type: ignore[attr-defined]
    for obj in (tensor, [tensor], {"a": [tensor]}):
        got = way(obj)
        while not isinstance(got, torch.Tensor):
            got = next(iter(got.values() if isinstance(got, dict) else got))
        assert got.grad is None
        assert not hasattr(got, "note")
        assert got._backward_hooks is None


@pytest.mark.parametrize("way", WAYS)
def test_a_view_deep_in_an_object_sends_its_own_bytes(way: Way) -> None:
    big = torch.arange(1_000_000, dtype=torch.float32)
    obj = [Frozen(big[5:6])]
    flat = flatten(obj)
    assert flat.payload_bytes == 4
    assert len(encode_manifest(flat)) < 500
    got = way(obj)
    same(obj, got)
    assert got[0].t.untyped_storage().nbytes() == 4


EMPTY = [(0,), (0, 3), (3, 0), ()]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("allow_pickle", [True, False])
def test_zero_elements(way: Way, allow_pickle: bool) -> None:
    tensors = [torch.empty(shape, dtype=dtype) for shape in EMPTY for dtype in (torch.float32, torch.bfloat16, torch.bool)]
    big = torch.arange(262_144, dtype=torch.float32)
    for obj in (*tensors, tensors, [*tensors, big], {"t": tensors, "big": big, "array": np.empty((0, 3)), "b": b"", "a": bytearray()}):
        same(obj, way(obj, allow_pickle=allow_pickle))


@pytest.mark.parametrize("way", WAYS)
def test_everything_that_arrives_can_be_written(way: Way) -> None:
    got = way({"t": zeros(3), "a": np.zeros(3), "b": bytearray(3), "h": torch.zeros(2, 2, dtype=torch.float16)})
    got["t"] += 1
    got["a"] += 1
    got["b"][0] = 1
    got["h"] += 1


@pytest.mark.parametrize("way", WAYS)
def test_what_arrives_is_independent_of_what_was_sent(way: Way) -> None:
    tensor, array = torch.arange(4), np.arange(4)
    obj = {"t": tensor, "a": array}
    got = way(obj)
    got["t"] += 1
    got["a"] += 1
    assert tensor.tolist() == array.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("obj", "path"),
    [
        (zeros(2, 3).t(), "obj"),
        ([zeros(1), zeros(2, 3).t()], "obj[1]"),
        ({"a": zeros(1), "b": zeros(4)[::2]}, "obj['b']"),
        ({"a": [0, 1, 2, Frozen(zeros(2, 3).t())]}, "obj['a'][3].t"),
        (Batch(zeros(1), [], {"deep": (Point(zeros(1).expand(3), ""),)}), "obj.extra['deep'][0].x"),
        (Holder(model=nn.ParameterDict({"w": Parameter(zeros(2, 3).t())})), "obj.model._parameters['w']"),
    ],
)
def test_a_strided_tensor_is_refused_with_its_path(obj: Any, path: str) -> None:
    with pytest.raises(NonContiguousTensor) as caught:
        flatten(obj)
    assert caught.value.path == path
    assert f"send {path}.contiguous()" in str(caught.value)


def test_a_strided_tensor_is_refused_without_pickle_too() -> None:
    with pytest.raises(NonContiguousTensor, match=r"obj\['a'\]\[1\]"):
        flatten({"a": [1, zeros(2, 3).t()]}, allow_pickle=False)


class GivesStrided:
    def __reduce__(self) -> Any:
        return (list, ([zeros(2, 3).t()],))


def test_a_strided_tensor_that_is_no_part_of_the_object() -> None:
    with pytest.raises(NonContiguousTensor, match="a tensor inside GivesStrided"):
        flatten(GivesStrided())


class Unpicklable:
    def __reduce__(self) -> Any:
        raise OSError("not this one")


def test_what_cannot_be_pickled_is_refused_with_its_path() -> None:
    with pytest.raises(UnsupportedObject, match=r"obj\['a'\]\[1\] cannot be pickled: .*lambda") as caught:
        flatten({"t": zeros(1), "a": [0, lambda: None]})
    assert caught.value.path == "obj['a'][1]"
    assert isinstance(caught.value, TypeError)
    with pytest.raises(UnsupportedObject, match=r"obj\.extra\['x'\] cannot be pickled: OSError: not this one") as caught:
        flatten(Batch(zeros(1), [], {"x": Unpicklable()}))
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(UnsupportedObject, match="generator"):
        flatten([1, (x for x in [1])])
    # and the next one is not touched by it
    same({"a": 1}, by_inline({"a": 1}))


def test_an_object_nested_too_deeply() -> None:
    obj: Any = zeros(1)
    for _ in range(100_000):
        obj = [obj]
    with pytest.raises(UnsupportedObject, match="nested too deeply"):
        flatten(obj)
    with pytest.raises(UnsupportedObject, match="nested deeper than 200"):
        flatten(obj, allow_pickle=False)
    while isinstance(obj, list):  # taking it down recursively would overflow the stack
        obj = obj.pop()


def test_an_interrupt_while_pickling_is_not_swallowed() -> None:
    class Interrupts:
        def __reduce__(self) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        flatten([Interrupts()])


def test_meta_and_fake_tensors_are_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(3)
    for obj in (torch.empty(2, device="meta"), fake, Parameter(torch.empty(2, device="meta"))):
        for around, path in ((obj, "obj"), ([obj], r"obj\[0\]"), ({"a": 1, "b": obj}, r"obj\['b'\]")):
            for allow_pickle in (True, False):
                with pytest.raises(UnsupportedObject, match=path):
                    flatten(around, allow_pickle=allow_pickle)


def test_versions_tell_about_writes() -> None:
    tensor, other = zeros(2), zeros(2)
    with torch.inference_mode():
        untracked = zeros(2)
    flat = flatten({"t": tensor, "list": [other, np.zeros(2)], "u": untracked})
    before = flat.versions()
    assert flat.versions() == before
    other += 1
    assert flat.versions() != before
    flat = flatten(Frozen(tensor[0:1]))
    before = flat.versions()
    tensor.fill_(3)
    assert flat.versions() != before


@pytest.mark.parametrize("way", WAYS)
def test_the_waiters_inference_mode_does_not_matter(way: Way) -> None:
    obj = [zeros(2), {"a": 1}, torch.zeros(2, dtype=torch.bfloat16)]
    for sent in (obj, obj[:1], obj[0]):
        with torch.inference_mode():
            got = way(sent)
            assert torch.is_inference_mode_enabled()
        same(sent, got)
        first = got if isinstance(got, torch.Tensor) else got[0]
        assert not first.is_inference()
    with torch.inference_mode():
        untracked = torch.ones(2)
    assert not way(untracked).is_inference()


@pytest.mark.parametrize("way", WAYS)
def test_the_waiters_default_device_and_dtype_do_not_matter(way: Way) -> None:
    obj = [zeros(2), torch.zeros(0, dtype=torch.bfloat16), torch.zeros(2, 2, dtype=torch.bfloat16)]
    with torch.device("meta"):
        got = way([obj, 1])
    same([obj, 1], got)


def test_a_rebuilt_object_lives_in_its_buffers() -> None:
    flat = flatten({"t": torch.arange(4), "n": [np.arange(4)]})
    buffers = buffers_of(flat)
    got = rebuild(decode_manifest(encode_manifest(flat)), buffers)
    assert got["t"].data_ptr() == buffers[0].data_ptr()
    assert got["n"][0].ctypes.data == buffers[1].data_ptr()


def test_a_rebuilt_object_keeps_its_buffers_alive() -> None:
    memory = np.zeros(4000, dtype=np.uint8)
    gone = weakref.ref(memory)
    flat = flatten(torch.arange(1000, dtype=torch.int32))
    got = rebuild(decode_manifest(encode_manifest(flat)), [torch.from_numpy(memory)])
    del memory
    part = got[:1]
    del got
    gc.collect()
    assert gone() is not None
    assert part.tolist() == [0]
    del part
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("offset", [0, 1, 2, 4, 8, 16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8])
def test_a_buffer_at_an_odd_address(offset: int, dtype: torch.dtype) -> None:
    sent = torch.arange(10).to(dtype)
    flat = flatten([sent])
    pool = torch.zeros(200, dtype=torch.uint8)
    start = -pool.data_ptr() % 16 + offset
    buffer = pool[start : start + flat.payload_bytes]
    buffer.copy_(buffers_of(flat)[0])
    got = rebuild(decode_manifest(encode_manifest(flat)), [buffer])[0]
    same(sent, got)
    assert got.data_ptr() % 16 == 0
    assert (got.data_ptr() == buffer.data_ptr()) == (offset % 16 == 0)


def test_buffers_that_do_not_fit_are_a_bug() -> None:
    manifest = decode_manifest(encode_manifest(flatten(zeros(4))))
    for buffers in (
        [],
        [torch.zeros(15, dtype=torch.uint8)],
        [zeros(4)],
        [torch.zeros(4, 4, dtype=torch.uint8)],
        [torch.zeros(32, dtype=torch.uint8)[::2]],
        [torch.zeros(16, dtype=torch.uint8, device="meta")],
    ):
        with pytest.raises(InternalError, match="buffer"):
            rebuild(manifest, buffers)


def test_a_pickled_object_is_refused_where_pickle_is_off() -> None:
    flat = flatten({"a": 1, "t": zeros(1)})
    manifest = decode_manifest(encode_manifest(flat))
    with pytest.raises(UnsupportedObject, match="unpickling is switched off"):
        rebuild(manifest, buffers_of(flat), allow_pickle=False)
    assert bits(rebuild(manifest, buffers_of(flat))["t"]) == bytes(4)


@pytest.mark.parametrize("allow_pickle", [True, False])
def test_long_skeletons_travel_as_leaves(allow_pickle: bool) -> None:
    obj = {"numbers": list(range(50_000)), "t": zeros(3), "blob": b"b" * 300_000, "text": "é" * 100_000, "array": bytearray(100_000)}
    flat = flatten(obj, allow_pickle=allow_pickle)
    manifest = encode_manifest(flat)
    assert len(manifest) < 150_000
    same(obj, by_rebuild(obj, allow_pickle=allow_pickle))
    same(obj, by_inline(obj, allow_pickle=allow_pickle))


def test_large_bytes_are_not_copied() -> None:
    blob = b"b" * 1_000_000
    flat = flatten(["x", blob, {"again": blob}])
    raw = [leaf.raw for leaf in flat.leaves]
    assert [view.obj is blob for view in raw if view is not None] == [True]


@pytest.mark.asyncio
async def test_what_lives_in_this_process_is_named_where_it_is() -> None:
    async with init("a:0") as comm:
        loop = asyncio.get_running_loop()
        group = comm.collective.create_collective_group(["a:0", "b:0"])
        waiting = comm.recv("a:0")
        for alive, said in (
            (loop, f"cannot be pickled: it is a {type(loop).__name__}, which stays in its process"),
            (comm, "a worker cannot be sent or pickled (hint: send its address"),
            (group, "cannot be pickled: it is a CollectiveGroup, which stays in its process"),
            (waiting, "a work (recv) cannot be sent or pickled"),
        ):
            with pytest.raises(UnsupportedObject) as caught:
                comm.send({"step": 1, "parts": [alive]}, "a:0")
            assert caught.value.path == "obj['parts'][0]"
            assert said in str(caught.value)
        waiting.cancel()
