"""One leaf on its way in: its bytes go from the network into buffers, and from there, in any thread, into the final tensor's memory."""

from __future__ import annotations

import time
from collections.abc import Container
from enum import Enum, auto

from aiorlinf.codec.base import Context
from aiorlinf.codec.header import LEAF_HEADER, PLAIN, RECORD_HEADER, LeafHeader, record_crc, record_size
from aiorlinf.codec.memory import BufferLease, BufferSource, Memory, writable_view
from aiorlinf.codec.stats import CompressionStats
from aiorlinf.errors import WireError

__all__ = ["Decompressor", "Record"]


_POOLED_FROM = 64 * 1024
"""Bytes. Smaller memory is quicker to make than to keep."""


class Record:
    """One chunk that has arrived. `run` it once, in any thread, then hand it to `Decompressor.finish` on the home thread.

    Attributes:
        index: number of the chunk.
        codec: number of the codec whose context `run` needs; 0: none, the chunk came as it is.
        ran: whether `run` came back without an error.
    """

    __slots__ = ("_crc", "_data", "_lease", "_seconds", "_target", "_word", "codec", "index", "ran")

    def __init__(
        self, index: int, codec: int, word: int, crc: int, data: memoryview, target: memoryview, lease: BufferLease | None
    ) -> None:
        self.index: int = index
        self.codec: int = codec
        self.ran: bool = False
        self._word = word
        self._crc = crc
        self._data = data
        self._target = target
        self._lease = lease
        self._seconds = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return RECORD_HEADER + self._data.nbytes

    @property
    def original(self) -> int:
        """Bytes of the chunk."""
        return self._target.nbytes

    def run(self, context: Context | None = None) -> None:
        """Check the chunk, and decompress it into its place.

        Raises:
            WireError: corrupt. The place then holds anything, and the leaf is void.
        """
        start = time.perf_counter()
        if record_crc(self.index, self._word, self._data) != self._crc:
            raise WireError(f"chunk {self.index} of a compressed tensor does not match its checksum")
        if self.codec != PLAIN:
            if context is None:
                raise ValueError("this record needs a context of its codec")
            context.decompress_into(self._data, self._target)
        self._seconds = time.perf_counter() - start
        self.ran = True

    def release(self) -> None:
        """Let go of all memory. Not while `run` is at work."""
        self._data = self._target = memoryview(b"")
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()


class _Stage(Enum):
    HEADER = auto()
    RECORD = auto()
    BODY = auto()
    WHOLE = auto()
    END = auto()


