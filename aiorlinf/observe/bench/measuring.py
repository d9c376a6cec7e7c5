"""What the two workers of ``aiorlinf bench`` do: one measures, the other answers."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from aiorlinf.errors import UsageError
from aiorlinf.rendezvous.settings import Backend
from aiorlinf.worker import Worker

__all__ = ["Figures", "TensorFigures", "Wishes", "measure"]

_SMALL = {"reward": 0.5, "done": False, "step": 128}
_CONTROL = 1  # the tag of what is not measured
_TRIED = 20
_MOST = 200_000
_IN_FLIGHT = 1000


@dataclass(frozen=True, slots=True)
class Wishes:
    """What is to be measured.

    Attributes:
        backend: of large payloads, None: as the configuration says.
        sizes: of the tensors, in bytes.
        seconds: for each figure, about.
        as_json: how it is printed.
    """

    backend: Backend | None
    sizes: tuple[int, ...]
    seconds: float
    as_json: bool


@dataclass(frozen=True, slots=True)
class TensorFigures:
    """Of tensors of one size, each sent when the one before has been received: the medians."""

    size_bytes: int
    seconds: float
    gb_per_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured.

    Attributes:
        between: the two workers.
        address, backend, reason: of their link: how they are connected, the way of large payloads, and why.
        round_trip_us_median, round_trip_us_p99: of a small dict, there and back.
        messages_per_s: small dicts one way, as fast as they go.
        tensors: see there.
    """

    between: tuple[str, str]
    address: str | None
    backend: str
    reason: str
    round_trip_us_median: float
    round_trip_us_p99: float
    messages_per_s: float
    tensors: tuple[TensorFigures, ...]

    def __str__(self) -> str:
        lines = [
            f"{self.between[0]} and {self.between[1]}: over {self.address}, large payloads over {self.backend} ({self.reason})",
            f"{'round trip of a small dict':30}{self.round_trip_us_median:12,.0f} us   (99 % within {self.round_trip_us_p99:,.0f} us)",
            f"{'small dicts one way':30}{self.messages_per_s:12,.0f} per second",
        ]
        lines += [
            f"{f'tensor of {each.size_bytes:,} bytes':30}{each.gb_per_s:12.2f} GB/s ({each.seconds * 1e3:,.2f} ms)" for each in self.tensors
        ]
        return "\n".join(lines)


async def measure(comm: Worker, wishes: Wishes) -> None:
    """Be one of the two, by the rank of the address; rank 0 prints.

    Raises:
        UsageError: another rank than 0 and 1.
    """
    group, rank = comm.address.group, comm.address.rank
    if rank not in (0, 1):
        raise UsageError(f"{comm.address} is one too many", hint="two workers measure, of ranks 0 and 1")
    peer = f"{group}:{1 - rank}"
    if rank == 1:
        await _answer(comm, peer)
        return
    figures = await _ask(comm, peer, wishes)
    print(json.dumps(asdict(figures)) if wishes.as_json else figures, flush=True)


async def _answer(comm: Worker, peer: str) -> None:
    while (order := await comm.recv(peer, tag=_CONTROL)) is not None:
        kind, count = order
        for _ in range(count):
            message = await comm.recv(peer)
            if kind == "echo":
                await comm.send(message, peer)
        await comm.send("done", peer, tag=_CONTROL)


async def _ask(comm: Worker, peer: str, wishes: Wishes) -> Figures:
    trips = await _round_trips(comm, peer, _SMALL, wishes.seconds)
    rate = await _one_way(comm, peer, wishes.seconds / statistics.median(trips))
    tensors = []
    for size in wishes.sizes:
        tensor = torch.arange(size, dtype=torch.int64).to(torch.uint8)
        seconds = statistics.median(await _deliveries(comm, peer, tensor, wishes.seconds))
        tensors.append(TensorFigures(size, seconds, size / seconds / 1e9))
    (link,) = (each for each in comm.stats().links if each.remote == peer)
    await comm.send(None, peer, tag=_CONTROL)
    return Figures(
        (str(comm.address), peer),
        link.address,
        link.backend,
        link.reason,
        statistics.median(trips) * 1e6,
        statistics.quantiles(trips, n=100)[98] * 1e6,
        rate,
        tuple(tensors),
    )


async def _round_trips(comm: Worker, peer: str, message: Any, seconds: float) -> list[float]:
    """How long each took, there and back."""

    async def some(count: int) -> list[float]:
        await comm.send(("echo", count), peer, tag=_CONTROL)
        took = []
        for _ in range(count):
            begin = time.perf_counter()
            await comm.send(message, peer)
            await comm.recv(peer)
            took.append(time.perf_counter() - begin)
        await comm.recv(peer, tag=_CONTROL)
        return took

    return await some(_often(await some(_TRIED), seconds))


async def _deliveries(comm: Worker, peer: str, tensor: torch.Tensor, seconds: float) -> list[float]:
    """How long it took until each was received, and the sender knew."""

    async def some(count: int) -> list[float]:
        took = []
        for _ in range(count):
            begin = time.perf_counter()
            await comm.send(("take", 1), peer, tag=_CONTROL)
            await comm.send(tensor, peer)
            await comm.recv(peer, tag=_CONTROL)
            took.append(time.perf_counter() - begin)
        return took

    return await some(_often(await some(3), seconds))


async def _one_way(comm: Worker, peer: str, wanted: float) -> float:
    """Messages per second, with many under way."""
    count = max(_IN_FLIGHT, min(_MOST, int(wanted)))
    await comm.send(("take", count), peer, tag=_CONTROL)
    begin = time.perf_counter()
    sends = []
    for _ in range(count):
        sends.append(comm.send(_SMALL, peer))
        if len(sends) >= _IN_FLIGHT:
            for send in sends:
                await send
            sends.clear()
    for send in sends:
        await send
    await comm.recv(peer, tag=_CONTROL)
    return count / (time.perf_counter() - begin)


def _often(took: list[float], seconds: float) -> int:
    return max(_TRIED if len(took) >= _TRIED else 3, min(_MOST, int(seconds / statistics.median(took))))
