"""What two ends of a link must remember so that another connection can go on where a broken one stopped. Pure.

Both count the bytes of the stream from its first frame on. What was written is kept until the peer says that it has it; after a break
each tells the other how much it has, and what is missing is written again. So nothing is lost and nothing comes twice, wherever in a frame
the break was.

Small frames are kept as they are. Of a payload only references to the caller's memory are kept, so that keeping costs no copy; such a
payload has not left the caller's memory before the peer has it (`settled`).
"""

from __future__ import annotations

from collections import deque

from aiorlinf.errors import WireError

__all__ = ["Ledger"]

_TELL_BYTES = 64 * 1024
"""So much may have come before the peer is told of it, if no payload ends earlier."""


class Ledger:
    """Counters in bytes since the link came up.

    Attributes:
        written: of the stream, whether they have reached the kernel or not.
        received: of the peer's stream.
        confirmed: of ours, by the peer.
    """

    __slots__ = ("_kept", "_lent", "_start", "_told", "confirmed", "received", "written")

    def __init__(self) -> None:
        self.written: int = 0
        self.received: int = 0
        self.confirmed: int = 0
        self._told = 0
        self._start = 0  # position of the first byte in `_kept`
        self._kept: deque[bytes | memoryview] = deque()
        self._lent = 0  # references to the memory of others end before this position

    def keep(self, data: bytes | memoryview, *, lent: bool = False) -> None:
        """This was written. `lent`: it lies in memory of somebody who wants it back."""
        self._kept.append(data)
        self.written += len(data)
        if lent:
            self._lent = self.written

    def acknowledged(self, count: int) -> None:
        """The peer has so many bytes.

        Raises:
            WireError: it cannot have.
        """
        if count > self.written or count < 0:
            raise WireError(f"the peer says that it has {count} bytes of {self.written}")
        self.confirmed = max(self.confirmed, count)
        kept, start = self._kept, self._start
        while kept and start + len(kept[0]) <= count:
            start += len(kept.popleft())
        self._start = start

    @property
    def settled(self) -> bool:
        """No memory of others is referred to any more."""
        return self._start >= self._lent

    @property
    def kept_bytes(self) -> int:
        """Written, and not known to be with the peer; in whole frames."""
        return self.written - self._start

    def missing(self, count: int) -> list[bytes | memoryview]:
        """What a peer that has `count` bytes lacks, in order.

        Raises:
            WireError: it cannot have so many, or has had more.
        """
        if count < self._start:
            raise WireError(f"the peer says that it has {count} bytes, and has had {self._start}")
        self.acknowledged(count)
        pieces = list(self._kept)
        if pieces and count > self._start:
            pieces[0] = memoryview(pieces[0])[count - self._start :]
        return pieces

    def arrived(self, count: int) -> bool:
        """So many more bytes came; True when the peer should be told."""
        self.received += count
        return self.received - self._told >= _TELL_BYTES

    def tell(self) -> int:
        """What the peer is told now."""
        self._told = self.received
        return self.received

    def close(self) -> None:
        """Nothing will be written again."""
        self._kept.clear()
