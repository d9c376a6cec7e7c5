"""The heart of a channel: puts, gets and what lies between them. Pure: events in, instructions out, no clock of its own.

A put passes three gates: it waits for room, in order; it is admitted, which gives its item a position, and in which queue, if a policy
decides that; it is committed, which makes the item available. Between the last two the producer may still withdraw, so that a put that is
cancelled has not happened. What is handed out is held (its bytes count) until it is taken; what comes back goes to its old position.

Instructions are collected in `told`; see `records.Told`.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

from aiorlinf.channel.budget import ByteBudget
from aiorlinf.channel.dispatch import Dispatch
from aiorlinf.channel.lane import Lane
from aiorlinf.channel.leases import Leases
from aiorlinf.channel.meters import RateMeter, Waits
from aiorlinf.channel.policies import LoadBalancePolicy
from aiorlinf.channel.records import Consumer, Delivery, Get, Item, ItemInfo, Key, Producer, Put, PutState, Rejected, Told
from aiorlinf.channel.roster import Roster
from aiorlinf.errors import ChannelClosed, ChannelEmpty, ChannelFull, UsageError

__all__ = ["ChannelQueue"]

_NEVER = float("inf")
_ADMITTED, _OVER = PutState.ADMITTED, PutState.OVER  # they are compared for every item

_PATIENCE_SECONDS = 1.0
"""So long an item that came back waits for a consumer that has got nothing newer; see `lane.Lane`."""


class ChannelQueue:
    """One channel. All times are seconds on one clock that never goes back.

    Args:
        name: for errors.
        maxsize: bound on items, 0: none. What is handed out does not count.
        max_bytes: bound on the bytes of items, None: none. What is handed out and not taken counts.
        policy: None: whoever asks next gets the oldest item.
        producers: so many must have come before the stream can end.
        shared: a bound on bytes that other channels share.
        told: where to put what the owner has to do, by default one of its own. Channels that share a bound share this, too: one's
            event can be what another one waits for.

    Attributes:
        told: the owner takes out what is there after each event.
        length: items that can be taken.
        admitted: puts that have room and are not committed.
    """

    def __init__(
        self,
        name: str,
        *,
        maxsize: int = 0,
        max_bytes: int | None = None,
        policy: LoadBalancePolicy | None = None,
        producers: int = 1,
        shared: ByteBudget | None = None,
        told: deque[Told] | None = None,
    ) -> None:
        self.name = name
        self.maxsize = maxsize
        self.budget: ByteBudget = ByteBudget(max_bytes)
        self._shared = None if shared is None or shared.limit is None else shared
        self.roster: Roster = Roster(name, producers)
        self.dispatch: Dispatch = Dispatch(name, policy)
        self.told: deque[Told] = deque() if told is None else told
        self.length: int = 0
        self.admitted: int = 0
        self.waits: Waits = Waits()
        self.came: RateMeter = RateMeter()
        self.went: RateMeter = RateMeter()
        self.redeliveries: int = 0
        self._line: deque[Put] = deque()  # puts that wait for room
        self._emptied = False  # by a shutdown: nothing is kept any more
        self._pressing = False  # a put that does not wait has just found no room
        self._numbers = itertools.count(1)
        self._batches: set[Get] = set()  # those that wait, and perhaps some that do not any more
        self._backs: set[Lane] = set()  # with items that came back
        self._leases = Leases()

    # ---- room

    @property
    def max_bytes(self) -> int | None:
        """See the class."""
        return self.budget.limit

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is here or handed out and not taken."""
        return self.budget.used

    @property
    def full(self) -> bool:
        """Whether a put of something small would have to wait."""
        return not self._room(1)

    def _room(self, nbytes: int) -> bool:
        if 0 < self.maxsize <= self.length + self.admitted:
            return False
        return self.budget.fits(nbytes) and (self._shared is None or self._shared.fits(nbytes))

    def _take_bytes(self, nbytes: int) -> None:
        self.budget.used += nbytes
        if self._shared is not None:
            self._shared.used += nbytes

    def _give_bytes(self, nbytes: int) -> None:
        self.budget.used -= nbytes
        if self._shared is not None:
            self._shared.give(nbytes)
        if self._line:
            self._admit_line()

    # ---- puts

    def put(self, put: Put, now: float) -> None:
        """A producer wants to put."""
        if put.producer.state != "open":
            closed = ChannelClosed(f"{put.producer.name} has closed its end of channel {self.name!r}", operation="put")
            self._reject(put, self.roster.error("put") if self.roster.closed else closed)
        elif self.roster.shut is not None:
            self._reject(put, self.roster.error("put"))
        elif not (self._line and self._first_waiting()) and self._room(put.nbytes):
            self._admit(put)
        elif put.nowait:
            self._reject(put, self._full_error(put))
            self._pressing = True  # it will come again, as one that waits would: see `_press`
            self._press(now)
            self._pressing = False
        else:
            put.state = PutState.WAITING
            self._line.append(put)
            self._wait_for_room()
            self._press(now)

    def _full_error(self, put: Put) -> ChannelFull:
        used, limit = self.length + self.admitted, self.maxsize
        room = f"{used} of {limit} items" if limit and used >= limit else f"{self.nbytes} bytes, and {put.nbytes} more do not fit"
        if self._line:
            room += f", {sum(put.state == PutState.WAITING for put in self._line)} puts wait"
        return ChannelFull(f"channel {self.name!r} is full: {room}", operation="put_nowait")

    def _first_waiting(self) -> Put | None:
        line = self._line
        while line:
            if line[0].state == PutState.WAITING:
                return line[0]
            line.popleft()
        return None

    def _admit(self, put: Put) -> None:
        dispatch = self.dispatch
        if dispatch.policy is not None:
            try:
                put.consumer = dispatch.choose(ItemInfo(put.key, put.weight, put.nbytes, put.producer.name))
            except (Exception, SystemExit) as error:  # whatever a user's policy raises is this put's error
                self._reject(put, error)
                return
            if put.consumer is not None:
                put.consumer.chosen(put.weight, put.nbytes)
        put.state = _ADMITTED
        put.seq = next(self._numbers)
        self.admitted += 1
        self.budget.used += put.nbytes
        if self._shared is not None:
            self._shared.used += put.nbytes
        self.told.append(put)

    def _admit_line(self) -> None:
        while self._line and (put := self._first_waiting()) is not None and self._room(put.nbytes):
            self._line.popleft()
            self._admit(put)
        if self._line:
            self._wait_for_room()

    def _wait_for_room(self) -> None:
        if self._shared is not None:  # of our own we know
            self._shared.wait(self._admit_line)

    def commit(self, put: Put, payload: Any, now: float) -> None:
        """An admitted put's item is here, and its producer will not withdraw it."""
        if put.state != _ADMITTED:
            return
        if self._emptied:
            put.payload = None
            self.retract(put, now)
            return
        put.state = _OVER
        put.payload = payload
        put.since = now
        self.admitted -= 1
        producer = put.producer
        producer.puts += 1
        producer.weight += put.weight
        self.came.add(1, now)
        self.length += 1
        lane = self.dispatch.put_down(put)
        if lane.waited_for or lane.back:
            self._serve(lane, now)
        if self.roster.may_have_ended:
            self._check_end(now)

    def retract(self, put: Put, now: float) -> None:
        """The producer does not want to put it any more. Nothing happens once it is committed."""
        if put.state == PutState.WAITING:
            put.state = PutState.OVER
            if self._line and self._line[-1] is put:
                self._line.pop()
            self._admit_line()
            self._check_end(now)
        elif put.state == PutState.ADMITTED:
            put.state = PutState.OVER
            self.admitted -= 1
            if put.consumer is not None:
                put.consumer.spared(put.weight, put.nbytes)
            self._give_bytes(put.nbytes)
            self._check_end(now)

    def _reject(self, request: Put | Get, error: BaseException) -> None:
        if isinstance(request, Put):
            request.state = PutState.OVER
        self.told.append(Rejected(request, error))

    # ---- gets

    def get(self, get: Get, now: float) -> None:
        """A consumer wants an item, or a batch of them."""
        consumer, key = get.consumer, get.key
        consumer.asks(get, now)
        lane = self.dispatch.lane(consumer, key)
        lane.wait(get)
        consumer.asking += 1
        before = self.length
        if lane.items or lane.back:
            self._serve(lane, now)
        if get.waiting and self.length and not lane.items and self.dispatch.move_to(consumer, key, now):
            self._serve(lane, now)
        if self.length != before and self.roster.may_have_ended:
            self._check_end(now)  # others may have waited for what this one took, or for what somebody before it in line did
        if not get.waiting:
            return
        if self.roster.ended and self._drained(get, self._coming()):
            self._dismiss(lane, get, self.roster.error("get"))
        elif get.nowait:
            self._dismiss(lane, get, ChannelEmpty(f"channel {self.name!r} is empty", operation="get_nowait"))
        elif get.target is not None:
            self._batches.add(get)

    def _dismiss(self, lane: Lane, get: Get, error: BaseException) -> None:
        lane.leave(get)
        get.consumer.asking -= 1
        self._reject(get, error)

    def cancel(self, get: Get, now: float) -> None:
        """The consumer does not want it any more. Nothing happens once the get was served."""
        if get.waiting:
            self._batches.discard(get)
            lane = self.dispatch.lane(get.consumer, get.key)
            was_first = lane.first() is get
            lane.leave(get)
            get.consumer.asking -= 1
            if was_first:
                self._serve(lane, now)  # a batch may have held up smaller ones
                self._check_end(now)
            self.dispatch.tidy(get.consumer, get.key)

    def _serve(self, lane: Lane, now: float) -> None:
        """Hand out what the first of the line asks for, as long as it is there."""
        if lane.back:
            self._serve_back(lane, now)
        while lane.items and (get := lane.first()) is not None:
            count = 1 if get.target is None else lane.fitting(get, enough=self._pressed())
            if not count:
                return
            self._deliver(lane, get, [lane.take()] if count == 1 else lane.take_many(count), now)

    def _serve_back(self, lane: Lane, now: float) -> None:
        """Hand out what came back, to those who have got nothing newer."""
        for get in lane.line():
            if not lane.back:
                break
            items = lane.for_one(get, _PATIENCE_SECONDS, now)
            if items:
                items = items[:1] if get.target is None else lane.batch_with(get, items, enough=self._pressed())
            if items:
                lane.take_these(items)
                self._deliver(lane, get, items, now)
        if lane.back:
            self._backs.add(lane)
        else:
            self._backs.discard(lane)

    def _pressed(self) -> bool:
        """A batch cannot grow: nothing more comes, or nothing more fits until something is taken."""
        return (self.roster.ended and not self.admitted) or self._pressing or self._first_waiting() is not None

    def _press(self, now: float) -> None:
        """A put finds no room. Those who wait for a larger batch are content with what there is, or both sides would wait for ever."""
        for get in list(self._batches):
            if get.waiting:
                self._serve(self.dispatch.lane(get.consumer, get.key), now)
            if not get.waiting:
                self._batches.discard(get)

    def _serve_all(self, now: float) -> None:
        for _, _, lane in list(self.dispatch.lanes()):
            self._serve(lane, now)

    def _deliver(self, lane: Lane, get: Get, items: list[Item], now: float) -> None:
        lane.served(get)
        delivery = Delivery(get, items, now)
        lane.got(delivery)
        consumer = get.consumer
        if get.target is not None:
            self._batches.discard(get)
        count = len(items)
        consumer.gets(delivery, count, now, chosen=self.dispatch.policy is not None)
        self.length -= count
        self.went.add(count, now)
        for item in items:
            self.waits.add(now - item.since)
        if get.lease:
            self._leases.add(delivery)
        self.told.append(delivery)
        if self._line:
            self._admit_line()

    # ---- what was handed out

    def taken(self, delivery: Delivery, now: float) -> bool:
        """The consumer has it for good; of a lease: it is done with it. False: too late, the items have gone back."""
        if not delivery.open:
            return False
        self._close(delivery)
        if delivery.get.lease:
            delivery.get.consumer.ends(delivery, now)
        self._give_bytes(delivery.nbytes)
        if delivery.get.lease:
            self._check_end(now)
        return True

    def returned(self, delivery: Delivery, now: float, *, redelivery: bool = False) -> None:
        """The consumer did not take it after all, or (a redelivery) it gave back a lease: the items go where they were.

        Also after `taken`, where the caller kept the items. Not twice.
        """
        consumer = delivery.get.consumer
        if delivery.open:
            self._close(delivery)
        else:
            self._take_bytes(delivery.nbytes)
        consumer.ends(delivery, _NEVER)
        lanes: dict[Lane, None] = {}
        count = len(delivery.items)
        self.length += count
        if redelivery:
            for item in delivery.items:
                item.redeliveries += 1
            consumer.redeliveries += count
            self.redeliveries += count
        if self.dispatch.policy is None and not redelivery:
            lane = self.dispatch.lane(None, delivery.get.key)
            lane.put_back(delivery, now)
            lanes[lane] = None
        else:
            for item in delivery.items:
                if self.dispatch.policy is not None and consumer.row >= 0:
                    item.consumer = consumer
                    consumer.chosen(item.weight, item.nbytes)
                lanes[self.dispatch.put_down(item)] = None
        self.went.total -= count
        consumer.taken.total -= count
        for lane in lanes:
            self._serve(lane, now)
        self._check_end(now)

    def dropped(self, delivery: Delivery, now: float) -> None:
        """Nobody knows whether the consumer had it: at most once means that it is gone."""
        if delivery.open:
            self._close(delivery)
            self._give_bytes(delivery.nbytes)

    def _close(self, delivery: Delivery) -> None:
        delivery.open = False
        delivery.get.consumer.open.pop(delivery, None)
        if delivery.get.lease:
            self._leases.remove(delivery)

    def next_deadline(self) -> float | None:
        """When `tick` should be called next."""
        lease = self._leases.next_deadline()
        back = min((item.back for lane in self._backs for item in lane.back), default=_NEVER) + _PATIENCE_SECONDS
        if lease is not None:
            return min(lease, back)
        return None if back == _NEVER else back

    def tick(self, now: float) -> list[Delivery]:
        """End the leases whose time is over; which ones. To be called at `next_deadline`, and about once a second while `uneven`."""
        over = []
        for delivery in self._leases.expired(now):
            over.append(delivery)
            self.returned(delivery, now, redelivery=True)
        for lane in list(self._backs):
            for item in list(lane.back):
                if now - item.back >= _PATIENCE_SECONDS:
                    lane.offer_to_all(item)
            self._serve(lane, now)
        if self.uneven:
            for consumer in self.dispatch.consumers:
                for key, lane in self.dispatch.lanes_of(consumer):
                    if not lane.items and lane.first() is not None and self.dispatch.move_to(consumer, key, now):
                        self._serve(lane, now)
        self._check_end(now)
        return over

    @property
    def uneven(self) -> bool:
        """A policy has chosen, and while some wait for items, items wait for others."""
        return self.dispatch.policy is not None and self.length > 0 and any(consumer.asking for consumer in self.dispatch.consumers)

    # ---- coming and going

    def join_consumer(self, consumer: Consumer, now: float) -> None:
        """A consumer has come.

        Raises:
            UsageError: there is one of this name.
        """
        if self.dispatch.consumers.named(consumer.name) is not None:
            raise UsageError(f"channel {self.name!r} has a consumer {consumer.name!r} already", hint="give each consumer its own name")
        for lane in self.dispatch.join(consumer):
            self._serve(lane, now)
        self._check_end(now)

    def leave_consumer(self, consumer: Consumer, now: float, error: BaseException | None = None) -> None:
        """A consumer is gone: its leases and what waits for it go to the others, its gets end with `error` (None: nobody is left to tell).

        What it has got and not taken is gone, unless the caller said `returned` before.
        """
        for _, lane in self.dispatch.lanes_of(consumer):
            gets = [get for get in lane.line() if get.consumer is consumer]
            lane.dismiss(gets)
            lane.newest.pop(consumer, None)
            if error is not None:
                for get in gets:
                    self._reject(get, error)
        consumer.asking = 0
        consumer.stops()
        self.dispatch.leave(consumer)
        for delivery in list(consumer.open):
            if delivery.get.lease:
                self.returned(delivery, now, redelivery=True)
            else:
                self.dropped(delivery, now)
        self._serve_all(now)  # what came back, and whoever is first now may be content with less than who was
        self._check_end(now)

    def leave_producer(self, producer: Producer, now: float, cause: str | None = None) -> None:
        """A producer has closed: what it has put before that still comes, also where it waits for room. Or it is lost for this cause: the
        caller has committed or retracted its puts."""
        self.roster.leave(producer, cause)
        self._check_end(now)

    def withdraw_producer(self, producer: Producer, now: float) -> None:
        """A producer that has put nothing has not come after all."""
        self.roster.withdraw(producer)
        self._check_end(now)

    def shutdown(self, by: str, now: float, *, immediate: bool = False) -> None:
        """End the stream for all. Puts that wait fail; items can still be taken, unless it is `immediate`."""
        self.roster.shutdown(by)
        self._emptied = self._emptied or immediate
        line, self._line = self._line, deque()
        for put in line:
            if put.state == PutState.WAITING:
                self._reject(put, self.roster.error("put"))
        if immediate:
            for consumer, _, lane in list(self.dispatch.lanes()):
                for item in lane.clear():
                    self.length -= 1
                    if consumer is not None:
                        consumer.spared(item.weight, item.nbytes)
                    self._give_bytes(item.nbytes)
        self._check_end(now)

    def _check_end(self, now: float) -> None:
        """Nothing more comes: those who wait get what is left, or hear why."""
        if not self.roster.ended:
            return
        self._serve_all(now)
        coming = self._coming()
        for _, _, lane in list(self.dispatch.lanes()):
            for get in lane.line():
                if self._drained(get, coming):
                    self._dismiss(lane, get, self.roster.error("get"))

    def _coming(self) -> set[Key]:
        """Of what still waits for room: its producers had put it before they closed."""
        return {put.key for put in self._line if put.state == PutState.WAITING}

    def _drained(self, get: Get, coming: set[Key]) -> bool:
        """Nothing is left that this get could still be given: also not what others have on lease and may give back."""
        if self.admitted or get.key in coming or self._leases.of_others(get.consumer):
            return False
        if self.dispatch.policy is None:
            return not len(self.dispatch.lane(None, get.key))
        return not any(len(lane) for _, key, lane in self.dispatch.lanes() if key == get.key)

    # ---- looks

    @property
    def over(self) -> bool:
        """Nothing is here, nothing will come, and nothing can come back."""
        return self.roster.closed and not self.length and not self.admitted and not self._leases and not self._line

    def waiting_puts(self) -> Sequence[Put]:
        """Those that wait for room, in order."""
        return [put for put in self._line if put.state == PutState.WAITING]

    def items(self, key: Key, *, all_keys: bool = False) -> list[Item]:
        """Items that can be taken, in order of their positions."""
        found = [item for _, of, lane in self.dispatch.lanes() if all_keys or of == key for item in lane.all()]
        return sorted(found, key=lambda item: item.seq)

    def keys(self) -> list[Key]:
        """Keys with items, in no order."""
        return list(dict.fromkeys(key for _, key, lane in self.dispatch.lanes() if len(lane)))

    def open_leases(self) -> int:
        """Leases that have not ended."""
        return len(self._leases)
