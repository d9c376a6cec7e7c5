"""Bare uvloop sockets and memory copies: what everything else is held against."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import ClassVar, Final, cast

from scripts.benchmarks import limits
from scripts.benchmarks.bare_protocols import (
    BLOCK_MESSAGES,
    Ask,
    Bulk,
    BulkSource,
    ByteEcho,
    BytePing,
    ObjectEcho,
    ObjectPing,
    ObjectTalk,
    Part,
    StreamSink,
    StreamSource,
    small_dict,
    small_tensor,
)
from scripts.benchmarks.contender import Contender, Effort, Metrics, Place, unknown
from scripts.benchmarks.tensors import both_rates, byte_view, check_bulk, make_bulk
from scripts.benchmarks.ticker import LoopDelay

__all__ = ["Bare"]

WARM_UP: Final = 50
ROUND_TRIPS: Final = ("small_dict_rtt", "small_tensor_rtt", "first_message")
STREAMS: Final = {"stream_256B": 64, "channel_items": 256}
"""Elements of each tensor."""
BOTH_WAYS: Final = ("loop_delay", "both_directions")


class Bare(Contender):
    """A connection per measurement. A variant ends in ``_tcp`` or ``_unix``."""

    needs: ClassVar[tuple[str, ...]] = ("uvloop", "torch")

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.servers: list[asyncio.Server] = []
        self.accepted: asyncio.Queue[asyncio.Transport] = asyncio.Queue()
        self.where: dict[str, str] = {}

    async def offer(self) -> dict[str, str]:
        if self.leads:
            return {}
        loop = asyncio.get_running_loop()
        path = str(self.place.directory / f"bare{self.place.generation}.sock")
        tcp = await loop.create_server(lambda: Greeter(self.accepted), "127.0.0.1", 0)
        unix = await loop.create_unix_server(lambda: Greeter(self.accepted), path)
        self.servers = [tcp, unix]
        return {"port": str(tcp.sockets[0].getsockname()[1]), "path": path}

    async def open(self, offer: dict[str, str]) -> None:
        self.where = offer

    async def close(self) -> None:
        for server in self.servers:
            server.close()
            await server.wait_closed()

    async def measure(self, case: str, variant: str, effort: Effort) -> Metrics:
        if variant == "memcpy_both":
            found = limits.memcpy("memcpy_warm", replace(effort, tensor_bytes=effort.both_ways_bytes, transfers=effort.both_ways_messages))
            return {"rate": 2 * found["rate"]} if self.leads else {}
        if variant in ("memcpy_1MiB", "memcpy_1MiB_many"):
            small = replace(effort, tensor_bytes=1 << 20, transfers=40 * effort.transfers)
            return limits.memcpy("memcpy_many" if variant.endswith("many") else "memcpy_warm", small) if self.leads else {}
        if variant.startswith("memcpy"):
            return limits.memcpy(variant, effort) if self.leads else {}
        if variant == "idle":
            with LoopDelay() as delay:
                await asyncio.sleep(0.3)
            return delay.metrics()
        start = time.perf_counter()
        transport = await (self._connect(variant) if self.leads else self._accept())
        try:
            found = await (self._ask if self.leads else self._answer)(transport, case, variant, effort)
        finally:
            transport.close()
        if case == "first_message" and self.leads:
            return {"time": (found["first"] - start) * 1e3}
        return found

    async def _connect(self, variant: str) -> asyncio.Transport:
        loop = asyncio.get_running_loop()
        ask = Ask(b"?")
        if variant.endswith("unix"):
            await loop.create_unix_connection(lambda: ask, self.where["path"])
        else:
            await loop.create_connection(lambda: ask, "127.0.0.1", int(self.where["port"]))
        await ask.agreed
        assert ask.transport is not None
        return ask.transport

    async def _accept(self) -> asyncio.Transport:
        return await self.accepted.get()

    async def _ask(self, transport: asyncio.Transport, case: str, variant: str, effort: Effort) -> Metrics:
        payload = small_tensor() if case == "small_tensor_rtt" else small_dict()
        if variant.startswith("await"):
            talk = ObjectTalk(transport, payload)
            transport.set_protocol(talk)
            took = sorted((await talk.ask(effort.round_trips + WARM_UP))[WARM_UP:])
            return {"time": took[len(took) // 2] * 1e6}
        if case in ROUND_TRIPS:
            count = 1 if case == "first_message" else effort.round_trips + WARM_UP
            ping = BytePing(transport, count) if variant.startswith("byte") else ObjectPing(transport, payload, count)
            transport.set_protocol(ping)
            ping.go()
            await ping.finished
            if case == "first_message":
                return {"first": time.perf_counter()}
            took = sorted(ping.took[WARM_UP:])
            return {"time": took[len(took) // 2] * 1e6}
        if case in STREAMS:
            source = StreamSource(transport, effort.stream_messages, BLOCK_MESSAGES if "coalesced" in variant else 1, STREAMS[case])
            transport.set_protocol(source)
            start = time.perf_counter()
            await source.run()
            return {"rate": effort.stream_messages / (time.perf_counter() - start)}
        if case == "tensor":
            bulk_source = BulkSource(transport)
            transport.set_protocol(bulk_source)
            view = byte_view(make_bulk(effort.tensor_bytes))
            took = sorted([await bulk_source.send(view) for _ in range(effort.transfers + 1)][1:])
            return {"rate": effort.tensor_bytes / took[len(took) // 2] / 1e9}
        if case in BOTH_WAYS:
            return await self._both_ways(transport, effort)
        raise unknown(case, variant)

    async def _answer(self, transport: asyncio.Transport, case: str, variant: str, effort: Effort) -> Metrics:
        if case in BOTH_WAYS:
            return await self._both_ways(transport, effort, go=True)
        payload = small_tensor() if case == "small_tensor_rtt" else small_dict()
        if variant.startswith("await"):
            talk = ObjectTalk(transport, payload)
            transport.set_protocol(talk)
            transport.write(b"!")
            await talk.answer(effort.round_trips + WARM_UP)
            await talk.finished
            return {}
        if case in ROUND_TRIPS:
            part: Part = ByteEcho(transport) if variant.startswith("byte") else ObjectEcho(transport, payload)
        elif case in STREAMS:
            part = StreamSink(transport, effort.stream_messages, STREAMS[case])
        elif case == "tensor":
            part = Bulk(transport, effort.tensor_bytes, effort.transfers + 1, fresh="fresh" in variant, acknowledge=True)
        else:
            raise unknown(case, variant)
        transport.set_protocol(part)
        transport.write(b"!")
        await part.finished
        if isinstance(part, Bulk):
            check_bulk(part.target, effort.tensor_bytes)
        return {}

    async def _both_ways(self, transport: asyncio.Transport, effort: Effort, *, go: bool = False) -> Metrics:
        view = byte_view(make_bulk(effort.both_ways_bytes))
        part = Bulk(transport, effort.both_ways_bytes, effort.both_ways_messages, fresh=False, acknowledge=False)
        transport.set_protocol(part)
        if go:
            # Nothing may follow the go before the asking end has taken its part.
            transport.write(b"!")
            await part.begun.wait()
        with LoopDelay() as delay:
            start = time.perf_counter()
            for _ in range(effort.both_ways_messages):
                await part.send(view)
            await part.finished
            took = time.perf_counter() - start
        return {**delay.metrics(), **({"rate": both_rates(effort, took)} if self.leads else {})}


class Greeter(asyncio.Protocol):
    """The answering end before it takes its part."""

    def __init__(self, accepted: asyncio.Queue[asyncio.Transport]) -> None:
        self.accepted = accepted
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        # The asking end writes nothing more before it is answered, so `data` is its question alone.
        assert self.transport is not None
        self.accepted.put_nowait(self.transport)
