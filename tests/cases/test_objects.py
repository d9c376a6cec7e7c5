"""Odd objects: section H of the cases, between two workers, each way that a payload can go."""

from __future__ import annotations

import array
import collections
import dataclasses
import datetime
import decimal
import enum
import textwrap
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from aiorlinf import init
from aiorlinf.errors import NonContiguousTensor, RemoteError, UnsupportedObject
from tests.cases.conftest import BACKENDS, Pair
from tests.cases.sameness import all_dtypes, assert_same, raw, sample
from tests.cases.scripts import run_script


class Step(NamedTuple):
    obs: torch.Tensor
    reward: float


@dataclasses.dataclass
class Row:
    data: torch.Tensor
    name: str = "row"


@dataclasses.dataclass(frozen=True)
class Frozen:
    data: torch.Tensor
    parts: tuple[Any, ...] = ()


@dataclasses.dataclass(slots=True)
class Slotted:
    data: torch.Tensor
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlotted:
    data: torch.Tensor


@dataclasses.dataclass
class Counted:
    """Counts what was made of it; `total` is no argument of __init__."""

    data: torch.Tensor
    total: float = dataclasses.field(init=False, default=0.0)
    made: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        self.made += 1
        self.total = float(self.data.sum())


class Items(list[Any]):
    """A subclass of list with an attribute."""

    label = ""


class Table(dict[str, Any]):
    """A subclass of dict."""


class Colour(enum.Enum):
    RED = 1


class Custom:
    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = list(tensors)
        self.inner = {"first": tensors[0]}


