"""Payloads in shared memory between real processes."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import functools
import os
import random
import resource
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aiorlinf import LinkStats, Worker, init
from aiorlinf.backends.shm.arena import ArenaStats
from aiorlinf.errors import BackendUnavailable, Mismatch, PeerLost, RemoteError, UsageError
from aiorlinf.testing import procfs
from tests.peers import Peer, Pipe, process, worker
from tests.system import memory_file_at, memory_file_mappings, no_more_descriptors, soon

MIB = 1 << 20
ORDERS = 4711
NOBODY = 65534


# ---- what runs in the other process


class Holder:
    """Does what it is told: each order is the name of a method and its arguments, each answer what the method returns."""

    def __init__(self, comm: Worker) -> None:
        self.comm = comm
        self.kept: list[Any] = []
        self.starving: contextlib.AbstractContextManager[None] | None = None
        self.files: list[tuple[int, int]] = []

    async def run(self) -> None:
        while (order := await self.comm.recv("a:0", tag=ORDERS)) is not None:
            name, *arguments = order
            method: Callable[..., Awaitable[Any]] = getattr(self, name)
            await self.comm.send(await method(*arguments), "a:0", tag=ORDERS)

    async def receive(self, how: str = "whole") -> dict[str, Any]:
        """Receive one tensor and keep it, or what is made of it."""
        tensor = await self.comm.recv("a:0")
        facts = {
            "shared": self.is_shared(tensor),
            "aligned": tensor.data_ptr() % 64 == 0,
            "first": float(tensor.view(-1)[0]),
            "same": bool(torch.all(torch.eq(tensor, tensor.view(-1)[0]))),
        }
        ways: dict[str, Callable[[], Any]] = {
            "whole": lambda: tensor,
            "slice": lambda: tensor.view(-1)[5:100],
            "numpy": lambda: tensor.numpy()[::2],
            "buffer": lambda: memoryview(tensor.numpy()),
            "list": lambda: [{"deep": (tensor,)}],
            "nothing": lambda: None,
        }
        self.kept.append(ways[how]())
        return facts

    def is_shared(self, tensor: torch.Tensor) -> bool:
        if self.starving is None:  # else we could not read what the kernel says, and there can be no new ones
            self.files = memory_file_mappings()
        return any(start <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= end for start, end in self.files)

    async def sums(self) -> list[float]:
        return [float(torch.as_tensor(np.asarray(kept)).sum()) for kept in self.kept]

    async def fill(self, value: float) -> None:
        for kept in self.kept:
            kept.fill_(value)

    async def drop(self, count: int | None = None) -> None:
        del self.kept[:count]

    async def forward(self, to: str) -> None:
        """Send on what is kept, and keep it no more."""
        await self.comm.send(self.kept.pop(), to)

    async def held(self) -> int:
        return sum(link.shared_bytes_held for link in self.comm.stats().links)

    async def stats(self) -> tuple[LinkStats, ...]:
        return self.comm.stats().links

    async def mappings(self) -> int:
        return len(memory_file_mappings())

    async def own_memory(self) -> int:
        """Bytes of anonymous memory that is there."""
        (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
        return int(line.split()[1]) * 1024

    async def descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    async def starve(self) -> None:
        """No more descriptors."""
        self.starving = no_more_descriptors()
        self.starving.__enter__()

    async def feed(self) -> None:
        assert self.starving is not None
        self.starving.__exit__(None, None, None)
        self.starving = None

    async def fork(self) -> tuple[float, float]:
        """A child reads what is kept, writes to it and lets go of it; what it read, and what we see after that."""
        out, into = os.pipe()
        pid = os.fork()
        if not pid:
            signal.alarm(10)
            array = self.kept[0].numpy()  # torch's own threads do not survive a fork
            os.write(into, str(float(array.sum())).encode())
            array[0] = 77
            del array
            self.kept.clear()
            os._exit(0)
        await asyncio.to_thread(os.waitpid, pid, 0)
        os.close(into)
        seen = float(os.read(out, 100))
        os.close(out)
        return seen, float(self.kept[0][0])

    async def leave_the_network(self) -> int:
        """This thread goes on in a network namespace of its own; open sockets stay where they are."""
        clone_newnet = 0x40000000
        return int(ctypes.CDLL(None).unshare(clone_newnet))

    async def send(self, size: int) -> None:
        await self.comm.send(torch.ones(size, dtype=torch.uint8), "a:0")

    async def tensors(self) -> dict[str, Any]:
        """One message of many tensors: where they lie."""
        message = await self.comm.recv("a:0")
        inside = [
            [start for start, end in memory_file_mappings() if start <= tensor.data_ptr() < end]
            for tensor in message.values()
            if tensor.nbytes
        ]
        self.kept.append(message)
        return {
            "mappings": len({start for starts in inside for start in starts}),
            "outside": sum(not starts for starts in inside),
            "aligned": all(tensor.data_ptr() % 64 == 0 for tensor in message.values()),
            "values": [float(tensor.double().sum()) for tensor in message.values()],
        }


async def hold(comm: Worker) -> None:
    await Holder(comm).run()


class Told:
    """The test's end of a `Holder`."""

    def __init__(self, comm: Worker, address: str, peer: Peer) -> None:
        self.comm = comm
        self.address = address
        self.peer = peer

    async def ask(self, *order: Any) -> Any:
        await self.comm.send(order, self.address, tag=ORDERS, timeout=20)
        return await self.comm.recv(self.address, tag=ORDERS, timeout=20)

    async def give(self, tensor: Any, *order: Any) -> Any:
        """Send it while the other side does this."""
        work = self.comm.send(tensor, self.address)
        answer = await self.ask(*order)
        await work
        return answer

    @property
    def link(self) -> LinkStats:
        (found,) = [link for link in self.comm.stats().links if link.remote == self.address]
        return found


