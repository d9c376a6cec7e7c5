"""What the library needs of an accelerator, and nothing more.

Rules that hold for every runtime:

- Nothing here waits for the device. What the device does is asked by `query`, which the one completion poller of a loop does.
- Copies run on streams of ours (`side_stream`), in the order in which they were given, and start when the events that the stream was
  told to wait for have happened.
- Memory from `empty` belongs to the stream that it was made for. If another stream uses it, `hold` says so, and the memory is not
  used again before that stream is through with what it was given until then.
- Streams and events are opaque to everybody else. All methods may be called from any thread; "current" is the calling thread's.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

__all__ = ["Event", "Identity", "Runtime", "Shared", "Stream"]

Stream = Any
"""A queue of device operations."""

Event = Any
"""A point in a stream."""


@dataclass(frozen=True, slots=True)
class Identity:
    """One device.

    Attributes:
        kind: torch's device type.
        uuid: the same in every process of the host, whatever devices are visible there and in whatever order.
        index: its number in this process.
        name: for people.
    """

    kind: str
    uuid: str
    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Shared:
    """Device memory as another process of the host can open it: a place in an allocation.

    Attributes:
        uuid: of the device.
        handle: of the allocation: opaque bytes, never those of another one, even if that comes to lie at the same address later.
        nbytes: of the memory.
        at: where it begins in the allocation, in bytes.
        epoch: grows whenever this process gives memory back to the device.
    """

    uuid: str
    handle: bytes
    nbytes: int
    at: int = 0
    epoch: int = 0


class Runtime(Protocol):
    """See the module.

    Attributes:
        kind: torch's device type.
        opens_own: what this process has exported can be opened in this process, too.
    """

    kind: str
    opens_own: bool

    # ---- which devices there are

    def problem(self) -> str | None:
        """Why it cannot be used in this process, None if it can. Starts nothing."""

    def started(self) -> bool:
        """Somebody in this process uses it already."""

    def count(self) -> int:
        """How many devices this process sees. Starts nothing."""

    def identity(self, index: int) -> Identity:
        """Which device that is."""

    def current_device(self) -> int:
        """Where new tensors go."""

    def memory(self, index: int) -> tuple[int, int]:
        """Free and total bytes; free is what tensors of this process can still have."""

    def peer_access(self, index: int, other: int) -> bool:
        """The one device can read the other's memory itself."""

    # ---- streams and events

    def current_stream(self, index: int) -> Stream:
        """Where the calling thread's operations on this device go."""

    def side_stream(self, index: int, purpose: str) -> Stream:
        """A stream of ours, one for each purpose, made on first use."""

    def record(self, stream: Stream) -> Event:
        """The point behind everything that the stream was given so far."""

    def place(self, event: Event) -> tuple[Hashable, int] | None:
        """The stream of an event from `record`, and a number that grows along it: it does not happen before those with smaller numbers.
        None: not known."""

    def query(self, event: Event) -> bool:
        """It has happened, and what was written before it can be read. Raises RuntimeError if the device has failed."""

    def wait(self, stream: Stream, event: Event) -> None:
        """What the stream is given from now on starts after the event. The caller goes on at once."""

    # ---- memory

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Host memory that the device copies from and to by itself: one-dimensional uint8. May take long for large sizes."""

    def empty(self, nbytes: int, index: int, stream: Stream) -> torch.Tensor:
        """Device memory for use on this stream: one-dimensional uint8."""

    def copy(self, out: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Copy on this stream between two one-dimensional uint8 tensors of one size; host memory is pinned. The stream is one of a
        device that one of the two is on. Host memory from `pinned` may be let go of at once: it is not used again too early.
        Between two that are both on devices the types may differ: the values are converted."""

    def hold(self, tensor: torch.Tensor, stream: Stream) -> None:
        """This stream uses the tensor's memory, too."""

    # ---- between processes

    def export(self, tensor: torch.Tensor) -> Shared:
        """Memory of a contiguous tensor, for another process. The caller keeps the tensor until that one is through with it.

        Raises:
            RuntimeError: this memory cannot be shared.
        """

    def open(self, shared: Shared, index: int) -> torch.Tensor:
        """What another process has exported, as one-dimensional uint8, on this device of ours. May take milliseconds. The allocation is let
        go of with the last tensor in it, which may wait for the device. What was asked for may end behind the end of the allocation.

        Raises:
            RuntimeError: it cannot be opened here.
        """

    def let_go(self, memories: list[torch.Tensor]) -> None:
        """Empty a list of what `open` has opened: the last there is of it. Closing may take long, but it does not wait for what the program
        has given its own streams."""

    def export_event(self, stream: Stream) -> tuple[Event, bytes]:
        """As `record`, for another process. The caller keeps the event until that one is through with it."""

    def open_event(self, handle: bytes, index: int) -> Event:
        """What another process has recorded, for `wait`."""

    def collect(self) -> None:
        """Free what was kept for other processes that are through with it."""
