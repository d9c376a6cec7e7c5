"""The frames of a link: a fixed 16-byte header, then a body of bounded length.

Header, little endian: body length u32, type u8, flags u8, extra u16, key u64. What `key` means depends on the type:

=========  ==========================  =====================================================================
type       key                         body
=========  ==========================  =====================================================================
DATA       stream (context and tag)    [message id u64 if WANT_REPLY] whole small message
OPEN       stream                      message id u64, payload bytes u64, manifest
START      message id                  how the payload travels (`Start`)
CHUNK      message id                  the next bytes of the payload
END        message id                  trailer: nothing, or why the message is withdrawn or void
GO         message id                  (receiver to sender) a place is ready, start regardless of the window
CREDIT     bytes consumed, ever        (receiver to sender) opens the window
ACCEPTED   message id                  (receiver to sender) the message is in the hands of the peer
REFUSED    message id                  (receiver to sender) JSON: the receiver's side of the mismatch
PAIR       generation of the pair      rendezvous of a process group, see `rendezvous.pairs`
GOODBYE    0                           nothing more will come
RELEASE    0                           (receiver to sender) places in shared memory whose last views are gone
DROP       segment number              (sender to receiver) this shared memory is not used any more
AGAIN      message id                  (receiver to sender) the payload was lost on its way around the stream: send it over the stream
FLOW       stream                      (receiver to sender) general receives take these: a small send there is done once written
DEVICE     0                           JSON: which accelerators a side has, see `link.device_facts`
COPIED     message id                  (receiver to sender) the payload was copied out of the sender's device memory
RECEIVED   bytes received, ever        between connections that outlive their sockets: so much need not be kept, see `link.ledger`
TAKEN      0                           the first frame of the side that connected: it has the link, see `link.half_made`
PLACED     stream                      message id u64, payload bytes u64, bytes of the place u32, place, manifest: OPEN, START and END
                                       in one, for a payload that lies in shared memory already
=========  ==========================  =====================================================================

Message ids count up from 1 per direction. Totals travel as running sums, so that a repeated or merged frame does no harm.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from aiorlinf.errors import WireError

__all__ = [
    "HEADER",
    "MAX_TAG",
    "MESSAGE_ID",
    "OPEN_PREFIX",
    "PLACED_PREFIX",
    "Flag",
    "FrameType",
    "Start",
    "Via",
    "frame",
    "stream_key",
]

HEADER = struct.Struct("<IBBHQ")
MESSAGE_ID = struct.Struct("<Q")
OPEN_PREFIX = struct.Struct("<QQ")
PLACED_PREFIX = struct.Struct("<QQI")
_START = struct.Struct("<BBHIQ")

MAX_TAG = (1 << 32) - 1


class FrameType:
    """Plain integers, not an enum: these are compared for every message."""

    DATA = 1
    OPEN = 2
    START = 3
    CHUNK = 4
    END = 5
    GO = 6
    CREDIT = 7
    ACCEPTED = 8
    REFUSED = 9
    PAIR = 10
    GOODBYE = 11
    FLOW = 12
    AGAIN = 13
    RELEASE = 14
    DROP = 15
    DEVICE = 16
    COPIED = 17
    RECEIVED = 18
    PLACED = 19
    TAKEN = 20


class Flag:
    """Bits of the header's flags."""

    WANT_REPLY = 1  # DATA, OPEN, PLACED: the sender waits for ACCEPTED or REFUSED
    TENSOR = 2  # DATA, OPEN, PLACED: from send_tensor
    INLINE = 4  # OPEN: the payload is a whole small message, there is no manifest
    BEGUN = 8  # OPEN: START follows unasked (GO would be for nothing)
    CHARGED = 8  # START, PLACED: the payload counts against the window (DATA always does)
    VOID = 16  # END: the payload is void, an error text follows
    RELIEVED = 16  # ACCEPTED: by the lock-out rule; END uses the same bit for VOID
    ASK = 1  # DEVICE: the other side is to tell, too
    DEVICES = 32  # PAIR: of a pair between accelerators
    ABANDONED = 1  # RELEASE: somebody that the peer has lent the memory to has gone without a word, and may still look at it
    WITHDRAWN = 32  # END: the sender cancelled; the receiver acts as if the message had never come


class Via(enum.IntEnum):
    """How a payload travels."""

    STREAM = 0
    GLOO = 1
    SHM = 2
    CODED = 3
    IPC = 4
    NCCL = 5


class Start(NamedTuple):
    """How the payload of one message travels.

    STREAM: all of it as chunks. GLOO: tensor leaves of at least `threshold` bytes through the pair of this `generation`, everything
    else as chunks, in order. SHM: all of it in shared memory, at `place` (`link.shared.Placement`). CODED: as chunks, some leaves
    compressed; `place` says which (`codec.header`). IPC: leaves on accelerators are to be copied from the sender's device memory, to which
    `place` has the handles (`backends.cuda_ipc`); NCCL: they come through the pair of this `generation`; the others as chunks.
    """

    via: int
    generation: int = 0
    threshold: int = 0
    place: bytes | memoryview = b""

    def encode(self) -> bytes:
        """The body of a START frame."""
        return _START.pack(self.via, 0, 0, self.generation, self.threshold) + self.place

    @classmethod
    def decode(cls, body: memoryview) -> Start:
        """Raises WireError if malformed. `place` shows the memory of `body`."""
        if len(body) < _START.size:
            raise WireError(f"a START frame has {len(body)} bytes instead of {_START.size}")
        via, _, _, generation, threshold = _START.unpack_from(body)
        if via > Via.NCCL:
            raise WireError(f"unknown backend number {via} in a START frame")
        return cls(via, generation, threshold, body[_START.size :])


def frame(kind: int, key: int, body: bytes = b"", flags: int = 0, extra: int = 0) -> bytes:
    """One whole frame."""
    return HEADER.pack(len(body), kind, flags, extra, key) + body


def stream_key(context: int, tag: int) -> int:
    """The key of the stream of messages of one group (context, 32 bits) and tag."""
    return context << 32 | tag