@contextlib.asynccontextmanager
async def holder(comm: Worker, address: str = "b:0") -> AsyncIterator[Told]:
    async with worker(comm, address, hold, loop="uvloop") as peer:
        told = Told(comm, address, peer)
        yield told
        await comm.send(None, address, tag=ORDERS)
        await peer.result()


def arena(comm: Worker) -> ArenaStats:
    stats = comm.stats().shared_memory
    assert stats is not None
    return stats


def config(**shared_memory: Any) -> dict[str, Any]:
    return {"cluster": {"collective": {"shared_memory": shared_memory}}}


def memory_files_open() -> int:
    return sum("memfd:aiorlinf" in target for target in procfs.open_descriptors().values())


# ---- receiving


@pytest.mark.asyncio
async def test_what_arrives_is_the_senders_memory_and_writable() -> None:
    async with init("a:0") as a, holder(a) as b:
        assert await b.give(torch.full((1 << 18,), 2.0), "receive") == {"shared": True, "aligned": True, "first": 2, "same": True}
        before = await b.ask("own_memory")
        await b.give(torch.full((16 << 20,), 3.0), "receive")
        assert await b.ask("own_memory") - before < 16 * MIB, "there is no copy of the 64 MiB"
        assert await b.ask("mappings") == arena(a).segments == 2
        await b.ask("fill", 5.0)
        assert await b.ask("sums") == [5.0 * (1 << 18), 5.0 * (16 << 20)]
        assert b.link.backend == "shm"
        assert b.link.around_bytes_sent == 65 * MIB


@pytest.mark.asyncio
async def test_memory_is_lent_until_the_last_view_is_gone() -> None:
    async with init("a:0") as a, holder(a) as b:
        for how in ("whole", "slice", "numpy", "buffer", "list"):
            await b.give(torch.ones(MIB, dtype=torch.uint8), "receive", how)
            await asyncio.sleep(0.02)
            assert b.link.shared_bytes_lent == arena(a).used_bytes == await b.ask("held") == MIB, how
            await b.ask("drop")
            await soon(lambda: b.link.shared_bytes_lent == 0)
            assert arena(a).used_bytes == await b.ask("held") == 0
        await b.give(torch.ones(MIB, dtype=torch.uint8), "receive", "nothing")
        await soon(lambda: b.link.shared_bytes_lent == 0)
        assert arena(a).misses == 1, "all of them lay in the same place"


@pytest.mark.asyncio
async def test_what_is_sent_on_to_a_third_is_free_when_the_second_has_sent_it() -> None:
    async with init("a:0") as a, holder(a) as b, holder(a, "c:0") as c:
        await b.give(torch.full((MIB,), 4, dtype=torch.uint8), "receive")
        assert b.link.shared_bytes_lent == MIB
        await b.ask("forward", "a:0")
        got = await a.recv("b:0", timeout=20)
        await soon(lambda: b.link.shared_bytes_lent == 0)
        assert (await c.give(got, "receive"))["same"]
        del got
        await soon(lambda: b.link.shared_bytes_held == 0)
        assert await c.ask("sums") == [4 * MIB]


