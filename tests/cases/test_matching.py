"""Order and matching: section D of the cases, and what Gloo alone would get wrong (the table of facts)."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import time
from typing import Any

import pytest
import torch

from aiorlinf import AsyncWork, Worker, init, wait_all
from aiorlinf.backends.gloo import GlooPair
from aiorlinf.errors import (
    AiorlinfError,
    DeadlineExceeded,
    Mismatch,
    NonContiguousTensor,
    PeerError,
    RemoteError,
    RendezvousError,
    UsageError,
)
from tests import peers
from tests.cases.conftest import CARRIERS, Pair, carried_by
from tests.cases.sameness import assert_same, raw, sample


async def both_fail(sending: AsyncWork[Any], receiving: AsyncWork[Any]) -> tuple[BaseException, BaseException]:
    """The errors of the two sides."""
    outcomes: list[object] = list(await asyncio.gather(sending.async_wait(20), receiving.async_wait(20), return_exceptions=True))
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert len(errors) == 2, outcomes
    return errors[0], errors[1]


# ---- sender and receiver disagree


@pytest.mark.asyncio
async def test_dtype_shape_or_size_that_differ_raise_on_both_sides(pair: Pair) -> None:
    cases = [
        (sample(torch.bfloat16, (4,)), torch.full((4,), 7, dtype=torch.float16)),  # as many bytes
        (torch.ones(4), torch.full((3,), 7.0)),  # the buffer is smaller: Gloo would abort the process
        (torch.ones(4), torch.full((5,), 7.0)),  # larger: Gloo would leave the tail as it is
        (torch.ones(2, 3), torch.full((3, 2), 7.0)),
        (torch.ones(1), torch.full((), 7.0)),
        (torch.ones(0), torch.full((1,), 7.0)),
        (torch.ones(200_000), torch.full((100_000,), 7.0)),
    ]
    for first in ("send", "receive"):
        for tensor, out in cases:
            before = raw(out)
            if first == "send":
                sending = pair.ab.send_tensor(tensor)
                await asyncio.sleep(0)
                receiving = pair.ba.recv_tensor(out)
            else:
                receiving = pair.ba.recv_tensor(out)
                await asyncio.sleep(0)
                sending = pair.ab.send_tensor(tensor)
            for error in await both_fail(sending, receiving):
                assert isinstance(error, Mismatch)
                for words in (str(tensor.dtype), str(out.dtype), str(list(tensor.shape)), str(list(out.shape))):
                    assert words.removeprefix("torch.").replace(" ", "") in str(error)
                assert "a:0" in str(error)
                assert "b:0" in str(error)
            assert raw(out) == before
            # The pair goes on.
            sending = pair.ab.send_tensor(tensor)
            assert_same(await pair.ba.recv_tensor(torch.empty_like(tensor)), tensor)
            await sending
    assert pair.ba.stats()[0].mismatches == 2 * len(cases)


@pytest.mark.asyncio
async def test_an_object_is_no_tensor(pair: Pair, complaints: list[str]) -> None:
    out = torch.full((3,), 7.0)
    receiving = pair.ba.recv_tensor(out)
    sending: AsyncWork[Any] = pair.ab.send({"x": torch.ones(3)})
    for error in await both_fail(sending, receiving):
        assert isinstance(error, Mismatch)
        assert "(send)" in str(error)
        assert "(recv_tensor)" in str(error)
    assert out.tolist() == [7.0] * 3
    for order in ("send", "receive"):
        if order == "send":
            sending = pair.ab.send_tensor(torch.ones(3), tag=1)
            asking = pair.ba.recv(tag=1)
        else:
            asking = pair.ba.recv(tag=1)
            sending = pair.ab.send_tensor(torch.ones(3), tag=1)
        for error in await both_fail(sending, asking):
            assert isinstance(error, Mismatch)
            assert "(send_tensor)" in str(error)
            assert "(recv)" in str(error)
    assert await pair.trip("fine") == "fine"
    assert await pair.trip("fine", tag=1) == "fine"
    # A small object that was sent long before the wrong receive: its send is over, so the sender reads it in its log.
    await pair.ab.send("small")
    await asyncio.sleep(0.05)
    complaints.clear()
    with pytest.raises(Mismatch):
        await pair.ba.recv_tensor(out)
    assert await pair.trip("fine") == "fine"
    while not any("was lost after its send was done" in text for text in complaints):  # the refusal travels on its own
        await asyncio.sleep(0.01)
    complaints.clear()


@pytest.mark.asyncio
async def test_strided_tensors_never_reach_the_backend(pair: Pair) -> None:
    strided = torch.arange(12.0).reshape(3, 4)[:, ::2]
    with pytest.raises(NonContiguousTensor, match="tensor"):
        pair.ab.send_tensor(strided)
    with pytest.raises(NonContiguousTensor, match="out"):
        pair.ba.recv_tensor(strided)
    sending = pair.ab.send_tensor(strided.contiguous())
    assert_same(await pair.ba.recv_tensor(torch.empty(3, 2)), strided.contiguous())
    await sending


# ---- into the caller's own memory


@pytest.mark.asyncio
async def test_the_tensor_received_into_is_the_one_that_changes(pair: Pair) -> None:
    module = torch.nn.Linear(300, 300)
    weight = module.weight
    address, version = weight.data_ptr(), weight._version
    wanted = torch.randn(300, 300)
    with torch.no_grad():
        sending = pair.ab.send_tensor(wanted)
        got = await pair.ba.recv_tensor(weight.data)
        await sending
        assert got.data_ptr() == address
        assert torch.equal(module.weight, wanted)
        sending = pair.ab.send_tensor(wanted + 1)
        await pair.ba.recv_tensor(weight.detach())
        await sending
    assert module.weight is weight
    assert weight.data_ptr() == address
    assert torch.equal(module.weight.detach(), wanted + 1)
    assert weight._version > version  # autograd can tell


@pytest.mark.asyncio
async def test_into_one_row_of_a_batch(pair: Pair) -> None:
    batch = torch.zeros(4, 70_000)
    works = [pair.ab.send_tensor(torch.full((70_000,), float(number + 1))) for number in range(4)]
    for number in (2, 0, 3, 1):
        await pair.ba.recv_tensor(batch[number])
    await wait_all(works)
    assert batch[:, 0].tolist() == [2.0, 4.0, 1.0, 3.0]
    assert batch.sum(1).tolist() == [140_000.0, 280_000.0, 70_000.0, 210_000.0]


# ---- order


@pytest.mark.asyncio
async def test_messages_of_a_tag_stay_in_order_whatever_their_size(pair: Pair) -> None:
    sizes = [10, 100_000, 10, 3_000_000, 20_000, 10, 10, 500_000, 0, 10]
    works = [pair.ab.send([number, torch.full((size // 4,), float(number))]) for number, size in enumerate(sizes * 2)]
    for number, size in enumerate(sizes * 2):
        got = await pair.ba.recv(timeout=20)
        assert got[0] == number
        assert got[1].shape == (size // 4,)
        assert (got[1] == number).all()
    await wait_all(works)


@pytest.mark.asyncio
async def test_receives_are_served_in_the_order_they_were_posted(pair: Pair) -> None:
    receives = [pair.ba.recv() for _ in range(20)]
    works = [pair.ab.send([number, torch.ones(number % 3 * 40_000)]) for number in range(20)]
    assert [got[0] for got in await wait_all(receives)] == list(range(20))
    await wait_all(works)


@pytest.mark.asyncio
async def test_objects_and_tensors_share_one_order(pair: Pair) -> None:
    works: list[AsyncWork[Any]] = []
    for number in range(6):
        works.append(pair.ab.send_tensor(torch.full((50_000,), float(number))))
        works.append(pair.ab.send(number))
    for number in range(6):
        assert (await pair.ba.recv_tensor(torch.empty(50_000), timeout=20))[0] == number
        assert await pair.ba.recv(timeout=20) == number
    await wait_all(works)


@pytest.mark.asyncio
async def test_tags_do_not_wait_for_each_other(pair: Pair) -> None:
    large = torch.ones(500_000)
    works = [pair.ab.send([tag, large], tag=tag) for tag in (1, 2, 3, 4_294_967_295)]
    for tag in (4_294_967_295, 2, 3, 1):
        got = await pair.ba.recv(tag=tag, timeout=20)
        assert got[0] == tag
        assert torch.equal(got[1], large)
    await wait_all(works)


@pytest.mark.asyncio
async def test_groups_of_the_same_workers_are_kept_apart(pair: Pair) -> None:
    members = ["a:0", "b:0"]
    one, two = (pair.a.collective.create_collective_group(members, name) for name in ("one", "two"))
    assert pair.a.collective.create_collective_group(members, "one") is one
    assert pair.a.collective.create_collective_group(reversed(members)) is pair.ab
    works = [pair.ab.send("unnamed"), two.send("two"), one.send("one")]
    assert await pair.b.collective.create_collective_group(members, "one").recv(timeout=20) == "one"
    assert await pair.b.collective.create_collective_group(members, "two").recv(timeout=20) == "two"
    assert await pair.b.recv("a:0", timeout=20) == "unnamed"
    await wait_all(works)


@pytest.mark.asyncio
async def test_the_two_directions_do_not_wait_for_each_other() -> None:
    """Nobody takes what `a` sends, and far more than the window is sent; the other way goes on."""
    for carrier in CARRIERS[1:]:
        config = carried_by(carrier, window_bytes=1 << 20)
        async with init("a:0", config=config) as a, init("b:0", config=config) as b:
            stuck = [a.send(torch.ones(100_000), "b:0") for _ in range(30)]
            for number in range(10):
                sending = b.send([number, torch.ones(1000)], "a:0")
                assert (await a.recv("b:0", timeout=20))[0] == number
                await sending
            assert not all(work.done() for work in stuck)
            for _ in range(30):
                await b.recv("a:0", timeout=20)
            await wait_all(stuck)


@pytest.mark.asyncio
async def test_both_send_first(pair: Pair) -> None:
    """Gloo alone would lock up: there a send is over only when its receive was posted."""
    for size in (1, 100_000, 1_000_000):
        await wait_all([pair.ab.send([size, torch.ones(size)]), pair.ba.send([size, torch.ones(size)])])
        for group in (pair.ab, pair.ba):
            assert (await group.recv(timeout=20))[0] == size
        await wait_all([pair.ab.send_tensor(torch.ones(size)), pair.ba.send_tensor(torch.zeros(size))])
        assert (await pair.ab.recv_tensor(torch.ones(size), timeout=20)).sum() == 0
        assert (await pair.ba.recv_tensor(torch.zeros(size), timeout=20)).sum() == size


# ---- the memory that is sent


@pytest.mark.asyncio
async def test_a_write_to_a_tensor_that_waits_for_its_receive_fails_both_sides(pair: Pair) -> None:
    for size in (1000, 500_000):
        tensor = torch.zeros(size)
        sending = pair.ab.send_tensor(tensor)
        await asyncio.sleep(0.01)
        tensor.add_(1)
        receiving = pair.ba.recv_tensor(torch.full((size,), 7.0))
        if pair.carrier == "shm" or (pair.carrier == "frame" and size == 1000):  # it is copied at the call or soon after
            outcomes: list[Any] = list(await asyncio.gather(sending, receiving, return_exceptions=True))
            if outcomes[0] is None:
                assert outcomes[1].sum() == 0
                continue
            sent, received = outcomes
        else:
            sent, received = await both_fail(sending, receiving)
        assert isinstance(sent, UsageError)
        assert "written to" in str(sent)
        assert isinstance(received, RemoteError)
        assert "written to" in str(received)
    assert await pair.trip("next") == "next"


@pytest.mark.asyncio
async def test_a_write_right_after_the_call_never_gives_a_mixture(pair: Pair) -> None:
    """Either the values of the call arrive, or both sides fail."""
    for size in (1000, 500_000, 5_000_000):
        tensor = torch.zeros(size)
        sending = pair.ab.send([tensor])
        for turn in range(size // 500_000):
            await asyncio.sleep(0)
            del turn
        tensor.add_(1)
        outcomes: list[Any] = list(await asyncio.gather(sending, pair.ba.recv(timeout=20), return_exceptions=True))
        sent, received = outcomes
        if isinstance(received, RemoteError):
            assert isinstance(sent, UsageError)
        else:
            assert sent is None
            assert received[0].sum() == 0


def assign_data(tensor: torch.Tensor) -> None:
    tensor.data = torch.full((3,), 9.0)


def set_elsewhere(tensor: torch.Tensor) -> None:
    tensor.set_(torch.full((3,), 9.0).untyped_storage())


def make_small(tensor: torch.Tensor) -> None:
    tensor.resize_(3)


@pytest.mark.asyncio
async def test_a_tensor_that_gets_other_memory_while_it_is_sent_arrives_as_it_was_or_fails_both_sides(pair: Pair) -> None:
    """`data = ...` is no write, and the version counter does not show it. The sender read past the end of its memory."""
    for change in (assign_data, set_elsewhere, make_small):
        for turns in (0, 2):
            tensor = torch.ones(2_000_000)
            sending = pair.ab.send({"x": tensor})
            for _ in range(turns):
                await asyncio.sleep(0)
            change(tensor)
            outcomes: list[Any] = list(await asyncio.gather(sending, pair.ba.recv(timeout=20), return_exceptions=True))
            sent, received = outcomes
            if change is assign_data or sent is None:
                assert sent is None
                assert received["x"].shape == (2_000_000,)
                assert received["x"].min() == 1
            else:
                assert isinstance(sent, UsageError)
                assert isinstance(received, RemoteError)
    assert await pair.trip("next") == "next"


@pytest.mark.asyncio
async def test_a_tensor_that_gets_other_memory_while_it_is_received_into_is_an_error(pair: Pair) -> None:
    for change in (assign_data, set_elsewhere, make_small):
        for turns in (-1, 0, 2):
            out = torch.zeros(700_000)
            if turns < 0:  # before there is anything to receive
                receiving = pair.ba.recv_tensor(out, timeout=20)
                change(out)
                sending = pair.ab.send_tensor(torch.ones(700_000))
            else:
                sending = pair.ab.send_tensor(torch.ones(700_000))
                await asyncio.sleep(0.01)
                receiving = pair.ba.recv_tensor(out, timeout=20)
                for _ in range(turns):
                    await asyncio.sleep(0)
                change(out)
            outcomes: list[Any] = list(await asyncio.gather(receiving, sending, return_exceptions=True))
            received, sent = outcomes
            assert sent is None
            if isinstance(received, BaseException):
                assert isinstance(received, UsageError)
                assert "other memory" in str(received)
            else:  # it was over
                assert received is out
    assert await pair.trip("next") == "next"


@pytest.mark.asyncio
async def test_what_arrives_is_a_copy(pair: Pair) -> None:
    for size in (3, 200_000):
        tensor = torch.zeros(size)
        got = await pair.trip([tensor])
        tensor.add_(1)
        assert got[0].sum() == 0
        got[0].add_(5)
        assert tensor.sum() == size


@pytest.mark.asyncio
async def test_sending_to_oneself_copies_as_any_other_way(pair: Pair) -> None:
    for size in (3, 200_000):
        tensor = torch.zeros(size)
        work = pair.a.send({"x": tensor}, "a:0")
        got = await pair.a.recv("a:0", timeout=20)
        await work
        tensor.add_(1)
        assert got["x"].sum() == 0
        sending = pair.a.send_tensor(tensor, "a:0")
        out = torch.zeros(size)
        assert await pair.a.recv_tensor(out, "a:0", timeout=20) is out
        await sending
        assert torch.equal(out, tensor)
    receiving = pair.a.recv("a:0")
    await pair.a.send("posted first", "a:0")
    assert await receiving == "posted first"
    wrong = pair.a.send_tensor(torch.ones(2), "a:0")
    for error in await both_fail(wrong, pair.a.recv_tensor(torch.ones(3), "a:0")):
        assert isinstance(error, Mismatch)


@pytest.mark.asyncio
async def test_what_one_sends_oneself_is_what_it_was_at_the_call(pair: Pair) -> None:
    """Changed before it is received: the old values arrive, or both works fail as with any other peer."""
    for size in (3, 200_000):
        for into in (False, True):
            tensor = torch.zeros(size)
            sending: AsyncWork[Any] = pair.a.send_tensor(tensor, "a:0") if into else pair.a.send({"x": tensor}, "a:0")
            await asyncio.sleep(0.01)
            tensor.add_(1)
            receiving: AsyncWork[Any] = (
                pair.a.recv_tensor(torch.full((size,), 7.0), "a:0", timeout=20) if into else pair.a.recv("a:0", timeout=20)
            )
            outcomes: list[Any] = list(await asyncio.gather(sending, receiving, return_exceptions=True))
            sent, received = outcomes
            if isinstance(sent, BaseException):
                assert isinstance(sent, UsageError)
                assert isinstance(received, RemoteError)
                assert "written to" in str(sent)
            else:
                assert (received if into else received["x"]).sum() == 0


@pytest.mark.asyncio
async def test_a_forgotten_send_arrives(pair: Pair) -> None:
    """Neither the works nor the tensors are held by anybody but the library."""
    sizes = (10, 300_000)
    for size in sizes:
        for number in range(5):
            pair.ab.send([number, torch.full((size,), float(number))])
        pair.ab.send_tensor(torch.ones(size), tag=1)
    gc.collect(1)  # what is only weakly held by the loop is young; a full collection takes long
    for size in sizes:
        for number in range(5):
            got = await pair.ba.recv(timeout=20)
            assert got[0] == number
            assert got[1].shape == (size,)
            assert (got[1] == number).all()
        assert (await pair.ba.recv_tensor(torch.zeros(size), tag=1, timeout=20)).sum() == size


# ---- limits and cancelling


@pytest.mark.asyncio
async def test_a_receive_that_is_too_late_changes_nothing(pair: Pair) -> None:
    """After one timeout Gloo's own pair is closed for good."""
    out = torch.zeros(200_000)
    for _ in range(2):
        with pytest.raises(DeadlineExceeded) as caught:
            await pair.ba.recv(timeout=0.05)
        assert "a:0" in str(caught.value)
        assert "b:0" in str(caught.value)
        with pytest.raises(DeadlineExceeded):
            await pair.ba.recv_tensor(out, timeout=0.05)
        assert_same(await pair.trip(torch.ones(200_000), tag=1), torch.ones(200_000))
        waiting = pair.ba.recv()
        with pytest.raises(TimeoutError):
            await waiting.async_wait(0.05)
        sending = pair.ab.send("for the one that waits")
        assert await waiting == "for the one that waits"
        await sending
    sending = pair.ab.send_tensor(torch.ones(200_000), tag=2)
    await pair.ba.recv_tensor(out, tag=2, timeout=20)
    await sending
    assert out.sum() == 200_000


