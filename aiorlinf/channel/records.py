"""What a channel's queue works on: who puts and gets, items, requests and deliveries. Changed by `channel.queue` and its parts only."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from aiorlinf.channel.meters import RateMeter, Speed

__all__ = ["KEYS_KEPT", "Consumer", "Delivery", "Get", "Item", "ItemInfo", "Key", "Producer", "Put", "PutState", "Rejected", "Told"]

Key = str | int | bytes | None
"""Keys are independent FIFOs. None is one of them, the one that is used when no key is given."""

KEYS_KEPT = 64
"""So many keys of a consumer are remembered; one who has as many may ask for any."""


class Producer:
    """One who puts.

    Attributes:
        name: how it is called in errors and statistics.
        state: open, closed or lost; `cause` says why it was lost.
        puts, weight: of the items that it committed.
    """

    __slots__ = ("cause", "name", "puts", "state", "weight")

    def __init__(self, name: str) -> None:
        self.name: str = name
        self.state: str = "open"
        self.cause: str = ""
        self.puts: int = 0
        self.weight: float = 0.0

    def __repr__(self) -> str:
        return f"<Producer {self.name} {self.state}>"


class Consumer:
    """One who gets, as the channel and its policy see it. A policy only reads.

    What a consumer works on is taken from its calls: it works from a delivery on until its next get (of a lease: until the lease ends). One
    that keeps several gets in flight works on as many items as it got more than it asked for again.

    Attributes:
        name: unique in the channel.
        share: its weight for `weighted_round_robin`.
        labels: what it said about itself, such as the host.
        free_memory: bytes that it said it has free, None if it did not.
        pending_items, pending_weight, pending_bytes: chosen for it or handed to it, and not finished.
        speed: weight per second of work, as measured; None before it has finished anything.
        busy_seconds: how long it has worked on what it finished.
        head_start: seconds of work that the others had done when it came; with `busy_seconds` comparable to theirs.
        asking: its gets that wait.
        keys: that it has asked for, the first `KEYS_KEPT` of them; for people who want to know whom a put waits for.
    """

    __slots__ = (
        "_last_done",
        "_rows",
        "_unfinished",
        "asking",
        "busy_seconds",
        "free_memory",
        "head_start",
        "keys",
        "labels",
        "name",
        "open",
        "pending_bytes",
        "pending_items",
        "pending_weight",
        "redeliveries",
        "row",
        "share",
        "speed_meter",
        "taken",
    )

    def __init__(self, name: str, share: float = 1.0, labels: Mapping[str, str] | None = None) -> None:
        self.name: str = name
        self.share: float = share
        self.labels: dict[str, str] = dict(labels or {})
        self.free_memory: int | None = None
        self.pending_items: int = 0
        self.pending_weight: float = 0.0
        self.pending_bytes: int = 0
        self.busy_seconds: float = 0.0
        self.head_start: float = 0.0
        self.speed_meter: Speed = Speed()
        self.asking: int = 0
        self.keys: set[Key] = set()
        self.taken: RateMeter = RateMeter()
        self.redeliveries: int = 0
        self.open: dict[Delivery, None] = {}  # handed over, neither taken nor given back
        self.row: int = 0
        self._rows: set[int] | None = None  # of the table, those that have changed
        self._unfinished: deque[Delivery] = deque()
        self._last_done = 0.0

    @property
    def speed(self) -> float | None:
        return self.speed_meter.value

    @property
    def work_seconds(self) -> float:
        """Work done, comparable between consumers that came at different times."""
        return self.busy_seconds + self.head_start

    # ---- what the queue tells

    def chosen(self, weight: float, nbytes: int, items: int = 1) -> None:
        """This is for it."""
        self.pending_items += items
        self.pending_weight += weight
        self.pending_bytes += nbytes
        if self._rows is not None:
            self._rows.add(self.row)

    def spared(self, weight: float, nbytes: int, items: int = 1) -> None:
        """This is not for it after all, or is finished."""
        self.pending_items -= items
        self.pending_weight = self.pending_weight - weight if self.pending_items else 0.0
        self.pending_bytes -= nbytes
        if self._rows is not None:
            self._rows.add(self.row)

    def gets(self, delivery: Delivery, count: int, now: float, *, chosen: bool) -> None:
        """It has got these items, which a policy had `chosen` for it."""
        self.asking -= 1
        self.open[delivery] = None
        self.taken.add(count, now)
        self._unfinished.append(delivery)
        if not chosen:
            self.chosen(delivery.weight, delivery.nbytes, count)

    def asks(self, get: Get, now: float) -> None:
        """It wants more, so it has finished what it got first."""
        if get.key not in self.keys and len(self.keys) < KEYS_KEPT:
            self.keys.add(get.key)
        if self._unfinished and not get.lease and not self._unfinished[0].get.lease:
            self._finished(self._unfinished.popleft(), now)

    def ends(self, delivery: Delivery, now: float) -> None:
        """The lease of this is over, or it was given back: nothing was done then (`now` is infinite)."""
        if delivery not in self._unfinished:
            return
        self._unfinished.remove(delivery)
        if now != float("inf"):
            self._finished(delivery, now)
        else:
            self.spared(delivery.weight, delivery.nbytes, len(delivery.items))

    def _finished(self, delivery: Delivery, now: float) -> None:
        seconds = max(0.0, now - max(delivery.given, self._last_done))
        self._last_done = now
        self.busy_seconds += seconds
        self.speed_meter.add(delivery.weight, seconds)
        self.spared(delivery.weight, delivery.nbytes, len(delivery.items))

    def stops(self) -> None:
        """It is gone."""
        self._unfinished.clear()

    def __repr__(self) -> str:
        return f"<Consumer {self.name}: {self.pending_items} pending>"


class ItemInfo(NamedTuple):
    """What a load-balance policy is told of an item.

    Attributes:
        key: as given to `put`.
        weight: as given to `put`.
        nbytes: size of the payload; 0 where it is not known (objects in a local channel other than tensors, arrays and bytes).
        producer: name of the producer.
    """

    key: Key
    weight: float
    nbytes: int
    producer: str


class Item:
    """Something in the queue.

    Attributes:
        seq: position among all items that the channel ever admitted. An item that comes back goes where it was.
        payload: whatever the queue's owner gave; never looked at.
        since: when it could be taken for the first time.
        back: when it came back from a consumer that had not taken it, 0 if it did not.
        consumer: in whose queue it is, None: in the one for all.
        redeliveries: how often it came back from a lease.
    """

    __slots__ = ("back", "consumer", "key", "nbytes", "payload", "producer", "redeliveries", "seq", "since", "weight")

    seq: int
    key: Key
    weight: float
    nbytes: int
    payload: Any
    producer: Producer
    consumer: Consumer | None
    since: float
    back: float
    redeliveries: int

    def info(self) -> ItemInfo:
        """For a policy."""
        return ItemInfo(self.key, self.weight, self.nbytes, self.producer.name)

    def __repr__(self) -> str:
        return f"<Item {self.seq} key {self.key!r} weight {self.weight:g}>"


class PutState:
    """Only moves down this list. Plain integers: they are compared for every item."""

    NEW = 0
    WAITING = 1  # for room
    ADMITTED = 2  # has room, and a position; the item comes with `commit`
    OVER = 3


class Put(Item):
    """A put. Once it is committed it is the item that it brought.

    Attributes:
        nowait: fail instead of waiting for room.
        seq: position, once admitted.
        consumer: whose queue the policy chose, once admitted.
        owner: the caller's, not looked at; `number` and `slot` neither.
        payload: the caller keeps here what is there of the item before it is committed.
    """

    __slots__ = ("nowait", "number", "owner", "slot", "state")

    def __init__(
        self,
        producer: Producer,
        key: Key,
        weight: float,
        nbytes: int,
        nowait: bool = False,
        payload: Any = None,
        owner: Any = None,
        number: int = 0,
    ) -> None:
        self.producer = producer
        self.key = key
        self.weight = weight
        self.nbytes = nbytes
        self.nowait: bool = nowait
        self.payload = payload
        self.owner: Any = owner
        self.number: int = number
        self.slot: int = 0
        self.state: int = 0  # NEW
        self.seq = 0
        self.consumer: Consumer | None = None
        self.since: float = 0.0
        self.back: float = 0.0
        self.redeliveries = 0


class Get:
    """A get.

    Attributes:
        target: weight of a batch, None: one item.
        nowait: fail instead of waiting for an item.
        lease: the items come back unless they are said to be done.
        lease_seconds: and at the latest after so long; None: when the consumer is lost.
        waiting: it is in the line.
        count, total: how many items from the head of the queue fit into the batch so far, and their weight.
        owner, number: the caller's, not looked at.
    """

    __slots__ = ("consumer", "count", "key", "lease", "lease_seconds", "nowait", "number", "owner", "target", "total", "waiting")

    def __init__(
        self,
        consumer: Consumer,
        key: Key = None,
        target: float | None = None,
        nowait: bool = False,
        lease: bool = False,
        lease_seconds: float | None = None,
        owner: Any = None,
        number: int = 0,
    ) -> None:
        self.consumer: Consumer = consumer
        self.key: Key = key
        self.target: float | None = target
        self.nowait: bool = nowait
        self.lease: bool = lease
        self.lease_seconds: float | None = lease_seconds
        self.owner: Any = owner
        self.number: int = number
        self.waiting: bool = False
        self.count: int = 0
        self.total: float = 0.0


class Delivery:
    """Items that were handed to a get.

    Attributes:
        given: when.
        deadline: of the lease, None if it has none.
        open: neither taken nor given back; the items' bytes still count.
        before: the newest item that the consumer had got before.
        messages: the owner's, not looked at.
    """

    __slots__ = ("before", "deadline", "get", "given", "items", "messages", "nbytes", "open", "weight")

    def __init__(self, get: Get, items: list[Item], given: float) -> None:
        self.get: Get = get
        self.items: list[Item] = items
        self.given: float = given
        if len(items) == 1:
            self.weight: float = items[0].weight
            self.nbytes: int = items[0].nbytes
        else:
            self.weight = sum(item.weight for item in items)
            self.nbytes = sum(item.nbytes for item in items)
        self.deadline: float | None = None if get.lease_seconds is None else given + get.lease_seconds
        self.open: bool = True
        self.before: int = 0
        self.messages: int = 0


class Rejected(NamedTuple):
    """This request has failed."""

    request: Put | Get
    error: BaseException


Told = Put | Delivery | Rejected
"""What the queue tells its owner to do: this put has room (`commit` or `retract` it), hand over this delivery, this request has failed."""