@pytest.mark.asyncio
async def test_many_tensors_of_one_message_lie_in_one_segment() -> None:
    sizes = [1, 3, 64, 100, 4097, 0, 1 << 16, 1 << 20]
    message = {f"{dtype}{size}": torch.ones(size, dtype=dtype) for size in sizes for dtype in (torch.uint8, torch.float64, torch.bfloat16)}
    async with init("a:0") as a, holder(a) as b:
        facts = await b.give(message, "tensors")
        assert facts == {"mappings": 1, "outside": 0, "aligned": True, "values": [float(tensor.numel()) for tensor in message.values()]}
        assert await b.ask("mappings") == 1


@pytest.mark.asyncio
async def test_one_small_tensor_keeps_the_whole_message_and_the_figures_say_so() -> None:
    async with init("a:0") as a, init("b:0") as b:
        work = a.send({"large": torch.ones(8 * MIB, dtype=torch.uint8), "small": torch.ones(16)}, "b:0")
        got = await b.recv("a:0", timeout=20)
        await work
        kept = got["small"]
        del got
        await asyncio.sleep(0.02)
        (link,) = a.stats().links
        (back,) = b.stats().links
        assert link.shared_bytes_lent == back.shared_bytes_held == 8 * MIB + 64
        del kept
        await soon(lambda: a.stats().links[0].shared_bytes_lent == 0)


@dataclasses.dataclass
class Row:
    data: torch.Tensor
    array: Any
    text: bytes


async def return_all(comm: Worker, count: int) -> None:
    for _ in range(count):
        got = await comm.recv("a:0")
        shared = comm.stats().links[0].shared_bytes_held > 0
        await comm.send((shared, got), "a:0")
    out = torch.zeros(1 << 18)
    assert await comm.recv_tensor(out, "a:0") is out
    await comm.send(float(out.sum()), "a:0")
    await comm.recv("a:0")


@pytest.mark.asyncio
async def test_every_kind_of_payload() -> None:
    tensor, array = torch.randn(1 << 18), np.arange(1 << 18).reshape(512, -1)
    read_only = array[:, ::2].copy()
    read_only.flags.writeable = False
    messages: list[Any] = [
        tensor,
        [tensor, torch.zeros(0), torch.tensor(3.0)],
        (tensor.bfloat16(), tensor > 0),
        {"x": tensor, "y": tensor[:100]},
        array,
        np.asfortranarray(array),
        read_only,
        bytes(range(256)) * 4096,
        bytearray(MIB),
        Row(tensor, array, b"x" * MIB),
        {"deep": [Row(tensor, array, b""), {"params": torch.nn.Parameter(tensor)}], "lr": 0.1},
        "text" * MIB,
    ]
    async with init("a:0") as a, worker(a, "b:0", return_all, len(messages)) as peer:
        for message in messages:
            work = a.send(message, "b:0")
            shared, got = await a.recv("b:0", timeout=20)
            await work
            assert_same(got, message)
            held_after_unpickling = not isinstance(message, (bytes, bytearray, str))
            assert shared or not held_after_unpickling
        before = a.stats().links[0].around_bytes_sent
        await asyncio.gather(a.send_tensor(tensor, "b:0"), a.recv("b:0", timeout=20))
        assert a.stats().links[0].around_bytes_sent - before == MIB
        await a.send(None, "b:0")
        await peer.result()
        await soon(lambda: arena(a).used_bytes == 0)


def assert_same(got: Any, sent: Any) -> None:
    assert type(got) is type(sent)
    if isinstance(sent, torch.Tensor):
        assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
        assert torch.equal(got, sent)
    elif isinstance(sent, np.ndarray):
        assert np.array_equal(got, sent)
        assert got.flags.writeable == sent.flags.writeable
        assert got.flags.f_contiguous == sent.flags.f_contiguous
    elif isinstance(sent, dict):
        assert list(got) == list(sent)
        for key, value in sent.items():
            assert_same(got[key], value)
    elif isinstance(sent, (list, tuple)):
        for one, other in zip(got, sent, strict=True):
            assert_same(one, other)
    elif isinstance(sent, Row):
        assert_same((got.data, got.array, got.text), (sent.data, sent.array, sent.text))
    else:
        assert got == sent


