"""What is measured: each number with what the machine itself can do beside it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import torch

from aiorlinf import Worker
from scripts.gpuchecks.checks import MIB, A, B, Check, told
from scripts.gpuchecks.place import Place

__all__ = ["SPEEDS"]

ROUNDS = 7


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


async def nothing(comm: Worker, place: Place) -> str:
    return ""


SPEEDS = [
    Check("copy_ between the device and pinned memory, 1 GiB", pinned_copy, nothing),
    Check("1 GiB, same device", send_large, recv_large),
    Check("1 GiB, staged through shared memory", send_large, recv_large, backend="shm"),
    Check("1 GiB, staged over the stream", send_large, recv_large, backend="stream"),
    Check("1 KiB, same device", send_small, recv_small),
    Check("1 KiB, staged", send_small, recv_small, backend="stream"),
]
