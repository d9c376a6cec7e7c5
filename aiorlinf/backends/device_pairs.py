"""Which library connects accelerators of one type: what the pairs of a link are made with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from aiorlinf.backends.nccl import NcclMaker

if TYPE_CHECKING:
    import torch

    from aiorlinf.device.runtime import Runtime

__all__ = ["DevicePair", "PairMaker", "Watch", "pair_maker", "register_pairs", "unregister_pairs"]

Watch = Callable[[list[tuple["Runtime", Any]], Callable[[BaseException | None], None], object], None]
"""Calls back on the home thread when these events have happened, and keeps something until then (`link.device_events.watch_events`)."""


class DevicePair(Protocol):
    """One direction between two devices; meets `rendezvous.pairs.PairGroup`."""

    def transfer(self, leaves: list[torch.Tensor], then: Callable[[BaseException | None], None]) -> None: ...
    def retire(self) -> None: ...


class PairMaker(Protocol):
    """Makes pairs.

    Attributes:
        name: of the backend.
        out, into: what the streams are called that the two ends of a pair work on (`Runtime.side_stream`).
    """

    name: str
    out: str
    into: str

    def problem(self) -> str | None:
        """Why there can be none in this process. Starts nothing."""

    def describe(self) -> str:
        """What it is, with its version, for people. Only if there is no problem."""

    def make(self, store: Any, rank: int, index: int, timeout: float, watch: Watch) -> DevicePair:
        """Make one end: 0 sends, 1 receives. Blocks; called in a private thread.

        Raises:
            RuntimeError: it cannot be made.
        """


_makers: dict[str, PairMaker] = {"cuda": NcclMaker()}


def pair_maker(kind: str) -> PairMaker | None:
    """For a type of device; None if nothing connects them."""
    return _makers.get(kind)


def register_pairs(kind: str, maker: PairMaker) -> None:
    """Connect devices of this type with these from now on."""
    _makers[kind] = maker


def unregister_pairs(kind: str) -> None:
    """Take back `register_pairs`."""
    _makers.pop(kind, None)