async def keep_some(comm: Worker, seed: int, count: int) -> int:
    """Receive messages of a known pattern, keep parts of some for a while; how many do not show what they should in the end."""
    torch.set_num_threads(1)  # three processes share the cores
    choice = random.Random(seed)
    kept: list[tuple[torch.Tensor, int]] = []
    wrong = 0
    for number in range(count):
        got = await comm.recv("a:0")
        part = got.view(-1)[choice.randrange(got.numel()) :] if choice.random() < 0.5 else got
        kept.append((part, number % 251))
        del got, part
        while len(kept) > choice.randrange(12):
            tensor, value = kept.pop(choice.randrange(len(kept)))
            wrong += not bool((tensor == value).all())
    return wrong + sum(not bool((tensor == value).all()) for tensor, value in kept)


@pytest.mark.asyncio
async def test_nothing_that_is_kept_is_ever_written_over() -> None:
    choice = random.Random(5)
    count = 100
    async with init("a:0", config=config(max_bytes=24 * MIB, segment_bytes=4 * MIB)) as a:
        async with worker(a, "b:0", keep_some, 1, count) as one, worker(a, "c:0", keep_some, 2, count) as two:
            for number in range(count):
                tensors = [torch.full((choice.randrange(70_000, 3 * MIB),), number % 251, dtype=torch.uint8) for _ in range(2)]
                works = [a.send(tensor, peer) for tensor, peer in zip(tensors, ("b:0", "c:0"), strict=True)]
                if number % 10 == 9:
                    await asyncio.gather(*works)
            for peer in (one, two):
                assert await peer.result() == 0
        assert arena(a).hits > 50
        await soon(lambda: arena(a).used_bytes == 0)


# ---- when receivers hold everything


@pytest.mark.asyncio
async def test_a_receiver_that_holds_everything_gets_the_rest_over_the_stream_and_shared_memory_comes_back() -> None:
    async with init("a:0", config=config(max_bytes=8 * MIB, segment_bytes=4 * MIB)) as a, holder(a) as b:
        message = torch.ones(4 * MIB, dtype=torch.uint8)
        shared = [(await b.give(message, "receive"))["shared"] for _ in range(4)]
        assert shared == [True, True, False, False]
        assert b.link.around_bytes_sent == 8 * MIB
        assert b.link.bytes_sent > 16 * MIB
        assert (arena(a).refused, arena(a).used_bytes, arena(a).bytes) == (2, 8 * MIB, 8 * MIB)
        assert (b.link.backend, b.link.shared_bytes_lent) == ("shm", 8 * MIB)
        await b.ask("drop", 1)
        await soon(lambda: b.link.shared_bytes_lent == 4 * MIB)
        shared = [(await b.give(message, "receive"))["shared"] for _ in range(2)]
        assert shared == [True, False]
        await b.ask("drop")
        await soon(lambda: b.link.shared_bytes_lent == 0)
        assert (await b.give(message, "receive"))["shared"]
        assert await b.ask("mappings") == 2


@pytest.mark.asyncio
async def test_thousands_of_kept_tensors_take_no_descriptors() -> None:
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_NOFILE, (256, 256))
    async with init("a:0") as a:
        with process(_keep_thousands, env=a.env("b:0"), prepare=limit) as peer:
            works = []
            for number in range(5000):
                works.append(a.send(torch.full((25_000,), number, dtype=torch.int32), "b:0"))
                if len(works) == 50:
                    await asyncio.gather(*works)
                    works.clear()
            assert await a.recv("b:0", timeout=20) == {"shared": 5000, "right": 5000, "descriptors": 0}
            assert arena(a).used_bytes == 5000 * 25 * 4096
            assert arena(a).segments < 14
            await a.send(None, "b:0")
            await peer.result()


def _keep_thousands(pipe: Pipe) -> None:
    async def main() -> None:
        async with init() as comm:
            kept = [await comm.recv("a:0")]
            before = len(os.listdir("/proc/self/fd"))
            kept += [await comm.recv("a:0") for _ in range(4999)]
            files = np.array(memory_file_mappings())
            shared = sum(bool(((files[:, 0] <= tensor.data_ptr()) & (tensor.data_ptr() < files[:, 1])).any()) for tensor in kept)
            right = sum(int(tensor[0]) == int(tensor[-1]) == number for number, tensor in enumerate(kept))
            more = len(os.listdir("/proc/self/fd")) - before
            await comm.send({"shared": shared, "right": right, "descriptors": more}, "a:0")
            await comm.recv("a:0")

    asyncio.run(main())


