"""aiorlinf on links of a chosen bandwidth, with each way to compress: real links that the kernel shapes, and emulated ones."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import aiorlinf
from aiorlinf.errors import ConfigError
from aiorlinf.manager.service import ManagerService
from scripts.benchmarks import shaped
from scripts.benchmarks.contender import Contender, Effort, Metrics, Place, unknown
from scripts.benchmarks.payloads import PAYLOADS, check_payload, make_payload, payload_bytes

__all__ = ["CODECS", "WAYS", "Compressed", "Emulated1G", "EmulatedFar", "Link1G", "Link10G", "Link100M"]

SIGNAL: Final = 7
"""Tag of the answering half's acknowledgements."""

WARM_UP: Final = 1
WARM_UP_AUTO: Final = 6
"""Messages before the clock starts: with `codec: auto` a link tries what there is before it settles."""

MOST: Final = 10
ENOUGH_S: Final = 0.3
"""What is quick is sent more often than was asked for, up to so many times as often: until so many seconds were measured."""

LIMIT_S: Final = 20.0
"""For the other half to start a worker."""

TOKEN: Final = b"nobody else is on this link"

WAYS: Final[dict[str, dict[str, Any]]] = {
    "raw": {"enabled": False},
    "lz4": {"codec": "lz4"},
    "zstd 1": {"codec": "zstd", "level": 1},
    "zstd 3": {"codec": "zstd", "level": 3},
    "zstd 9": {"codec": "zstd", "level": 9},
    "auto": {"codec": "auto"},
}
"""``cluster.collective.tensor_compression`` of each way."""


def known(way: dict[str, Any]) -> bool:
    """Whether the library has it."""
    try:
        aiorlinf.load_config({"cluster": {"collective": {"tensor_compression": way}}})
    except ConfigError:
        return False
    return True


CODECS: Final = {name: way for name, way in WAYS.items() if known(way)}
"""Those that can be measured."""


@dataclass(slots=True)
class Taken:
    """What the messages of one way have taken in one round: seconds each, and bytes on the link."""

    seconds: list[float] = field(default_factory=list)
    sent: int = 0

    def wants(self, effort: Effort) -> bool:
        """More are to be sent."""
        count = len(self.seconds)
        most = MOST * effort.transfers if effort.transfers > 1 else 1
        return count < effort.transfers or (count < most and sum(self.seconds) < ENOUGH_S)

    def metrics(self, nbytes: int) -> Metrics:
        """For the tables; `nbytes` of a message's tensors."""
        return {"time": statistics.median(self.seconds) * 1e3, "wire": self.sent / len(self.seconds) / nbytes}


@dataclass(slots=True)
class Side:
    """This half of a job with one way to compress."""

    way: str
    worker: aiorlinf.Worker
    manager: ManagerService | None
    other: str

    async def close(self) -> None:
        await self.worker.close()
        if self.manager is not None:
            await self.manager.close()


