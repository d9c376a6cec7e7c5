"""The `gloo` backend: one standalone process group per direction of a link.

A transfer is a broadcast of bytes in a group of two, because point-to-point Gloo works have no future and cannot be polled. The group is
made of public classes with a store of its own; the default group is never touched. Bytes only: Gloo refuses several dtypes in
collectives, and reads strided tensors wrongly.

Making a pair blocks, and Gloo has no call that ends it: the side that listens for the other waits, and would do so long after the other
has died. So whoever gives an attempt up has its own listener knocked at, in the peer's place; what comes of that is thrown away.

Gloo's own sockets are not authenticated: whoever can reach the port while a pair is being made can disturb it.
"""

from __future__ import annotations

import atexit
import datetime
import os
import socket
import struct
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch.distributed.distributed_c10d import BroadcastOptions, ProcessGroupGloo, Store

from aiorlinf.backends.unwanted import Unwanted

__all__ = ["GlooPair", "MeetingStore", "gloo_available"]

_FOREVER = datetime.timedelta(days=365)

_GLOO_WAITS_TIMES = 5
"""So many times its time limit Gloo waits for a connection (`Pair::waitUntilConnected`)."""

_KNOCK_S = 2.0
"""Seconds for a connection to the listener of this very process."""

_EXIT_WAIT_S = 2.0
"""Seconds that the end of the process waits for groups that are being destroyed."""

_pairs: weakref.WeakSet[GlooPair] = weakref.WeakSet()
_unwanted = Unwanted()


def gloo_available() -> str | None:
    """None if this torch has Gloo, else why it cannot be used."""
    if not torch.distributed.is_available():
        return "this torch was built without torch.distributed"
    if not torch.distributed.is_gloo_available():
        return "this torch was built without Gloo"
    return None


class MeetingStore(Protocol):
    """A torch store for one attempt to meet (`rendezvous.store.PairStore`)."""

    def when_aborted(self, then: Callable[[list[bytes]], None]) -> None:
        """Call this with the values that this side has set, once the attempt is given up."""


class GlooPair:
    """One direction between two workers. Member 0 sends, member 1 receives.

    Making it blocks until both sides are connected, so it is done in a private thread. It ends at once when the store is aborted: with
    an error, or with a pair that leads nowhere and is to be retired.

    Args:
        store: where the two sides find each other.
        rank: 0 for the sender, 1 for the receiver.
        host: own address to listen on.
        timeout: seconds for the connection to be made, from when the peer's address is known.

    Raises:
        RuntimeError: Gloo's own error, or the store's.
    """

    def __init__(self, store: MeetingStore, rank: int, host: str, timeout: float) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = datetime.timedelta(seconds=timeout / _GLOO_WAITS_TIMES)
        options._devices = [ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
        options._threads = 1
        self._store = cast(Store, store)
        made = threading.Event()
        store.when_aborted(lambda published: _knock(published, rank, made))
        try:
            # The stubs do not know the backends' own collectives.
            self._group: Any = ProcessGroupGloo(self._store, rank, 2, options)
        finally:
            made.set()
        self._options = BroadcastOptions()
        self._options.rootRank = 0
        self._options.rootTensor = 0
        # Liveness is the link's business: a transfer waits as long as the peer lives.
        self._options.timeout = _FOREVER
        _pairs.add(self)

    def transfer(self, leaves: list[torch.Tensor], then: Callable[[BaseException | None], None]) -> None:
        """Send or receive these contiguous one-dimensional uint8 tensors, in order; `then` is called once, on a thread of Gloo."""
        group = self._group
        if group is None:
            then(RuntimeError("the pair is closed"))
            return
        left = len(leaves)
        lock = threading.Lock()
        first: list[BaseException] = []

        def done(future: Any) -> None:
            nonlocal left
            error: BaseException | None = None
            try:
                future.value()
            except BaseException as caught:  # whatever Gloo reports is handed on
                error = caught
            with lock:
                left -= 1
                if error is not None:
                    first.append(error)
                last = left == 0
            if last:
                leaves.clear()
                then(first[0] if first else None)

        if not left:
            then(None)
            return
        for leaf in list(leaves):
            try:
                group.broadcast([leaf], self._options).get_future().add_done_callback(done)
            except RuntimeError as error:
                failed: torch.futures.Future[Any] = torch.futures.Future()
                failed.set_exception(error)
                done(failed)

    def retire(self) -> None:
        """Drop the group without waiting: its destructor joins threads that may be in a transfer which ends only with the peer."""
        _unwanted.take(self)


@atexit.register
def _retire_all() -> None:
    """A thread that comes back from C++ into an interpreter that is being finalized takes the process down with SIGABRT.

    So Gloo's threads, which call back into Python, end before that; destroying a group takes milliseconds.
    """
    for pair in list(_pairs):
        pair.retire()
    _unwanted.wait(_EXIT_WAIT_S)


os.register_at_fork(after_in_child=_pairs.clear)  # these are its parent's


def _knock(published: list[bytes], rank: int, made: threading.Event) -> None:
    """Connect, as the peer would, to the listener of an attempt that nobody wants any more: whoever waits there for the peer comes back."""
    addresses = [address for address in map(_listening_at, published) if address is not None]
    if made.is_set() or not addresses:
        return

    def knock() -> None:
        for address in addresses:
            try:
                with socket.create_connection(address, _KNOCK_S) as sock:
                    sock.sendall(struct.pack("=q", 1 - rank))  # which of the listener's pairs: it has one for each rank
                    made.wait(_KNOCK_S)
            except OSError:  # it is over already; else its time limit ends it
                pass

    _unwanted.run(threading.Thread(target=knock, name="aiorlinf-retire-knock", daemon=True))


def _listening_at(published: bytes) -> tuple[str, int] | None:
    """Where a member listens, from what it has published: the host's name, then a socket address, each behind its length."""
    try:
        (name,) = struct.unpack_from("=Q", published)
        (family,) = struct.unpack_from("=H", published, 16 + name)
        (port,) = struct.unpack_from("!H", published, 18 + name)
        begin, size = {socket.AF_INET: (20, 4), socket.AF_INET6: (24, 16)}[family]
        return socket.inet_ntop(family, published[name + begin : name + begin + size]), port
    except (struct.error, KeyError, ValueError, OverflowError):  # of another Gloo
        return None
