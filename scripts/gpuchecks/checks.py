"""The checks: each has two halves, which run in two processes, and says what it found, or raises."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import torch

from aiorlinf import Channel, Worker
from aiorlinf.errors import BackendUnavailable, RemoteError
from aiorlinf.observe.doctor.devices import check_devices
from aiorlinf.observe.doctor.findings import Level
from scripts.gpuchecks.place import Place

__all__ = ["CHECKS", "Check", "Half", "idle", "told"]

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
        lands_on: the device where tensors land that the second worker receives.
        way: how tensors on accelerators must have gone; empty: any way is right. There is no nccl between fake ones.
    """

    name: str
    first: Half
    second: Half
    devices: int = 1
    backend: str = "auto"
    fallback: bool = True
    lands_on: int = 0
    way: str = ""


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


async def send_again(comm: Worker, place: Place) -> str:
    """The same weights, written anew each time, and memory given back to the device in between."""
    weights = place.late(values(place, 32))
    for step in range(6):
        place.write(weights, values(place, 32, step))
        await comm.send([weights, weights[100:200]], B)
        await comm.recv(B)
        if step == 3:
            place.empty_cache()
    return f"{told(comm)}; {await comm.recv(B)}"


async def recv_again(comm: Worker, place: Place) -> str:
    for step in range(6):
        whole, part = await comm.recv(A)
        expect(place, whole, values(place, 32, step), f"{place.kind}:0")
        expect(place, part, values(place, 32, step)[100:200], f"{place.kind}:0")
        await comm.send("seen", A)
    (link,) = comm.collective.create_collective_group([A, B]).stats()
    await comm.send(f"memory was opened {link.device_opened} times and found open {link.device_reused} times", A)
    if place.kind == "cuda" and not 1 <= link.device_opened <= 4:
        raise AssertionError(f"memory was opened {link.device_opened} times for 12 tensors of one allocation")
    return ""


async def send_for_streams(comm: Worker, place: Place) -> str:
    for seed in range(5):
        await comm.send(place.late(values(place, 16, seed)), B)
    await comm.recv(B)
    return told(comm)


async def recv_for_streams(comm: Worker, place: Place) -> str:
    for seed in range(5):
        with place.on_a_stream():
            got = await comm.recv(A).wait_stream()  # done before its copy may be
            expect(place, got, values(place, 16, seed), f"{place.kind}:0")
    await comm.send("seen", A)
    return ""


async def share_weights(comm: Worker, place: Place) -> str:
    group = comm.collective.create_collective_group([A, B])
    for seed in range(3):
        much = values(place, 8, seed + 3)  # too much to come in one note with where the rest is
        sent = {"w": place.late(values(place, 16, seed)), "much": much, "step": seed} if comm.address == A else None
        got = await group.broadcast(sent, root=A)
        expect(place, got["w"], values(place, 16, seed), f"{place.kind}:0")
        expect(place, got["much"], much, "cpu")
        into = None if comm.address == A else {"w": place.late(values(place, 16))}
        await group.broadcast({"w": place.late(values(place, 16, seed + 7))} if comm.address == A else None, root=A, into=into)
        if into is not None:
            expect(place, into["w"], values(place, 16, seed + 7), f"{place.kind}:0")
    rows = await group.gather(place.late(values(place, 4, 1 if comm.address == A else 2)), root=A)
    if rows is not None:
        expect(place, rows[1], values(place, 4, 2), f"{place.kind}:0")
        await comm.recv(B)
    else:
        await comm.send("seen", A)
    return told(comm)


async def put_items(comm: Worker, place: Place) -> str:
    channel = await comm.create_channel("items", maxsize=8)
    for seed in range(6):
        await channel.put({"x": place.late(values(place, 8, seed)), "r": values(place, 1, seed)})
    await comm.recv(B)
    return "by get, by a prefetch to a device, and to CPU memory"


async def get_items(comm: Worker, place: Place) -> str:
    channel = await comm.connect_channel("items")
    device = f"{place.kind}:0"
    for seed in range(2):
        got = await channel.get()
        expect(place, got["x"], values(place, 8, seed), device)
        expect(place, got["r"], values(place, 1, seed), "cpu")
    async with channel.prefetch(2, device=device) as ahead:
        for seed in range(2, 5):
            got = await anext(ahead)
            expect(place, got["x"], values(place, 8, seed), device)
            expect(place, got["r"], values(place, 1, seed), device)
    got = await channel.get(device="cpu")
    expect(place, got["x"], values(place, 8, 5), "cpu")
    await comm.send("seen", A)
    return ""


