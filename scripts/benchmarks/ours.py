"""aiorlinf itself: large payloads in shared memory, on the link (``stream``), on Gloo pairs, or as it chooses by itself (``auto``)."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, Final, Literal

import torch

import aiorlinf
from scripts.benchmarks.contender import SMALL_DICT, Contender, Effort, Metrics, Place, unknown
from scripts.benchmarks.footprint import KEPT, Footprint
from scripts.benchmarks.tensors import (
    both_rates,
    check_bulk,
    check_kept,
    check_nested,
    check_small_dict,
    check_stream,
    make_bulk,
    make_nested,
    make_stream,
)
from scripts.benchmarks.ticker import LoopDelay

__all__ = ["OursAuto", "OursGloo", "OursShm", "OursStream"]

WARM_UP: Final = 50
GIVEN_WARM_UP: Final = 3
WINDOW: Final = 256
"""Works kept under way by a sender that pipelines."""
SIGNAL: Final = 7
"""Tag of the answering half's acknowledgements."""


class Ours(Contender):
    """Two workers; the one that leads embeds the manager."""

    backend: ClassVar[Literal["auto", "stream", "shm", "gloo"]]
    needs: ClassVar[tuple[str, ...]] = ("uvloop", "torch", "aiorlinf")

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.worker: aiorlinf.Worker | None = None
        self.made: aiorlinf.CollectiveGroup | None = None

    async def offer(self) -> dict[str, str]:
        if not self.leads:
            return {}
        await self._start()
        assert self.worker is not None
        return self.worker.env("bench:1")

    async def open(self, offer: dict[str, str]) -> None:
        if not self.leads:
            os.environ.update(offer)
            await self._start()
        assert self.worker is not None
        self.made = self.worker.collective.create_collective_group(["bench:0", "bench:1"])

    @property
    def group(self) -> aiorlinf.CollectiveGroup:
        assert self.made is not None
        return self.made

    async def _start(self) -> None:
        self.worker = aiorlinf.init(f"bench:{self.place.role}", backend=self.backend)
        await self.worker

    async def close(self) -> None:
        if self.worker is not None:
            await self.worker.close()

    async def measure(self, case: str, variant: str, effort: Effort) -> Metrics:
        if case == "first_message":
            return await self._first(variant)
        if case == "small_dict_rtt":
            return await self._objects(SMALL_DICT, check_small_dict, effort.round_trips)
        if case == "small_tensor_rtt":
            return await self._objects(make_stream()[1], lambda back: check_stream(back, 1), effort.round_trips)
        if case == "nested":
            return await self._nested(effort)
        if case == "given":
            size, _, filled = variant.partition(" ")
            return await self._given(int(size), effort, filled=bool(filled))
        if case == "steady":
            return await self._steady(effort)
        if case == "tensor":
            return await (self._tensor_into if variant == "into" else self._tensor_fresh)(effort)
        if case == "stream_256B":
            return await self._stream(effort.stream_messages, window=WINDOW if variant == "window" else 1)
        if case in ("loop_delay", "both_directions"):
            return await self._both_ways(effort, into=variant == "into")
        if case == "in_flight":
            return await self._in_flight(effort.works_in_flight)
        raise unknown(case, variant)

    async def _first(self, variant: str) -> Metrics:
        obj: Any = SMALL_DICT if variant == "object" else make_bulk(1 << 20)
        start = time.perf_counter()
        if self.leads:
            await self.group.send(obj)
            await self.group.recv(tag=SIGNAL)
            return {"time": (time.perf_counter() - start) * 1e3}
        await self.group.recv()
        await self.group.send(None, tag=SIGNAL)
        return {}

    async def _objects(self, sample: Any, check: Callable[[Any], None], count: int) -> Metrics:
        took, back = [], None
        group = self.group
        for _ in range(count + WARM_UP):
            start = time.perf_counter()
            if self.leads:
                await group.send(sample)
                back = await group.recv()
                took.append(time.perf_counter() - start)
            else:
                await group.send(await group.recv())
        if not self.leads:
            return {}
        check(back)
        took = sorted(took[WARM_UP:])
        return {"time": took[len(took) // 2] * 1e6}

    async def _tensor_into(self, effort: Effort) -> Metrics:
        bulk = make_bulk(effort.tensor_bytes)
        took = []
        if not self.leads:
            bulk.zero_()
        for _ in range(effort.transfers + 1):
            start = time.perf_counter()
            if self.leads:
                await self.group.send_tensor(bulk)
                await self.group.recv(tag=SIGNAL)
                took.append(time.perf_counter() - start)
            else:
                await self.group.recv_tensor(bulk)
                await self.group.send(None, tag=SIGNAL)
        return self._tensor_result(bulk, took, effort)

    async def _tensor_fresh(self, effort: Effort) -> Metrics:
        bulk = make_bulk(effort.tensor_bytes)
        took = []
        for _ in range(effort.transfers + 1):
            start = time.perf_counter()
            if self.leads:
                await self.group.send(bulk)
                await self.group.recv(tag=SIGNAL)
                took.append(time.perf_counter() - start)
            else:
                del bulk
                bulk = await self.group.recv()
                await self.group.send(None, tag=SIGNAL)
        return self._tensor_result(bulk, took, effort)

    def _tensor_result(self, bulk: torch.Tensor, took: list[float], effort: Effort) -> Metrics:
        if not self.leads:
            check_bulk(bulk, effort.tensor_bytes)
            return {}
        took = sorted(took[1:])
        return {"rate": effort.tensor_bytes / took[len(took) // 2] / 1e9}

    async def _nested(self, effort: Effort) -> Metrics:
        nested: Any = make_nested(effort.tensor_bytes) if self.leads else None
        took = []
        for _ in range(effort.transfers + 1):
            start = time.perf_counter()
            if self.leads:
                await self.group.send(nested)
                await self.group.recv(tag=SIGNAL)
                took.append(time.perf_counter() - start)
            else:
                nested = None
                nested = await self.group.recv()
                await self.group.send(None, tag=SIGNAL)
        if not self.leads:
            check_nested(nested, effort.tensor_bytes)
            return {}
        took = sorted(took[1:])
        return {"rate": effort.tensor_bytes / took[len(took) // 2] / 1e9}

    async def _given(self, nbytes: int, effort: Effort, *, filled: bool) -> Metrics:
        """Tensors made in shared memory; making them is not in the time.

        ``filled``: the sender writes all of each tensor just before. Else it does so in the warm-up, which makes the pages, and
        writes the ends from then on.
        """
        took = []
        for index in range(effort.given_transfers + GIVEN_WARM_UP):
            if self.leads:
                assert self.worker is not None
                tensor = self.worker.empty(nbytes // 4, dtype=torch.float32)
                if filled or index < GIVEN_WARM_UP:
                    tensor.fill_(index)
                tensor[0] = tensor[-1] = index
                start = time.perf_counter()
                await self.group.send(tensor)
                await self.group.recv(tag=SIGNAL)
                took.append(time.perf_counter() - start)
            else:
                tensor = await self.group.recv()
                await self.group.send(None, tag=SIGNAL)
                if (tensor.nbytes, tensor[0].item(), tensor[-1].item()) != (nbytes, index, index):
                    raise AssertionError("the tensor that arrived is not the one that was sent")
            del tensor
        if not self.leads:
            return {}
        took = sorted(took[GIVEN_WARM_UP:])
        return {"time": took[len(took) // 2] * 1e6}

    async def _steady(self, effort: Effort) -> Metrics:
        footprint = Footprint(effort.steady_messages)
        kept: deque[torch.Tensor] = deque(maxlen=KEPT)
        bulk = make_bulk(effort.steady_bytes)
        if not self.leads:
            del bulk
        start = time.perf_counter()
        for index in range(effort.steady_messages):
            if self.leads:
                bulk[0] = index
                await self.group.send(bulk)
            else:
                kept.append(await self.group.recv())
            footprint.passed_one()
        if self.leads:
            await self.group.recv(tag=SIGNAL)
            rate = effort.steady_messages * effort.steady_bytes / (time.perf_counter() - start) / 1e9
            return {**footprint.metrics(), "rate": rate}
        found = footprint.metrics()
        check_kept(kept, effort.steady_messages)
        await self.group.send(None, tag=SIGNAL)
        return found

    async def _stream(self, count: int, *, window: int) -> Metrics:
        group = self.group
        if self.leads:
            tensors = make_stream()
            start = time.perf_counter()
            if window == 1:
                for index in range(count):
                    await group.send(tensors[index % len(tensors)])
            else:
                pending: deque[aiorlinf.AsyncWork[None]] = deque()
                for index in range(count):
                    pending.append(group.send(tensors[index % len(tensors)]))
                    if len(pending) >= window:
                        await pending.popleft()
                await aiorlinf.wait_all(list(pending))
            await group.recv(tag=SIGNAL)
            return {"rate": count / (time.perf_counter() - start)}
        got = make_stream()[0]
        for _ in range(count):
            got = await group.recv()
        check_stream(got, count - 1)
        await group.send(None, tag=SIGNAL)
        return {}

    async def _both_ways(self, effort: Effort, *, into: bool) -> Metrics:
        group, count = self.group, effort.both_ways_messages
        bulk = make_bulk(effort.both_ways_bytes)
        # Tensors that arrive are kept until the clock has stopped: giving 64 MiB back to the system takes 5 ms of the loop's time,
        # and when that happens is the user's choice.
        arrived = [torch.zeros_like(bulk)] if into else []

        async def send() -> None:
            for _ in range(count):
                await (group.send_tensor(bulk) if into else group.send(bulk))

        async def receive() -> None:
            for _ in range(count):
                if into:
                    await group.recv_tensor(arrived[0])
                else:
                    arrived.append(await group.recv())

        with LoopDelay() as delay:
            start = time.perf_counter()
            await asyncio.gather(send(), receive())
            took = time.perf_counter() - start
        check_bulk(arrived[-1], effort.both_ways_bytes)
        return {**delay.metrics(), **({"rate": both_rates(effort, took)} if self.leads else {})}

    async def _in_flight(self, count: int) -> Metrics:
        """All receives are posted before the first send; all sends are started before the first is waited for."""
        group = self.group
        before = kernel_threads()
        if self.leads:
            await group.recv(tag=SIGNAL)  # the other half has posted
            start = time.perf_counter()
            works: list[aiorlinf.AsyncWork[Any]] = [group.send(index) for index in range(count)]
        else:
            start = time.perf_counter()
            works = [group.recv() for _ in range(count)]
            await group.send(None, tag=SIGNAL)
        during = kernel_threads()
        found = await aiorlinf.wait_all(works)
        took = time.perf_counter() - start
        if not self.leads and found != list(range(count)):
            raise AssertionError("messages arrived in another order than they were sent")
        return {"time": took / count * 1e6, "threads": float(max(during, kernel_threads()) - before)}


def kernel_threads() -> int:
    """Threads of this process as the kernel counts them: native ones too."""
    return len(os.listdir("/proc/self/task"))


class OursAuto(Ours):
    backend = "auto"


class OursShm(Ours):
    backend = "shm"


class OursStream(Ours):
    backend = "stream"


class OursGloo(Ours):
    backend = "gloo"
