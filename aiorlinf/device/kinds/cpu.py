"""The CPU as a device: everything has happened by the time that a call returns."""

from __future__ import annotations

import os
from collections.abc import Hashable

import torch

from aiorlinf.device.runtime import Event, Identity, Shared, Stream

__all__ = ["CpuRuntime", "make_runtime"]

_NO_SHARING = "memory of the CPU is shared by backends/shm"


class CpuRuntime:
    """Meets `device.runtime.Runtime`."""

    kind = "cpu"

    opens_own = False

    def problem(self) -> str | None:
        return None

    def started(self) -> bool:
        return True

    def count(self) -> int:
        return 1

    def identity(self, index: int) -> Identity:
        return Identity("cpu", "cpu", 0, "CPU")

    def current_device(self) -> int:
        return 0

    def memory(self, index: int) -> tuple[int, int]:
        page = os.sysconf("SC_PAGE_SIZE")
        return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")

    def peer_access(self, index: int, other: int) -> bool:
        return True

    def current_stream(self, index: int) -> Stream:
        return None

    def side_stream(self, index: int, purpose: str) -> Stream:
        return None

    def record(self, stream: Stream) -> Event:
        return None

    def place(self, event: Event) -> tuple[Hashable, int] | None:
        return None

    def query(self, event: Event) -> bool:
        return True

    def wait(self, stream: Stream, event: Event) -> None:
        """Nothing is ever under way."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def empty(self, nbytes: int, index: int, stream: Stream) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def copy(self, out: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        with torch.no_grad():
            out.copy_(source)

    def hold(self, tensor: torch.Tensor, stream: Stream) -> None:
        """As `wait`."""

    def export(self, tensor: torch.Tensor) -> Shared:
        raise RuntimeError(_NO_SHARING)

    def open(self, shared: Shared, index: int) -> torch.Tensor:
        raise RuntimeError(_NO_SHARING)

    def let_go(self, memories: list[torch.Tensor]) -> None:
        memories.clear()

    def export_event(self, stream: Stream) -> tuple[Event, bytes]:
        return None, b""

    def open_event(self, handle: bytes, index: int) -> Event:
        return None

    def collect(self) -> None:
        """Nothing is kept."""


def make_runtime() -> CpuRuntime:
    """For `device.registry`."""
    return CpuRuntime()
