"""Messages on their way in, and receives: records, changed by `link.receiver` and `link.mailbox` only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from aiorlinf.link.memory import Copy, byte_tensor, fresh_bytes
from aiorlinf.link.staging import StreamOrdered, make_wait

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiorlinf.codec.pool import TensorBufferPool
    from aiorlinf.device.runtime import Runtime, Stream
    from aiorlinf.errors import AiorlinfError
    from aiorlinf.link.loan import Held
    from aiorlinf.link.sink import Sink
    from aiorlinf.link.staging import Ready, Trip
    from aiorlinf.wire.leaves import LeafSpec
    from aiorlinf.wire.manifest import Manifest
    from aiorlinf.work.base import AsyncWork

__all__ = ["Content", "Incoming", "ParcelReceive", "Receive", "Whole"]


class Receive(StreamOrdered):
    """A posted receive.

    Attributes:
        work: what the caller holds; None again once it is over, so that the two do not keep each other (and the value) alive.
        key: stream it asks for.
        tensor_out: the caller's buffer for `recv_tensor`, None for `recv`.
        memory: another tensor on the memory that it had at the call, which is what is written to, whatever becomes of the tensor object.
        cancelled: set instead of searching the queue, which skips such entries when it meets them.
        message: the matched message whose payload is still to come, else None.
        order: position of the message it got, for giving it back.
        with_sender: the value is (sender, object), as `inbox` gives it.
        receiver: the receiving half that it was posted to, None before that.
        opaque: the value is a `Parcel`, as `recv_parcel` gives it.
        device: where tensors come to that were on an accelerator at the sender; None: `link.staging.Landing.target`.
        ready: what is to be over before `tensor_out` is written to, if that is on a device.
        streams: of the user, which are to wait for the value instead of the work (`AsyncWork.wait_stream`).
        under_way: copies that have begun, and what ends the waiting for them; None if there are none.
    """

    opaque = False

    # Most receives have nothing to do with accelerators: what is for those lies in the class until it is set.
    __slots__ = ("__dict__", "cancelled", "key", "message", "order", "receiver", "tensor_out", "with_sender", "work")

    memory: torch.Tensor | None = None
    device: torch.device | None = None
    ready: Ready | None = None
    streams: list[tuple[Runtime, Stream]] | None = None
    under_way: tuple[Trip, Callable[[], None]] | None = None

    def __init__(self, key: int, tensor_out: torch.Tensor | None = None, *, with_sender: bool = False) -> None:
        self.work: AsyncWork[Any] | None = None
        self.key: int = key
        self.tensor_out: torch.Tensor | None = tensor_out
        if tensor_out is not None:
            self.memory = tensor_out.detach()
        self.with_sender: bool = with_sender
        self.cancelled: bool = False
        self.message: Incoming | None = None
        self.order: int = 0
        self.receiver: Any = None

    @property
    def takes_stores(self) -> bool:
        """It makes an object of the payload, over its memory in this process."""
        return not self.opaque and self.tensor_out is None

    @property
    def operation(self) -> str:
        """The public call."""
        if self.opaque:
            return "recv_parcel"
        return "inbox" if self.with_sender else "recv" if self.tensor_out is None else "recv_tensor"

    def finish(self, value: Any) -> None:
        """End the work with its value."""
        work, self.work = self.work, None
        if self.under_way is not None:
            self.under_way = None
        if work is not None:
            work._finish(value)

    def order_after(self, streams: list[tuple[Runtime, Stream]]) -> None:
        """These streams are to wait for the value, and the work need not."""
        self.streams = [*(self.streams or ()), *streams]
        under_way, self.under_way = self.under_way, None
        if under_way is not None:
            self.begun(*under_way)

    def begun(self, trip: Trip, finish: Callable[[], None]) -> None:
        """The value's bytes are on their way."""
        if self.streams:
            make_wait(self.streams, trip)
            finish()
        else:
            self.under_way = (trip, finish)

    def fail(self, error: BaseException) -> None:
        """End the work with an error."""
        work, self.work = self.work, None
        if self.under_way is not None:
            self.under_way = None
        if work is not None:
            work._fail(error)

    def give_back(self, value: Any) -> None:
        """The caller was cancelled between delivery and taking the value."""
        self.receiver.returns.give_back(self, value)

    @property
    def facts(self) -> dict[str, Any]:
        """What an error about it says."""
        tag = {"tag": self.key & 0xFFFFFFFF}
        return tag if self.receiver is None else {**tag, "local": self.receiver.local, "remote": self.receiver.remote}

    def __str__(self) -> str:
        tag = f"tag {self.key & 0xFFFFFFFF}"
        if self.receiver is None:
            return tag
        sink = None if self.message is None or self.message.content is None else self.message.content.sink
        stages = None if sink is None else sink.stages
        return f"{self.receiver.local}<-{self.receiver.remote} {tag}{'' if stages is None else f', {stages}'}"


class ParcelReceive(Receive):
    """A receive that does not look into its message."""

    __slots__ = ()

    opaque = True


