"""Channel: a named queue between workers, or within one process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, overload

from aiorlinf.channel.calls import GetCall, Port, PutCall
from aiorlinf.channel.items import T
from aiorlinf.channel.landing import ANYWHERE, Wish
from aiorlinf.channel.lease import Lease
from aiorlinf.channel.prefetch import Prefetch
from aiorlinf.channel.putting import PutWork
from aiorlinf.channel.settings import PolicySource, check_key, check_target, check_weight
from aiorlinf.device.registry import parse_device
from aiorlinf.errors import ChannelClosed, DeadlineExceeded, UsageError, WouldBlockLoop
from aiorlinf.link.staging import callers_device
from aiorlinf.work.base import AsyncWork
from aiorlinf.work.deadline import NO_DEADLINE, check_limit, current_deadline, effective_deadline, expire

if TYPE_CHECKING:
    import torch

    from aiorlinf.channel.records import Key
    from aiorlinf.channel.stats import ChannelStats

__all__ = ["Channel"]

DeviceName: TypeAlias = "str | int | torch.device | None"

_NOTHING = "gave nothing"
_NO_ROOM = "had no room"
"""Within a time limit."""


class Channel(Generic[T]):
    """One handle of a channel. Made by `comm.create_channel`, `comm.connect_channel` and `Channel.local`.

    A queue with the names and errors of `asyncio.Queue`, between any workers of a job. Any thread may call. Every operation returns an
    `AsyncWork`, so it is awaited, also `put_nowait` and `qsize`; with ``async_op=False`` it waits and returns the value.

    Items have a key (each key is a FIFO of its own) and a weight (what `get_batch` and the policies count). A handle becomes a producer
    with its first put and a consumer with its first get. Whose puts come first, gets first; of one producer and key the order is that of
    its calls.

    The stream ends when the last producer has called `close`: gets then take what is left, and after that raise `ChannelClosed`. If the
    last producer is lost instead, they raise `ProducerLost` with its name and the cause, until a producer comes back.

    For type checkers a channel has the type of its items: ``channel: Channel[Trajectory] = await comm.connect_channel("trajectories")``.
    """

    def __init__(self, port: Port) -> None:
        self._port = port

    @staticmethod
    def local(
        name: str = "local",
        *,
        maxsize: int = 0,
        max_bytes: int | None = None,
        policy: PolicySource = None,
        producers: int = 1,
        offload_above: float | None = None,
        loop: Literal["auto", "thread"] = "auto",
    ) -> Channel:
        """A channel within this process: objects are handed over as they are, nothing is copied.

            >>> channel = Channel.local("samples", loop="thread")
            >>> for length in (300, 500, 400):
            ...     channel.put(f"sample of {length} tokens", weight=length, async_op=False)
            >>> channel.get_batch(target_weight=800).wait(timeout=10)
            ['sample of 300 tokens', 'sample of 500 tokens']
            >>> channel.get().wait(timeout=10)
            'sample of 400 tokens'
            >>> channel.close().wait()

        It lives on the running event loop; without one, or with ``loop="thread"``, on one in a thread of its own, which ends when the
        stream has ended and is drained or when the process does.

        Args:
            name: for messages only.
            maxsize: bound on items, 0 for none. Items that were handed out do not count.
            max_bytes: bound on the bytes of tensors, arrays and bytes in the items (also within lists, tuples, dicts), None for none.
            policy: chooses the consumer of each item; None: whoever asks next gets the oldest item.
            producers: so many must have come before the stream can end.
            offload_above: a share of an accelerator's memory, from 0 to 1. When more of it is in use, the tensors of an item that is put go
                to pinned host memory until the item is got, and then come back. None: they stay where they are.

        Raises:
            UsageError: with the argument concerned.
        """
        from aiorlinf.channel.local import open_local

        return Channel(open_local(name, maxsize, max_bytes, policy, producers, loop, offload_above))

    def handle(
        self,
        *,
        consumer: str | None = None,
        producer: str | None = None,
        share: float = 1.0,
        labels: Mapping[str, str] | None = None,
    ) -> Channel[T]:
        """Another handle of a local channel, as `connect_channel` makes for others: a producer or consumer of its own.

        Args:
            consumer, producer: names under which it gets and puts.
            share: its part of the items, relative to the others', under ``weighted_round_robin``.
            labels: what a policy can know of it.

        Raises:
            UsageError: this is not a local channel.
        """
        another = getattr(self._port, "another", None)
        if another is None:
            raise UsageError("further handles of this channel come from comm.connect_channel(name)")
        return Channel(another(consumer, producer, share, labels))

    @property
    def name(self) -> str:
        """The channel's."""
        return self._port.name

    # ---- putting

    @overload
    def put(
        self, item: T, *, weight: float = 1, key: Key = None, timeout: float | None = None, async_op: Literal[True] = True
    ) -> AsyncWork[None]: ...
    @overload
    def put(self, item: T, *, weight: float = 1, key: Key = None, timeout: float | None = None, async_op: Literal[False]) -> None: ...
    def put(
        self, item: T, *, weight: float = 1, key: Key = None, timeout: float | None = None, async_op: bool = True
    ) -> AsyncWork[None] | None:
        """Put an item, as soon as there is room.

        The work is done when the channel has the item for certain, and the memory of its tensors may be written to again.

        Args:
            item: whatever `send` takes; tensors must be contiguous.
            weight: at least 0.
            key: text, bytes, a whole number or None.
            timeout: seconds; None waits as long as it takes.

        Raises:
            NonContiguousTensor, UnsupportedObject, UsageError, ClosedError: at the call.
            ChannelClosed: nothing can be put any more.
            DeadlineExceeded: there was no room in time; the item is not in the channel.
            PeerLost: the channel worker is gone, and the channel with it.
            RemoteError: the policy failed for this item (in a local channel: the policy's own error).

        Cancelling, or the passing of the time, is exactly-once: the item is not put.
        """
        work = self._put("put", item, weight, key, False, timeout, async_op)
        return work if async_op else work.wait()

    def put_nowait(self, item: T, *, weight: float = 1, key: Key = None) -> AsyncWork[None]:
        """As `put`, but the work fails with `ChannelFull` (which is also `asyncio.QueueFull`) when there is no room."""
        return self._put("put_nowait", item, weight, key, True, None, True)

    def _put(
        self, operation: str, item: T, weight: float, key: Key, nowait: bool, timeout: float | None, async_op: bool
    ) -> AsyncWork[None]:
        port = self._port
        port.check()
        if not async_op:
            self._check_may_block()
        weight = check_weight(weight)
        if timeout is not None:
            check_limit(timeout)
        if key is not None:
            check_key(key)
        payload, nbytes = port.prepare(item)
        call = PutCall(port, payload, nbytes, weight, key, nowait)
        work = PutWork(port.home, operation, abort=_stop_put, detail=call)
        call.work = work
        port.home.call(port.start_put, call)
        if timeout is not None or current_deadline.get() is not NO_DEADLINE:
            self._limit(work, timeout, _NO_ROOM)
        return work

    # ---- getting

    @overload
    def get(
        self, *, key: Key = None, device: DeviceName = None, timeout: float | None = None, async_op: Literal[True] = True
    ) -> AsyncWork[T]: ...
    @overload
    def get(self, *, key: Key = None, device: DeviceName = None, timeout: float | None = None, async_op: Literal[False]) -> T: ...
    def get(self, *, key: Key = None, device: DeviceName = None, timeout: float | None = None, async_op: bool = True) -> Any:
        """The oldest item of this key, as soon as there is one.

        Gets are served in order of their coming; where a policy balances, among those of this consumer.

        An item counts for `max_bytes` until somebody has taken it from its work, except in a local channel: who waits for several gets at
        once with `wait_all`, which takes nothing before all are done, needs room for all of their items together (`asyncio.gather` and
        `then` take each at once).

        Args:
            key: as given to `put`.
            device: all tensors of the item come there, copied on a stream of the library's own. None: those that were on an accelerator
                where they were put come to one here, as with `recv`, and others to CPU memory; in a local channel all stay where they are.
            timeout: seconds; None waits as long as it takes.

        Raises:
            ChannelClosed: the stream has ended and is drained.
            ProducerLost: the last producer was lost, and nothing is left.
            DeadlineExceeded: nothing came within `timeout` seconds; nothing was taken.
            UnsupportedObject: the item cannot be rebuilt here; it is lost.
            PeerLost: the channel worker is gone.

        Cancelling, or the passing of the time, is exactly-once: an item that was on its way to this call goes back to its place. An item
        that was handed to a consumer which then dies is gone; see `lease`.
        """
        work = self._get("get", key, None, False, timeout, async_op, device)
        return work if async_op else work.wait()

    def get_nowait(self, *, key: Key = None) -> AsyncWork[T]:
        """As `get`, but the work fails with `ChannelEmpty` (which is also `asyncio.QueueEmpty`) when there is nothing, or others wait
        before."""
        return self._get("get_nowait", key, None, True, None, True)

    @overload
    def get_batch(
        self,
        target_weight: float,
        *,
        key: Key = None,
        device: DeviceName = None,
        timeout: float | None = None,
        async_op: Literal[True] = True,
    ) -> AsyncWork[list[T]]: ...
    @overload
    def get_batch(
        self, target_weight: float, *, key: Key = None, device: DeviceName = None, timeout: float | None = None, async_op: Literal[False]
    ) -> list[T]: ...
    def get_batch(
        self, target_weight: float, *, key: Key = None, device: DeviceName = None, timeout: float | None = None, async_op: bool = True
    ) -> Any:
        """The oldest items of this key that together weigh `target_weight`, as a list, all at once.

        As many as fit, so never more than the target: the batch is whole when it weighs just that, or when the next item would make it
        heavier. An item that is heavier by itself comes alone. What is there so far is handed out, lighter than the target, when the stream
        ends, and when the channel is full, for then the batch could not grow. Gets that come later wait until this one is served.

        Args:
            target_weight: a finite number above 0; the weights are those given to `put`, 1 unless said.
            key, device: as of `get`.
            timeout: seconds for the whole batch; None waits as long as it takes.

        Raises:
            DeadlineExceeded: the batch was not whole in time; nothing was taken, and what had come stays in the channel.
            ChannelClosed, ProducerLost: the stream has ended, and nothing at all is left.
            UsageError: at the call, for `target_weight`.
            UnsupportedObject, PeerLost: as of `get`.

        Cancelling, or the passing of the time: as of `get`, for all of the items together.
        """
        work = self._get("get_batch", key, check_target(target_weight), False, timeout, async_op, device)
        return work if async_op else work.wait()

    def _get(
        self, operation: str, key: Key, target: float | None, nowait: bool, timeout: float | None, async_op: bool, device: DeviceName = None
    ) -> AsyncWork[Any]:
        port = self._port
        port.check()
        if not async_op:
            self._check_may_block()
        check_limit(timeout)
        if key is not None:
            check_key(key)
        call = GetCall(port, key, target, nowait, False, None)
        if device is not None:
            call.wish = Wish(parse_device(device), True)
        return self._begin_get(operation, call, timeout)

    def _begin_get(self, operation: str, call: GetCall, timeout: float | None) -> AsyncWork[Any]:
        port = self._port
        work: AsyncWork[Any] = AsyncWork(port.home, operation, abort=_stop_get, give_back=call.give_back, detail=call)
        call.work = work
        if call.wish is ANYWHERE and not port.home.on_home() and (device := callers_device()) is not None:
            call.wish = Wish(device, False)
        port.home.call(port.start_get, call)
        self._limit(work, timeout, _NOTHING if call.target is None else f"had no whole batch of weight {call.target:g}")
        return work

    @overload
    def lease(
        self, *, key: Key = None, target_weight: None = None, seconds: float | None = None, timeout: float | None = None
    ) -> Lease[T]: ...
    @overload
    def lease(
        self, *, key: Key = None, target_weight: float, seconds: float | None = None, timeout: float | None = None
    ) -> Lease[list[T]]: ...
    def lease(
        self, *, key: Key = None, target_weight: float | None = None, seconds: float | None = None, timeout: float | None = None
    ) -> Lease[Any]:
        """An item that comes back unless it was dealt with: ``async with channel.lease() as item``.

        It goes back to the head of the queue when the block raises, when this worker dies, or when the time is over; so an item is
        processed at least once. In the channel the item stays until the block ends.

        Args:
            key: as for `get`.
            target_weight: a batch of this weight, as a list; None: one item.
            seconds: how long the block may take; None: as long as this worker lives.
            timeout: seconds to wait for the item.

        Raises (on entering): as `get`.
        """
        port = self._port
        port.check()
        check_limit(timeout)
        if key is not None:
            check_key(key)
        if seconds is not None and not (type(seconds) in (int, float) and 0 < seconds < 1e9):
            raise UsageError(f"seconds={seconds!r} is not a time above 0", operation="lease")
        target = None if target_weight is None else check_target(target_weight)
        call = GetCall(port, key, target, False, True, None if seconds is None else float(seconds))
        return Lease(port, call, lambda: self._begin_get("lease", call, timeout))

    def prefetch(self, count: int, *, key: Key = None, device: DeviceName = None) -> Prefetch[T]:
        """An iterator that keeps so many gets under way ahead of the loop: ``async for item in channel.prefetch(8)``.

        Items come in the order of the queue. What was on its way when the loop is left goes back: leave it with ``async with`` or `aclose`,
        or by the end of the stream. With a `device`, the tensors of the items that are under way are copied there meanwhile (see `get`).

        Raises:
            UsageError: not a number of at least 1; no such device in this process.
        """
        _check_count(count, "prefetch")
        if key is not None:
            check_key(key)
        port = self._port
        wish = ANYWHERE if device is None else Wish(parse_device(device), True)
        stream = port.stream(key, count, wish) if asyncio._get_running_loop() is port.home.loop else None
        return Prefetch(lambda: self.get(key=key, device=wish.device), count, stream, self._limit_a_get)

    def batches(self, target_weight: float, *, key: Key = None, device: DeviceName = None, ahead: int = 1) -> Prefetch[list[T]]:
        """An iterator over batches: ``async for batch in channel.batches(800)``; see `get_batch`.

        It ends with the stream. What was on its way when the loop is left goes back, as with `prefetch`.

        Args:
            target_weight, key, device: as for `get_batch`.
            ahead: so many batches are asked for at a time, from 1 on: while the loop works on one, the others are on their way.

        Raises:
            UsageError: with the argument concerned.
        """
        _check_count(ahead, "batches")
        target = check_target(target_weight)
        if key is not None:
            check_key(key)
        wanted = None if device is None else parse_device(device)
        return Prefetch(lambda: self.get_batch(target, key=key, device=wanted), ahead, None, self._limit_a_get)

    def __aiter__(self) -> Channel[T]:
        return self

    async def __anext__(self) -> T:
        """The next item of the key None.

        Ends when the stream has ended; raises `ProducerLost` when it is broken. Cancelling takes nothing.
        """
        try:
            return await self.get()
        except ChannelClosed:
            raise StopAsyncIteration from None

    # ---- looking

    def qsize(self, *, key: Key = None) -> AsyncWork[int]:
        """How many items can be taken: of all keys, or with `key` of that one. It may be wrong as soon as it is known.

        Raises:
            UsageError, ClosedError: at the call.
            PeerLost: the channel worker is gone.

        Cancelling stops the waiting only.
        """
        return self._ask("qsize", "length", key)

    def empty(self, *, key: Key = None) -> AsyncWork[bool]:
        """Whether there is no item; raises and cancelling as `qsize`."""
        return self.qsize(key=key).then(_is_zero)

    def full(self) -> AsyncWork[bool]:
        """Whether a put would have to wait; raises and cancelling as `qsize`."""
        return self._ask("full", "full", None)

    def peek_all(self, *, key: Key = None) -> AsyncWork[list[T]]:
        """Copies of all items of one key, oldest first, which stay where they are. For debugging: all of them travel.

        Raises and cancelling as `qsize`.
        """
        return self._ask("peek_all", "peek", key)

    def stats(self) -> AsyncWork[ChannelStats]:
        """Lengths, weights, rates and waiting times, for each key, consumer and producer. It can be printed.

        Raises and cancelling as `qsize`. See `ChannelStats` for the units.
        """
        return self._ask("stats", "stats", None)

    def _ask(self, operation: str, what: str, key: Key) -> AsyncWork[Any]:
        port = self._port
        port.check()
        if key is not None:
            check_key(key)
        work: AsyncWork[Any] = AsyncWork(port.home, operation, abort=_forget)
        port.home.call(port.ask, work, what, key, key is None and what != "peek")
        return work

    def report_memory(self, free_bytes: int | None) -> None:
        """Tell ``memory_aware`` how much memory this consumer has free, on its device or host. Returns at once; call it when that changes.

        Raises:
            UsageError: not a whole number of at least 0, or None.
        """
        if free_bytes is not None and (type(free_bytes) is not int or not 0 <= free_bytes < 2**63):
            raise UsageError(f"free_bytes={free_bytes!r} is not a number of bytes", operation="report_memory")
        self._port.check()
        self._port.home.call(self._port.report, free_bytes)

    # ---- the end

    def close(self) -> AsyncWork[None]:
        """Nothing more will be put by this handle. When the last producer has closed, the stream ends.

        What it has put before still comes, also what waits for room. The work is done when the channel knows, not when there was room.

        A handle that has put can go on getting what is left. One that has only got leaves: what it was chosen for goes to others, its gets
        that wait end with `ChannelClosed`. One that was not used counts as a producer that had nothing to put. May be called again.
        Cancelling stops the waiting, not the closing.
        """
        return self._end(shutdown=False, immediate=False)

    def shutdown(self, immediate: bool = False) -> AsyncWork[None]:
        """End the stream for everybody, as `asyncio.Queue.shutdown` does: puts fail from now on, also those that wait; gets take what is
        left.

        With `immediate` nothing is left. Cancelling stops the waiting only.
        """
        return self._end(shutdown=True, immediate=immediate)

    def _end(self, *, shutdown: bool, immediate: bool) -> AsyncWork[None]:
        port = self._port
        work: AsyncWork[None] = AsyncWork(port.home, "shutdown" if shutdown else "close", abort=_forget)
        port.home.call(lambda: port.close(work, shutdown=shutdown, immediate=immediate))
        return work

    async def __aenter__(self) -> Channel[T]:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<Channel {self._port.describe()}>"

    # ---- helpers

    def _check_may_block(self) -> None:
        if self._port.home.on_home():
            raise WouldBlockLoop("async_op=False on the loop's own thread would never return", hint="await the operation instead")

    def _limit_a_get(self, work: AsyncWork[Any]) -> None:
        self._limit(work, None, _NOTHING)

    def _limit(self, work: AsyncWork[Any], timeout: float | None, what: str) -> None:
        if timeout is None and current_deadline.get() is NO_DEADLINE:
            return
        name = self.name

        def too_late(elapsed: float) -> DeadlineExceeded:
            text = f"channel {name!r} {what} within {elapsed:.3g} s"
            hint = None if what in (_NOTHING, _NO_ROOM) else "what had come for it stays in the channel: stats() shows its weight"
            return DeadlineExceeded(text, step="match", operation=work.operation, elapsed=elapsed, hint=hint)

        expire(work, effective_deadline(timeout), too_late)


def _stop_put(work: AsyncWork[Any]) -> None:
    call: PutCall = work._detail
    call.work = None
    call.port.stop_put(call)


def _stop_get(work: AsyncWork[Any]) -> None:
    call: GetCall = work._detail
    call.work = None
    call.port.stop_get(call)


def _forget(work: AsyncWork[Any]) -> None:
    """The answer will find nobody."""


def _check_count(count: object, operation: str) -> None:
    if type(count) is not int or count < 1:
        what = "count" if operation == "prefetch" else "ahead"
        raise UsageError(f"{what}={count!r} is not a whole number of at least 1", operation=operation)


def _is_zero(number: int) -> bool:
    return number == 0
