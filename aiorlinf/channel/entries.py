"""What a worker and a channel worker say to each other: many short entries in one small message. Pure.

A message begins with the number of the conversation, drawn at random by the worker, and flags; then entries follow, each a fixed part, a
key and a payload. Numbers of calls count up in each conversation. Payloads that are too large for an entry lie in shared memory, and the
entry says where (PLACED; see `link.lending`); or they travel on their own, as messages of reserved contexts whose tag is the `slot` of an
entry; the channel worker deals the slots out.

=========  =================================================================================================================
to the channel worker
---------  -----------------------------------------------------------------------------------------------------------------
OPEN       a new handle, `port`; the payload says of which channel, and who it is
PUT        `number` shall be put: weight `value`, `extra` bytes, the payload unless LARGE; LARGE, PLACED: where it is; NOWAIT
RETRACT    put `number` is not wanted any more
COMMIT     all admitted puts of this port up to `number` are final
GET        `number` wants an item, or (BATCH) a weight of `value`; NOWAIT; LEASE, for at most `extra` milliseconds (0: no limit); so do
           the `slot` numbers after it
CANCEL     get `number` is not wanted any more
TAKEN      what the gets from `number` on were given, `extra` of them, is theirs for good
RETURN     what get `number` was given goes back; what has come as a message follows in the slots that the payload lists
AGAIN      item `extra` of get `number` cannot be had where it is said to lie: it is wanted as a message
DONE       lease `number` is over, its items are dealt with
BACK       lease `number` is over, its items go back
ASK        a question, what the payload names
REPORT     this port's consumer has `extra` bytes free (NOWAIT: it does not know)
CLOSE      this port closes; SHUTDOWN, IMMEDIATE: the stream ends for all; NOWAIT: it is not wanted after all, perhaps before it is open
---------  -----------------------------------------------------------------------------------------------------------------
from the channel worker
---------  -----------------------------------------------------------------------------------------------------------------
ADMIT      all puts of this port up to `number` that have not failed have room
AGAIN      put `number` is not where it is said to lie: GO will ask for it, and ADMIT does not count for it
GO         the payload of put `number` is expected in `slot`
ITEM       for get `number`; LARGE: it comes in `slot`, and is what AGAIN has asked for if `extra` is one more than its index; LARGE,
           PLACED: where it is, with LEASE to be looked at privately; MORE: further items of the batch follow
ANSWER     to OPEN, ASK or CLOSE `number`
ERROR      call `number` has failed
END        the conversation is over, as something was not understood or has failed: the payload says what
=========  =================================================================================================================
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from aiorlinf.channel.records import Key
from aiorlinf.errors import WireError

__all__ = ["FIXED", "GETS", "HEAD", "HELLO", "LIFE", "PUTS", "REPLIES", "REQUESTS", "RETURNS", "Bits", "Entry", "Op", "decode_end",
           "decode_key", "encode_end", "encode_key", "entries", "entry"]  # fmt: skip

REQUESTS, REPLIES, PUTS, GETS, RETURNS, LIFE = range(1, 7)
"""Reserved contexts: entries to and from the channel worker, large payloads of puts, of gets, and of gets that go back; one in which a
receive ends with the link, unless the peer says there before that an error is what ends it."""

_CAUSE_BYTES = 1000

HEAD = struct.Struct("<QB")
"""Number of the conversation, flags."""

HELLO = 1
"""The conversation begins with this message."""

FIXED = struct.Struct("<BBHHHIQdQ")
"""Operation, bits, port, slot, size of the key, size of the payload, number, value, extra."""


class Op:
    """Plain integers: they are compared for every entry."""

    OPEN = 1
    PUT = 2
    RETRACT = 3
    COMMIT = 4
    GET = 5
    CANCEL = 6
    TAKEN = 7
    RETURN = 8
    DONE = 9
    BACK = 10
    ASK = 11
    REPORT = 12
    CLOSE = 13
    AGAIN = 14
    ADMIT = 32
    GO = 33
    ITEM = 34
    ANSWER = 35
    ERROR = 36
    END = 37


class Bits:
    """Of an entry."""

    NOWAIT = 1
    LARGE = 2
    BATCH = 4
    LEASE = 8
    MORE = 16
    PLACED = 32
    FORGET = 2  # in CLOSE
    SHUTDOWN = 32  # in CLOSE
    IMMEDIATE = 64
    ALL_KEYS = 128


class Entry(NamedTuple):
    """One entry, taken apart."""

    op: int
    bits: int
    port: int
    slot: int
    number: int
    value: float
    extra: int
    key: bytes
    payload: bytes


def entry(
    op: int,
    port: int,
    number: int,
    bits: int = 0,
    *,
    slot: int = 0,
    value: float = 0.0,
    extra: int = 0,
    key: bytes = b"",
    payload: bytes = b"",
) -> bytes:
    """As bytes."""
    return FIXED.pack(op, bits, port, slot, len(key), len(payload), number, value, extra) + key + payload


def entries(body: bytes) -> Iterator[tuple[int, int, int, int, int, float, int, bytes, bytes]]:
    """Those of a message, after its head, as `Entry` has them: there are so many that a plain tuple has to do.

    Raises:
        WireError: malformed.
    """
    at, end, size = HEAD.size, len(body), FIXED.size
    unpack = FIXED.unpack_from
    while at < end:
        if end - at < size:
            raise WireError(f"{end - at} bytes are no entry of a channel")
        op, bits, port, slot, key_size, payload_size, number, value, extra = unpack(body, at)
        at += size
        after = at + key_size + payload_size
        if after > end:
            raise WireError(f"an entry of a channel ends {after - end} bytes after its message")
        if key_size:
            yield op, bits, port, slot, number, value, extra, body[at : at + key_size], body[at + key_size : after]
        else:
            yield op, bits, port, slot, number, value, extra, b"", body[at:after]
        at = after


def encode_key(key: Key) -> bytes:
    """A key as bytes; the usual one, None, as none."""
    if key is None:
        return b""
    if isinstance(key, str):
        return b"s" + key.encode("utf-8", "surrogatepass")
    if isinstance(key, bytes):
        return b"b" + key
    return b"i%d" % key


def decode_key(data: bytes) -> Key:
    """The reverse of `encode_key`. Raises WireError."""
    if not data:
        return None
    kind, rest = data[:1], data[1:]
    try:
        if kind == b"s":
            return rest.decode("utf-8", "surrogatepass")
        if kind == b"b":
            return rest
        if kind == b"i":
            return int(rest)
    except ValueError:
        pass
    raise WireError(f"{data[:40]!r} is not a key")


def encode_end(number: int, cause: str) -> bytes:
    """What a worker that ends conversation `number` because of an error says on LIFE, so that its leaving is not taken for a good end."""
    return HEAD.pack(number, 0) + cause.encode("utf-8", "replace")[:_CAUSE_BYTES]


def decode_end(body: bytes | None, number: int) -> str | None:
    """The cause; whatever else a peer sends there is one, too. None: it is about another conversation."""
    if body is None or len(body) < HEAD.size:
        return "it ended with an error"
    if HEAD.unpack_from(body)[0] != number:
        return None
    return body[HEAD.size : HEAD.size + _CAUSE_BYTES].decode("utf-8", "replace") or "it ended with an error"
