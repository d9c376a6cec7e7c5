"""Channels within one process: the queue itself, without anything in between."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from aiorlinf.channel.calls import GetCall, PutCall
from aiorlinf.channel.handle import Handle
from aiorlinf.channel.landing import Wish, bring_value
from aiorlinf.channel.on_device import OnDevice
from aiorlinf.channel.putting import Confirming
from aiorlinf.channel.queue import ChannelQueue
from aiorlinf.channel.records import Consumer, Delivery, Get, Key, Put, PutState, Rejected
from aiorlinf.channel.settings import ChannelSettings, PolicySource
from aiorlinf.channel.stats import take_stats
from aiorlinf.errors import ChannelClosed, ClosedError, ForkedHandle, UsageError
from aiorlinf.work.home import LoopHome
from aiorlinf.work.loop_thread import LoopThread

if TYPE_CHECKING:
    from aiorlinf.work.base import AsyncWork

__all__ = ["LocalPort", "measure", "open_local"]

_LOOK_AGAIN_SECONDS = 1.0
_DEEPEST = 6


def open_local(
    name: str, maxsize: int, max_bytes: int | None, policy: PolicySource, producers: int, loop: str, offload_above: float | None
) -> LocalPort:
    """The first handle of a new local channel. Raises UsageError."""
    if loop not in ("auto", "thread"):
        raise UsageError(f"loop={loop!r}", hint="loop is 'auto' or 'thread'")
    if offload_above is not None and not (type(offload_above) in (int, float) and 0 <= offload_above <= 1):
        raise UsageError(f"offload_above={offload_above!r} is not a share from 0 to 1")
    named = policy if isinstance(policy, str) else None
    settings = ChannelSettings.make(name, maxsize=maxsize, max_bytes=max_bytes, policy=named, producers=producers)
    if policy is not None and named is None and not callable(getattr(policy, "select_consumer", None)):
        raise UsageError(f"policy={policy!r} has no select_consumer(item, consumers)")
    made: Any = settings.make_policy() if named is not None else policy
    running = asyncio._get_running_loop()
    thread = None if running is not None and loop == "auto" else LoopThread(f"aiorlinf channel {name}")
    home = thread.home if thread is not None else LoopHome(_known(running), name=f"aiorlinf channel {name}")
    queue = ChannelQueue(name, maxsize=maxsize, max_bytes=max_bytes, policy=made, producers=producers)
    described = named or ("" if policy is None else type(policy).__name__)
    return LocalPort(_Hub(home, queue, described, thread, offload_above), None, None, 1.0, None)


def _known(loop: asyncio.AbstractEventLoop | None) -> asyncio.AbstractEventLoop:
    assert loop is not None
    return loop


class _Hub:
    """What all handles of one local channel share."""

    def __init__(self, home: LoopHome, queue: ChannelQueue, policy: str, thread: LoopThread | None, offload_above: float | None) -> None:
        self.home = home
        self.queue = queue
        self.policy = policy
        self.thread = thread
        self.offload_above = offload_above
        self.handles = 0
        self.ended: bool = False
        self.pid: int = os.getpid()
        self._working = False
        self._under_way = 0  # items whose tensors are being copied
        self._timer: asyncio.TimerHandle | None = None
        self._confirming = Confirming(home, self._commit, self._retract)

    def _commit(self, call: PutCall) -> None:
        payload, call.payload = call.payload, None
        put, call.record = call.record, None  # which is the item from now on
        if self.offload_above is not None and type(payload) is OnDevice:
            self._under_way += payload.offload(self.home, self.offload_above, self._offloaded)
        self.queue.commit(put, payload, time.monotonic())
        self.work_off()

    def _retract(self, call: PutCall) -> None:
        call.payload = None
        put, call.record = call.record, None
        self.queue.retract(put, time.monotonic())
        self.work_off()

    def work_off(self) -> None:
        """Do what the queue tells. Finishing a work may run user code that calls us again: that comes after what is there already."""
        if self._working:
            return
        self._working = True
        told = self.queue.told
        try:
            while told:
                each = told.popleft()
                if isinstance(each, Put):
                    if each.state == PutState.ADMITTED:
                        self._confirming.finish(each.owner)
                elif isinstance(each, Rejected):
                    each.request.owner.fail(each.error)
                else:
                    self._hand_over(each)
        finally:
            self._working = False
            if told:  # Ctrl-C in a then-step, say
                self.home.call_soon(self.work_off)
        if self.thread is not None and self.queue.over:
            self.home.call_soon(self._maybe_end)
        self._wind()

    def _hand_over(self, delivery: Delivery) -> None:
        call: GetCall = delivery.get.owner
        call.record = delivery
        values = [item.payload for item in delivery.items]
        if call.work is not None and (call.wish.everything or any(type(value) is OnDevice for value in values)):
            self._fetch(call, delivery, values)
        else:
            self._finish(call, delivery, values)

    def _offloaded(self) -> None:
        self._under_way -= 1
        self._let_threads_end()

    def _let_threads_end(self) -> None:
        """Copies of large tensors begin in private threads. A loop that is not ours ends without a word, so they do not wait for more."""
        if not self._under_way and self.thread is None:
            self.home.drop_pool()

    def _fetch(self, call: GetCall, delivery: Delivery, values: list[Any]) -> None:
        """Bring tensors where they are wanted."""
        missing = 1
        self._under_way += 1
        failure: Exception | None = None

        def over(index: int, value: Any, error: Exception | None) -> None:
            nonlocal missing, failure
            missing -= 1
            failure = failure or error
            if error is None and index >= 0:
                values[index] = value
            if not missing:
                self._under_way -= 1
                self._let_threads_end()
                self._finish(call, delivery, values, failure)
                self.work_off()

        for index, value in enumerate(list(values)):
            missing += 1
            then = partial(over, index)
            if type(value) is OnDevice:
                begun = value.fetch(self.home, call.wish, then)
                values[index] = value.value
            else:
                assert call.wish.device is not None
                begun = bring_value(self.home, value, call.wish.device, then)
            missing -= not begun
        over(-1, None, None)

    def _finish(self, call: GetCall, delivery: Delivery, values: list[Any], failure: Exception | None = None) -> None:
        work, call.work = call.work, None
        if work is None:
            _keep(delivery)
            self.queue.returned(delivery, time.monotonic())
            return
        if failure is not None:
            if call.lease:
                _keep(delivery)
                self.queue.returned(delivery, time.monotonic(), redelivery=True)
            else:
                self.queue.taken(delivery, time.monotonic())
                _let_go(delivery)
            work._fail(failure)
            return
        if not call.lease:
            call.record = _HandedOver(delivery)
            self.queue.taken(delivery, time.monotonic())
        work._finish(values[0] if call.target is None else values)

    def _wind(self) -> None:
        """Be woken at the next deadline of a lease, and now and then while a policy's choice leaves some without work."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.ended:
            return  # there is no loop that could ring
        now = time.monotonic()
        deadline = self.queue.next_deadline()
        if self.queue.uneven:
            deadline = min(now + _LOOK_AGAIN_SECONDS, now + _LOOK_AGAIN_SECONDS if deadline is None else deadline)
        if deadline is not None:
            self._timer = self.home.loop.call_later(max(0.0, deadline - now), self._ring)

    def _ring(self) -> None:
        self._timer = None
        self.queue.tick(time.monotonic())
        self.work_off()

    def _maybe_end(self) -> None:
        """The thread of its own ends with the stream."""
        if self.thread is not None and self.queue.over:
            thread, self.thread = self.thread, None
            self.ended = True
            self.home.close_nowait()
            self.home.loop.call_soon(self.home.rest)  # not from within the calls that it would run
            thread.stop()


