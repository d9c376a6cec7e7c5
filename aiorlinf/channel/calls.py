"""Calls of a channel under way, and what the two kinds of channel do with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from aiorlinf.channel.landing import ANYWHERE, Wish

if TYPE_CHECKING:
    from aiorlinf.channel.records import Key
    from aiorlinf.channel.stream import GetStream
    from aiorlinf.work.base import AsyncWork
    from aiorlinf.work.home import LoopHome

__all__ = ["Confirmer", "GetCall", "Port", "PutCall"]


class Confirmer(Protocol):
    """See `channel.putting`."""

    def confirm(self, call: PutCall) -> None: ...


class PutCall:
    """A put.

    Attributes:
        work: what the caller holds; None once it is over, so that the two do not keep each other alive.
        payload: what the port made of the item.
        record, number, settled: the port's own.
        confirming: has it while it is done and may still be taken back.
    """

    __slots__ = ("confirming", "key", "nbytes", "nowait", "number", "payload", "port", "record", "settled", "weight", "work")

    def __init__(self, port: Port, payload: Any, nbytes: int, weight: float, key: Key, nowait: bool) -> None:
        self.work: AsyncWork[None] | None = None
        self.port: Port = port
        self.payload: Any = payload
        self.nbytes: int = nbytes
        self.weight: float = weight
        self.key: Key = key
        self.nowait: bool = nowait
        self.record: Any = None
        self.number: int = 0
        self.settled: bool = False
        self.confirming: Confirmer | None = None

    def fail(self, error: BaseException) -> None:
        """It has failed."""
        work, self.work = self.work, None
        if work is not None:
            work._fail(error)

    def __str__(self) -> str:
        return _describe(self.port, self.key)


class GetCall:
    """A get. Attributes as of a put.

    Attributes:
        target: the weight of a batch, None for one item.
        seconds: the time of the lease.
        wish: where its tensors are wanted.
    """

    __slots__ = ("key", "lease", "nowait", "number", "port", "record", "seconds", "target", "wish", "work")

    def __init__(self, port: Port, key: Key, target: float | None, nowait: bool, lease: bool, seconds: float | None) -> None:
        self.work: AsyncWork[Any] | None = None
        self.port: Port = port
        self.key: Key = key
        self.target: float | None = target
        self.nowait: bool = nowait
        self.lease: bool = lease
        self.seconds: float | None = seconds
        self.wish: Wish = ANYWHERE
        self.record: Any = None
        self.number: int = 0

    def fail(self, error: BaseException) -> None:
        """It has failed."""
        work, self.work = self.work, None
        if work is not None:
            work._fail(error)

    def failed(self, number: int, error: BaseException) -> None:
        """As `fail`; its number is its own."""
        self.fail(error)

    def give_back(self, value: Any) -> None:
        """It was done, and cancelled before anybody took the value."""
        self.port.give_back(self, value)

    def __str__(self) -> str:
        return _describe(self.port, self.key)


class Port(Protocol):
    """One handle's way into its channel. All but `check` and `prepare` on the home thread."""

    home: LoopHome
    name: str

    def check(self) -> None:
        """Raise what every call raises: the handle or its worker is closed, or cannot be used from here."""

    def prepare(self, item: Any) -> tuple[Any, int]:
        """The payload and its size in bytes. Any thread; raises what `send` raises."""

    def start_put(self, call: PutCall) -> None: ...
    def stop_put(self, call: PutCall) -> None:
        """The caller has cancelled: the item is not put."""

    def start_get(self, call: GetCall) -> None: ...
    def stop_get(self, call: GetCall) -> None:
        """The caller has cancelled: nothing is taken."""

    def give_back(self, call: GetCall, value: Any) -> None:
        """As `stop_get`, for a get that was done already."""

    def end_lease(self, call: GetCall, *, done: bool) -> None:
        """The lease is over: done, or the items go back."""

    def ask(self, work: AsyncWork[Any], what: str, key: Key, all_keys: bool) -> None:
        """Finish the work with a number (``length``, ``full``), the statistics (``stats``) or the items (``peek``)."""

    def stream(self, key: Key, count: int, wish: Wish) -> GetStream | None:
        """The gets of a `prefetch` loop; None: they are made one by one."""

    def report(self, free_memory: int | None) -> None:
        """What a policy shall know of this handle as a consumer."""

    def close(self, work: AsyncWork[None], *, shutdown: bool, immediate: bool) -> None:
        """Leave the channel, or end it for all; then finish the work."""

    def describe(self) -> str:
        """For `repr`."""


def _describe(port: Port, key: Key) -> str:
    return repr(port.name) if key is None else f"{port.name!r} key {key!r}"