@pytest.mark.asyncio
async def test_a_receiver_without_descriptors_gets_it_over_the_stream_and_later_again_in_shared_memory() -> None:
    message = torch.ones(MIB, dtype=torch.uint8)
    async with init("a:0") as a, holder(a) as b:
        await b.ask("starve")
        assert [(await b.give(message, "receive"))["shared"] for _ in range(3)] == [False] * 3
        assert (b.link.backend, b.link.reason) == ("stream", "the peer could not map a memory file")
        assert b.link.shared_bytes_lent == arena(a).used_bytes == 0
        await b.ask("feed")
        for _ in range(200):
            if (await b.give(message, "receive"))["shared"]:
                break
            await asyncio.sleep(0.05)
        assert (b.link.backend, b.link.reason) == ("shm", "both workers are on one host")


# ---- in the middle


@pytest.mark.asyncio
async def test_a_mismatch_leaves_the_memory_free_and_the_pair_usable() -> None:
    large = torch.ones(1 << 20)
    async with init("a:0") as a, init("b:0") as b:
        mismatches: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
            (lambda: a.send_tensor(large, "b:0"), lambda: b.recv_tensor(torch.zeros(3), "a:0")),
            (lambda: a.send(large, "b:0"), lambda: b.recv_tensor(torch.zeros(1 << 20), "a:0")),
            (lambda: a.send_tensor(large, "b:0"), lambda: b.recv("a:0")),
        ]
        for send, recv in mismatches:
            for first in ("send", "recv"):
                if first == "send":
                    work = send()
                    await asyncio.sleep(0.05)
                    receive = recv()
                else:
                    receive = recv()
                    await asyncio.sleep(0.05)
                    work = send()
                with pytest.raises(Mismatch):
                    await receive
                if not work.done() or work.exception() is not None:
                    with pytest.raises(Mismatch):
                        await work
                await soon(lambda: arena(a).used_bytes == 0)
        work = a.send(large, "b:0")
        assert torch.equal(await b.recv("a:0", timeout=20), large)
        await work
        assert b.stats().links[0].mismatches == 6


@pytest.mark.asyncio
async def test_a_send_that_is_cancelled_leaves_the_memory_free() -> None:
    large = torch.ones(8 << 20)
    async with init("a:0") as a, init("b:0") as b:
        await asyncio.gather(a.send(1, "b:0"), b.recv("a:0"))
        for turns in range(12):
            work = a.send_tensor(large, "b:0")
            for _ in range(turns):
                await asyncio.sleep(0.002)
            work.cancel()
            await soon(lambda: arena(a).used_bytes == 0)
        work = a.send(large, "b:0")
        assert torch.equal(await b.recv("a:0", timeout=20), large)
        await work


@pytest.mark.asyncio
async def test_a_cancelled_receive_leaves_the_message_for_the_next() -> None:
    large = torch.ones(2 << 20)
    async with init("a:0") as a, init("b:0") as b:
        for turns in range(12):
            receive = b.recv("a:0")
            work = a.send(large, "b:0")
            for _ in range(turns):
                await asyncio.sleep(0)
            receive.cancel()
            got = await b.recv("a:0", timeout=20) if receive.cancelled() else receive.result()
            await work
            assert torch.equal(got, large)
            del got, receive
            await soon(lambda: arena(a).used_bytes == 0)


@pytest.mark.asyncio
async def test_a_receive_whose_waiter_is_cancelled_gives_the_message_back() -> None:
    large = torch.ones(2 << 20)
    async with init("a:0") as a, init("b:0") as b:
        for _ in range(5):
            received: Any = b.recv("a:0")
            waiters: list[asyncio.Task[Any]] = []
            received.add_done_callback(lambda _work, waiters=waiters: waiters[0].cancel())  # before it can take the value
            waiters.append(asyncio.ensure_future(_wait_for(received)))
            await a.send(large, "b:0")
            with pytest.raises(asyncio.CancelledError):
                await waiters[0]
            assert received.cancelled()
            got = await b.recv("a:0", timeout=20)
            assert torch.equal(got, large)
            assert memory_file_at(got.data_ptr(), got.nbytes)
            del received, waiters, got
            await soon(lambda: arena(a).used_bytes == 0)


async def _wait_for(work: Any) -> Any:
    return await work


