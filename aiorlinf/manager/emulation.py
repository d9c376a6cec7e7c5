"""The emulated network (``cluster.net_emulation``): what lies between two workers, and the clocks that a whole job shares. Pure.

A bandwidth group is workers behind one link. Its two directions are two budgets, each with one clock: the moment up to which it is booked.
The clocks are the manager's, so that members share them wherever they live. A worker books what it is about to send, a slice of some
milliseconds at a time (`link.emulated_wire`), and is told how long that takes; its bytes leave when they would have left that link.
Only durations travel, so the hosts' clocks need not agree. A worker that dies leaves its last slices booked, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from aiorlinf.address import AddressRange, WorkerAddress
from aiorlinf.config import NetEmulationConfig, address_ranges

__all__ = ["Booking", "Budgets", "EmulatedNetwork", "Route", "missing_ranges"]

_BYTES_PER_MEGABIT = 1_000_000 / 8


class Route(NamedTuple):
    """What lies between one worker and another, in one direction.

    Attributes:
        delay_s: seconds that everything is under way.
        budgets: numbers of the budgets that every byte is charged to, in the order of the way.
        rate: bytes per second of the narrowest of them, None if there are none.
    """

    delay_s: float
    budgets: tuple[int, ...]
    rate: float | None

    def __str__(self) -> str:
        parts = [f"{self.delay_s * 1e3:g} ms"] if self.delay_s else []
        parts += [f"{self.rate / _BYTES_PER_MEGABIT:g} Mbit/s"] if self.rate is not None else []
        return ", ".join(parts)


class Booking(NamedTuple):
    """The answer to a booking.

    Attributes:
        wait_s: seconds until the last byte has left.
        span_s: seconds of them in which the bytes leave, one after the other.
    """

    wait_s: float
    span_s: float


class EmulatedNetwork:
    """Who is how far from whom. The configuration has been checked: no two entries contradict each other."""

    def __init__(self, config: NetEmulationConfig) -> None:
        self._symmetric = config.symmetric
        self._pairs = [
            (address_ranges(pair.src), address_ranges(pair.dst), pair.delay_ms / 1e3) for pair in config.crossdc_pairs if config.enabled
        ]
        self._groups = [address_ranges(group.members) for group in config.bandwidth_groups if config.enabled]
        self._rates = _rates(config)

    def route(self, src: WorkerAddress, dst: WorkerAddress) -> Route | None:
        """From one worker to another; None if nothing is emulated between them in this direction."""
        if src == dst:
            return None
        delay = self._delay(src, dst)
        budgets = []
        for index, members in enumerate(self._groups):
            sends, receives = _holds(members, src), _holds(members, dst)
            if sends and receives and delay is None:
                continue  # on their side of the link
            if sends:
                budgets.append(2 * index)
            if receives and self._symmetric:
                budgets.append(2 * index + 1)
        budgets.sort(key=lambda number: number % 2)  # out of the sender's links, then into the receiver's
        if not delay and not budgets:
            return None
        return Route(delay or 0.0, tuple(budgets), min((self._rates[number] for number in budgets), default=None))

    def _delay(self, src: WorkerAddress, dst: WorkerAddress) -> float | None:
        for one, other, delay in self._pairs:
            if _holds(one, src) and _holds(other, dst):
                return delay
            if self._symmetric and _holds(one, dst) and _holds(other, src):
                return delay
        return None


class Budgets:
    """The clocks. Budget ``2 * i`` is what members of group ``i`` send, ``2 * i + 1`` what they receive."""

    def __init__(self, config: NetEmulationConfig) -> None:
        self._rates = _rates(config)
        self._booked = [float("-inf")] * len(self._rates)  # up to when

    def __len__(self) -> int:
        return len(self._rates)

    def book(self, budgets: Sequence[int], nbytes: int, now: float) -> Booking:
        """Charge bytes to each of these budgets, at least one, in the order in which they are passed.

        A budget's bookings never overlap. In the second one the bytes leave as they come out of the first, or later.
        """
        begin = finish = now
        for number in budgets:
            took = nbytes / self._rates[number]
            # Not before the first byte comes out of the one before, nor done before the last does.
            begin = max(self._booked[number], begin, finish - took)
            finish = self._booked[number] = begin + took
        return Booking(finish - now, nbytes / min(self._rates[number] for number in budgets))


def missing_ranges(config: NetEmulationConfig, expected: Iterable[WorkerAddress]) -> list[str]:
    """What the configuration names of which not one worker is expected."""
    if not config.enabled:
        return []
    keys = [key for pair in config.crossdc_pairs for key in (pair.src, pair.dst)] + [group.members for group in config.bandwidth_groups]
    named = dict.fromkeys(workers for key in keys for workers in address_ranges(key))
    addresses = list(expected)
    return [str(workers) for workers in named if not any(workers.holds(address) for address in addresses)]


def _rates(config: NetEmulationConfig) -> list[float]:
    """Bytes per second of each budget."""
    return [group.bandwidth_mbps * _BYTES_PER_MEGABIT for group in config.bandwidth_groups if config.enabled for _ in range(2)]


def _holds(ranges: tuple[AddressRange, ...], address: WorkerAddress) -> bool:
    return any(one.holds(address) for one in ranges)
