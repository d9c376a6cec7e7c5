"""A runtime over the interfaces that torch has for every accelerator. `kinds` adds what only one of them has."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Hashable
from typing import Any

import torch

from aiorlinf.device.runtime import Event, Identity, Shared, Stream

__all__ = ["TorchRuntime"]

_PLACE = "_aiorlinf_place"


class TorchRuntime:
    """Meets `device.runtime.Runtime`, but that memory stays in its process.

    Args:
        kind: torch's device type.
    """

    opens_own = False

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._streams: dict[tuple[int, str], Any] = {}
        self._lock = threading.Lock()
        self._recorded = itertools.count()

    @property
    def _torch(self) -> Any:
        """`torch.cuda` and its like."""
        return torch.get_device_module(self.kind)

    # ---- which devices there are

    def problem(self) -> str | None:
        try:
            if not self._torch.is_available():
                return f"torch finds no {self.kind} device"
        except (RuntimeError, AttributeError) as error:
            return f"torch has no {self.kind}: {error}"
        return None

    def started(self) -> bool:
        return bool(getattr(self._torch, "is_initialized", lambda: True)())

    def count(self) -> int:
        return int(self._torch.device_count())

    def identity(self, index: int) -> Identity:
        properties = self._torch.get_device_properties(index)
        name = str(getattr(properties, "name", self.kind))
        uuid = getattr(properties, "uuid", None)
        return Identity(self.kind, str(uuid) if uuid is not None else f"{self.kind}-{index}", index, name)

    def current_device(self) -> int:
        return int(self._torch.current_device())

    def memory(self, index: int) -> tuple[int, int]:
        free, total = self._torch.mem_get_info(index)
        return int(free), int(total)

    def peer_access(self, index: int, other: int) -> bool:
        return index == other

    # ---- streams and events

    def current_stream(self, index: int) -> Stream:
        return self._torch.current_stream(index)

    def side_stream(self, index: int, purpose: str) -> Stream:
        stream = self._streams.get((index, purpose))
        if stream is None:
            with self._lock:
                stream = self._streams.get((index, purpose))
                if stream is None:
                    stream = self._streams[index, purpose] = self._make_stream(index)
        return stream

    def _make_stream(self, index: int) -> Stream:
        return self._torch.Stream(device=index)

    def record(self, stream: Stream) -> Event:
        event = self._torch.Event()
        with self._lock:  # numbers are in the order of the stream, whatever threads record on it
            event.record(stream)
            try:
                setattr(event, _PLACE, (stream, next(self._recorded)))
            except AttributeError:  # torch has classes of events that take no attributes
                pass
        return event

    def place(self, event: Event) -> tuple[Hashable, int] | None:
        place: tuple[Hashable, int] | None = getattr(event, _PLACE, None)
        return place

    def query(self, event: Event) -> bool:
        return bool(event.query())

    def wait(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    # ---- memory

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def empty(self, nbytes: int, index: int, stream: Stream) -> torch.Tensor:
        with self._torch.stream(stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=torch.device(self.kind, index))

    def copy(self, out: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        # torch's allocator of pinned memory notes the stream: a buffer is not used again before the copy has happened.
        with torch.no_grad(), self._torch.stream(stream):
            out.copy_(source, non_blocking=True)

    def hold(self, tensor: torch.Tensor, stream: Stream) -> None:
        tensor.record_stream(stream)

    # ---- between processes

    def export(self, tensor: torch.Tensor) -> Shared:
        raise RuntimeError(f"memory of {self.kind} devices cannot be shared between processes")

    def open(self, shared: Shared, index: int) -> torch.Tensor:
        raise RuntimeError(f"memory of {self.kind} devices cannot be shared between processes")

    def let_go(self, memories: list[torch.Tensor]) -> None:
        memories.clear()

    def export_event(self, stream: Stream) -> tuple[Event, bytes]:
        raise RuntimeError(f"events of {self.kind} devices cannot be shared between processes")

    def open_event(self, handle: bytes, index: int) -> Event:
        raise RuntimeError(f"events of {self.kind} devices cannot be shared between processes")

    def collect(self) -> None:
        """Nothing is kept."""
