"""The checks: each has two halves, which run in two processes, and says what it found, or raises."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import torch

from aiorlinf import Worker
from aiorlinf.errors import BackendUnavailable, RemoteError
from scripts.gpuchecks.place import Place

__all__ = ["CHECKS", "Check", "Half", "told"]

Half = Callable[[Worker, Place], Awaitable[str]]

A, B = "a:0", "b:0"
MIB = 1 << 20


@dataclass(frozen=True)
class Check:
    """One thing to be checked.

    Attributes:
        first, second: run in the workers a:0 and b:0.
        devices: how many it needs.
        backend, fallback: settings of the job.
    """

    name: str
    first: Half
    second: Half
    devices: int = 1
    backend: str = "auto"
    fallback: bool = True


def values(place: Place, mib: int, seed: int = 0) -> torch.Tensor:
    """Numbers that no other seed gives."""
    return torch.arange(seed, seed + mib * MIB // 4 // place.scale, dtype=torch.int32)


def expect(place: Place, tensor: torch.Tensor, wanted: torch.Tensor, device: str) -> None:
    """Raise unless it is that."""
    if str(tensor.device) != device or not torch.equal(place.host(tensor), wanted):
        raise AssertionError(f"{list(tensor.shape)} on {tensor.device} is not what was sent, or not on {device}")


def told(comm: Worker) -> str:
    """How tensors on accelerators went."""
    (link,) = comm.collective.create_collective_group([A, B]).stats()
    return f"{link.device_backend}: {link.device_reason}"


async def send_mixed(comm: Worker, place: Place) -> str:
    large = values(place, 64)
    with place.on_a_stream():
        there = place.late(large)
        work = comm.send({"there": there, "here": large[:1000].clone(), "empty": there[:0], "one": there[7].clone()}, B)
    del there  # it must live on until it is sent
    await work
    await comm.recv(B)
    return told(comm)


async def recv_mixed(comm: Worker, place: Place) -> str:
    large = values(place, 64)
    device = f"{place.kind}:0"
    got = await comm.recv(A)
    expect(place, got["there"], large, device)
    expect(place, got["here"], large[:1000], "cpu")
    expect(place, got["empty"], large[:0], device)
    expect(place, got["one"], large[7], device)
    await comm.send("seen", A)
    return ""


async def send_to_cpu(comm: Worker, place: Place) -> str:
    await comm.send(place.late(values(place, 16)), B)
    await comm.recv(B)
    return told(comm)


async def recv_on_cpu(comm: Worker, place: Place) -> str:
    expect(place, await comm.recv(A, device="cpu"), values(place, 16), "cpu")
    await comm.send("seen", A)
    return ""


async def send_tensors(comm: Worker, place: Place) -> str:
    for seed in range(4):
        await comm.send_tensor(place.late(values(place, 16, seed)), B)
    return told(comm)


async def recv_tensors(comm: Worker, place: Place) -> str:
    for seed in range(4):
        wanted = values(place, 16, seed)
        out = place.late(torch.zeros_like(wanted))
        expect(place, await comm.recv_tensor(out, A), wanted, f"{place.kind}:0")
    return ""


async def send_under_pressure(comm: Worker, place: Place) -> str:
    works = []
    for seed in range(40):
        works.append(comm.send(place.late(values(place, 16, seed)), B, tag=seed % 4))
        noise = [torch.full((place.scale,), -1, device=f"{place.kind}:0") for _ in range(4)]  # takes memory that was freed too early
        del noise
    await asyncio.gather(*works)
    await comm.recv(B)
    return told(comm)


async def recv_under_pressure(comm: Worker, place: Place) -> str:
    for seed in range(40):
        got = await comm.recv(A, tag=seed % 4)
        expect(place, got, values(place, 16, seed), f"{place.kind}:0")
        del got
    await comm.send("seen", A)
    return ""


async def send_both_ways(comm: Worker, place: Place) -> str:
    peer = B if comm.address == A else A
    works = [comm.send(place.late(values(place, 8, seed)), peer) for seed in range(10)]
    for seed in range(10):
        expect(place, await comm.recv(peer), values(place, 8, seed), f"{place.kind}:0")
    await asyncio.gather(*works)
    await asyncio.gather(comm.send("seen", peer), comm.recv(peer))
    return told(comm)


async def send_refused(comm: Worker, place: Place) -> str:
    try:
        await comm.send(place.late(values(place, 1)), B)
    except BackendUnavailable as error:
        return str(error)
    raise AssertionError("two workers on one device must not be able to use nccl")


async def recv_refused(comm: Worker, place: Place) -> str:
    try:
        await comm.recv(A)
    except RemoteError as error:
        return str(error)
    raise AssertionError("a message came")


async def send_across(comm: Worker, place: Place) -> str:
    for seed in range(10):
        await comm.send({"there": place.late(values(place, 64, seed)), "seed": seed}, B)
    await comm.recv(B)
    return told(comm)


async def recv_across(comm: Worker, place: Place) -> str:
    for seed in range(10):
        got = await comm.recv(A, device=f"{place.kind}:1")
        expect(place, got["there"], values(place, 64, seed), f"{place.kind}:1")
    await comm.send("seen", A)
    return ""


CHECKS = [
    Check("mixed message, one device", send_mixed, recv_mixed),
    Check("mixed message, staged", send_mixed, recv_mixed, backend="shm"),
    Check("to CPU memory", send_to_cpu, recv_on_cpu),
    Check("tensors into tensors", send_tensors, recv_tensors),
    Check("tensors into tensors, staged", send_tensors, recv_tensors, backend="stream"),
    Check("lifetimes under pressure", send_under_pressure, recv_under_pressure),
    Check("lifetimes under pressure, staged", send_under_pressure, recv_under_pressure, backend="shm"),
    Check("both directions at once", send_both_ways, send_both_ways),
    Check("nccl asked for on one device", send_mixed, recv_mixed, backend="nccl"),
    Check("nccl required on one device", send_refused, recv_refused, backend="nccl", fallback=False),
    Check("two devices", send_across, recv_across, devices=2),
    Check("two devices, nccl", send_across, recv_across, devices=2, backend="nccl"),
]
