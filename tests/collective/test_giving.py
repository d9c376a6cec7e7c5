"""Tensors made with `comm.empty`: who has the memory at which moment."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from torch.nn import Parameter

from aiorlinf import Worker, init
from aiorlinf.errors import AiorlinfError, DeadlineExceeded, Mismatch, PeerLost, RemoteError, UsageError
from aiorlinf.link.link import Link
from aiorlinf.wire.dtypes import DTYPES
from tests.system import memory_file_at, soon

SIZE = 1 << 18
"""Bytes; large enough to go around the stream, small enough to be copied on the loop."""


@dataclasses.dataclass
class Row:
    data: torch.Tensor
    name: str = "row"


class Custom:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.inner = {"deep": [tensor]}


@pytest.fixture(scope="module", autouse=True)
def no_garbage_collection() -> Iterator[None]:
    """Memory must come back without one."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Pair:
    """Two workers of this process."""

    def __init__(self, a: Worker, b: Worker) -> None:
        self.a = a
        self.b = b

    async def trip(self, obj: Any) -> Any:
        """Send from a to b; what arrives."""
        work = self.a.send(obj, "b:0")
        got = await self.b.recv("a:0", timeout=20)
        await work
        return got

    def link(self, of: Worker, to: str) -> Link:
        link = of._table.peek(to)  # type: ignore[arg-type]
        assert link is not None
        return link

    @property
    def used(self) -> int:
        """Bytes of a's arena that somebody holds."""
        stats = self.a.stats().shared_memory
        assert stats is not None
        return stats.used_bytes

    @property
    def lent(self) -> int:
        return sum(link.shared_bytes_lent for link in self.a.stats().links)

    async def given_back(self) -> None:
        """Nobody holds anything any more."""
        await soon(lambda: self.used == 0)


async def pair_of(**collective: Any) -> AsyncIterator[Pair]:
    config = {"cluster": {"collective": collective}}
    async with init("a:0", config=config) as a, init("b:0", config=config) as b:
        yield Pair(a, b)


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Pair]:
    async for made in pair_of():
        yield made


