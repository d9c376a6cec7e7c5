"""The receiving half of a coded payload: its bytes become tensors, some of them through a codec, in private threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from aiorlinf.codec.decoder import Decoder
from aiorlinf.codec.decompressing import Decompressor, Record
from aiorlinf.errors import AiorlinfError, WireError
from aiorlinf.link.sink import Sink

__all__ = ["CodedOwner", "CodedSink", "MakeDecompressor"]

_STAGING_BYTES = 32 * 1024
"""Bytes that are read in one go and copied from there. What belongs in one place and is longer is read straight into that place."""

MakeDecompressor = Callable[[memoryview], Decompressor]


class CodedOwner(Protocol):
    """Who has the messages that payloads belong to: the receiving half of the link."""

    def coded_wanted(self, sink: CodedSink) -> bool:
        """Somebody still wants this payload. Asked in any thread."""

    def coded_settled(self, sink: CodedSink) -> None:
        """Its last record was decompressed after all others, or it is void and nothing works on it any more."""


class _Owner:
    """Of a record."""

    __slots__ = ("_decompressor", "_sink")

    def __init__(self, sink: CodedSink, decompressor: Decompressor) -> None:
        self._sink = sink
        self._decompressor = decompressor

    @property
    def wanted(self) -> bool:
        return self._sink.wanted

    @property
    def spans(self) -> list[tuple[float, float]] | None:
        return self._sink.spans

    def finish(self, record: Record, error: AiorlinfError | None) -> None:
        self._decompressor.finish(record)
        self._sink.record_over(error)


class CodedSink(Sink):
    """See the module. Home thread only, but for `wanted`.

    What is wrong with it concerns one message only: the rest of it is thrown away, and `error` says what it was. It refers to its message
    by number only: a message that is let go of must not wait for the garbage collector.

    Args:
        leaves: the memory of each, and whether it begins with a leaf header.

    Attributes:
        error: the payload is void.
        spans: when codecs have worked on it, None if nobody wants to know.
    """

    __slots__ = (
        "_decoder",
        "_decompressor",
        "_direct",
        "_leaves",
        "_make",
        "_next",
        "_owner",
        "_pending",
        "_place",
        "_staging",
        "error",
        "message_id",
        "spans",
    )

    done: int

    def __init__(
        self,
        owner: CodedOwner,
        message_id: int,
        leaves: Sequence[tuple[memoryview, bool]],
        decoder: Decoder,
        make: MakeDecompressor,
    ) -> None:
        super().__init__([])
        self.total: int = sum(len(view) for view, _ in leaves)
        self.error: AiorlinfError | None = None
        self.message_id: int = message_id
        self.spans: list[tuple[float, float]] | None = None
        self._owner = owner
        self._leaves = [(view, tried) for view, tried in leaves if len(view)]
        self._decoder = decoder
        self._make = make
        self._next = 0  # leaves that were begun
        self._decompressor: Decompressor | None = None  # of the leaf that comes in
        self._place = memoryview(b"")  # or the rest of its memory, if it comes as it is
        self._staging = memoryview(b"")
        self._direct = False
        self._pending = 0  # records that are being decompressed, or wait for it
        self._begin_leaf()

    @property
    def wanted(self) -> bool:
        """Somebody still wants it, and it is not void."""
        return self.error is None and self._owner.coded_wanted(self)

    @property
    def received(self) -> bool:
        """All bytes are in, or it does not matter any more."""
        return self.error is not None or (self._decompressor is None and not self._place and self._next == len(self._leaves))

    @property
    def settled(self) -> bool:
        """All bytes are in, and nothing works on them any more: all of the final memory is written, or the payload is void."""
        return self.received and not self._pending

    # ---- bytes

    def _wanted_place(self) -> memoryview:
        return self._place if self._decompressor is None else self._decompressor.want()

    def view(self, limit: int) -> memoryview:
        place = self._wanted_place()
        self._direct = len(place) >= _STAGING_BYTES
        if self._direct:
            return place[:limit]
        if not self._staging:
            self._staging = memoryview(bytearray(_STAGING_BYTES))
        return self._staging[:limit]

    def advance(self, count: int) -> None:
        if self._direct:
            self._arrived(count)
            return
        data = self._staging[:count]
        while data and self.error is None:
            place = self._wanted_place()
            if not place:
                self.fail(WireError(f"more payload than the {self.total} bytes announced"))
                return
            size = min(len(place), len(data))
            place[:size] = data[:size]
            data = data[size:]
            self._arrived(size)

    def _arrived(self, count: int) -> None:
        """So many bytes are where they belong."""
        decompressor = self._decompressor
        if decompressor is None:
            self.done += count
            self._place = self._place[count:]
            if not self._place:
                self._begin_leaf()
            return
        try:
            record = decompressor.got(count)
        except WireError as error:
            self.fail(error)
            return
        if record is not None:
            self.done += record.original
        if decompressor.plain:
            self._decompressor, self._place = None, decompressor.want()
        elif decompressor.received:
            self._begin_leaf()
        if record is not None:
            self._pending += 1
            self._decoder.add(record, _Owner(self, decompressor))

    def _begin_leaf(self) -> None:
        self._decompressor = None
        self._place = memoryview(b"")
        if self._next < len(self._leaves):
            view, tried = self._leaves[self._next]
            self._next += 1
            if tried:
                self._decompressor = self._make(view)
            else:
                self._place = view

    # ---- ends

    def record_over(self, error: AiorlinfError | None) -> None:
        """One of the records was decompressed, or not."""
        self._pending -= 1
        if error is not None:
            self.fail(error)
        if self.settled:
            self._owner.coded_settled(self)

    def end(self) -> None:
        """No more bytes will come."""
        if not self.received:
            self.fail(WireError("a compressed payload is cut short", bytes_done=self.done, bytes_expected=self.total))

    def fail(self, error: AiorlinfError) -> None:
        """The payload is void."""
        if self.error is not None:
            return
        self.error = error.with_traceback(None)  # its frames hold the memory of the payload, and the user may keep the error for long
        decompressor, self._decompressor = self._decompressor, None
        self._place = self._staging = memoryview(b"")
        self._direct = False
        self._leaves = []
        if decompressor is not None:
            decompressor.abort()

    def redirect(self, views: Sequence[memoryview]) -> None:
        raise NotImplementedError("a coded payload never goes into a receive's own buffer")

    @property
    def stages(self) -> str | None:
        if not self.received:
            return f"[receive {self.done} of {self.total} bytes] -> decompress -> rebuild"
        return f"receive -> {'decompress -> [rebuild]' if self.settled else '[decompress] -> rebuild'}"