@pytest.mark.asyncio
async def test_a_send_that_nobody_receives_in_time_fails_alone(pair: Pair) -> None:
    """No watchdog ends the process, and neither this pair nor one that is made after it has suffered."""
    for size in (300_000, 20_000_000):
        with pytest.raises(DeadlineExceeded) as caught:
            await pair.ab.send_tensor(torch.ones(size), tag=3, timeout=0.1)
        assert "b:0" in str(caught.value)
    assert_same(await pair.trip(torch.ones(300_000)), torch.ones(300_000))
    async with init("c:0", config=carried_by(pair.carrier)) as c:
        sending = pair.a.send_tensor(torch.full((300_000,), 2.0), "c:0")
        assert (await c.recv_tensor(torch.zeros(300_000), "a:0", timeout=20))[0] == 2
        await sending
    sending = pair.ab.send_tensor(torch.full((300_000,), 3.0), tag=3)
    assert (await pair.ba.recv_tensor(torch.zeros(300_000), tag=3, timeout=20))[0] == 3
    await sending


@pytest.mark.asyncio
async def test_a_cancelled_receive_takes_nothing(pair: Pair) -> None:
    large = torch.arange(300_000.0)
    for rounds in range(10):
        receiving = pair.ba.recv()
        sending = pair.ab.send([rounds, large])
        for _ in range(rounds):
            await asyncio.sleep(0)
        cancelled = receiving.cancel()
        got = await (pair.ba.recv(timeout=20) if cancelled else receiving)
        assert got[0] == rounds
        assert torch.equal(got[1], large)
        await sending


