"""What is measured: each number with what the machine itself can do beside it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import torch

from aiorlinf import Worker
from aiorlinf.device.registry import runtime_of
from aiorlinf.link.device_events import watch_events
from scripts.gpuchecks.checks import MIB, A, B, Check, told
from scripts.gpuchecks.place import Place

__all__ = ["SPEEDS"]

ROUNDS = 7
_SHORT_CYCLES = 2_000_000
"""About a millisecond."""


def _sync(place: Place) -> None:
    if place.kind == "cuda":
        torch.cuda.synchronize()


async def _timed(turn: Callable[[], Awaitable[Any]]) -> float:
    """Seconds of the quickest of some rounds; the first ones make pairs, caches and pinned memory."""
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        await turn()
        times.append(time.perf_counter() - begin)
    return min(times)


def _gib(place: Place) -> torch.Tensor:
    return torch.ones(1024 * MIB // place.scale, dtype=torch.uint8, device=f"{place.kind}:0")


async def send_large(comm: Worker, place: Place) -> str:
    tensor = _gib(place)
    _sync(place)

    async def turn() -> None:
        work = comm.send(tensor, B)
        await comm.recv(B)
        await work

    seconds = await _timed(turn)
    return f"{1e3 * seconds:.2f} ms a round, {tensor.nbytes / seconds / 1e9:.1f} GB/s ({told(comm)})"


async def recv_large(comm: Worker, place: Place) -> str:
    for _ in range(ROUNDS):
        await comm.recv(A)
        await comm.send(None, A)
    return ""


async def send_small(comm: Worker, place: Place) -> str:
    tensor = torch.ones(256, device=f"{place.kind}:0")

    async def turn() -> None:
        for _ in range(20):
            work = comm.send(tensor, B)
            await comm.recv(B)
            await work

    return f"{1e6 * await _timed(turn) / 20:.0f} us there and back ({told(comm)})"


async def recv_small(comm: Worker, place: Place) -> str:
    for _ in range(ROUNDS * 20):
        await comm.send(await comm.recv(A), A)
    return ""


async def pinned_copy(comm: Worker, place: Place) -> str:
    if place.kind != "cuda":
        return "only on a real device"
    tensor = _gib(place)
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)

    async def out() -> None:
        host.copy_(tensor, non_blocking=True)
        _sync(place)

    async def back() -> None:
        tensor.copy_(host, non_blocking=True)
        _sync(place)

    first, second = await _timed(out), await _timed(back)
    return f"out {tensor.nbytes / first / 1e9:.1f} GB/s, in {tensor.nbytes / second / 1e9:.1f} GB/s"


async def event_to_await(comm: Worker, place: Place) -> str:
    """From the moment that a thread, which does nothing but wait for the device, knows of an event, to who awaits it on the loop."""
    runtime = runtime_of(place.kind)
    if place.kind != "cuda" or runtime is None:
        return "only on a real device"
    cuda: Any = torch.cuda
    loop = asyncio.get_running_loop()
    late = []
    for _ in range(ROUNDS * 20):
        happened = loop.create_future()
        cuda._sleep(_SHORT_CYCLES)
        stream = runtime.current_stream(0)
        other = cuda.Event(blocking=False)
        other.record(stream)
        watch_events(comm.home, [(runtime, runtime.record(stream))], happened.set_result)

        def known(event: Any) -> float:
            event.synchronize()
            return time.perf_counter()

        waiting = loop.run_in_executor(None, known, other)
        await happened
        here = time.perf_counter()
        late.append(here - await waiting)
    late.sort()
    return f"half within {1e6 * late[len(late) // 2]:.0f} us, 99 % within {1e6 * late[int(0.99 * len(late))]:.0f} us"


async def nothing(comm: Worker, place: Place) -> str:
    return ""


SPEEDS = [
    Check("from an event to who awaits it", event_to_await, nothing),
    Check("copy_ between the device and pinned memory, 1 GiB", pinned_copy, nothing),
    Check("1 GiB, same device", send_large, recv_large),
    Check("1 GiB, staged through shared memory", send_large, recv_large, backend="shm"),
    Check("1 GiB, staged over the stream", send_large, recv_large, backend="stream"),
    Check("1 KiB, same device", send_small, recv_small),
    Check("1 KiB, staged", send_small, recv_small, backend="stream"),
]