class NeedsArguments(Exception):
    """Can be pickled and not unpickled: its constructor wants what pickle does not give."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(f"{why} ({code})")


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("this object stays at home")


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


# ---- views


@pytest.mark.asyncio
async def test_a_view_sends_its_own_bytes(pair: Pair) -> None:
    big = torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024)
    before = pair.ab.stats()
    got = await pair.trip([Row(big[0:1]), {"tail": big[-1]}])
    sent = pair.ab.stats()[0].bytes_sent - sum(stats.bytes_sent for stats in before)
    assert torch.equal(got[0].data, big[0:1])
    assert torch.equal(got[1]["tail"], big[-1])
    assert sent < big.nbytes // 100
    assert got[0].data.untyped_storage().nbytes() == 4096


@pytest.mark.asyncio
async def test_one_tensor_twice_arrives_as_one_object(pair: Pair) -> None:
    t = torch.arange(6.0)
    looks: list[tuple[Any, Callable[[Any], tuple[Any, Any]]]] = [
        ([t, t], lambda got: (got[0], got[1])),
        ((t, t), lambda got: (got[0], got[1])),
        ({"x": t, "y": t}, lambda got: (got["x"], got["y"])),
        (Frozen(t, (t,)), lambda got: (got.data, got.parts[0])),
        ([1, t, {"deep": t}], lambda got: (got[1], got[2]["deep"])),
    ]
    for message, look in looks:
        first, second = look(await pair.trip(message))
        assert first is second
        assert torch.equal(first, t)


@pytest.mark.asyncio
async def test_two_views_of_one_storage_arrive_as_independent_copies(pair: Pair) -> None:
    t = torch.arange(6.0)
    for message in ([t, t[:]], (t, t[:]), {"x": t, "y": t[:]}, Frozen(t, (t[:],))):
        got = await pair.trip(message)
        first, second = list(got.values()) if isinstance(got, dict) else (got.data, got.parts[0]) if isinstance(got, Frozen) else got
        assert first is not second
        first += 100
        assert torch.equal(second, t)


# ---- zero elements


@pytest.mark.asyncio
async def test_zero_elements(pair: Pair) -> None:
    large = torch.arange(1 << 18, dtype=torch.float32)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for shape in ((0,), (0, 3), (3, 0)):
            empty = torch.empty(shape, dtype=dtype)
            for message in (empty, [empty], {"e": empty}, Row(empty), [empty, large, empty], {"s": "x", "e": empty, "l": [large]}):
                assert_same(await pair.trip(message), message)
            work = pair.ab.send_tensor(empty)
            out = torch.empty(shape, dtype=dtype)
            assert await pair.ba.recv_tensor(out, timeout=20) is out
            await work


@pytest.mark.asyncio
async def test_empty_containers_and_none(stream_pair: Pair) -> None:
    plain: list[Any] = [None, [], {}, (), set(), "", b"", bytearray(), [[], {}, ()], {"batch": []}]
    for message in [*plain, np.empty((0, 3)), array.array("d"), Row(torch.empty(0))]:
        assert_same(await stream_pair.trip(message), message)


# ---- dtypes


@pytest.mark.asyncio
async def test_every_dtype_with_every_number_of_dimensions(pair: Pair) -> None:
    for dtype in all_dtypes():
        samples = [sample(dtype, shape) for shape in ((), (3,), (2, 3), (2, 3, 4))]
        works = [pair.ab.send(samples), pair.ab.send({"x": samples[0], "y": samples[1]}), pair.ab.send([1, *samples[2:]])]
        assert_same(await pair.ba.recv(timeout=20), samples)
        assert_same(list((await pair.ba.recv(timeout=20)).values()), samples[:2])
        assert_same(await pair.ba.recv(timeout=20), [1, *samples[2:]])
        for t in samples[1:3] if pair.carrier == "gloo" else samples:
            work = pair.ab.send_tensor(t)
            out = torch.empty(t.shape, dtype=dtype)
            assert await pair.ba.recv_tensor(out, timeout=20) is out
            assert raw(out) == raw(t)
            await work
        for work in works:
            await work


@pytest.mark.asyncio
async def test_bits_of_nan_and_minus_zero_are_kept(pair: Pair) -> None:
    bits = torch.tensor([0x7FC00001, 0x7F800001, 0xFFC12345 - (1 << 32), -(1 << 31)], dtype=torch.int32)
    floats = bits.view(torch.float32)
    half = torch.tensor([0x7E01, 0x7C01, -0x8000], dtype=torch.int16)
    message: dict[str, Any] = {
        "f32": floats,
        "f16": half.view(torch.float16),
        "bf16": half.view(torch.bfloat16),
        "py": [-0.0, float("inf")],
    }
    got = await pair.trip(message)
    for key in ("f32", "f16", "bf16"):
        assert raw(got[key]) == raw(message[key])
    assert str(got["py"]) == "[-0.0, inf]"
    out = torch.zeros(4)
    work = pair.ab.send_tensor(floats)
    await pair.ba.recv_tensor(out)
    await work
    assert raw(out) == raw(floats)


@pytest.mark.asyncio
async def test_lazy_conjugates_and_signs_are_carried_out(pair: Pair) -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    conjugate, sign = z.conj(), z.conj().imag
    assert conjugate.is_conj()
    assert sign.is_neg()
    got = await pair.trip([conjugate, sign.clone(), torch.zeros(()), z])
    assert_same(got, [torch.tensor([1 - 2j, 3 + 4j]), torch.tensor([-2.0, 4.0]), torch.zeros(()), z])
    work = pair.ab.send_tensor(conjugate)
    assert torch.equal(await pair.ba.recv_tensor(torch.empty_like(z)), torch.tensor([1 - 2j, 3 + 4j]))
    await work


# ---- gradients and parameters


@pytest.mark.asyncio
async def test_data_travels_and_flags_with_it(pair: Pair) -> None:
    leaf = torch.arange(3.0, requires_grad=True)
    message = {
        "leaf": leaf,
        "inner": leaf * 2,
        "plain": torch.ones(2),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "whole": torch.nn.Parameter(torch.tensor([1, 2]), requires_grad=False),
    }
    (leaf * 3).sum().backward()  # type: ignore[no-untyped-call]  # torch
    for sent in (message, list(message.values()), Custom(*message.values())):
        got = await pair.trip(sent)
        values = list(got.values()) if isinstance(got, dict) else got.tensors if isinstance(got, Custom) else got
        for value, (name, original) in zip(values, message.items(), strict=True):
            assert type(value) is type(original), name
            assert value.requires_grad == original.requires_grad, name
            assert value.is_leaf, name
            assert value.grad is None, name
            assert torch.equal(value.detach(), original.detach()), name


@pytest.mark.asyncio
async def test_tied_weights_of_a_module_stay_tied(pair: Pair) -> None:
    module = Tied()
    got = await pair.trip(module)
    assert isinstance(got, Tied)
    assert got.head.weight is got.embed.weight
    assert isinstance(got.head.weight, torch.nn.Parameter)
    assert torch.equal(got.head.weight, module.head.weight)
    state = await pair.trip(module.state_dict())
    assert type(state) is OrderedDict
    got.load_state_dict(state)


# ---- containers


@pytest.mark.asyncio
async def test_containers_keep_their_type(pair: Pair) -> None:
    t = torch.arange(4.0)
    items = Items([t, Items([t + 1])])
    items.label = "outer"
    message = {
        "namedtuple": Step(t, 0.5),
        "tuple": (t, (t, ())),
        "ordered": OrderedDict(b=t, a=1),
        "default": defaultdict(list, {"k": [t]}),
        "deque": deque([t, 1], maxlen=5),
        "frozen": Frozen(t, (Frozen(t + 2),)),
        "slotted": Slotted(t, "note"),
        "both": FrozenSlotted(t),
        "deep": [{"x": (Step(t, 1.0), [Row(t), {"y": Slotted(t)}])}],
        "items": items,
        "table": Table(k=t),
        "counter": collections.Counter("hello"),
        "set": {1, 2},
        "frozenset": frozenset({"a"}),
        "enum": Colour.RED,
        "date": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
        "decimal": decimal.Decimal("1.10"),
        "big": 1 << 200,
        "complex": 1 - 2j,
        "range": range(3),
        "bytes": b"b" * 10,
        "size": torch.Size([1, 2]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
    }
    got = await pair.trip(message)
    assert_same(got, message)
    assert got["default"].default_factory is list
    assert got["deque"].maxlen == 5
    assert got["items"].label == "outer"
    with pytest.raises(dataclasses.FrozenInstanceError):
        got["frozen"].data = t


@pytest.mark.asyncio
async def test_post_init_does_not_run_again(stream_pair: Pair) -> None:
    sent = Counted(torch.ones(3))
    sent.total = 99.0
    got = await stream_pair.trip(sent)
    assert (got.made, got.total) == (1, 99.0)
    assert torch.equal(got.data, sent.data)
    (nested,) = await stream_pair.trip([sent])
    assert (nested.made, nested.total) == (1, 99.0)


@pytest.mark.asyncio
async def test_an_object_that_contains_itself(stream_pair: Pair) -> None:
    loop: list[Any] = [torch.ones(2)]
    loop.append(loop)
    got = await stream_pair.trip(loop)
    assert got[1] is got
    assert torch.equal(got[0], torch.ones(2))


# ---- sparse, quantised, nested


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.asyncio
async def test_sparse_quantised_and_nested_travel_or_are_refused_at_the_call(stream_pair: Pair) -> None:
    dense = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    quantised = torch.quantize_per_channel(torch.ones(2, 2), torch.tensor([0.1, 0.2]), torch.tensor([0, 0]), 0, torch.qint8)
    with FakeTensorMode():
        fake = torch.empty(3)
    odd: dict[str, torch.Tensor] = {
        "coo": dense.to_sparse(),
        "csr": dense.to_sparse_csr(),
        "quantised": quantised,
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "meta": torch.empty(3, device="meta"),
        "fake": fake,
    }
    refused: set[str] = set()
    paths: set[tuple[type, str, str]] = set()
    for name, tensor in odd.items():
        for message in (tensor, {"x": [tensor]}):
            try:
                work = stream_pair.ab.send(message)
            except TypeError as error:
                refused.add(name)
                paths.add((type(error), "obj['x'][0]" if message is not tensor else "obj", str(error)))
                continue
            got = await stream_pair.ba.recv(timeout=20)
            await work
            arrived = got if message is tensor else got["x"][0]
            assert arrived.layout == tensor.layout
            assert arrived.dtype == tensor.dtype
            if name in ("coo", "csr"):
                assert torch.equal(arrived.to_dense(), dense)
            elif name == "quantised":
                assert torch.equal(arrived.int_repr(), tensor.int_repr())
            else:
                assert [part.tolist() for part in arrived.unbind()] == [part.tolist() for part in tensor.unbind()]
        with pytest.raises(UnsupportedObject):
            stream_pair.ab.send_tensor(tensor)
    assert {"meta", "fake"} <= refused
    for error_type, path, text in paths:
        assert error_type is UnsupportedObject
        assert path in text
    assert await stream_pair.trip("still fine") == "still fine"


# ---- many small, few large


@pytest.mark.asyncio
async def test_a_dict_of_2000_small_tensors_is_one_message(pair: Pair) -> None:
    count = 200 if pair.carrier == "gloo" else 2000  # here every tensor makes a trip of its own through Gloo, however small
    message = {f"layer.{number}": torch.full((number % 7,), float(number)) for number in range(count)}
    sent = sum(stats.messages_sent for stats in pair.ab.stats())
    got = await pair.trip(message)
    assert_same(got, message)
    assert pair.ab.stats()[0].messages_sent == sent + 1


@pytest.mark.asyncio
async def test_tensors_inside_any_object_stay_out_of_the_pickle(pair: Pair) -> None:
    tensors = [torch.randn(1 << 16) for _ in range(3)]
    message = Custom(*tensors)
    got = await pair.trip(message)
    assert all(map(torch.equal, got.tensors, tensors))
    assert got.inner["first"] is got.tensors[0]
    stats = pair.ab.stats()[0]
    payload = sum(t.nbytes for t in tensors)
    assert payload <= stats.bytes_sent < payload + 2000
    assert stats.backend == BACKENDS[pair.carrier]
    assert stats.around_bytes_sent == (payload if pair.carrier in ("shm", "gloo") else 0)


# ---- arrays and buffers


@pytest.mark.asyncio
async def test_what_was_writable_arrives_writable(pair: Pair) -> None:
    readonly = np.arange(4.0)
    readonly.flags.writeable = False
    message = [np.arange(4.0), readonly, torch.arange(4.0), bytearray(b"abc"), np.array(3), {"deep": np.ones((2, 2))}]
    got = await pair.trip(message)
    assert_same(got, message)
    got[0] += 1
    got[2] += 1
    got[3][0] = 0
    got[4] += 1
    got[5]["deep"][0, 0] = 5
    assert not got[1].flags.writeable
    (alone,) = await pair.trip([np.zeros(100_000)])
    alone += 1


@pytest.mark.asyncio
async def test_arrays_of_every_kind(pair: Pair) -> None:
    base = np.arange(24.0).reshape(4, 6)
    message: dict[str, Any] = {
        "fortran": np.asfortranarray(base),
        "reversed": base[::-1],
        "strided": base[::2, ::3],
        "transposed": base.T,
        "structured": np.array([(1, 2.5, b"x"), (3, 4.5, b"y")], dtype=[("a", "i4"), ("b", "f8"), ("c", "S1")]),
        "aligned": np.zeros(2, dtype=np.dtype([("a", "i1"), ("b", "f8")], align=True)),
        "object": np.array([1, "two", [3]], dtype=object),
        "date": np.array(["2026-01-02", "NaT"], dtype="datetime64[ns]"),
        "delta": np.array([1, 2], dtype="timedelta64[s]"),
        "text": np.array(["a", "bcd"]),
        "bytes": np.array([b"a", b"bcd"]),
        "bool": np.array([True, False]),
        "half": np.array([1, 2], dtype=np.float16),
        "complex": np.array([1 + 2j]),
        "big-endian": np.array([1, 2, 3], dtype=">i4"),
        "0-d": np.array(7),
        "empty": np.empty((0, 3), dtype=np.int16),
        "scalar": np.float32(1.5),
        "generic": np.datetime64("2026-01-02"),
        "masked": np.ma.masked_array([1, 2, 3], mask=[False, True, False]),
    }
    got = await pair.trip(message)
    assert_same(got, message)
    assert got["fortran"].flags.f_contiguous
    assert got["structured"].dtype == message["structured"].dtype


@pytest.mark.asyncio
async def test_one_array_twice_arrives_as_one(pair: Pair) -> None:
    values = np.arange(100_000)
    got = await pair.trip({"x": values, "y": [values]})
    assert got["x"] is got["y"][0]


@pytest.mark.asyncio
async def test_buffers_are_measured_in_bytes(pair: Pair) -> None:
    matrix: Any = np.arange(6.0).reshape(2, 3)
    for message, expected in (
        (memoryview(matrix), matrix.tobytes()),
        (memoryview(b"xyz"), b"xyz"),
        (memoryview(bytearray(200_000)), bytes(200_000)),
        (memoryview(b""), b""),
    ):
        for got in (await pair.trip(message), (await pair.trip([message]))[0]):
            assert isinstance(got, memoryview)
            assert got.tobytes() == expected
    for plain in (bytearray(b"abc"), bytearray(200_000), array.array("d", [1, 2]), array.array("i"), b"", bytes(200_000), "x" * 200_000):
        assert_same(await pair.trip(plain), plain)
        assert_same(await pair.trip({"in": plain}), {"in": plain})


# ---- what cannot travel, or not arrive


@pytest.mark.asyncio
async def test_an_object_that_cannot_be_sent_fails_its_own_call(stream_pair: Pair) -> None:
    for message, path in (
        (lambda: 1, "obj"),
        ({"ok": 1, "bad": [Unpicklable()]}, "obj['bad'][0]"),
        (Row(torch.ones(1), name=Unpicklable()), "obj.name"),  # type: ignore[arg-type]
        ({"f": open}, None),
        ({"generator": (x for x in "ab")}, "obj['generator']"),
    ):
        if path is None:  # a function of a module travels by its name
            assert await stream_pair.trip(message) == message
            continue
        with pytest.raises(UnsupportedObject) as caught:
            stream_pair.ab.send(message)
        assert caught.value.path == path
        assert path in str(caught.value)
    assert await stream_pair.trip("next") == "next"


@pytest.mark.asyncio
async def test_a_strided_tensor_is_refused_with_its_place(stream_pair: Pair) -> None:
    strided = torch.arange(6.0).reshape(2, 3).t()
    spread = torch.ones(1).expand(4)
    for message, path in (
        (strided, "obj"),
        ([torch.ones(2), strided], "obj[1]"),
        ({"a": {"b": (1, spread)}}, "obj['a']['b'][1]"),
        (Row(strided), "obj.data"),
        (Step(spread, 1.0), "obj.obs"),
    ):
        with pytest.raises(NonContiguousTensor) as caught:
            stream_pair.ab.send(message)
        assert caught.value.path == path
        assert f"{path}.contiguous()" in str(caught.value)
    with pytest.raises(NonContiguousTensor, match="contiguous"):
        stream_pair.ab.send_tensor(strided)
    assert_same(await stream_pair.trip(strided.contiguous()), strided)


@pytest.mark.asyncio
async def test_an_exception_that_cannot_be_unpickled_fails_its_own_message(pair: Pair) -> None:
    works = [pair.ab.send(NeedsArguments(7, "no fuel")), pair.ab.send("next")]
    with pytest.raises(UnsupportedObject) as caught:
        await pair.ba.recv(timeout=20)
    assert "NeedsArguments" in str(caught.value) or "missing 1 required positional argument" in str(caught.value)
    assert caught.value.remote == "a:0"
    assert await pair.ba.recv(timeout=20) == "next"
    with pytest.raises(RemoteError) as told:
        await works[0]
    assert told.value.remote == "b:0"
    assert told.value.remote_type == "TypeError"
    await works[1]
    error = await pair.trip(ValueError("plain ones travel"))
    assert (type(error), error.args) == (ValueError, ("plain ones travel",))


def test_classes_of_main(tmp_path: Path) -> None:
    """A dataclass of `__main__`, one that only the sender has, then a normal message; the receiver runs another script."""
    (tmp_path / "receiver.py").write_text(
        textwrap.dedent("""
        import asyncio, dataclasses, aiorlinf

        @dataclasses.dataclass
        class Shared:
            data: object

        async def main():
            async with aiorlinf.init() as comm:
                got = await comm.recv("a:0")
                print("shared", isinstance(got, Shared), got.data.sum().item())
                for number in range(2):
                    try:
                        await comm.recv("a:0")
                    except aiorlinf.errors.UnsupportedObject as error:
                        print(number, "refused", "OnlyHere" in str(error), error.remote)
                print("then", await comm.recv("a:0"))
                await comm.send("bye", "a:0")

        asyncio.run(main())
        """)
    )
    done = run_script(
        tmp_path,
        """
        import asyncio, dataclasses, os, subprocess, sys, torch, aiorlinf

        @dataclasses.dataclass
        class Shared:
            data: object

        @dataclasses.dataclass
        class OnlyHere:
            data: object

        async def main():
            async with aiorlinf.init("a:0") as comm:
                with subprocess.Popen([sys.executable, "receiver.py"], env={**os.environ, **comm.env("b:0")}):
                    await comm.send(Shared(torch.ones(3)), "b:0")
                    small, large = (comm.send(OnlyHere(torch.ones(size)), "b:0") for size in (3, 1_000_000))
                    await comm.send("a normal message", "b:0")
                    await comm.recv("b:0")
                    await small
                    try:
                        await large
                    except aiorlinf.errors.RemoteError as error:
                        print("told", error.remote_type)

        asyncio.run(main())
        """,
    )
    assert done.returncode == 0, done.stderr
    refused = {"0 refused True a:0", "1 refused True a:0", "told AttributeError"}
    assert set(done.stdout.splitlines()) == {"shared True 3.0", *refused, "then a normal message"}
    # The small one's send was done before the receiver looked at what it got, so the sender learns it from its log.
    assert done.stderr.count("a message was lost after its send was done") == 1


@pytest.mark.asyncio
async def test_tensordict_travels_as_any_object(stream_pair: Pair) -> None:
    tensordict = pytest.importorskip("tensordict", reason="tensordict is not installed")
    one = tensordict.TensorDict({"x": torch.ones(2, 3), "y": torch.zeros(2)}, batch_size=[2])
    other = tensordict.TensorDict({"x": torch.ones(2, 4), "y": torch.zeros(2)}, batch_size=[2])
    stack = tensordict.LazyStackedTensorDict(one, other)
    got = await stream_pair.trip({"stack": stack, "name": "text"})
    assert got["name"] == "text"
    assert torch.equal(got["stack"][1]["x"], other["x"])


@pytest.mark.asyncio
async def test_a_work_is_to_be_awaited_first() -> None:
    async with init("a:0") as a:
        work = a.recv("b:0")
        for obj in (work, {"x": [1, work]}, a.gather(1, members=["a:0"])):
            with pytest.raises(UnsupportedObject, match=r"a work \((recv|gather)\) cannot be sent .*await it first"):
                await a.send(obj, "a:0")
        work.cancel()
