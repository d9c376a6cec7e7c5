"""Figures of a job, from what its workers told at two moments. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiorlinf.observe.job import JobState, WorkerState

__all__ = ["ChannelFigures", "Ended", "Flow", "channel_figures", "ended_links", "flows"]


@dataclass(frozen=True, slots=True)
class Flow:
    """What goes from one worker to another.

    Attributes:
        source, target: their addresses.
        state, backend: of the link, as the source sees it; or the target, if the source did not answer.
        messages_per_s, bytes_per_s: since the moment before; None if it was not there, or one of them did not answer.
        messages, bytes: in all.
        pending: messages that are not in the target's hands.
        unread: messages that are there, and that nobody has received; None if the target did not answer. `unread_tags` are some of their
            tags, but for those of channels and collectives.
    """

    source: str
    target: str
    state: str
    backend: str
    messages_per_s: float | None
    bytes_per_s: float | None
    messages: int
    bytes: int
    pending: int | None
    unread: int | None
    unread_tags: tuple[int, ...] = ()


def flows(now: JobState, before: JobState | None) -> list[Flow]:
    """Both directions of every link, those first that carry most."""
    ends = {(worker.name, link["remote"]): (worker, link) for worker in now.workers for link in _links(worker)}
    earlier = {} if before is None else {worker.record.identity: worker for worker in before.workers}
    found: dict[tuple[str, str], Flow] = {}
    for (local, remote), (worker, link) in ends.items():
        found[local, remote] = _flow(local, remote, worker, link, "sent", earlier, ends)
        if (remote, local) not in ends:
            found[remote, local] = _flow(remote, local, worker, link, "received", earlier, ends)
    return sorted(found.values(), key=lambda flow: (-(flow.bytes_per_s or 0.0), -(flow.messages_per_s or 0.0), flow.source, flow.target))


def _links(worker: WorkerState) -> list[Mapping[str, Any]]:
    return [] if worker.report is None else worker.report["links"]


def _flow(
    source: str,
    target: str,
    teller: WorkerState,
    link: Mapping[str, Any],
    way: str,
    earlier: Mapping[Any, WorkerState],
    ends: Mapping[tuple[str, str], tuple[WorkerState, Mapping[str, Any]]],
) -> Flow:
    messages, nbytes = link[f"messages_{way}"], link[f"bytes_{way}"]
    other = ends.get((target, source))
    receiving = link if way == "received" else None if other is None else other[1]
    messages_per_s = bytes_per_s = None
    past = earlier.get(teller.record.identity)
    if past is not None and past.report is not None and teller.report is not None:
        seconds = teller.report["clock"] - past.report["clock"]
        was = next((each for each in past.report["links"] if _same(each, link)), None)
        if was is not None and seconds > 0 and was[f"messages_{way}"] <= messages:
            messages_per_s = (messages - was[f"messages_{way}"]) / seconds
            bytes_per_s = (nbytes - was[f"bytes_{way}"]) / seconds
    return Flow(
        source,
        target,
        link["state"],
        link["device_backend"] or link["backend"],
        messages_per_s,
        bytes_per_s,
        messages,
        nbytes,
        link["pending_sends"] if way == "sent" else None,
        None if receiving is None else receiving["unread_messages"],
        () if receiving is None else tuple(receiving["unread_tags"]),
    )


def _same(some: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return bool(some["remote"] == other["remote"] and some["incarnation"] == other["incarnation"])


@dataclass(frozen=True, slots=True)
class Ended:
    """What the links of a worker with a peer have carried that have ended, together."""

    worker: str
    peer: str
    links: int
    messages_sent: int
    bytes_sent: int
    messages_received: int
    bytes_received: int


def ended_links(now: JobState) -> list[Ended]:
    """Of all workers, those first that have carried most."""
    found = [
        Ended(
            worker.name,
            each["remote"],
            each["links"],
            each["messages_sent"],
            each["bytes_sent"],
            each["messages_received"],
            each["bytes_received"],
        )
        for worker in now.workers
        for each in (() if worker.report is None else worker.report["ended_links"])
    ]
    return sorted(found, key=lambda each: (-each.bytes_sent - each.bytes_received, each.worker, each.peer))


@dataclass(frozen=True, slots=True)
class ChannelFigures:
    """One channel.

    Attributes:
        name, worker: which, and who holds it.
        length, maxsize, held_bytes: items, their bound (0: none), bytes.
        oldest_s: age of the oldest item.
        puts_per_s, gets_per_s: items per second, over the last ten.
        producers, consumers: open ones.
        waiting_gets, waiting_puts: calls that wait.
        balance: how evenly its consumers get items: what they get on average, to what the busiest gets; 1.0 is even, 1/n is one of n who
            gets everything. None with fewer than two, or if nothing has gone.
        ended: nothing more will come.
    """

    name: str
    worker: str
    length: int
    maxsize: int
    held_bytes: int
    oldest_s: float
    puts_per_s: float
    gets_per_s: float
    producers: int
    consumers: int
    waiting_gets: int
    waiting_puts: int
    balance: float | None
    ended: bool


def channel_figures(channel: Mapping[str, Any]) -> ChannelFigures:
    """Of one channel, as its worker tells of it (`channel.pending.seen_channels`)."""
    rates = [consumer["items_per_second"] for consumer in channel["consumers"]]
    most = max(rates, default=0.0)
    return ChannelFigures(
        name=channel["name"],
        worker=channel["worker"],
        length=channel["length"],
        maxsize=channel["maxsize"],
        held_bytes=channel["held_bytes"],
        oldest_s=max((key["oldest_age_seconds"] for key in channel["keys"]), default=0.0),
        puts_per_s=channel["puts_per_second"],
        gets_per_s=channel["gets_per_second"],
        producers=sum(producer["state"] == "open" for producer in channel["producers"]),
        consumers=len(rates),
        waiting_gets=sum(consumer["waiting_gets"] for consumer in channel["consumers"]),
        waiting_puts=channel["waiting_puts"],
        balance=sum(rates) / len(rates) / most if len(rates) > 1 and most else None,
        ended=channel["ended"],
    )