class _HandedOver:
    """The items of a delivery, which are the caller's from now on: see `_let_go`. The call has this as long as they may come back."""

    __slots__ = ("_delivery", "_payloads")

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._payloads = [item.payload for item in delivery.items]
        _let_go(delivery)

    def undone(self) -> Delivery:
        """They are to go back."""
        for item, payload in zip(self._delivery.items, self._payloads, strict=True):
            item.payload = payload
        return self._delivery


class LocalPort:
    """A handle's way into a local channel; see `calls.Port`."""

    def __init__(self, hub: _Hub, consumer: str | None, producer: str | None, share: float, labels: Mapping[str, str] | None) -> None:
        hub.handles += 1
        own = hub.queue.name if hub.handles == 1 else f"{hub.queue.name}/{hub.handles}"
        self.home: LoopHome = hub.home
        self.name: str = hub.queue.name
        self._hub = hub
        self._queue = hub.queue
        self._handle = Handle(hub.queue, consumer or own, producer or own, share, labels)
        if consumer is not None:
            self.home.call(self._join)

    def another(self, consumer: str | None, producer: str | None, share: float, labels: Mapping[str, str] | None) -> LocalPort:
        """See `Channel.handle`."""
        self.check()
        return LocalPort(self._hub, consumer, producer, share, labels)

    def check(self) -> None:
        if self._hub.pid != os.getpid():
            raise ForkedHandle(f"the local channel {self.name!r} was made before a fork")
        if self.home.loop.is_closed() and not self._hub.ended:
            raise ClosedError(f"the event loop that channel {self.name!r} lives on is closed")

    def prepare(self, item: Any) -> tuple[Any, int]:
        return OnDevice.of(item) or item, measure(item)

    # ---- home thread

    def start_put(self, call: PutCall) -> None:
        if call.work is None:
            return
        try:
            producer = self._handle.producing()
        except ChannelClosed as error:
            call.fail(error)
            return
        call.record = put = Put(producer, call.key, call.weight, call.nbytes, call.nowait, None, call)
        self._queue.put(put, time.monotonic())
        self._hub.work_off()

    def stop_put(self, call: PutCall) -> None:
        call.payload = None
        if call.record is not None:
            self._queue.retract(call.record, time.monotonic())
            self._hub.work_off()

    def start_get(self, call: GetCall) -> None:
        if call.work is None:
            return
        try:
            consumer = self._join()
        except (ChannelClosed, UsageError) as error:
            call.fail(error)
            return
        call.record = get = Get(
            consumer, call.key, target=call.target, nowait=call.nowait, lease=call.lease, lease_seconds=call.seconds, owner=call
        )
        self._queue.get(get, time.monotonic())
        self._hub.work_off()

    def _join(self) -> Consumer:
        consumer = self._handle.consuming(time.monotonic())
        self._hub.work_off()
        return consumer

    def stream(self, key: Key, count: int, wish: Wish) -> None:
        """See `calls.Port`: here there is nothing to save."""

    def stop_get(self, call: GetCall) -> None:
        if isinstance(call.record, Get):
            self._queue.cancel(call.record, time.monotonic())
            self._hub.work_off()

    def give_back(self, call: GetCall, value: Any) -> None:
        record, call.record = call.record, None
        delivery: Delivery = record.undone() if isinstance(record, _HandedOver) else record
        _keep(delivery)
        self._queue.returned(delivery, time.monotonic())
        self._hub.work_off()

    def end_lease(self, call: GetCall, *, done: bool) -> None:
        record, call.record = call.record, None  # which refers to the call in turn
        delivery: Delivery = record
        if done:
            if self._queue.taken(delivery, time.monotonic()):
                _let_go(delivery)
        elif delivery.open:
            _keep(delivery)
            self._queue.returned(delivery, time.monotonic(), redelivery=True)
        self._hub.work_off()

    def ask(self, work: AsyncWork[Any], what: str, key: Key, all_keys: bool) -> None:
        queue = self._queue
        if what == "length":
            work._finish(queue.length if all_keys else len(queue.items(key)))
        elif what == "full":
            work._finish(queue.full)
        elif what == "stats":
            work._finish(take_stats(queue, time.monotonic(), "", self._hub.policy))
        else:
            work._finish([_value_of(item.payload) for item in queue.items(key)])

    def report(self, free_memory: int | None) -> None:
        self._handle.report(free_memory)

    def close(self, work: AsyncWork[None], *, shutdown: bool, immediate: bool) -> None:
        now = time.monotonic()
        if shutdown:
            self._queue.shutdown(self._handle.producer_name, now, immediate=immediate)
        else:
            self._handle.close(now)
        self._hub.work_off()
        work._finish(None)

    def describe(self) -> str:
        queue = self._queue
        bound = f" of {queue.maxsize}" if queue.maxsize else ""
        return f"{self.name!r} local, {queue.length}{bound} items{', ended' if queue.roster.ended else ''}"


def _value_of(payload: Any) -> Any:
    return payload.value if type(payload) is OnDevice else payload


def _let_go(delivery: Delivery) -> None:
    """The items are gone. The queue may remember the delivery for long: it must keep neither them nor the call, which refers to it."""
    delivery.get.owner = None
    for item in delivery.items:
        item.payload = None


def _keep(delivery: Delivery) -> None:
    """Its items have not been taken after all."""
    for item in delivery.items:
        if type(item.payload) is OnDevice:
            item.payload.keep()


def measure(obj: Any, depth: int = 0) -> int:
    """Bytes of the tensors, arrays and bytes in an object, also within lists, tuples and dicts."""
    if isinstance(obj, torch.Tensor):
        return obj.nbytes if obj.layout is torch.strided else 0  # a sparse one does not say
    if isinstance(obj, np.ndarray):
        return int(obj.nbytes)
    if isinstance(obj, (bytes, bytearray, memoryview, str)):
        return len(obj)
    if depth < _DEEPEST:
        if isinstance(obj, (list, tuple)):
            return sum(measure(part, depth + 1) for part in obj)
        if isinstance(obj, dict):
            return sum(measure(part, depth + 1) for part in obj.values())
    return 0