class Content:
    """Payload of a message that does not come in one frame, or of a tensor.

    Attributes:
        manifest: what the payload is; None for tensors, and for a whole small message that had to wait for the window.
        head: the same as the sender made it.
        spec: description of a `send_tensor` payload.
        total: payload bytes.
        tensors: memory of the leaves, one-dimensional uint8, once the payload has started; made of `stores` if those are set.
        stores: the same as NumPy arrays, for who makes the object of them at once; None: there are none.
        held: what the tensors lie in, if that is memory of a peer that can be lent on.
        direct: the payload goes into the receive's own buffer.
        borrowed: that receive was cancelled while a lane still writes into its buffer.
        copying: fills the receive's own buffer from `tensors`, None if nothing does.
        sink: where the stream's part goes.
        lane_pending: the lane has not delivered its part.
        attempt: how often the payload has begun.
        ended: the trailer of this attempt is here.
        asked: GO was sent.
        begun: the payload comes without being asked for.
        relief: by the lock-out rule it is accepted when complete; `relieved` bytes of our memory are spent on it.
        refused: nobody wants the payload any more.
    """

    __slots__ = (
        "_tensors",
        "asked",
        "attempt",
        "begun",
        "borrowed",
        "copying",
        "direct",
        "ended",
        "head",
        "held",
        "lane_pending",
        "manifest",
        "refused",
        "relief",
        "relieved",
        "sink",
        "spec",
        "stores",
        "total",
    )

    def __init__(self, manifest: Manifest | None, spec: LeafSpec | None, total: int) -> None:
        self.manifest: Manifest | None = manifest
        self.head: bytes = b""
        self.spec: LeafSpec | None = spec
        self.total: int = total
        self._tensors: list[torch.Tensor] = []
        self.stores: list[Any] | None = None
        self.held: Held | None = None
        self.direct: bool = False
        self.borrowed: bool = False
        self.copying: Copy | None = None
        self.sink: Sink | None = None
        self.lane_pending: bool = False
        self.attempt: int = 0
        self.ended: bool = False
        self.asked: bool = False
        self.begun: bool = False
        self.relief: bool = False
        self.relieved: int = 0
        self.refused: bool = False

    @property
    def tensors(self) -> list[torch.Tensor]:
        """See the class."""
        stores = self.stores
        if stores is not None:
            self._tensors, self.stores = [torch.from_numpy(store) for store in stores], None
        return self._tensors

    @tensors.setter
    def tensors(self, tensors: list[torch.Tensor]) -> None:
        self._tensors, self.stores = tensors, None

    def sizes(self) -> list[int]:
        """Bytes of each leaf."""
        return [self.total] if self.manifest is None else self.manifest.sizes

    def allocate(self, pool: TensorBufferPool | None) -> None:
        """Memory for every leaf."""
        self.tensors = [fresh_bytes(size, pool) for size in self.sizes()]

    def place_into(self, out: torch.Tensor) -> None:
        """The caller's own memory."""
        self.direct = True
        self.tensors = [byte_tensor(out)]

    def split(self, threshold: int | None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Memory of the leaves that come around the stream (`outgoing.goes_around`), and of those that come over it."""
        if threshold is None:
            return [], self.tensors
        if self.manifest is None:
            around = [self.spec is not None and self.total >= threshold]
        else:
            around = [spec.is_tensor and spec.nbytes >= threshold for spec in self.manifest.specs]
        pairs = list(zip(self.tensors, around, strict=True))
        return [tensor for tensor, yes in pairs if yes], [tensor for tensor, yes in pairs if not yes]

    @property
    def whole(self) -> bool:
        """The payload is a whole small message, as it would have come in a frame."""
        return self.manifest is None and self.spec is None


class Incoming:
    """A message that has been announced; its payload may still be under way.

    Attributes:
        key: stream it belongs to.
        order: position among all messages that this worker gets.
        message_id: sender's number, 0 where the sender waits for no reply.
        is_tensor: from `send_tensor`.
        want_reply: the sender waits for ACCEPTED or REFUSED.
        charged: bytes that count against the window until the message is taken, 0 once returned.
        complete: the payload is there and committed.
        body: whole small message, or bytes of a small tensor.
        content: what is needed to place and rebuild a payload; None for a plain small message.
        receive: the matched receive while the payload is still to come, else None.
        value: the finished object in a one-element list, once a receive gave it back.
        error: the sender failed in the middle; whoever receives the message gets this.
        queued: it is in its mailbox, nobody has taken it.
    """

    __slots__ = (
        "body",
        "charged",
        "complete",
        "content",
        "error",
        "is_tensor",
        "key",
        "message_id",
        "order",
        "queued",
        "receive",
        "value",
        "want_reply",
    )

    def __init__(self, key: int, order: int, message_id: int, *, is_tensor: bool, want_reply: bool) -> None:
        self.key: int = key
        self.order: int = order
        self.message_id: int = message_id
        self.is_tensor: bool = is_tensor
        self.want_reply: bool = want_reply
        self.charged: int = 0
        self.complete: bool = False
        self.body: bytes | memoryview | None = None
        self.content: Content | None = None
        self.receive: Receive | None = None
        self.value: list[Any] | None = None
        self.error: AiorlinfError | None = None
        self.queued: bool = False


class Whole(Incoming):
    """A plain small message: it came whole in one frame, from `send`, and nobody waits for an answer.

    There may be a hundred thousand of them in a second, and all but four of their attributes are the same: those lie in the class. What
    is changed later goes into the instance.
    """

    __slots__ = ("__dict__",)

    message_id = 0
    is_tensor = False
    want_reply = False
    complete = True
    content: Content | None = None
    receive: Receive | None = None
    value: Any = None
    error: AiorlinfError | None = None
    queued = False

    def __init__(self, key: int, order: int, body: bytes, charged: int) -> None:
        self.key = key
        self.order = order
        self.body: bytes | memoryview | None = body
        self.charged = charged