@pytest_asyncio.fixture(params=["frame", "shm", "stream", "gloo"])
async def pair_each_way(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    """The payload goes in the frame, around the stream in shared memory or through Gloo, or over the stream."""
    if request.param == "frame":
        async for made in pair_of(inline_max_bytes=1 << 20):
            yield made
    else:
        async for made in pair_of(backend=request.param):
            yield made


def filled(comm: Worker, value: float = 1.0, size: int = SIZE) -> torch.Tensor:
    tensor = comm.empty(size // 4)
    assert memory_file_at(tensor.data_ptr(), tensor.nbytes)
    return tensor.fill_(value)


def is_given_away(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 0


# ---- given away


@pytest.mark.asyncio
async def test_the_receiver_gets_the_very_memory(pair: Pair) -> None:
    tensor = filled(pair.a, 3.0)
    assert pair.used == SIZE
    work = pair.a.send(tensor, "b:0")
    assert is_given_away(tensor)
    got = await pair.b.recv("a:0", timeout=20)
    await work
    assert got.shape == (SIZE // 4,)
    assert (got == 3).all()
    assert memory_file_at(got.data_ptr(), got.nbytes)
    assert pair.used == pair.lent == SIZE, "there is no other region"
    got.add_(1)
    del work
    kept = got[5:]
    del got
    await asyncio.sleep(0.02)
    assert pair.used == SIZE
    assert (kept == 4).all()
    del kept
    await pair.given_back()


@pytest.mark.asyncio
async def test_the_handle_is_empty_whichever_way_it_goes(pair_each_way: Pair) -> None:
    pair = pair_each_way
    for wrap, unwrap in WRAPS:
        tensor = filled(pair.a, 7.0)
        message = wrap(tensor)
        work = pair.a.send(message, "b:0")
        assert is_given_away(tensor)
        assert tensor.untyped_storage().nbytes() == 0
        got = unwrap(await pair.b.recv("a:0", timeout=20))
        await work
        assert got.shape == (SIZE // 4,)
        assert (got == 7).all()
        with pytest.raises(UsageError, match="given away by an earlier send"):
            pair.a.send(message, "b:0")
        with pytest.raises(UsageError, match="given away by an earlier send"):
            pair.a.send_tensor(tensor, "b:0")
        del got
    await pair.given_back()


WRAPS: list[tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = [
    (lambda t: t, lambda got: got),
    (lambda t: [t, torch.ones(3)], lambda got: got[0]),
    (lambda t: (torch.ones(0), t), lambda got: got[1]),
    (lambda t: {"x": t, "big": torch.ones(SIZE)}, lambda got: got["x"]),
    (Row, lambda got: got.data),
    (lambda t: {"deep": [Row(t), "text", np.ones(SIZE)]}, lambda got: got["deep"][0].data),
    (Custom, lambda got: got.inner["deep"][0]),
]


@pytest.mark.asyncio
async def test_send_tensor_gives_away_too(pair_each_way: Pair) -> None:
    pair = pair_each_way
    tensor = filled(pair.a, 2.0)
    out = torch.zeros(SIZE // 4)
    work = pair.a.send_tensor(tensor, "b:0")
    assert is_given_away(tensor)
    assert await pair.b.recv_tensor(out, "a:0", timeout=20) is out
    await work
    assert (out == 2).all()
    with pytest.raises(UsageError, match="given away"):
        pair.a.send_tensor(tensor, "b:0")
    await pair.given_back()


@pytest.mark.asyncio
async def test_a_worker_that_sends_to_itself_gives_away_too(pair: Pair) -> None:
    tensor = filled(pair.a, 2.0)
    work = pair.a.send(tensor, "a:0")
    assert is_given_away(tensor)
    got = await pair.a.recv("a:0", timeout=20)
    await work
    assert (got == 2).all()
    assert not memory_file_at(got.data_ptr(), got.nbytes), "its messages to itself are copied"
    await pair.given_back()


@pytest.mark.asyncio
async def test_a_parameter_is_a_handle_and_arrives_as_one(pair: Pair) -> None:
    parameter = Parameter(filled(pair.a, 5.0))
    got = await pair.trip([parameter])
    assert is_given_away(parameter)
    assert type(got[0]) is Parameter
    assert got[0].requires_grad
    assert (got[0] == 5).all()
    assert pair.used == pair.lent == SIZE
    with pytest.raises(UsageError, match="given away"):
        pair.a.send([parameter], "b:0")


@pytest.mark.asyncio
async def test_a_tensor_that_requires_a_gradient(pair: Pair) -> None:
    leaf = filled(pair.a, 5.0).requires_grad_()
    result = filled(pair.a, 2.0)
    result.mul_(torch.ones(1, requires_grad=True))  # no leaf of its graph
    got = await pair.trip([leaf, result])
    assert is_given_away(leaf)
    assert is_given_away(result)
    assert [tensor.requires_grad for tensor in got] == [True, True]
    assert [float(tensor.detach()[0]) for tensor in got] == [5, 2]


@pytest.mark.asyncio
async def test_one_tensor_twice_in_a_message_is_given_once(pair: Pair) -> None:
    tensor = filled(pair.a, 5.0)
    got = await pair.trip({"x": tensor, "y": tensor})
    assert got["x"] is got["y"]
    assert pair.lent == SIZE
    del got
    await pair.given_back()


@pytest.mark.asyncio
async def test_a_tensor_and_its_parameter_in_one_message_arrive_apart(pair: Pair) -> None:
    tensor = filled(pair.a, 5.0)
    parameter = Parameter(tensor)
    got = await pair.trip([tensor, parameter])
    assert is_given_away(tensor)
    assert is_given_away(parameter)
    with torch.no_grad():
        got[0].fill_(1)
    assert (got[1] == 5).all()
    del got
    await pair.given_back()


@pytest.mark.asyncio
async def test_many_in_one_message(pair: Pair) -> None:
    tensors = [filled(pair.a, number) for number in range(20)]
    plain = [torch.full((SIZE // 4,), -1.0) for _ in range(3)]
    got = await pair.trip([*tensors[:10], *plain, *tensors[10:]])
    assert all(map(is_given_away, tensors))
    assert [float(tensor[-1]) for tensor in got] == [*range(10), -1, -1, -1, *range(10, 20)]
    assert pair.lent == 23 * SIZE
    kept = got[17]
    del got
    await soon(lambda: pair.used == SIZE)
    assert (kept == 14).all()


# ---- what is not given away


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[10:],
        lambda t: t.view(8, -1),
        lambda t: t.detach(),
        lambda t: t[:],
        lambda t: t.view(torch.int32),
        lambda t: torch.from_numpy(t.numpy()),
    ],
)
async def test_a_view_is_sent_by_copy_and_stays(pair: Pair, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = filled(pair.a, 5.0)
    piece = view(tensor)
    got = await pair.trip({"piece": piece})
    assert torch.equal(got["piece"], piece)
    assert (tensor == 5).all()
    tensor.fill_(6)
    assert not torch.equal(got["piece"], piece)
    got = await pair.trip(piece)
    assert torch.equal(got, piece)
    assert not is_given_away(piece)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "look",
    [
        lambda t: t[:8],
        lambda t: t.numpy(),
        lambda t: t.detach(),
        lambda t: t.view(4, -1),
        lambda t: memoryview(t.numpy()),
        lambda t: t.data,
    ],
)
async def test_with_a_view_about_the_payload_is_copied_and_the_view_stays_good(
    pair_each_way: Pair, look: Callable[[torch.Tensor], Any]
) -> None:
    pair = pair_each_way
    tensor = filled(pair.a, 5.0)
    view = look(tensor)
    got = await pair.trip([tensor])
    assert is_given_away(tensor), "the rule does not depend on views"
    array = np.asarray(view).reshape(-1)
    array[:8] = 9
    assert (got[0] == 5).all()
    got[0].fill_(1)
    assert (array[:8] == 9).all()
    with pytest.raises(UsageError, match="given away"):
        pair.a.send([tensor], "b:0")
    del got, array, view
    await pair.given_back()


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", ["plain", "gradient", "inference"])
async def test_a_tensor_alone_goes_as_one_of_many_does(pair: Pair, mode: str) -> None:
    """It has a short way of its own, once tensors of its form have been seen."""
    for count in range(4):
        tensor = filled(pair.a, float(count))
        if mode == "gradient":
            tensor.requires_grad_()
        with torch.inference_mode(mode == "inference"):
            got = await pair.trip(tensor)
        assert (got == count).all()
        assert got.requires_grad == (mode == "gradient")
        assert is_given_away(tensor)
        with pytest.raises(UsageError, match="given away"):
            pair.a.send(tensor, "b:0")
        tensor = filled(pair.a, float(count))
        view = tensor[:8]
        got = await pair.trip(tensor)
        assert is_given_away(tensor)
        view.fill_(9)
        assert (got == count).all()
        del got, view
        assert await pair.trip({"small": count}) == {"small": count}
    await pair.given_back()


@pytest.mark.asyncio
async def test_writing_to_a_view_while_the_payload_is_copied_fails_both_sides(pair: Pair) -> None:
    tensor = pair.a.empty(32 << 20, dtype=torch.uint8).fill_(1)
    view = tensor[:8]
    work = pair.a.send(tensor, "b:0")
    view.fill_(2)
    with pytest.raises(RemoteError, match="written to"):
        await pair.b.recv("a:0", timeout=20)
    with pytest.raises(UsageError, match="written to"):
        await work
    assert tensor.numel() == 32 << 20, "it is given back"
    assert tensor[0] == 2
    assert int((await pair.trip(view))[3]) == 2


@pytest.mark.asyncio
async def test_what_was_received_stays_when_it_is_sent_on(pair: Pair) -> None:
    got = await pair.trip(filled(pair.a, 4.0))
    work = pair.b.send(got, "a:0")
    back = await pair.a.recv("b:0", timeout=20)
    await work
    got.fill_(0)
    assert (back == 4).all()


@pytest.mark.asyncio
async def test_another_workers_tensor_is_sent_by_copy(pair: Pair) -> None:
    tensor, own = filled(pair.a, 4.0), filled(pair.b, 5.0)
    work = pair.b.send([tensor, own], "a:0")
    got = await pair.a.recv("b:0", timeout=20)
    await work
    assert (tensor == 4).all()
    assert is_given_away(own)
    assert [float(each[0]) for each in got] == [4, 5]


# ---- given back


@pytest.mark.asyncio
async def test_what_is_refused_at_the_call_keeps_everything() -> None:
    async for pair in pair_of(max_message_bytes=1 << 20):
        tensor = filled(pair.a)
        beside: list[Any] = [torch.ones(3, 4).t(), torch.ones(1 << 20), threading.Lock()]
        for other in beside:
            with pytest.raises(AiorlinfError):
                pair.a.send([tensor, other], "b:0")
            assert (tensor == 1).all()
        for peer, tag in (("nonsense", 0), ("b:0", -1)):
            with pytest.raises(UsageError):
                pair.a.send(tensor, peer, tag=tag)
            with pytest.raises(UsageError):
                pair.a.send_tensor(tensor, peer, tag=tag)
            assert (tensor == 1).all()
        assert (await pair.trip(tensor) == 1).all()


@pytest.mark.asyncio
async def test_after_a_mismatch_the_memory_is_back(pair_each_way: Pair) -> None:
    pair = pair_each_way
    tensor = filled(pair.a, 3.0)
    for _ in range(3):
        work = pair.a.send_tensor(tensor, "b:0")
        assert is_given_away(tensor)
        with pytest.raises(Mismatch):
            await pair.b.recv_tensor(torch.zeros(7), "a:0", timeout=20)
        with pytest.raises(Mismatch):
            await work
        assert (tensor == 3).all()
        assert tensor.shape == (SIZE // 4,)
    assert (await pair.trip(tensor) == 3).all()
    assert is_given_away(tensor)
    await pair.given_back()


@pytest.mark.asyncio
async def test_cancelled_before_there_is_a_connection_it_is_back(pair: Pair) -> None:
    tensor, small = filled(pair.a, 3.0), filled(pair.a, 4.0, 64)
    works = [pair.a.send(tensor, "c:0"), pair.a.send(small, "c:0")]
    assert is_given_away(tensor)
    assert is_given_away(small)
    for work in works:
        work.cancel()
    assert (tensor == 3).all()
    assert (small == 4).all()
    with pytest.raises(DeadlineExceeded):
        await pair.a.send([tensor, small], "c:0", timeout=0.05)
    assert (tensor == 3).all()
    assert (small == 4).all()
    assert (await pair.trip(tensor) == 3).all()


@pytest.mark.asyncio
async def test_a_send_tensor_that_nobody_took_is_back_when_the_peer_says_so(pair_each_way: Pair) -> None:
    pair = pair_each_way
    tensor = filled(pair.a, 3.0)
    for number in range(3):
        work = pair.a.send_tensor(tensor, "b:0", tag=number)
        await asyncio.sleep(0.05)
        assert not work.done()
        work.cancel()
        await soon(lambda: not is_given_away(tensor))
        assert (tensor == 3).all()
    out = torch.zeros(SIZE // 4)
    work = pair.a.send_tensor(tensor, "b:0")
    assert is_given_away(tensor)
    assert (await pair.b.recv_tensor(out, "a:0", timeout=20) == 3).all()
    await work
    with pytest.raises(UsageError, match="given away"):
        pair.a.send(tensor, "b:0")
    await pair.given_back()


async def is_back(tensor: torch.Tensor) -> None:
    await soon(lambda: not is_given_away(tensor))


@pytest.mark.asyncio
async def test_a_send_that_nobody_took_is_back_whenever_it_is_cancelled(pair: Pair) -> None:
    """Also where the peer has just said that it is there: nobody had taken it when the peer heard of the cancel."""
    await pair.trip(b"connected")
    tensor = filled(pair.a, 3.0)
    for turns in [*range(12)] * 2:
        work = pair.a.send(tensor, "b:0")
        for _ in range(turns):
            await asyncio.sleep(0)
        if not work.cancel():
            got = await pair.b.recv("a:0", timeout=20)
            assert (got == 3).all()
            del got
            tensor = filled(pair.a, 3.0)
            continue
        await is_back(tensor)
        assert (tensor == 3).all()
    assert (await pair.trip(tensor) == 3).all()
    await pair.given_back()


@pytest.mark.asyncio
async def test_a_send_that_was_cancelled_too_late_stays_given(pair: Pair) -> None:
    await pair.trip(b"connected")
    tensor = filled(pair.a, 3.0)
    receiver = pair.link(pair.b, "a:0").receiver
    reply, held = receiver.reply, list[tuple[Any, ...]]()
    receiver.reply = lambda *args, **more: held.append((args, more))  # type: ignore[method-assign]  # its answer is long on the way
    recv = pair.b.recv("a:0", timeout=20)
    work = pair.a.send(tensor, "b:0")
    got = await recv
    assert work.cancel()
    receiver.reply = reply  # type: ignore[method-assign]
    for args, more in held:
        reply(*args, **more)
    await soon(work.done)
    assert work.cancelled()
    got.fill_(8)
    await asyncio.sleep(0.05)
    assert is_given_away(tensor), "else both would have it"
    del got, recv
    await asyncio.sleep(0.05)
    assert is_given_away(tensor)
    await pair.given_back()


@pytest.mark.asyncio
async def test_a_lost_link_keeps_what_had_left_and_gives_back_the_rest(pair: Pair) -> None:
    await pair.trip(b"connected")
    left, large = filled(pair.a, 3.0), pair.a.empty(100 << 20, dtype=torch.uint8)
    # Because of the view it has to be copied; it is larger than the window, and there is no memory for it yet: it waits for its receive.
    view = large[:1]
    works = [pair.a.send_tensor(left, "b:0"), pair.a.send(large, "b:0")]
    await soon(lambda: pair.lent == SIZE)
    pair.link(pair.a, "b:0").end(lambda: PeerLost("cut"))
    for work in works:
        with pytest.raises(PeerLost):
            await work
    assert large.numel() == 100 << 20
    assert view.numel() == 1
    assert is_given_away(left), "the peer may look at it"
    with pytest.raises(UsageError, match="given away"):
        pair.a.send(left, "b:0")


@pytest.mark.asyncio
async def test_a_closing_worker_gives_back_what_it_could_not_deliver(caplog: pytest.LogCaptureFixture) -> None:
    async with init("a:0") as a:
        tensor = filled(a, 3.0)
        work = a.send(tensor, "b:0")
        with caplog.at_level(logging.ERROR, "aiorlinf"):
            await a.close(timeout=0.05)
        with pytest.raises(AiorlinfError):
            await work
        assert (tensor == 3).all()


# ---- the memory


@pytest.mark.asyncio
async def test_what_was_never_sent_comes_back(pair: Pair) -> None:
    tensor = filled(pair.a)
    view = tensor.numpy()[3:]
    del tensor
    await asyncio.sleep(0.02)
    assert pair.used == SIZE
    del view
    await pair.given_back()
    address = filled(pair.a).data_ptr()
    await pair.given_back()
    assert filled(pair.a).data_ptr() == address, "it is used again"


@pytest.mark.asyncio
async def test_a_finished_work_keeps_nothing(pair: Pair) -> None:
    works = []
    for number in range(5):
        works.append(pair.a.send(filled(pair.a, number), "b:0"))
        assert float((await pair.b.recv("a:0", timeout=20))[0]) == number
    for work in works:
        await work
    await pair.given_back()


@pytest.mark.asyncio
async def test_every_dtype(pair: Pair) -> None:
    for dtype in DTYPES.values():
        tensor = pair.a.empty((4, 1 << 16), dtype=dtype)
        assert (tensor.dtype, tensor.shape) == (dtype, (4, 1 << 16))
        tensor.view(torch.uint8).copy_(torch.arange(tensor.nbytes, dtype=torch.int64).to(torch.uint8).view(4, -1))
        expected = tensor.view(torch.uint8).clone()
        got = await pair.trip(tensor)
        assert is_given_away(tensor)
        assert (got.dtype, got.shape) == (dtype, (4, 1 << 16))
        assert torch.equal(got.view(torch.uint8), expected)


@pytest.mark.asyncio
async def test_shapes(pair: Pair) -> None:
    assert pair.a.empty(2, 3).shape == (2, 3)
    assert pair.a.empty((2, 3)).shape == (2, 3)
    assert pair.a.empty([2, 3]).shape == (2, 3)
    assert pair.a.empty(torch.Size([2, 3])).shape == (2, 3)
    assert pair.a.empty(()).shape == ()
    assert pair.a.empty(5).shape == (5,)
    for shape in ((0,), (0, 3), (3, 0)):
        nothing = pair.a.empty(shape)
        assert nothing.shape == shape
        for _ in range(2):  # there was nothing to give away
            assert (await pair.trip(nothing)).shape == shape
    scalar = pair.a.empty(()).fill_(5)
    assert float(await pair.trip(scalar)) == 5
    like = pair.a.empty_like(torch.ones(3, 4, dtype=torch.int16))
    assert (like.shape, like.dtype) == ((3, 4), torch.int16)
    assert pair.a.empty_like(like, dtype=torch.bool).dtype is torch.bool
    with pytest.raises(UsageError, match="not the shape"):
        pair.a.empty(-1)
    with pytest.raises(UsageError, match="not the shape"):
        pair.a.empty(-2, -2)
    with pytest.raises(TypeError):
        pair.a.empty("x")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no plain memory"):
        pair.a.empty(3, dtype=torch.quint8)


@pytest.mark.asyncio
async def test_torchs_defaults_and_modes(pair: Pair) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert pair.a.empty(SIZE).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        assert filled(pair.a).device.type == "cpu"
        assert pair.a.empty(0).device.type == "cpu"
    with torch.inference_mode():
        tensor, other = filled(pair.a, 6.0), filled(pair.a, 7.0)
        work = pair.a.send(tensor, "c:0")
        assert is_given_away(tensor)
        work.cancel()
    assert (tensor == 6).all()
    assert not tensor.is_inference()
    got = await pair.trip([tensor, other])
    assert is_given_away(tensor)
    assert [float(each[0]) for each in got] == [6, 7]


@pytest.mark.asyncio
async def test_at_the_bound_it_is_an_ordinary_tensor() -> None:
    async for pair in pair_of(shared_memory={"max_bytes": 1 << 20, "segment_bytes": 1 << 20}):
        first = pair.a.empty(1 << 20, dtype=torch.uint8)
        second = pair.a.empty(1 << 20, dtype=torch.uint8)
        assert memory_file_at(first.data_ptr(), first.nbytes)
        assert not memory_file_at(second.data_ptr(), second.nbytes)
        second.fill_(2)
        assert (await pair.trip(second) == 2).all()
        assert (second == 2).all(), "it stays"
        stats = pair.a.stats().shared_memory
        assert stats is not None
        assert stats.refused >= 1


@pytest.mark.asyncio
async def test_with_shared_memory_off_it_is_an_ordinary_tensor() -> None:
    async for pair in pair_of(shared_memory={"enabled": False}):
        tensor = pair.a.empty(SIZE).fill_(2)
        assert (await pair.trip(tensor) == 2).all()
        assert (tensor == 2).all()


@pytest.mark.asyncio
async def test_before_and_after_the_workers_life() -> None:
    worker = init("a:0")
    with pytest.raises(UsageError, match="not joined"):
        worker.empty(3)
    async with worker as a:
        kept = filled(a, 3.0)
    assert (kept == 3).all()
    kept.fill_(4)
    assert a.empty(SIZE).shape == (SIZE,)
    del kept


def test_from_other_threads() -> None:
    with init("a:0") as a:
        tensor = a.empty(SIZE, dtype=torch.uint8)
        assert memory_file_at(tensor.data_ptr(), SIZE)
        with pytest.raises(UsageError, match="not the shape"):
            a.empty(-1)
        with pytest.raises(UsageError, match="no plain memory"):
            a.empty(1, dtype=torch.qint8)
        tensor.fill_(3)
        work = a.send(tensor, "a:0")
        assert is_given_away(tensor)
        assert (a.recv("a:0").wait(20) == 3).all()
        work.wait(20)
        with pytest.raises(UsageError, match="given away"):
            a.send(tensor, "a:0")

        async def here() -> torch.Tensor:
            return a.empty(SIZE)  # another loop than the worker's

        assert asyncio.run(here()).shape == (SIZE,)
