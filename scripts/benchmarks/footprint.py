"""How much memory a process takes while messages pass, and how often it meets a page for the first time (Linux)."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Final

from scripts.benchmarks.contender import Metrics

__all__ = ["KEPT", "Footprint"]

KEPT: Final = 8
"""Tensors that the receiver of a steady stream keeps: the latest ones."""


class Footprint:
    """Looks after each message. The first quarter of them may grow the process; whatever comes after that is counted."""

    def __init__(self, messages: int) -> None:
        self.warm_up = messages // 4
        self.passed = 0
        self.settled = self.most = 0
        self.faults = 0

    def passed_one(self) -> None:
        """A message is through."""
        self.passed += 1
        if self.passed < self.warm_up:
            return
        now = resident_bytes()
        if self.passed == self.warm_up:
            self.settled = self.most = now
            self.faults = page_faults()
        self.most = max(self.most, now)

    def metrics(self) -> Metrics:
        """MiB by which the process grew at its largest, and page faults per message."""
        return {
            "growth": (self.most - self.settled) / (1 << 20),
            "faults": (page_faults() - self.faults) / (self.passed - self.warm_up),
        }


def resident_bytes() -> int:
    """Memory of this process that is in RAM, mapped files and shared memory included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