class Decompressor:
    """See the module. Home thread only, but for `Record.run`. Nothing here waits.

    Bytes come in through `want` and `got`, without a copy, or through `feed`, in pieces of any size. Every record that comes out must be
    finished, also if it failed or never ran. After an error the leaf is void: `abort`.

    Args:
        dst: the final tensor's memory; nothing is written outside it.
        buffers: for what is still compressed. Where there is none, memory of its own is used.
        codecs: numbers of the codecs that can be undone here.

    Attributes:
        header: the leaf's, once it is here.
    """

    def __init__(self, dst: Memory, buffers: BufferSource, codecs: Container[int], stats: CompressionStats) -> None:
        self.header: LeafHeader | None = None
        self._dst = writable_view(dst)
        self._buffers = buffers
        self._codecs = codecs
        self._stats = stats
        self._stage = _Stage.HEADER
        self._head = memoryview(bytearray(LEAF_HEADER))
        self._filled = 0
        self._goal: memoryview = self._head
        self._index = 0
        self._stored = 0  # bytes behind the leaf's header, as far as their headers tell
        self._finished = 0
        self._lease: BufferLease | None = None
        self._record: tuple[int, int, bool] = (0, 0, False)  # word, checksum, raw

    @property
    def nbytes(self) -> int:
        """Bytes of the leaf."""
        return self._dst.nbytes

    @property
    def received(self) -> bool:
        """All bytes are in."""
        return self._stage is _Stage.END

    @property
    def plain(self) -> bool:
        """It comes as it is: from here on its bytes belong into the final memory, one after the other, and need not pass through here."""
        return self._stage is _Stage.WHOLE

    @property
    def done(self) -> bool:
        """All bytes are in, and all of the final memory is written."""
        return self.received and self.header is not None and self._finished == self.header.chunks

    def want(self) -> memoryview:
        """Where the next bytes belong: as many as fit there, or fewer. Empty: no more are expected."""
        return self._goal[self._filled :]

    def got(self, nbytes: int) -> Record | None:
        """So many bytes were put where `want` said. Returns the record that they complete.

        Raises:
            WireError: what arrived is no leaf of the size expected, in a codec known here.
        """
        self._filled += nbytes
        if self._filled < self._goal.nbytes:
            return None
        if self._stage is _Stage.HEADER:
            self._take_header()
        elif self._stage is _Stage.RECORD:
            self._take_record_header()
        elif self._stage is _Stage.BODY:
            return self._take_body()
        else:
            self._expect(_Stage.END, memoryview(b""))
        return None

    def feed(self, data: memoryview) -> tuple[int, list[Record]]:
        """Copy in what belongs to this leaf. Returns how many bytes that were, and the records that they complete.

        Raises:
            WireError: as `got`. Records that were complete before are released.
        """
        used = 0
        records: list[Record] = []
        try:
            while used < data.nbytes and not self.received:
                place = self.want()
                size = min(place.nbytes, data.nbytes - used)
                place[:size] = data[used : used + size]
                used += size
                record = self.got(size)
                if record is not None:
                    records.append(record)
        except WireError:
            for record in records:
                record.release()
            raise
        return used, records

    def finish(self, record: Record) -> None:
        """A record is over, well or not; its buffer goes back."""
        if record.ran:
            self._finished += 1
            self._stats.took(record.nbytes, record._target.nbytes, record._seconds, last=self.done)
        record.release()

    def end(self) -> None:
        """No more bytes will come.

        Raises:
            WireError: some are missing.
        """
        if not self.received:
            raise WireError(
                "a compressed tensor is cut short",
                bytes_done=self._index * self.header.chunk if self.header is not None else 0,
                bytes_expected=self._dst.nbytes,
            )

    def abort(self) -> None:
        """The leaf is void. Records that came out must still be finished."""
        self._expect(_Stage.END, memoryview(b""))
        self.header = None
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    def _expect(self, stage: _Stage, goal: memoryview) -> None:
        self._stage = stage
        self._goal = goal
        self._filled = 0

    def _take_header(self) -> None:
        header = LeafHeader.decode(self._head, self._dst.nbytes)
        if header.codec == PLAIN:
            self.header = header
            self._expect(_Stage.WHOLE if header.original else _Stage.END, self._dst)
            return
        if header.codec not in self._codecs:
            raise WireError(f"a tensor compressed with codec number {header.codec}, which is not known here")
        self.header = header
        self._stats.took(LEAF_HEADER, 0, 0.0, last=False)
        self._expect(_Stage.RECORD, self._head[:RECORD_HEADER])

    def _span(self) -> tuple[LeafHeader, int, int]:
        header = self.header
        if header is None:
            raise WireError("a leaf that is void")
        return header, *header.span(self._index)

    def _take_record_header(self) -> None:
        header, start, end = self._span()
        word, crc, size, raw = record_size(bytes(self._head[:RECORD_HEADER]), end - start)
        self._stored += RECORD_HEADER + size
        if self._stored > (header.original if header.stored is None else header.stored):
            raise WireError(f"a compressed tensor of {header.original} bytes takes {self._stored} bytes and more")
        self._record = word, crc, raw
        if raw:
            self._expect(_Stage.BODY, self._dst[start:end])
            return
        self._lease = self._buffers.acquire(size) if size >= _POOLED_FROM else None
        self._expect(_Stage.BODY, memoryview(bytearray(size)) if self._lease is None else self._lease.view[:size])

    def _take_body(self) -> Record:
        header, start, end = self._span()
        word, crc, raw = self._record
        lease, self._lease = self._lease, None
        record = Record(self._index, PLAIN if raw else header.codec, word, crc, self._goal, self._dst[start:end], lease)
        self._index += 1
        if self._index < header.chunks:
            self._expect(_Stage.RECORD, self._head[:RECORD_HEADER])
        else:
            self._expect(_Stage.END, memoryview(b""))
            if header.stored is not None and self._stored != header.stored:
                record.release()
                raise WireError(f"a compressed tensor takes {self._stored} bytes, but {header.stored} were announced")
        return record