@pytest.mark.asyncio
async def test_a_cancelled_send_is_withdrawn(pair: Pair) -> None:
    """Cancelling frees the caller at once, though a started Gloo transfer cannot be recalled."""
    large = torch.ones(300_000)
    for rounds in range(6):
        sending = pair.ab.send_tensor(large)
        for _ in range(rounds):
            await asyncio.sleep(0)
        assert sending.cancel()
        assert sending.cancelled()
        await asyncio.sleep(0.02)  # the peer has to hear of it before it receives
        sending = pair.ab.send_tensor(large + 1)
        assert (await pair.ba.recv_tensor(torch.zeros(300_000), timeout=20))[0] == 2
        await sending


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.asyncio
async def test_a_send_may_have_been_received_when_it_is_cancelled(pair: Pair, tensor: bool) -> None:
    """The sender has not heard of it yet: its cancel says True, the receive keeps the message, whole, and the next exchange works."""
    large = torch.ones(300_000)
    sending = pair.ab.send_tensor(large) if tensor else pair.ab.send(large)
    receiving = pair.ba.recv_tensor(torch.zeros(300_000)) if tensor else pair.ba.recv()
    while not receiving.done():  # in the very turn in which the receive is done, what it says of that has not left
        await asyncio.sleep(0)
    received_first = not sending.done()
    assert sending.cancel() is received_first
    assert torch.equal(await receiving, large)
    again = pair.ab.send_tensor(large + 1) if tensor else pair.ab.send(large + 1)
    got = pair.ba.recv_tensor(torch.zeros(300_000), timeout=20) if tensor else pair.ba.recv(timeout=20)
    assert (await got)[0] == 2
    await again
    if pair.carrier == "frame":
        assert received_first, "both are on one loop, and the answer needs a turn"


