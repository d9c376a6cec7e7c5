"""The section cluster.topology: where workers are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from aiorlinf.address import WorkerAddress
from aiorlinf.config.members import address_ranges, check_ranges
from aiorlinf.config.options import option, required

__all__ = ["TopologyConfig", "WorkerLabelsConfig"]


@dataclass(frozen=True, slots=True)
class WorkerLabelsConfig:
    """Labels of some workers."""

    members: str | tuple[str, ...] = required("workers that have them: rollout:0-3, rollout:*, or a list of such")
    labels: dict[str, str] = required("names and values; rack says who is near whom, others are free")  # noqa: RUF009 - makes a dataclass field

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield (key, complaint) for what a single key cannot tell."""
        yield from check_ranges("members", self.members)
        if not self.labels:
            yield "labels", "no labels are given"


@dataclass(frozen=True, slots=True)
class TopologyConfig:
    """Where workers are, for what goes to many at once."""

    labels: tuple[WorkerLabelsConfig, ...] = option((), "labels of workers; what a worker's own environment says goes before")

    def of(self, address: WorkerAddress) -> dict[str, str]:
        """The labels of one worker; a later entry goes before an earlier one."""
        found: dict[str, str] = {}
        for entry in self.labels:
            if any(members.holds(address) for members in address_ranges(entry.members)):
                found.update(entry.labels)
        return found