@pytest.mark.asyncio
async def test_writing_to_a_tensor_while_it_is_copied_fails_both_sides() -> None:
    async with init("a:0") as a, init("b:0") as b:
        await asyncio.gather(a.send(1, "b:0"), b.recv("a:0"))
        large = torch.ones(32 << 20, dtype=torch.uint8)
        for tag in range(3):
            work = a.send(large, "b:0", tag=tag)
            large[5] = 7
            with pytest.raises(RemoteError, match="written to"):
                await b.recv("a:0", tag=tag, timeout=20)
            with pytest.raises(UsageError, match="written to"):
                await work
            await soon(lambda: arena(a).used_bytes == 0)
        work = a.send(large, "b:0")
        assert int((await b.recv("a:0", timeout=20)).sum()) == (32 << 20) + 6
        await work


# ---- where it cannot be


def _be_sent_one(pipe: Pipe) -> tuple[bool, str, str]:
    """Receive one message; whether it came in shared memory, and what our own link says."""

    async def main() -> tuple[bool, str, str]:
        async with init() as comm:
            got = await comm.recv("a:0")
            await comm.send(got, "a:0")
            (link,) = comm.stats().links
            return memory_file_at(got.data_ptr(), got.nbytes), link.backend, link.reason

    return asyncio.run(main())


def _become_nobody() -> None:
    # Not before everything is imported: that user may not read where Python is.
    with init("warm:0") as comm:
        work = comm.send(torch.ones(1 << 18), "warm:0")
        comm.recv("warm:0").wait(20)
        work.wait(20)
    os.setuid(NOBODY)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("environment", "prepare", "options", "reasons"),
    [
        ({}, None, {}, ["both workers are on one host"] * 2),
        ({"AIORLINF_HOST_ID": "elsewhere"}, None, {}, ["the workers are on different hosts"] * 2),
        (
            {},
            None,
            {"enabled": False},
            ["both workers are on one host, but cluster.collective.shared_memory.enabled is off"] * 2,
        ),
        pytest.param(
            {},
            _become_nobody,
            {},
            [f"both workers are on one host, but the peer runs as another user ({NOBODY} instead of 0)", ""],
            marks=pytest.mark.skipif(os.getuid() != 0, reason="becoming another user takes root"),
        ),
    ],
    ids=["possible", "other host", "off", "other user"],
)
async def test_the_figures_say_why(
    environment: dict[str, str], prepare: Callable[[], None] | None, options: dict[str, Any], reasons: list[str]
) -> None:
    async with init("a:0", config=config(**options)) as a:
        with process(_be_sent_one, env={**a.env("b:0"), **environment}, prepare=prepare) as peer:
            group = a.collective.create_collective_group(["a:0", "b:0"])
            work = group.send(torch.ones(1 << 18))
            got = await group.recv(timeout=20)
            await work
            assert (got == 1).all()
            (link,) = group.stats()
            shared, backend, reason = await peer.result()
            possible = not environment and not options and prepare is None
            assert shared == possible
            assert (link.backend == "shm") == (backend == "shm") == possible
            assert link.reason == reasons[0]
            if reasons[1]:
                assert reason == reasons[1]
            else:
                assert "the peer runs as another user (0 instead of" in reason
            assert (link.around_bytes_sent > 0) == (possible or link.backend == "gloo")


@pytest.mark.asyncio
@pytest.mark.skipif(os.getuid() != 0, reason="a network namespace takes root")
async def test_a_peer_in_another_network_namespace_sends_over_the_stream() -> None:
    # It says that it is on this host, and was when the link was made; but its sockets do not reach ours any more.
    async with init("a:0") as a, holder(a) as b:
        if await b.ask("leave_the_network"):
            pytest.skip("this process may not make namespaces")
        for _ in range(2):
            told = asyncio.ensure_future(b.ask("send", MIB))
            got = await a.recv("b:0", timeout=20)
            await told
            assert int(got.sum()) == MIB
            assert not memory_file_at(got.data_ptr(), got.nbytes)
        (link,) = await b.ask("stats")
        assert link.backend == "stream"
        assert "a memory file could not be passed: [Errno 111]" in link.reason
        assert b.link.backend == "shm", "the other direction has no such trouble"
        assert (await b.give(torch.ones(1 << 18), "receive"))["shared"]


def _with_a_small_dev_shm() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    clone_newns, private, recursive = 0x00020000, 1 << 18, 1 << 14
    if libc.unshare(clone_newns) or libc.mount(None, b"/", None, private | recursive, None):
        return
    libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=16m")