# ---- several at once


@pytest.mark.asyncio
async def test_a_thread_and_tasks_share_one_pair(pair: Pair) -> None:
    """Each one's numbers arrive in order, and none is lost."""
    count = 40 if pair.carrier == "gloo" else 200

    def payload(source: str, number: int) -> Any:
        return source, number, torch.full((number % 5 * 100,), float(number))

    async def task(name: str) -> None:
        for number in range(count):
            await pair.ab.send(payload(name, number))
            if number % 7 == 0:
                await asyncio.sleep(0)

    def in_thread() -> None:
        for number in range(count):
            pair.ab.send(payload("thread", number)).wait(20)

    async def collect() -> dict[str, list[int]]:
        seen: dict[str, list[int]] = {}
        for _ in range(4 * count):
            source, number, tensor = await pair.ba.recv(timeout=20)
            assert (tensor == number).all()
            seen.setdefault(source, []).append(number)
        return seen

    # The thread's last wait may need the loop after the last message has come.
    seen, *_ = await asyncio.gather(collect(), *(task(f"task {number}") for number in range(3)), asyncio.to_thread(in_thread))
    assert seen == {name: list(range(count)) for name in ("thread", "task 0", "task 1", "task 2")}


@pytest.mark.asyncio
async def test_three_members_address_each_other_by_rank_or_name() -> None:
    members = ["a:0", "b:0", "c:0"]
    async with init("a:0") as a, init("b:0") as b, init("c:0") as c:
        ga, gb, gc_ = (worker.collective.create_collective_group(members) for worker in (a, b, c))
        works = [ga.send("to b", 1), ga.send("to c", "c:0"), gb.send("to c", 2), gc_.send("to a", dst="a:0")]
        assert await gc_.recv(1, timeout=20) == "to c"
        assert await gc_.recv("a:0", timeout=20) == "to c"
        assert await gb.recv(src=0, timeout=20) == "to b"
        assert await ga.recv(2, timeout=20) == "to a"
        await wait_all(works)
        with pytest.raises(UsageError, match="dst"):
            ga.send("to whom?")
        with pytest.raises(UsageError, match="no member"):
            ga.send("to nobody", "d:0")