class Compressed(Contender):
    """Two workers for each way to compress; the half that leads has their managers.

    All ways take turns, message by message: what else happens on the machine then happens to all of them, and their times can be compared
    also where a round of one alone would have had more luck than a round of another. So the first question of a round measures them all,
    and the others are answered from that.
    """

    mbps: ClassVar[float]
    needs: ClassVar[tuple[str, ...]] = ("uvloop", "torch", "aiorlinf", "ale_py")

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.sides: dict[str, Side] = {}
        self.payloads: dict[tuple[str, int], Any] = {}
        self.found: dict[str, dict[str, Metrics]] = {}  # by case what this round has found of each way, until it is asked for

    @property
    def host(self) -> str:
        """Where this half listens."""
        return "127.0.0.1"

    def emulation(self) -> dict[str, Any] | None:
        """``cluster.net_emulation``."""
        return None

    async def open(self, offer: dict[str, str]) -> None:
        self.sides.clear()

    async def close(self) -> None:
        for side in self.sides.values():
            await side.close()
        self.sides.clear()

    async def side(self, codec: str) -> Side:
        """This half of the job that compresses in this way."""
        if codec not in self.sides:
            self.sides[codec] = await self._start(codec)
        return self.sides[codec]

    async def _start(self, codec: str) -> Side:
        told = self.place.directory / f"{self.place.generation} {codec}.json"
        manager = None
        if self.leads:
            collective = {"tensor_compression": CODECS[codec], "backend": "stream", "shared_memory": {"enabled": False}}
            config = aiorlinf.load_config({"cluster": {"collective": collective, "net_emulation": self.emulation()}})
            manager = ManagerService(config=config, token=TOKEN)
            await manager.start(self.host)
            written = told.with_suffix(".new")
            written.write_text(json.dumps(manager.address))
            written.rename(told)
        end = time.monotonic() + LIMIT_S
        while not told.exists():
            if time.monotonic() > end:
                raise TimeoutError(f"the other half did not start with {codec}")
            await asyncio.sleep(0.002)
        address = json.loads(told.read_text())
        worker = aiorlinf.init(f"bench:{self.place.role}", manager=address, token=TOKEN)
        await worker
        return Side(codec, worker, manager, f"bench:{1 - self.place.role}")

    async def measure(self, case: str, variant: str, effort: Effort) -> Metrics:
        if case not in PAYLOADS or variant not in CODECS:
            raise unknown(case, variant)
        key = (case, effort.tensor_bytes)
        if key not in self.payloads:
            self.payloads[key] = make_payload(*key)
        found = self.found.get(case, {})
        if variant not in found:
            found = self.found[case] = await self._all_ways(self.payloads[key], effort)
        return found.pop(variant)

    async def _all_ways(self, payload: Any, effort: Effort) -> dict[str, Metrics]:
        """Send it with each way in turn, or answer who does. The first to go is another one in each turn."""
        sides = {way: await self.side(way) for way in CODECS}
        if not self.leads:
            await asyncio.gather(*(self._answer(side, payload) for side in sides.values()))
            return {way: {} for way in sides}
        taken = {way: Taken() for way in sides}
        turn = list(sides)
        for way, side in sides.items():
            for _ in range(WARM_UP_AUTO if way == "auto" else WARM_UP):
                await self._transfer(side, payload)
        while any(each.wants(effort) for each in taken.values()):
            for way in [each for each in turn if taken[each].wants(effort)]:
                before = self.sent(sides[way])
                taken[way].seconds.append(await self._transfer(sides[way], payload))
                taken[way].sent += self.sent(sides[way]) - before
            turn.append(turn.pop(0))
        for side in sides.values():
            await side.worker.send(False, side.other, tag=SIGNAL)
        return {way: each.metrics(payload_bytes(payload)) for way, each in taken.items()}

    async def _answer(self, side: Side, payload: Any) -> None:
        while await side.worker.recv(side.other, tag=SIGNAL):
            got = await side.worker.recv(side.other)
            await side.worker.send(None, side.other, tag=SIGNAL)
            check_payload(got, payload)
            del got
            await side.worker.send(None, side.other, tag=SIGNAL)  # the clock stands still while it is compared

    async def _transfer(self, side: Side, payload: Any) -> float:
        """Seconds until the other half has it."""
        try:
            await side.worker.send(True, side.other, tag=SIGNAL)
            start = time.perf_counter()
            await side.worker.send(payload, side.other)
            await side.worker.recv(side.other, tag=SIGNAL)
            took = time.perf_counter() - start
            await side.worker.recv(side.other, tag=SIGNAL)
        except Exception as error:  # the other ways of the round are lost with it, so it is to say which one it was
            raise RuntimeError(f"sent with {side.way}: {error}") from error
        return took

    def sent(self, side: Side) -> int:
        """Bytes that this half has put on the link."""
        raise NotImplementedError


class Shaped(Compressed):
    """In network namespaces of their own; nothing else is on the link, so the kernel's counters are ours."""

    @classmethod
    def problem(cls) -> str | None:
        return shaped.shaping_problem()

    @property
    def host(self) -> str:
        return shaped.address_of(self.place.role)

    async def offer(self) -> dict[str, str]:
        shaped.enter_namespace()
        return {"pid": str(os.getpid())}

    async def open(self, offer: dict[str, str]) -> None:
        await super().open(offer)
        await shaped.join(self.place.role, int(offer["pid"]), self.mbps)

    def sent(self, side: Side) -> int:
        return shaped.sent_bytes()


class Emulated(Compressed):
    """On loopback, slowed by ``cluster.net_emulation``."""

    delay_ms: ClassVar[float] = 0.0

    def emulation(self) -> dict[str, Any]:
        groups = [{"members": [f"bench:{role}"], "bandwidth_mbps": self.mbps} for role in (0, 1)]
        return {"crossdc_pairs": [{"src": "bench:0", "dst": "bench:1", "delay_ms": self.delay_ms}], "bandwidth_groups": groups}

    def sent(self, side: Side) -> int:
        (link,) = side.worker.stats().links
        saved = 0 if link.compression is None else link.compression["bytes_before"] - link.compression["bytes_after"]
        return link.bytes_sent - saved


class Link100M(Shaped):
    mbps = 100.0


class Link1G(Shaped):
    mbps = 1_000.0


class Link10G(Shaped):
    mbps = 10_000.0


class Emulated1G(Emulated):
    mbps = 1_000.0


class EmulatedFar(Emulated):
    mbps = 100.0
    delay_ms = 20.0
