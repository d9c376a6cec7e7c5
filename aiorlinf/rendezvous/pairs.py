"""Rendezvous of process-group pairs over a link: each side binds a port the kernel chose and publishes it.

Each direction has a pair of its own, owned by its sender. To make one, the owner raises the generation and offers it; both sides then
build their member in a thread of that attempt, exchanging addresses through a `PairStore` whose traffic is PAIR frames. The
receiver says READY when its member exists; the owner uses the pair when both do. A failed attempt ends its store, its thread and
nothing else: the next attempt has the next generation, and frames of older ones are ignored.

PAIR frames: key is the generation, flags say what, OUT marks frames of the direction's owner.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from aiorlinf.errors import AiorlinfError, BackendUnavailable, ClosedError, WireError
from aiorlinf.rendezvous.store import PairStore
from aiorlinf.wire.frames import Flag, FrameType, Via, frame
from aiorlinf.work.threads import start_thread

if TYPE_CHECKING:
    from aiorlinf.work.home import LoopHome

__all__ = ["PairFactory", "PairGroup", "Pairs"]

OFFER, SET, READY, FAILED = 1, 2, 4, 8
OUT = 16
_MAX_VALUE_BYTES = 64 * 1024
_MAX_KEYS = 64


class PairGroup(Protocol):
    """A pair of processes that can move bytes one way (`backends.gloo.GlooPair`)."""

    def transfer(self, leaves: list[torch.Tensor], then: Callable[[BaseException | None], None]) -> None: ...
    def retire(self) -> None: ...


PairFactory = Callable[[PairStore, int, float], PairGroup]
"""store, rank, timeout in seconds -> the group; blocks."""

Then = Callable[[BaseException | None], None]


class _Half:
    """One direction, as seen from here. `generation` never goes back; `group` is there once usable."""

    def __init__(self) -> None:
        self.generation = 0
        self.group: PairGroup | None = None
        self.store: PairStore | None = None
        self.made: PairGroup | None = None
        self.peer_ready = False
        self.keys = 0
        self.waiting: list[Callable[[AiorlinfError | None], None]] = []

    def drop(self, reason: str) -> None:
        """Forget the present attempt or group."""
        store, self.store = self.store, None
        if store is not None:
            store.abort(reason)
        for group in (self.group, self.made):
            if group is not None:
                group.retire()
        self.group = self.made = None
        self.peer_ready = False
        self.keys = 0


class Pairs:
    """Both directions of one link: the sender's lane, the receiver's lane, and the negotiation. Home thread only.

    Args:
        send: queues a frame on the link.
        make: builds a member; called in a private thread.
        threshold: leaves of at least so many bytes go through the pair.
        timeout: seconds for one attempt.
        name: of the backend, for errors.
        via: what it carries.
    """

    def __init__(
        self,
        home: LoopHome,
        send: Callable[[bytes], None],
        make: PairFactory,
        *,
        threshold: int,
        timeout: float,
        local: str,
        remote: str,
        name: str = "gloo",
        via: Via = Via.GLOO,
    ) -> None:
        self.via = via
        self._name = name
        self._mark = 0 if via is Via.GLOO else Flag.DEVICES
        self.home = home
        self.threshold = threshold
        self._send = send
        self._make = make
        self._timeout = timeout
        self._local = local
        self._remote = remote
        self._out = _Half()
        self._in = _Half()
        self._closed = False

    # ---- sending

    def ready(self) -> int | None:
        """The generation that can be used, None when `prepare` has to be called first."""
        return self._out.generation if self._out.group is not None else None

    def prepare(self, then: Callable[[AiorlinfError | None], None]) -> None:
        """Make the outgoing pair; `then` gets None, or why it cannot be had."""
        out = self._out
        if self._closed:
            then(ClosedError("the link is closed"))
            return
        out.waiting.append(then)
        if out.store is not None:
            return
        out.generation += 1
        generation = out.generation
        out.store = self._store(generation, OUT)
        self._tell(generation, b"", OFFER | OUT)
        self._build(out.store, 0, generation, self._out_built)

    def send(self, generation: int, leaves: list[torch.Tensor], then: Then) -> None:
        """Send these leaves; `then` is called on the home thread."""
        group = self._out.group
        if group is None or generation != self._out.generation:
            then(BackendUnavailable(f"pair {generation} to {self._remote} is gone"))
            return
        group.transfer(leaves, lambda error: self._back(self._sent, generation, error, then))

    def _sent(self, generation: int, error: BaseException | None, then: Then) -> None:
        if error is not None:
            self.drop_out(generation, str(error))
        then(error)

    def drop_out(self, generation: int, reason: str) -> None:
        """The outgoing pair failed; the next use makes a new one."""
        if generation == self._out.generation:
            self._out.drop(reason)

    # ---- receiving

    def receive(self, generation: int, leaves: list[torch.Tensor], then: Then) -> bool:
        """Receive these leaves; `then` is called on the home thread. False if that pair is not there."""
        half = self._in
        if half.group is None or generation != half.generation:
            return False
        half.group.transfer(leaves, lambda error: self._back(self._received, generation, error, then))
        return True

    def drop_in(self, generation: int, reason: str) -> None:
        """A transfer that the sender has begun is not received: nothing behind it can be, either. The sender sees its pair break."""
        if generation == self._in.generation:
            self._in.drop(reason)

    def _received(self, generation: int, error: BaseException | None, then: Then) -> None:
        if error is not None and generation == self._in.generation:
            self._in.drop(str(error))
        then(error)

    # ---- negotiation

    def on_pair(self, generation: int, flags: int, body: memoryview) -> None:
        """A PAIR frame."""
        half = self._in if flags & OUT else self._out
        if flags & OFFER:
            if not flags & OUT or generation <= half.generation:
                raise WireError(f"pair generation {generation} is offered after {half.generation}")
            half.drop("a newer pair is offered")
            half.generation = generation
            half.store = self._store(generation, 0)
            self._build(half.store, 1, generation, self._in_built)
            return
        if generation != half.generation:
            return  # of an attempt that is over
        if flags & SET:
            self._on_set(half, body)
        elif flags & READY:
            half.peer_ready = True
            self._out_usable()
        elif flags & FAILED:
            reason = f"{self._remote}: {str(body, 'utf-8', 'replace')}"
            if half is self._out:
                self._out_failed(generation, reason)
            else:
                half.drop(reason)
        else:
            raise WireError(f"a PAIR frame with flags {flags:#x}")

    def _tell(self, generation: int, body: bytes, flags: int) -> None:
        self._send(frame(FrameType.PAIR, generation, body, flags | self._mark))

    def _on_set(self, half: _Half, body: memoryview) -> None:
        half.keys += 1
        if len(body) > _MAX_VALUE_BYTES or half.keys > _MAX_KEYS:
            raise WireError("too much is published for one pair")
        key, _, value = bytes(body).partition(b"\0")
        if half.store is not None:
            half.store.feed(key.decode("utf-8", "replace"), value)

    def _store(self, generation: int, flags: int) -> PairStore:
        def forward(key: str, value: bytes) -> None:  # from the private thread
            self.home.call(self._forward, generation, flags, key.encode() + b"\0" + value)

        return PairStore(forward, self._timeout, self._remote)

    def _forward(self, generation: int, flags: int, body: bytes) -> None:
        half = self._out if flags & OUT else self._in
        if generation == half.generation and not self._closed:
            self._tell(generation, body, SET | flags)

    def _build(self, store: PairStore, rank: int, generation: int, built: Callable[[int, PairGroup | None, str | None], None]) -> None:
        """Make a member in a thread of this attempt: a shared thread could be waiting for a peer that waits for it."""

        def run() -> None:
            group: PairGroup | None = None
            reason: str | None = None
            try:
                group = self._make(store, rank, self._timeout)
            except Exception as error:  # torch raises RuntimeError, DistStoreError and others here
                reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            self._back(built, generation, group, reason)

        try:
            start_thread(threading.Thread(target=run, name=f"aiorlinf-pair-{generation}", daemon=True))
        except AiorlinfError as error:  # as any other attempt that fails; told in a later turn, as from the thread
            self.home.call_soon(built, generation, None, str(error))

    def _back(self, fn: Callable[..., None], *args: object) -> None:
        """From a foreign thread to the home thread; after its end there is nobody to tell."""
        try:
            self.home.call(fn, *args)
        except AiorlinfError:
            for arg in args:
                retire = getattr(arg, "retire", None)
                if retire is not None:
                    retire()

    def _out_built(self, generation: int, group: PairGroup | None, reason: str | None) -> None:
        out = self._out
        if generation != out.generation or self._closed or out.store is None:
            if group is not None:
                group.retire()
            return
        if group is None:
            self._tell(generation, (reason or "").encode()[:1024], FAILED | OUT)
            self._out_failed(generation, reason or "it cannot be made")
            return
        out.made = group
        self._out_usable()

    def _out_usable(self) -> None:
        out = self._out
        if out.made is None or not out.peer_ready:
            return
        out.group, out.made, out.store = out.made, None, None
        waiting, out.waiting = out.waiting, []
        for then in waiting:
            then(None)

    def _out_failed(self, generation: int, reason: str) -> None:
        out = self._out
        out.drop(reason)
        waiting, out.waiting = out.waiting, []
        for then in waiting:
            then(
                BackendUnavailable(
                    "the pair cannot be made",
                    {self._name: f"{self._local} waited for {self._remote}: {reason}"},
                    local=self._local,
                    remote=self._remote,
                )
            )

    def _in_built(self, generation: int, group: PairGroup | None, reason: str | None) -> None:
        half = self._in
        if generation != half.generation or self._closed or half.store is None:
            if group is not None:
                group.retire()
            return
        half.store = None
        if group is None:
            self._tell(generation, (reason or "").encode()[:1024], FAILED)
            return
        half.group = group
        self._tell(generation, b"", READY)

    def close(self) -> None:
        """The link has ended: nobody waits any more."""
        self._closed = True
        self._out.drop("the link ended")
        self._in.drop("the link ended")
        waiting, self._out.waiting = self._out.waiting, []
        for then in waiting:
            then(ClosedError("the link ended"))