# ---- done by itself, gone by itself


@pytest.mark.asyncio
async def test_a_work_nobody_awaits_is_done_by_itself(pair: Pair) -> None:
    seen: list[Any] = []
    for size in (3, 300_000):
        receiving = pair.ba.recv()
        receiving.then(lambda got: seen.append(got.numel()))
        tensor_receiving = pair.ba.recv_tensor(torch.zeros(size), tag=1)
        sendings = [pair.ab.send(torch.ones(size)), pair.ab.send_tensor(torch.ones(size), tag=1)]
        end = time.monotonic() + 20
        while not all(work.done() for work in (receiving, tensor_receiving, *sendings)) and time.monotonic() < end:
            await asyncio.sleep(0.005)
        assert receiving.done()
        assert tensor_receiving.done()
        assert seen.pop() == size


@pytest.mark.asyncio
async def test_made_and_closed_again_and_again() -> None:
    """The leak check of the suite looks at what is left; Gloo's C++ threads it does not see, so they are counted here."""
    counts: list[int] = []
    for carrier in itertools.chain(CARRIERS[1:], ("gloo",) * 4):
        config = carried_by(carrier)
        async with init("a:0", config=config) as a, init("b:0", config=config) as b:
            sendings = [a.send(torch.ones(1000), "b:0"), b.send(torch.ones(1000), "a:0")]
            await a.recv("b:0", timeout=20)
            await b.recv("a:0", timeout=20)
            await wait_all(sendings)
        end = time.monotonic() + 5
        while counts and len(os.listdir("/proc/self/task")) > counts[-1] and time.monotonic() < end:
            await asyncio.sleep(0.01)
        counts.append(len(os.listdir("/proc/self/task")))
    assert counts[-1] <= counts[3]


