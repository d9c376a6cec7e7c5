"""One message on its way out: a record, changed by `link.sender` and `link.pump` only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from aiorlinf.link.staging import StreamOrdered, make_wait
from aiorlinf.link.window import FRAME_COST
from aiorlinf.wire.frames import Flag

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiorlinf.device.runtime import Runtime, Stream
    from aiorlinf.link.loan import Held
    from aiorlinf.link.placement import Placement
    from aiorlinf.link.source import Source
    from aiorlinf.link.staging import Departure, Trip
    from aiorlinf.wire.flat import Flat
    from aiorlinf.wire.leaves import Leaf
    from aiorlinf.work.base import AsyncWork

__all__ = ["GIVEN_AWAY", "Kept", "Outgoing", "State", "goes_around", "put_back"]

GIVEN_AWAY = "_aiorlinf_given_away"
"""Attribute of tensors whose memory was given away (`collective.giving`)."""


class _Root(Protocol):
    """Of memory at which nobody looks (`link.host_memory.Root`)."""

    def tensor(self) -> torch.Tensor:
        """A tensor over it."""


Kept = _Root | torch.Tensor
"""What holds the memory of a tensor that was given away."""


class State:
    """Only moves down this list. Plain integers: they are compared for every message."""

    QUEUED = 0
    OPENED = 1
    STARTED = 2
    SENT = 3
    DONE = 4


STATE_NAMES = ("waits for the link", "waits until the peer receives", "under way", "waits for the peer's answer", "over")


class Outgoing(StreamOrdered):
    """One message on its way out.

    Attributes:
        work: what the caller holds; None again once it is over, so that the two do not keep each other alive.
        key: stream.
        flags: TENSOR, WANT_REPLY, INLINE.
        body: the whole small message, or None.
        head: bytes at the front of `body` that describe it (a tensor's header); they go into the OPEN frame if the message must wait.
        flat: the flattened object (keeps its tensors alive), or None.
        manifest: encoded description of `flat`.
        total: payload bytes.
        charged: bytes taken from the window, until the peer is told (START).
        position: payload bytes handed to the stream.
        stream_bytes: payload bytes that travel over the stream (the rest goes through a lane).
        busy: a way around the stream still uses the memory (`link.ways`).
        lane_generation: of the pair that carries it, 0 for none.
        in_shared: where in shared memory it was handed over, None if it was not.
        owned: leaves that are in shared memory already, by index: their regions.
        held: all of it lies in shared memory of a peer already, None if it does not.
        moved: tensors that were given away by this send, with what holds their memory: a second handle, or a root.
        versions: version counters of the tensors at the call.
        attempt: how often the payload was started; chunks of an earlier attempt are dropped.
        withdrawn: cancelled, but a transfer that cannot be recalled still uses the memory.
        reply: the work finishes with the peer's answer.
        sender: the sending half that has it, None before that.
        tried: for each leaf, whether a codec is tried on it; empty: on none; None: nobody has asked yet (`link.coded_way`).
        source: where its bytes come from as they are compressed, None if they are not.
        departure: its leaves that are still on accelerators, None if all of them are in CPU memory.
        streams: of the user, which are to wait for the copy of the tensors instead of the work (`AsyncWork.wait_stream`).
        under_way: that copy, while it goes on.
        number: among all messages of this link, once it was opened.
        carrier: the backend that carries those from device to device, empty if none does.
        on_over: called once with (the peer has it, that is certain), before the work ends; for those who send a message on.
    """

    __slots__ = (
        "attempt",
        "body",
        "busy",
        "carrier",
        "charged",
        "departure",
        "flags",
        "flat",
        "head",
        "held",
        "in_shared",
        "key",
        "lane_generation",
        "manifest",
        "message_id",
        "moved",
        "number",
        "on_over",
        "owned",
        "position",
        "reply",
        "sender",
        "source",
        "state",
        "stream_bytes",
        "streams",
        "total",
        "tried",
        "under_way",
        "versions",
        "withdrawn",
        "work",
    )

    def __init__(
        self,
        work: AsyncWork[None],
        key: int,
        *,
        flags: int = 0,
        body: bytes | None = None,
        head: int = 0,
        flat: Flat | None = None,
        manifest: bytes = b"",
        total: int,
    ) -> None:
        self.work: AsyncWork[None] | None = work
        self.key: int = key
        self.flags: int = flags
        self.body: bytes | None = body
        self.head: int = head
        self.flat: Flat | None = flat
        self.manifest: bytes = manifest
        self.total: int = total
        self.state: int = State.QUEUED
        self.message_id: int = 0
        self.charged: int = 0
        self.position: int = 0
        self.stream_bytes: int = total
        self.busy: bool = False
        self.lane_generation: int = 0
        self.versions = None if flat is None else flat.versions()
        self.attempt: int = 0
        self.withdrawn: bool = False
        self.reply: bool = False
        self.in_shared: Placement | None = None
        self.owned: dict[int, Any] = {}
        self.held: Held | None = None
        self.moved: list[tuple[torch.Tensor, Kept]] = []
        self.sender: Any = None
        self.tried: list[bool] | None = None
        self.source: Source | None = None
        self.departure: Departure | None = None
        self.carrier: str = ""
        self.number: int = 0
        self.streams: list[tuple[Runtime, Stream]] | None = None
        self.under_way: Trip | None = None
        self.on_over: Callable[[bool, bool], None] | None = None

    @property
    def operation(self) -> str:
        """The public call."""
        return "send_tensor" if self.flags & Flag.TENSOR else "send"

    @property
    def facts(self) -> dict[str, Any]:
        """What an error about it says."""
        tag = {"tag": self.key & 0xFFFFFFFF, "bytes_done": self.position, "bytes_expected": self.total}
        return tag if self.sender is None else {**tag, "local": self.sender.local, "remote": self.sender.remote}

    def __str__(self) -> str:
        stage = "" if self.state == State.DONE else f", {self.stage}"  # the work itself says how that went
        return f"tag {self.key & 0xFFFFFFFF}, {self.total} bytes{stage}"

    @property
    def stage(self) -> str:
        """What it waits for."""
        if self.state == State.OPENED and self.sender is not None and self.total + FRAME_COST <= self.sender.window:
            return "waits until the peer receives what was sent before, which fills its window"
        return STATE_NAMES[self.state]

    def order_after(self, streams: list[tuple[Runtime, Stream]]) -> None:
        """These streams are to wait until the tensors have been copied, and the work need not."""
        self.streams = [*(self.streams or ()), *streams]
        if self.under_way is not None:
            self.begun(self.under_way)

    def begun(self, trip: Trip, _finish: Callable[[], None] | None = None) -> None:
        """The tensors are being copied. If streams of the user wait for that, the work is done, and the tensors may be written to there."""
        self.under_way = trip
        if self.flat is None or any(leaf.nbytes and leaf.raw is not None for leaf in self.flat.leaves):
            return  # what is in CPU memory is not copied in the order of any stream
        if self.streams:
            make_wait(self.streams, trip)
            self.versions = None
            if self.work is not None:
                self.work._finish(None)

    def unchanged(self) -> bool:
        """Nobody has written to the tensors since the call, as far as their version counters tell."""
        return self.flat is None or self.versions is None or self.flat.versions() == self.versions

    def restore(self) -> None:
        """The message did not get through: give tensors that were given away back to their handles."""
        moved, self.moved = self.moved, []
        put_back(moved)
        self.over(False, self.state < State.SENT)

    def over(self, delivered: bool, certain: bool = True) -> None:
        """See `on_over`; later calls tell nothing."""
        on_over, self.on_over = self.on_over, None
        if on_over is not None:
            on_over(delivered, certain)

    def stream_pieces(self, threshold: int | None) -> list[memoryview]:
        """The parts of the payload that travel over the stream, when leaves from `threshold` on do not."""
        if self.flat is None:
            return [memoryview(self.body or b"")[self.head :]]
        pieces = []
        for leaf in self.flat.leaves:
            if leaf.nbytes and (threshold is None or not goes_around(leaf, threshold)):
                raw = leaf.raw
                if raw is not None:
                    pieces.append(raw)
                else:
                    assert self.departure is not None  # it goes from device to device
        return pieces


def put_back(moved: list[tuple[torch.Tensor, Kept]]) -> None:
    """Give tensors that were given away their memory back."""
    for tensor, memory in moved:
        with torch.inference_mode(False), torch.no_grad():
            # The stubs miss this form.
            tensor.set_(memory if isinstance(memory, torch.Tensor) else memory.tensor())  # type: ignore[call-overload]
        delattr(tensor, GIVEN_AWAY)


def goes_around(leaf: Leaf, threshold: int) -> bool:
    """Whether this leaf takes a lane for leaves of at least `threshold` bytes. The receiver decides the same from the manifest."""
    return leaf.nbytes >= threshold and leaf.spec.is_tensor
