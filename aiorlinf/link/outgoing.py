"""One message on its way out: a record, changed by `link.sender` and `link.pump` only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiorlinf.wire.flat import Flat
    from aiorlinf.wire.leaves import Leaf
    from aiorlinf.work.base import AsyncWork

__all__ = ["Outgoing", "State", "goes_around"]


class State:
    """Only moves down this list. Plain integers: they are compared for every message."""

    QUEUED = 0
    OPENED = 1
    STARTED = 2
    SENT = 3
    DONE = 4


STATE_NAMES = ("waits for the link", "waits for the window or the receive", "under way", "waits for the peer's answer", "over")


class Outgoing:
    """One message on its way out.

    Attributes:
        work: what the caller holds.
        key: stream.
        flags: TENSOR, WANT_REPLY, INLINE.
        body: the whole small message, or None.
        head: bytes at the front of `body` that describe it (a tensor's header); they go into the OPEN frame if the message must wait.
        flat: the flattened object (keeps its tensors alive), or None.
        manifest: encoded description of `flat`.
        total: payload bytes.
        charged: bytes taken from the window.
        position: payload bytes handed to the stream.
        stream_bytes: payload bytes that travel over the stream (the rest goes through a lane).
        lane_pending: the lane has not finished its part.
        lane_generation: of the pair that carries it, 0 for none.
        versions: version counters of the tensors when the payload started.
        attempt: how often the payload was started; chunks of an earlier attempt are dropped.
        withdrawn: cancelled, but a transfer that cannot be recalled still uses the memory.
        reply: the work finishes with the peer's answer.
        sender: the sending half that has it, None before that.
    """

    __slots__ = (
        "attempt",
        "body",
        "charged",
        "flags",
        "flat",
        "head",
        "key",
        "lane_generation",
        "lane_pending",
        "manifest",
        "message_id",
        "position",
        "reply",
        "sender",
        "state",
        "stream_bytes",
        "total",
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
        self.work = work
        self.key = key
        self.flags = flags
        self.body = body
        self.head = head
        self.flat = flat
        self.manifest = manifest
        self.total = total
        self.state = State.QUEUED
        self.message_id = 0
        self.charged = 0
        self.position = 0
        self.stream_bytes = total
        self.lane_pending = False
        self.lane_generation = 0
        self.versions: object = None
        self.attempt = 0
        self.withdrawn = False
        self.reply = False
        self.sender: Any = None

    def __str__(self) -> str:
        return f"tag {self.key & 0xFFFFFFFF}, {self.total} bytes, {STATE_NAMES[self.state]}"

    def stream_pieces(self, threshold: int | None) -> list[memoryview]:
        """The parts of the payload that travel over the stream, when leaves from `threshold` on do not."""
        if self.flat is None:
            return [memoryview(self.body or b"")[self.head :]]
        pieces = []
        for leaf in self.flat.leaves:
            if leaf.nbytes and (threshold is None or not goes_around(leaf, threshold)):
                assert leaf.raw is not None
                pieces.append(leaf.raw)
        return pieces


def goes_around(leaf: Leaf, threshold: int) -> bool:
    """Whether this leaf takes a lane for leaves of at least `threshold` bytes. The receiver decides the same from the manifest."""
    return leaf.nbytes >= threshold and leaf.spec.is_tensor