# ---- the other process goes away, or never comes


async def receive_one_and_wait(comm: Worker) -> None:
    await comm.recv("a:0")
    await asyncio.sleep(60)


@pytest.mark.parametrize("backend", ["stream", "shm", "gloo"])
@pytest.mark.asyncio
async def test_a_killed_peer_fails_what_is_pending(backend: Any) -> None:
    async with init("a:0", backend=backend) as a:
        async with peers.worker(a, "b:0", receive_one_and_wait, backend=backend) as peer:
            await a.send(torch.ones(300_000), "b:0")
            pending = [a.recv("b:0"), a.recv_tensor(torch.zeros(5), "b:0", tag=1), a.send_tensor(torch.ones(300_000), "b:0", tag=2)]
            await asyncio.sleep(0.05)
            peer.kill()
            for work in pending:
                with pytest.raises(PeerError) as caught:
                    await work.async_wait(20)
                assert caught.value.remote is not None
                assert "b:0" in caught.value.remote
        # The next call says so at once, and other peers are not concerned.
        with pytest.raises(AiorlinfError):
            await a.send("still there?", "b:0", timeout=20)
        await a.send("me", "a:0")
        assert await a.recv("a:0") == "me"


async def die_as_the_pair_is_made(comm: Worker, sends_itself: bool) -> None:
    """The link is there, the rendezvous of the pair has begun, and nobody will ever open its connection."""

    def die(*_: Any, **__: Any) -> None:
        os._exit(7)

    GlooPair.__init__ = die  # type: ignore[method-assign]
    await comm.send("ready", "a:0")
    await (comm.send(torch.ones(300_000), "a:0") if sends_itself else comm.recv("a:0"))