async def keep_items_here(comm: Worker, place: Place) -> str:
    """Zero-copy where there is room, and out to host memory where there is none (any use of the device counts as none here)."""
    for above, away in ((1.0, False), (0.0, True)):
        async with Channel.local("here", offload_above=above) as channel:
            tensor = place.late(values(place, 16))
            pointer = tensor.data_ptr()
            await channel.put([tensor])
            del tensor
            if away:
                for _ in range(2000):
                    if (await channel.peek_all())[0][0].is_cpu:
                        break
                    await asyncio.sleep(0.01)
                else:
                    raise AssertionError("the item stays on its device")
            (got,) = await channel.get()
            expect(place, got, values(place, 16), f"{place.kind}:0")
            if not away and got.data_ptr() != pointer:
                raise AssertionError("the item was copied")
    return "handed over as it was, and out to host memory and back"


async def look_at_devices(comm: Worker, place: Place) -> str:
    found = list(check_devices())
    wrong = [f"{finding.subject}: {finding.text}" for finding in found if finding.level in (Level.WARNING, Level.PROBLEM)]
    if place.kind == "cuda" and not any(finding.subject == "cuda:0 -> cuda:0" and "cuda_ipc" in finding.text for finding in found):
        raise AssertionError(f"no cuda_ipc from cuda:0 to itself: {wrong}")
    return "; ".join(wrong) or f"{len(found)} findings, nothing is wrong"


async def idle(comm: Worker, place: Place) -> str:
    return ""


async def send_across_both_ways(comm: Worker, place: Place) -> str:
    """More than one message under way in each direction, through both of the pairs."""
    here, peer = (0, B) if comm.address == A else (1, A)
    works = [comm.send(place.late(values(place, 8, seed), here), peer) for seed in range(10)]
    for seed in range(10):
        expect(place, await comm.recv(peer, device=f"{place.kind}:{here}"), values(place, 8, seed), f"{place.kind}:{here}")
    await asyncio.gather(*works)
    await asyncio.gather(comm.send("seen", peer), comm.recv(peer))
    return told(comm)


CHECKS = [
    Check("what the doctor says", look_at_devices, idle),
    Check("mixed message, one device", send_mixed, recv_mixed, way="cuda_ipc"),
    Check("mixed message, staged", send_mixed, recv_mixed, backend="shm", way="staging"),
    Check("to CPU memory", send_to_cpu, recv_on_cpu),
    Check("tensors into tensors", send_tensors, recv_tensors, way="cuda_ipc"),
    Check("tensors into tensors, staged", send_tensors, recv_tensors, backend="stream", way="staging"),
    Check("one allocation again and again", send_again, recv_again, way="cuda_ipc"),
    Check("for streams that wait", send_for_streams, recv_for_streams, way="cuda_ipc"),
    Check("lifetimes under pressure", send_under_pressure, recv_under_pressure, way="cuda_ipc"),
    Check("lifetimes under pressure, staged", send_under_pressure, recv_under_pressure, backend="shm", way="staging"),
    Check("both directions at once", send_both_ways, send_both_ways, way="cuda_ipc"),
    Check("nccl asked for on one device", send_mixed, recv_mixed, backend="nccl", way="staging"),
    Check("nccl required on one device", send_refused, recv_refused, backend="nccl", fallback=False),
    Check("collectives", share_weights, share_weights, way="cuda_ipc"),
    Check("collectives, staged", share_weights, share_weights, backend="shm", way="staging"),
    Check("items of a channel", put_items, get_items),
    Check("items of a channel in one process", keep_items_here, idle),
    Check("two devices", send_across, recv_across, devices=2, lands_on=1),
    Check("two devices, nccl", send_across, recv_across, devices=2, backend="nccl", lands_on=1, way="nccl"),
    Check("two devices, nccl, both ways", send_across_both_ways, send_across_both_ways, devices=2, backend="nccl", lands_on=1, way="nccl"),
]
