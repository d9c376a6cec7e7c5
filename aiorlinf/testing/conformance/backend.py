"""What every way of large payloads keeps to, seen from two workers that use it."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from aiorlinf.collective.group import CollectiveGroup
from aiorlinf.errors import AiorlinfError, Mismatch, PeerLeft, PeerLost
from aiorlinf.rendezvous.settings import Backend
from aiorlinf.testing.cluster import LocalCluster, local_cluster
from aiorlinf.worker import Worker

__all__ = ["BackendConformance", "BackendPair"]

INLINE = 4096
WINDOW = 1 << 18
LIMIT_S = 20.0
DTYPES = (
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn),
)


@dataclass(frozen=True)
class BackendPair:
    """Two workers that have met, each with its group of the two."""

    cluster: LocalCluster
    a: Worker
    b: Worker
    ab: CollectiveGroup
    ba: CollectiveGroup

    async def trip(self, obj: Any, tag: int = 0) -> Any:
        """From `a` to `b`; what arrives."""
        work = self.ab.send(obj, tag=tag)
        got = await self.ba.recv(tag=tag, timeout=LIMIT_S)
        await work
        return got

    async def sane(self) -> None:
        """Both directions work, and nothing is queued."""
        for one, other in ((self.ab, self.ba), (self.ba, self.ab)):
            work = one.send("still here", tag=9)
            assert await other.recv(tag=9, timeout=LIMIT_S) == "still here"
            await work
        for worker in (self.a, self.b):
            assert [link.unread_messages for link in worker.stats().links] == [0]


class BackendConformance:
    """Tests of a backend, with two workers on one loop. Say in `backend` which one, and override what differs.

    Attributes:
        backend: as given to `aiorlinf.init`.
        carrier: what `comm.stats().links[0].backend` says while it is in use; None: the same.
        device_backend: what ``device_backend`` there says, for a backend between accelerators; None: it is not looked at.
        landing: where tensors come to, for `aiorlinf.init(device=...)`.
        dtypes: those that are tried.
    """

    backend: ClassVar[Backend] = "auto"
    carrier: ClassVar[str | None] = None
    device_backend: ClassVar[str | None] = None
    landing: ClassVar[str | None] = None
    dtypes: ClassVar[tuple[torch.dtype, ...]] = DTYPES

    # ---- what can be told

    def surroundings(self) -> AbstractContextManager[object]:
        """What has to be there during each test, such as a device."""
        return nullcontext()

    def collective(self) -> Mapping[str, Any]:
        """More of ``cluster.collective`` in the job's configuration."""
        return {}

    def place(self, values: torch.Tensor) -> torch.Tensor:
        """A tensor with these values, in memory that the backend sends from."""
        return values.clone()

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values of a tensor that has arrived, in CPU memory."""
        return tensor

    # ---- the pair

    @asynccontextmanager
    async def pair(self) -> AsyncIterator[BackendPair]:
        """Two workers."""
        config = {
            "cluster": {
                "collective": {
                    "backend": self.backend,
                    "inline_max_bytes": INLINE,
                    "window_bytes": WINDOW,
                    "chunk_bytes": WINDOW // 8,
                    "shared_memory": {"segment_bytes": 1 << 18},
                    **self.collective(),
                }
            }
        }
        with self.surroundings():
            async with local_cluster(config=config) as cluster:
                a = await cluster.join("a:0", device=self.landing)
                b = await cluster.join("b:0", device=self.landing)
                members = ["a:0", "b:0"]
                pair = BackendPair(cluster, a, b, *(each.collective.create_collective_group(members) for each in (a, b)))
                yield pair
            del a, b, pair
            gc.collect()

    def values(self, nbytes: int, number: int = 0) -> torch.Tensor:
        """So many bytes, different for each number."""
        return (torch.arange(nbytes) * 7 + number * 13).to(torch.uint8)

    def same(self, tensor: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether these values have arrived."""
        got = self.read(tensor)
        return got.dtype == values.dtype and got.shape == values.shape and torch.equal(_bytes(got), _bytes(values))

    # ---- what must hold

    @pytest.mark.asyncio
    async def test_it_is_what_carries_the_payload(self) -> None:
        async with self.pair() as pair:
            values = self.values(8 * INLINE)
            for _ in range(2):
                assert self.same(await pair.trip(self.place(values)), values)
            (stats,) = pair.a.stats().links
            if self.device_backend is not None:
                assert stats.device_backend == self.device_backend, stats.device_reason
            else:
                assert stats.backend == (self.carrier or self.backend), stats.reason
                assert (stats.around_bytes_sent > 0) == (stats.backend != "stream")

    @pytest.mark.asyncio
    async def test_every_size(self) -> None:
        async with self.pair() as pair:
            for nbytes in (0, 1, INLINE - 1, INLINE, INLINE + 1, WINDOW // 8, WINDOW // 8 + 1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW):
                values = self.values(nbytes)
                assert self.same(await pair.trip(self.place(values)), values), f"{nbytes} bytes"
            await pair.sane()

    @pytest.mark.asyncio
    async def test_every_dtype(self) -> None:
        async with self.pair() as pair:
            for dtype in self.dtypes:
                values = (self.values(2 * INLINE) % 2).to(dtype)
                assert self.same(await pair.trip(self.place(values)), values), str(dtype)
            scalar = torch.tensor(2.5)
            assert self.same(await pair.trip(self.place(scalar)), scalar)

    @pytest.mark.asyncio
    async def test_objects_with_many_tensors(self) -> None:
        async with self.pair() as pair:
            parts = [self.values(nbytes, nbytes) for nbytes in (10, 2 * INLINE, 0, INLINE + 3, 5)]
            obj = {"list": [self.place(part) for part in parts], "deep": {"tuple": (self.place(parts[1]), "text", 7)}, "text": "x" * INLINE}
            got = await pair.trip(obj)
            assert all(self.same(tensor, part) for tensor, part in zip(got["list"], parts, strict=True))
            assert self.same(got["deep"]["tuple"][0], parts[1])
            assert got["deep"]["tuple"][1:] == ("text", 7)
            assert got["text"] == obj["text"]

    @pytest.mark.asyncio
    async def test_order_whatever_the_sizes(self) -> None:
        async with self.pair() as pair:
            sizes = [8 * INLINE if number % 3 == 0 else 20 for number in range(40)]
            receives = [pair.ba.recv(timeout=LIMIT_S) for _ in sizes[:20]]
            sends = [pair.ab.send([number, self.place(self.values(size, number))]) for number, size in enumerate(sizes)]
            receives += [pair.ba.recv(timeout=LIMIT_S) for _ in sizes[20:]]
            for number, (size, work) in enumerate(zip(sizes, receives, strict=True)):
                got, tensor = await work
                assert got == number
                assert self.same(tensor, self.values(size, number))
                del tensor
            for send in sends:
                await send

    @pytest.mark.asyncio
    async def test_both_directions_at_once_and_each_may_send_first(self) -> None:
        async with self.pair() as pair:
            values = self.values(WINDOW // 2)
            for _ in range(3):
                sends = [pair.ab.send(self.place(values)), pair.ba.send(self.place(values))]
                for group in (pair.ab, pair.ba):
                    assert self.same(await group.recv(timeout=LIMIT_S), values)
                for send in sends:
                    await send

    @pytest.mark.asyncio
    async def test_what_was_received_is_the_receivers_own(self) -> None:
        async with self.pair() as pair:
            values = self.values(8 * INLINE)
            mine = self.place(values)
            first = await pair.trip(mine)
            mine.fill_(1)
            second = await pair.trip(self.place(values))
            first.fill_(2)
            assert self.same(second, values)
            assert self.same(first, torch.full_like(values, 2))

    @pytest.mark.asyncio
    async def test_a_tensor_into_a_buffer(self) -> None:
        async with self.pair() as pair:
            for number, nbytes in enumerate((16, 8 * INLINE, 2 * WINDOW)):
                values = self.values(nbytes, number)
                out = self.place(torch.zeros(nbytes, dtype=torch.uint8))
                work = pair.ab.send_tensor(self.place(values))
                got = await pair.ba.recv_tensor(out, timeout=LIMIT_S)
                assert got is out
                assert self.same(out, values)
                await work

    @pytest.mark.asyncio
    async def test_a_buffer_that_does_not_fit_is_left_alone(self) -> None:
        async with self.pair() as pair:
            for nbytes in (16, 8 * INLINE):
                before = self.values(nbytes + 1, 5)
                out = self.place(before)
                work = pair.ab.send_tensor(self.place(self.values(nbytes)))
                with pytest.raises(Mismatch):
                    await pair.ba.recv_tensor(out, timeout=LIMIT_S)
                with pytest.raises(Mismatch):
                    await work
                assert self.same(out, before)
            await pair.sane()

    @pytest.mark.asyncio
    async def test_a_cancelled_receive_takes_nothing(self) -> None:
        async with self.pair() as pair:
            for turns in (0, 1, 2, 3, 5, 8, 13, 30):
                values = self.values(8 * INLINE, turns)
                send = pair.ab.send(self.place(values))
                receive = pair.ba.recv()
                for _ in range(turns):
                    await asyncio.sleep(0)
                if receive.cancel():
                    assert self.same(await pair.ba.recv(timeout=LIMIT_S), values)
                else:
                    assert self.same(await receive, values)
                await send
            await pair.sane()

    @pytest.mark.asyncio
    async def test_a_cancelled_send_comes_whole_or_not_at_all(self) -> None:
        async with self.pair() as pair:
            for turns in (0, 1, 2, 3, 5, 8, 13, 30):
                values = self.values(8 * INLINE, turns)
                send = pair.ab.send(self.place(values))
                for _ in range(turns):
                    await asyncio.sleep(0)
                cancelled = send.cancel()
                await pair.ab.send("end")
                got = []
                while not isinstance(value := await pair.ba.recv(timeout=LIMIT_S), str):
                    got.append(value)
                assert len(got) <= 1
                assert cancelled or got
                assert all(self.same(tensor, values) for tensor in got)
            await pair.sane()

    @pytest.mark.asyncio
    async def test_when_the_peer_dies_everything_ends_and_its_next_life_is_met(self) -> None:
        async with self.pair() as pair:
            values = self.values(8 * INLINE)
            assert self.same(await pair.trip(self.place(values)), values)
            works = [pair.ab.recv(tag=1), pair.ab.recv(tag=2), pair.ab.send_tensor(self.place(values), tag=3)]
            works += [pair.ab.send(self.place(self.values(4 * WINDOW)), tag=4)]
            await asyncio.sleep(0.01)
            await pair.cluster.kill("b:0")
            for work in works:
                with pytest.raises(PeerLost):
                    await asyncio.wait_for(work, LIMIT_S)
            again = await pair.cluster.join("b:0", device=self.landing)
            await pair.a.wait_for("b:0", LIMIT_S)
            for turn in itertools.count():
                work = pair.ab.send(self.place(values))
                try:
                    await work
                    break
                except AiorlinfError:  # the news of the new life may be later than the wait for it
                    assert turn < 100
                    await asyncio.sleep(0.05)
            assert self.same(await again.recv("a:0", timeout=LIMIT_S), values)

    @pytest.mark.asyncio
    async def test_when_the_peer_leaves_what_it_has_sent_is_there(self) -> None:
        async with self.pair() as pair:
            values = self.values(8 * INLINE)
            send = pair.ba.send(self.place(values))
            waiting = pair.ab.recv(tag=1)
            assert self.same(await pair.trip(self.place(values)), values)
            leaving = asyncio.create_task(pair.cluster.leave("b:0"))
            assert self.same(await pair.ab.recv(timeout=LIMIT_S), values)
            await send
            await leaving
            with pytest.raises(PeerLeft):
                await asyncio.wait_for(waiting, LIMIT_S)

    @pytest.mark.asyncio
    async def test_memory_comes_back(self) -> None:
        async with self.pair() as pair:
            for number in range(10):
                values = self.values(WINDOW // 4, number)
                assert self.same(await pair.trip(self.place(values)), values)
            for turn in itertools.count():
                gc.collect()
                links = [*pair.a.stats().links, *pair.b.stats().links]
                if not any(link.shared_bytes_lent or link.shared_bytes_held or link.pending_sends for link in links):
                    break
                assert turn < 500, links
                await asyncio.sleep(0.01)
            assert pair.b.stats().buffer_pool.leased_bytes == 0


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