def _send_64_mib(pipe: Pipe) -> int:
    async def main() -> None:
        async with init() as comm:
            await comm.send(torch.ones(64 * MIB, dtype=torch.uint8), "a:0")

    asyncio.run(main())
    room = os.statvfs("/dev/shm")
    return room.f_blocks * room.f_frsize


@pytest.mark.asyncio
@pytest.mark.skipif(os.getuid() != 0, reason="to mount something takes root")
async def test_a_small_dev_shm_is_no_limit() -> None:
    async with init("a:0") as a:
        with process(_send_64_mib, env=a.env("b:0"), prepare=_with_a_small_dev_shm) as peer:
            got = await a.recv("b:0", timeout=20)
            assert memory_file_at(got.data_ptr(), got.nbytes)
            assert int(got[::4096].sum()) == 64 * 256
            if await peer.result() != 16 * MIB:
                pytest.skip("this process may not mount anything")


# ---- ends


async def next_life(operation: Callable[[], Any]) -> Any:
    """Once a peer that was killed is there again; before that operations say that it is gone."""
    while True:
        try:
            return await operation()
        except PeerLost:
            await asyncio.sleep(0.02)


async def _keep_then_close(pipe: Pipe) -> float:
    async with init() as comm:
        kept = [await comm.recv("a:0") for _ in range(3)]
    # It has left the job; what it received is still its own.
    pipe.say("closed")
    pipe.hear()
    return sum(float(tensor.double().sum()) for tensor in kept)


def _keep_then_close_and_live_on(pipe: Pipe) -> float:
    return asyncio.run(_keep_then_close(pipe))


@pytest.mark.asyncio
async def test_who_closes_keeps_what_he_has_whatever_is_sent_to_others() -> None:
    async with init("a:0", config=config(max_bytes=64 * MIB, segment_bytes=16 * MIB)) as a, init("c:0") as c:
        with process(_keep_then_close_and_live_on, env=a.env("b:0")) as peer:
            works = [a.send(torch.full((4 * MIB,), 3, dtype=torch.uint8), "b:0") for _ in range(3)]
            assert await peer.hear() == "closed"
            await asyncio.gather(*works)
            await soon(lambda: not a.stats().links)
            assert arena(a).bytes == 0, "what he has does not count as ours any more"
            for number in range(40):
                work = a.send(torch.full((4 * MIB,), number, dtype=torch.uint8), "c:0")
                got = await c.recv("a:0", timeout=20)
                assert (got == number).all()
                await work
            assert arena(a).bytes <= 32 * MIB
            peer.say("look")
            assert await peer.result() == 3 * 3 * 4 * MIB
    assert memory_files_open() == 0


async def send_many(comm: Worker, count: int) -> None:
    for number in range(count):
        await comm.send(torch.full((MIB,), number, dtype=torch.uint8), "a:0")
    await comm.recv("a:0")


@pytest.mark.asyncio
async def test_what_a_killed_sender_sent_stays_and_its_next_life_sends_more() -> None:
    async with init("a:0") as a:
        kept = []
        for life in (1, 2):
            async with worker(a, "b:0", send_many, 10) as peer:
                kept.append(await next_life(lambda: a.recv("b:0", timeout=20)))
                kept += [await a.recv("b:0", timeout=20) for _ in range(9)]
                assert a.stats().links[0].incarnation == life
                peer.kill()
                with pytest.raises(PeerLost):
                    await a.recv("b:0", timeout=20)
            assert [int(tensor[-1]) for tensor in kept] == [*range(10)] * life
            assert all(memory_file_at(tensor.data_ptr(), tensor.nbytes) for tensor in kept)
            kept[0].fill_(0)
        assert len(memory_file_mappings()) == 4, "two of each life, the second larger"
        kept.clear()
        await soon(lambda: memory_file_mappings() == [])
        assert a.stats().links == ()


@pytest.mark.asyncio
async def test_a_killed_receiver_costs_the_sender_nothing() -> None:
    async with init("a:0") as a:
        before = memory_files_open()
        for _ in range(2):
            async with worker(a, "b:0", hold) as peer:
                b = Told(a, "b:0", peer)
                await next_life(functools.partial(b.ask, "sums"))
                for _ in range(3):
                    assert (await b.give(torch.ones(20 * MIB, dtype=torch.uint8), "receive"))["shared"]
                assert (arena(a).used_bytes, memory_files_open() - before) == (60 * MIB, 2)
                peer.kill()
                await soon(lambda: not a.stats().links)
            assert (arena(a).bytes, arena(a).segments, memory_files_open() - before) == (0, 0, 0)
            await soon(lambda: memory_file_mappings() == [])


