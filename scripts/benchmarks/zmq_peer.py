"""pyzmq with its asyncio interface on uvloop, over a Unix socket."""

from __future__ import annotations

import asyncio
import importlib
import pickle
import time
from typing import Any, ClassVar, Final

import torch

from scripts.benchmarks.contender import SMALL_DICT, Contender, Effort, Metrics, Place, unknown
from scripts.benchmarks.tensors import (
    both_rates,
    byte_view,
    check_bulk,
    check_nested,
    check_stream,
    copied_bytes,
    made_from,
    make_bulk,
    make_nested,
    make_stream,
)

__all__ = ["Zmq"]

WARM_UP: Final = 20
DONE: Final = b"!"


class Zmq(Contender):
    """One PAIR socket on each side."""

    needs: ClassVar[tuple[str, ...]] = ("zmq", "uvloop", "torch")

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        # pyzmq is an optional peer, so nothing here may need its types.
        zmq = importlib.import_module("zmq")
        self.context: Any = importlib.import_module("zmq.asyncio").Context()
        self.socket: Any = self.context.socket(zmq.PAIR)
        self.address = f"ipc://{place.directory}/zmq{place.generation}.sock"
        self.connected = False

    async def offer(self) -> dict[str, str]:
        if not self.leads:
            self.socket.bind(self.address)
        return {}

    async def open(self, offer: dict[str, str]) -> None:
        """Nothing to do: the first measurement connects."""

    async def close(self) -> None:
        self.socket.close(linger=0)
        self.context.term()

    async def measure(self, case: str, variant: str, effort: Effort) -> Metrics:
        start = time.perf_counter()
        if self.leads and not self.connected:
            self.socket.connect(self.address)
            self.connected = True
        if case == "first_message":
            await self._objects(1)
            return {"time": (time.perf_counter() - start) * 1e3} if self.leads else {}
        if case == "small_dict_rtt":
            took = (await self._objects(effort.round_trips + WARM_UP))[WARM_UP:]
            return {"time": sorted(took)[len(took) // 2] * 1e6} if self.leads else {}
        if case == "small_tensor_rtt":
            return await self._small_tensor(effort.round_trips)
        if case == "nested":
            return await self._nested(effort)
        if case == "both_directions":
            return await self._both_ways(effort)
        if case == "tensor":
            return await self._tensor(effort, fresh=variant == "fresh")
        if case == "stream_256B":
            return await self._stream(effort.stream_messages)
        raise unknown(case, variant)

    async def _objects(self, count: int) -> list[float]:
        took, back = [], None
        for _ in range(count):
            start = time.perf_counter()
            if self.leads:
                await self.socket.send(pickle.dumps(SMALL_DICT, 5))
                back = pickle.loads(await self.socket.recv())
                took.append(time.perf_counter() - start)
            else:
                await self.socket.send(pickle.dumps(pickle.loads(await self.socket.recv()), 5))
        if self.leads and back != SMALL_DICT:
            raise AssertionError("another object came back")
        return took

    async def _small_tensor(self, count: int) -> Metrics:
        took, back = [], make_stream()[1]
        for _ in range(count + WARM_UP):
            start = time.perf_counter()
            if self.leads:
                await self.socket.send(copied_bytes(back))
                back = made_from(await self.socket.recv())
                took.append(time.perf_counter() - start)
            else:
                await self.socket.send(copied_bytes(made_from(await self.socket.recv())))
        if not self.leads:
            return {}
        check_stream(back, 1)
        took = sorted(took[WARM_UP:])
        return {"time": took[len(took) // 2] * 1e6}

    async def _nested(self, effort: Effort) -> Metrics:
        nested = make_nested(effort.tensor_bytes) if self.leads else {}
        took = []
        for _ in range(effort.transfers + 1):
            start = time.perf_counter()
            if self.leads:
                await self.socket.send(pickle.dumps(nested, 5), copy=False)
                await self.socket.recv()
                took.append(time.perf_counter() - start)
            else:
                nested = pickle.loads((await self.socket.recv(copy=False)).buffer)
                await self.socket.send(DONE)
        if not self.leads:
            check_nested(nested, effort.tensor_bytes)
            return {}
        took = sorted(took[1:])
        return {"rate": effort.tensor_bytes / took[len(took) // 2] / 1e9}

    async def _both_ways(self, effort: Effort) -> Metrics:
        bulk = make_bulk(effort.both_ways_bytes)
        arrived = torch.zeros_like(bulk)

        async def send() -> None:
            for _ in range(effort.both_ways_messages):
                await self.socket.send(byte_view(bulk), copy=False)

        async def receive() -> None:
            for _ in range(effort.both_ways_messages):
                byte_view(arrived)[:] = (await self.socket.recv(copy=False)).buffer

        start = time.perf_counter()
        await asyncio.gather(send(), receive())
        took = time.perf_counter() - start
        check_bulk(arrived, effort.both_ways_bytes)
        return {"rate": both_rates(effort, took)} if self.leads else {}

    async def _tensor(self, effort: Effort, *, fresh: bool) -> Metrics:
        bulk = make_bulk(effort.tensor_bytes)
        took = []
        if not self.leads:
            bulk.zero_()
        for _ in range(effort.transfers + 1):
            start = time.perf_counter()
            if self.leads:
                await self.socket.send(byte_view(bulk), copy=False)
                await self.socket.recv()
                took.append(time.perf_counter() - start)
                continue
            frame = await self.socket.recv(copy=False)
            if fresh:
                # The message's own memory is new and writable: the tensor takes it over without a copy.
                bulk = torch.frombuffer(frame.buffer, dtype=torch.float32)
            else:
                byte_view(bulk)[:] = frame.buffer
            del frame
            await self.socket.send(DONE)
        if not self.leads:
            check_bulk(bulk, effort.tensor_bytes)
            return {}
        took = sorted(took[1:])
        return {"rate": effort.tensor_bytes / took[len(took) // 2] / 1e9}

    async def _stream(self, count: int) -> Metrics:
        if self.leads:
            tensors = make_stream()
            start = time.perf_counter()
            for index in range(count):
                await self.socket.send(copied_bytes(tensors[index % len(tensors)]))
            await self.socket.recv()
            return {"rate": count / (time.perf_counter() - start)}
        got = None
        for _ in range(count):
            got = made_from(await self.socket.recv())
        assert got is not None
        check_stream(got, count - 1)
        await self.socket.send(DONE)
        return {}
