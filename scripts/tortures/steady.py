"""A steady stream of large messages: memory must not grow, and no page may be touched for the first time once it runs."""

from __future__ import annotations

from dataclasses import dataclass

from scripts.tortures.proc import Footprint
from scripts.tortures.stage import Stage

__all__ = ["Side", "run_steady"]


@dataclass(frozen=True)
class Side:
    """What one of the two looked like.

    Attributes:
        name: sender or receiver.
        settled: resident bytes when the stream had settled; `lowest` and `highest` are of the looks after that.
        faults: pages touched for the first time, per message after that.
        descriptors: how many more at the end than when it had settled.
    """

    name: str
    settled: int
    lowest: int
    highest: int
    faults: float
    descriptors: int

    @property
    def spread(self) -> int:
        """Bytes between the lowest and the highest."""
        return self.highest - self.lowest


def run_steady(messages: int, size: int, keep: int, settle: int, looks: int = 20) -> list[Side]:
    """Send so many messages of so many bytes, after `settle` others; the receiver keeps the last few. Raises Failed."""
    with Stage.open() as stage:
        sender, receiver = stage.start("a:0"), stage.start("b:0")

        def flow(count: int) -> tuple[Footprint, Footprint]:
            receiver.tell("flow_in", "a:0", count, keep)
            sender.ask("flow_out", "b:0", count, size)
            receiver.answer()
            return sender.footprint(), receiver.footprint()

        seen = [flow(settle)]
        left = messages
        while left > 0:
            seen.append(flow(min(left, -(-messages // looks))))
            left -= -(-messages // looks)
    return [side(name, [pair[index] for pair in seen], messages) for index, name in enumerate(("sender", "receiver"))]


def side(name: str, seen: list[Footprint], messages: int) -> Side:
    """From what was seen: first when the stream had settled."""
    first, last = seen[0], seen[-1]
    resident = [each.resident for each in seen]
    faults = (last.faults - first.faults) / messages
    return Side(name, first.resident, min(resident), max(resident), faults, last.descriptors - first.descriptors)
