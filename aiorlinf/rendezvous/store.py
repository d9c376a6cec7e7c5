"""A torch store of two members that lives on their link: no server, no port, no key left behind.

torch's process groups publish their addresses in a store and wait there for the other side's. Each side keeps its own table, every
`set` is forwarded to the peer over the authenticated link, and `get` waits for what the peer forwarded. The attempt's end is
the store's end: `abort` wakes whoever waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.distributed_c10d import Store

__all__ = ["PairStore"]


class PairStore(Store):
    """See the module. torch calls it from the private thread that makes the group; `feed` and `abort` come from the loop.

    Args:
        forward: called for each key that this side sets.
        timeout: seconds that one wait may take.
        waiting_for: names the other side in errors.
    """

    def __init__(self, forward: Callable[[str, bytes], None], timeout: float, waiting_for: str) -> None:
        super().__init__()
        self._forward = forward
        self._end = time.monotonic() + timeout
        self._timeout_s = timeout
        self._waiting_for = waiting_for
        self._table: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._reason: str | None = None
        self._published: list[bytes] = []
        self._then: Callable[[list[bytes]], None] | None = None

    def feed(self, key: str, value: bytes) -> None:
        """The peer set a key."""
        with self._changed:
            self._table[key] = value
            self._changed.notify_all()

    def abort(self, reason: str) -> None:
        """Wake whoever waits, with this reason; from then on nothing can be set, and waits for what is not there fail at once."""
        with self._changed:
            self._reason = self._reason or reason
            self._changed.notify_all()
            then, self._then = self._then, None
        if then is not None:
            then(self._published)

    def when_aborted(self, then: Callable[[list[bytes]], None]) -> None:
        """Call this once, with the values that this side has set, when the attempt is given up: who meets by them may wait elsewhere.

        It is called on the thread that gives up, or on this one if that has happened; it must not block.
        """
        with self._changed:
            aborted = self._reason is not None
            if not aborted:
                self._then = then
        if aborted:
            then(self._published)

    # ---- torch's side

    def set(self, key: str, value: Any) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        with self._changed:
            if self._reason is not None:
                raise RuntimeError(self._reason)
            self._published.append(data)
            self._table[key] = data
            self._changed.notify_all()
        self._forward(key, data)

    def get(self, key: str) -> bytes:
        self._await([key])
        return self._table[key]

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        self._await(keys)

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            return all(key in self._table for key in keys)

    def _await(self, keys: list[str]) -> None:
        with self._changed:
            while not all(key in self._table for key in keys):
                if self._reason is not None:
                    raise RuntimeError(self._reason)
                left = self._end - time.monotonic()
                if left <= 0:
                    raise RuntimeError(f"{self._waiting_for} did not publish its address within {self._timeout_s:.1f} s")
                self._changed.wait(left)
