"""What `channel.stats()` tells. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from aiorlinf.channel.entries import decode_key, encode_key
from aiorlinf.channel.queue import ChannelQueue
from aiorlinf.channel.records import Key

__all__ = ["ChannelStats", "ConsumerStats", "KeyStats", "ProducerStats", "take_stats"]


@dataclass(frozen=True, slots=True)
class KeyStats:
    """One key.

    Attributes:
        key: itself.
        length, weight, bytes: of its items that can be taken.
        oldest_age_seconds: since the oldest of them came.
        waiting_gets: gets that wait for one.
    """

    key: Key
    length: int
    weight: float
    bytes: int
    oldest_age_seconds: float
    waiting_gets: int


@dataclass(frozen=True, slots=True)
class ConsumerStats:
    """One consumer.

    Attributes:
        name: as it registered.
        queued, queued_weight: items that a policy chose for it and that it has not got yet.
        pending, pending_weight: these, and what it got and has not finished.
        held: items that it got and has not taken yet, or has on lease.
        taken: items it got in all; `items_per_second` over the last ten seconds.
        weight_per_second: of work, None before it has finished anything.
        busy_seconds: time it has worked.
        waiting_gets: its gets that wait.
        redeliveries: items of its leases that went back to the queue.
    """

    name: str
    queued: int
    queued_weight: float
    pending: int
    pending_weight: float
    held: int
    taken: int
    items_per_second: float
    weight_per_second: float | None
    busy_seconds: float
    waiting_gets: int
    redeliveries: int


@dataclass(frozen=True, slots=True)
class ProducerStats:
    """One producer.

    Attributes:
        name: as it registered.
        state: open, closed or lost.
        puts, weight: of its items that came.
        waiting_puts: puts that wait for room.
    """

    name: str
    state: str
    puts: int
    weight: float
    waiting_puts: int


@dataclass(frozen=True, slots=True)
class ChannelStats:
    """A channel at one moment.

    Attributes:
        name: the channel's; `worker` holds it, empty for a local one.
        length, weight, bytes: of the items that can be taken.
        held_bytes: of everything, also what is handed out and not taken yet; this is what `max_bytes` bounds.
        maxsize, max_bytes, policy: as created.
        ended: nothing more will come.
        puts_per_second, gets_per_second: items, over the last ten seconds.
        puts, gets: items in all.
        wait_p50_seconds, wait_p90_seconds, wait_p99_seconds: that half, 90 % and 99 % of the last thousand items waited; None before the
            first was taken.
        redeliveries: items that came back from a lease.
        open_leases: that have not ended.
        waiting_puts: that wait for room.
        keys, consumers, producers: the parts.
    """

    name: str
    worker: str
    length: int
    weight: float
    bytes: int
    held_bytes: int
    maxsize: int
    max_bytes: int | None
    policy: str
    ended: bool
    puts_per_second: float
    gets_per_second: float
    puts: int
    gets: int
    wait_p50_seconds: float | None
    wait_p90_seconds: float | None
    wait_p99_seconds: float | None
    redeliveries: int
    open_leases: int
    waiting_puts: int
    keys: tuple[KeyStats, ...]
    consumers: tuple[ConsumerStats, ...]
    producers: tuple[ProducerStats, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        data = asdict(self)
        for each in data["keys"]:
            each["key"] = encode_key(each["key"]).decode("latin-1")
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ChannelStats:
        """The reverse of `to_dict`."""
        rest = {field.name: data[field.name] for field in fields(cls)}
        rest["keys"] = tuple(KeyStats(**{**each, "key": decode_key(each["key"].encode("latin-1"))}) for each in rest["keys"])
        rest["consumers"] = tuple(ConsumerStats(**each) for each in rest["consumers"])
        rest["producers"] = tuple(ProducerStats(**each) for each in rest["producers"])
        return cls(**rest)

    def __str__(self) -> str:
        items = f"{_items(self.length)}, weight {self.weight:g}, {self.held_bytes} bytes held{', ended' if self.ended else ''}"
        lines = [f"channel {self.name}: {items}; {self.puts_per_second:.1f} puts/s, {self.gets_per_second:.1f} gets/s"]
        lines += [
            f"  key {key.key!r}: {_items(key.length)}, weight {key.weight:g}, oldest {key.oldest_age_seconds:.1f} s"
            for key in self.keys
            if key.key is not None or len(self.keys) > 1
        ]
        for consumer in self.consumers:
            speed = "" if consumer.weight_per_second is None else f", {consumer.weight_per_second:.3g} weight/s"
            done = f"{_items(consumer.taken)}, {consumer.pending} pending{speed}"
            lines.append(f"  to {consumer.name}: {done}, busy {consumer.busy_seconds:.1f} s")
        for producer in self.producers:
            waits = f", {producer.waiting_puts} wait" if producer.waiting_puts else ""
            lines.append(f"  from {producer.name}: {_items(producer.puts)}, {producer.state}{waits}")
        return "\n".join(lines)


def _items(number: int) -> str:
    return f"{number} item{'' if number == 1 else 's'}"


def take_stats(queue: ChannelQueue, now: float, worker: str, policy: str) -> ChannelStats:
    """Count."""
    lanes = list(queue.dispatch.lanes())
    keys = []
    for key in dict.fromkeys(key for _, key, lane in lanes if not lane.empty):
        of = [lane for _, other, lane in lanes if other == key]
        heads = [lane.all()[0].since for lane in of if len(lane)]
        keys.append(
            KeyStats(
                key,
                sum(len(lane) for lane in of),
                sum(lane.weight for lane in of),
                sum(lane.nbytes for lane in of),
                max((now - since for since in heads), default=0.0),
                sum(len(lane.line()) for lane in of),
            )
        )
    consumers = []
    for consumer in queue.dispatch.consumers:
        queued = [lane for owner, _, lane in lanes if owner is consumer]
        consumers.append(
            ConsumerStats(
                consumer.name,
                sum(len(lane) for lane in queued),
                sum(lane.weight for lane in queued),
                consumer.pending_items,
                consumer.pending_weight,
                sum(len(delivery.items) for delivery in consumer.open),
                int(consumer.taken.total),
                consumer.taken.rate(now),
                consumer.speed,
                consumer.busy_seconds,
                consumer.asking,
                consumer.redeliveries,
            )
        )
    line = queue.waiting_puts()
    producers = [
        ProducerStats(each.name, each.state, each.puts, each.weight, sum(put.producer is each for put in line))
        for each in [*queue.roster.open.values(), *queue.roster.gone.values()]
    ]
    waits = queue.waits.percentiles()
    return ChannelStats(
        queue.name,
        worker,
        queue.length,
        sum(lane.weight for _, _, lane in lanes),
        sum(lane.nbytes for _, _, lane in lanes),
        queue.nbytes,
        queue.maxsize,
        queue.max_bytes,
        policy,
        queue.roster.ended,
        queue.came.rate(now),
        queue.went.rate(now),
        int(queue.came.total),
        int(queue.went.total),
        None if waits is None else waits.p50,
        None if waits is None else waits.p90,
        None if waits is None else waits.p99,
        queue.redeliveries,
        queue.open_leases(),
        len(line),
        tuple(keys),
        tuple(consumers),
        tuple(producers),
    )