@pytest.mark.parametrize("sends_itself", [False, True])
@pytest.mark.asyncio
async def test_a_peer_that_dies_as_the_first_pair_is_made(sends_itself: bool) -> None:
    """Whichever of the two would have listened: the end of the link ends the waiting for it, and no thread of it goes on."""
    async with init("a:0", backend="gloo") as a, peers.worker(a, "b:0", die_as_the_pair_is_made, sends_itself, backend="gloo") as peer:
        assert await a.recv("b:0", timeout=20) == "ready"
        work: AsyncWork[Any] = a.recv("b:0") if sends_itself else a.send(torch.ones(300_000), "b:0")
        begin = time.monotonic()
        with pytest.raises(PeerError, match="b:0"):
            await work.async_wait(20)
        assert time.monotonic() - begin < 15, "the time limit of a pair is longer"
        with pytest.raises(peers.PeerFailed, match="died with 7"):
            await peer.result()


@pytest.mark.asyncio
async def test_a_peer_that_never_joins_is_named() -> None:
    config = {"cluster": {"network": {"rendezvous_timeout_s": 0.2}}}
    async with init("a:0", config=config) as a:
        works: list[AsyncWork[Any]] = [a.recv("late:7"), a.send(1, "late:7"), a.send_tensor(torch.ones(3), "late:7")]
        for work in works:
            with pytest.raises(RendezvousError) as caught:
                await work.async_wait(20)
            assert "late:7" in str(caught.value)
            assert "a:0" in str(caught.value)
        with pytest.raises(DeadlineExceeded) as late:
            await a.recv("late:7", timeout=0.05)
        assert "late:7" in str(late.value)


# ---- a worker that only receives


async def only_receive(comm: Worker) -> Any:
    got = await comm.recv("a:0")
    out = torch.zeros(3)
    await comm.recv_tensor(out, "a:0")
    return got, out.tolist()


@pytest.mark.asyncio
async def test_receiving_needs_no_declaration() -> None:
    async with init("a:0") as a, peers.worker(a, "b:0", only_receive, loop="uvloop") as peer:
        works = [a.send({"first": 1}, "b:0"), a.send_tensor(torch.ones(3), "b:0")]
        assert await peer.result() == ({"first": 1}, [1.0, 1.0, 1.0])
        await wait_all(works)