async def receive_and_end(comm: Worker, times: int) -> float:
    kept = [await comm.recv("a:0") for _ in range(times)]
    return sum(float(tensor.sum()) for tensor in kept if memory_file_at(tensor.data_ptr(), tensor.nbytes))


@pytest.mark.asyncio
async def test_who_comes_when_the_first_reader_has_ended_reads_the_same_memory_and_nobody_complains() -> None:
    """Where segments had names, the first reader's end removed them under their owner."""
    tensor = torch.ones(16 * MIB, dtype=torch.uint8)
    async with init("a:0") as a:
        for address in ("b:0", "c:0", "d:0"):
            async with worker(a, address, receive_and_end, 2) as peer:
                await asyncio.gather(a.send(tensor, address), a.send(tensor, address))
                assert await peer.result() == 2 * 16 * MIB
                # asyncio, in its debug mode, tells of turns that took long on a busy machine
                assert [line for line in peer.said_on_stderr().splitlines() if not line.startswith("Executing <")] == []
            await soon(lambda: not a.stats().links)


@pytest.mark.asyncio
async def test_a_fork_of_the_receiver_gives_nothing_back() -> None:
    async with init("a:0") as a, holder(a) as b:
        await b.give(torch.ones(1 << 18), "receive")
        seen, after = await b.ask("fork")
        assert seen == 1 << 18
        assert after == 77, "the memory is shared with the child, too"
        await asyncio.sleep(0.05)
        assert b.link.shared_bytes_lent == MIB
        await b.ask("drop")
        await soon(lambda: b.link.shared_bytes_lent == 0)
        assert (await b.give(torch.ones(1 << 18), "receive"))["shared"]


@pytest.mark.asyncio
async def test_many_links_later_nothing_is_left() -> None:
    async with init("a:0") as a:
        before = len(procfs.open_descriptors())
        for number in range(12):
            async with init("b:0") as b:
                work = a.send(torch.full((1 << 18,), float(number)), "b:0")
                got = await b.recv("a:0", timeout=20)
                await work
                assert float(got[0]) == number
            await soon(lambda: not a.stats().links)
            del got, work
            await soon(lambda: arena(a).used_bytes == 0)
        assert arena(a).segments <= 1
        assert len(procfs.open_descriptors()) <= before + 2


# ---- when nothing else will do


@pytest.mark.asyncio
async def test_without_a_fallback_what_cannot_go_this_way_fails_on_both_sides() -> None:
    options = config(max_bytes=8 * MIB, segment_bytes=4 * MIB)
    options["cluster"]["collective"].update(backend="shm", fallback=False)
    async with init("a:0", config=options) as a, init("b:0", config=options) as b:

        async def trip(value: int) -> torch.Tensor:
            work = a.send(torch.full((3 * MIB,), value, dtype=torch.uint8), "b:0")
            got: torch.Tensor = await b.recv("a:0", timeout=20)
            await work
            return got

        kept = [await trip(value) for value in (1, 2)]
        for _ in range(2):
            work = a.send(torch.full((3 * MIB,), 3, dtype=torch.uint8), "b:0")
            with pytest.raises(RemoteError, match="receivers hold all of it"):
                await b.recv("a:0", timeout=20)
            with pytest.raises(BackendUnavailable, match="shm: receivers hold all of it"):
                await work
        gift = a.empty(5 * MIB, dtype=torch.uint8)  # ordinary memory, there is no more
        work = a.send(gift, "b:0")
        with pytest.raises(RemoteError):
            await b.recv("a:0", timeout=20)
        with pytest.raises(BackendUnavailable):
            await work
        assert gift.numel() == 5 * MIB
        assert [(int(tensor.min()), int(tensor.max())) for tensor in kept] == [(1, 1), (2, 2)]
        kept.pop()
        await soon(lambda: arena(a).used_bytes == 3 * MIB)
        assert (await trip(4) == 4).all()
        # Nor does it go another way when the peer has no room for a descriptor.
        kept.clear()
        memory = a._table.memory
        assert memory is not None
        await soon(lambda: arena(a).used_bytes == 0)
        memory.arena.trim()
        work = a.send(torch.ones(MIB), "b:0")
        with no_more_descriptors():
            with pytest.raises((RemoteError, BackendUnavailable)):
                await b.recv("a:0", timeout=20)
            with pytest.raises(BackendUnavailable):
                await work
        assert (await trip(5) == 5).all()
