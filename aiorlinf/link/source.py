"""Where a payload that goes over the stream comes from, as the pump sees it."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Chunk", "Source"]

Chunk = tuple[list[memoryview], int, int]
"""The views of one chunk, their bytes together, and how many bytes of the payload they stand for."""


class Source(Protocol):
    """Where the bytes of a payload come from, in order.

    Attributes:
        lends: what was taken has to be given back: `sent` is called.
    """

    lends: bool

    @property
    def borrows(self) -> bool:
        """Some of what was taken is memory of the message's sender, who gets it back when the kernel has all of it."""

    @property
    def over(self) -> bool:
        """Everything was taken."""

    def take(self, limit: int) -> Chunk | None:
        """The next bytes, at most `limit`, in views that stay unchanged. None: there are none now; `Pump.wake` tells when there are."""

    def sent(self) -> None:
        """The kernel has all that was taken so far."""

    def drop(self) -> None:
        """Nobody wants the rest. May be called again. What was taken stays valid until `sent`, or as long as somebody holds on to it."""
