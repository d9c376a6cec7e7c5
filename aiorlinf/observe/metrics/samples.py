"""The figures themselves. Pure: from what workers tell (`link.report`) to names, labels and numbers.

Names are as Prometheus has them: with the unit, and ``_total`` for what only grows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from aiorlinf.observe.job import JobState
from aiorlinf.observe.top.rates import channel_figures

__all__ = ["METRICS", "Metric", "Sample", "of_job", "of_worker"]


@dataclass(frozen=True, slots=True)
class Metric:
    """What a figure is.

    Attributes:
        kind: a counter only grows, as long as its worker lives.
        labels: names of its labels, in order.
        text: what it says, for people.
        unit: ``seconds``, ``bytes`` or nothing.
    """

    kind: Literal["counter", "gauge"]
    labels: tuple[str, ...]
    text: str
    unit: str = ""


_LINK = ("worker", "peer")
_WAY = ("worker", "peer", "direction", "backend")
_CHANNEL = ("channel", "worker")

METRICS: Mapping[str, Metric] = {
    "aiorlinf_worker_answers": Metric("gauge", ("worker", "host"), "1 if the worker says what it is doing, 0 if it is frozen or cut off"),
    "aiorlinf_worker_life": Metric("gauge", ("worker",), "which life of this address it is, from 1"),
    "aiorlinf_worker_loop_blocked": Metric("gauge", ("worker",), "1 if its event loop has had no turn for half a second"),
    "aiorlinf_pending_operations": Metric("gauge", ("worker", "operation"), "operations that are not over"),
    "aiorlinf_oldest_pending_seconds": Metric("gauge", ("worker",), "age of the oldest of them", "seconds"),
    "aiorlinf_link_messages_total": Metric("counter", _WAY, "whole messages"),
    "aiorlinf_link_bytes_total": Metric("counter", _WAY, "payload bytes", "bytes"),
    "aiorlinf_link_pending_sends": Metric("gauge", _LINK, "messages that are not yet in the peer's hands"),
    "aiorlinf_link_unread_messages": Metric("gauge", _LINK, "messages that arrived and that nobody received yet"),
    "aiorlinf_link_mismatches_total": Metric("counter", _LINK, "messages refused because the receiver expected something else"),
    "aiorlinf_link_reconnects_total": Metric("counter", _LINK, "how often the network cut the connection and it was restored"),
    "aiorlinf_ended_links_total": Metric("counter", _LINK, "links that have ended; what they carried is in none of the figures above"),
    "aiorlinf_ended_link_messages_total": Metric("counter", (*_LINK, "direction"), "whole messages of links that have ended"),
    "aiorlinf_ended_link_bytes_total": Metric("counter", (*_LINK, "direction"), "payload bytes of links that have ended", "bytes"),
    "aiorlinf_channel_items": Metric("gauge", _CHANNEL, "items that can be taken"),
    "aiorlinf_channel_bytes": Metric("gauge", _CHANNEL, "bytes held, also of what is handed out and not taken yet", "bytes"),
    "aiorlinf_channel_oldest_seconds": Metric("gauge", _CHANNEL, "age of the oldest item", "seconds"),
    "aiorlinf_channel_puts_total": Metric("counter", _CHANNEL, "items that came"),
    "aiorlinf_channel_gets_total": Metric("counter", _CHANNEL, "items that went"),
    "aiorlinf_channel_redeliveries_total": Metric("counter", _CHANNEL, "items that came back from a lease"),
    "aiorlinf_channel_waiting_puts": Metric("gauge", _CHANNEL, "puts that wait for room"),
    "aiorlinf_channel_waiting_gets": Metric("gauge", _CHANNEL, "gets that wait for an item"),
    "aiorlinf_channel_wait_seconds": Metric("gauge", (*_CHANNEL, "quantile"), "how long so many of the last items waited", "seconds"),
    "aiorlinf_channel_balance": Metric("gauge", _CHANNEL, "what a consumer gets on average, to what the busiest gets: 1 is even"),
    "aiorlinf_channel_consumer_items_total": Metric("counter", (*_CHANNEL, "consumer"), "items a consumer got"),
    "aiorlinf_channel_consumer_busy_seconds_total": Metric(
        "counter", (*_CHANNEL, "consumer"), "time a consumer has worked on items", "seconds"
    ),
    "aiorlinf_waiting_circles": Metric("gauge", ("job",), "sets of workers that wait for each other"),
}
"""All figures, by name."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One figure at one moment."""

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


def of_worker(name: str, life: int, host: str, report: Mapping[str, Any] | None) -> Iterator[Sample]:
    """The figures of one worker and of the channels that it holds, from its report; None: it did not answer."""
    own = {"worker": name}
    yield Sample("aiorlinf_worker_answers", float(report is not None), {**own, "host": host})
    yield Sample("aiorlinf_worker_life", life, own)
    if report is None:
        return
    yield Sample("aiorlinf_worker_loop_blocked", float(report.get("loop_blocked", False)), own)
    for operation, count in Counter(each["operation"] for each in report["pending"]).items():
        yield Sample("aiorlinf_pending_operations", count, {**own, "operation": operation})
    ages = [each["elapsed_s"] for each in report["pending"] if each["elapsed_s"] is not None]
    yield Sample("aiorlinf_oldest_pending_seconds", max(ages, default=0.0), own)
    for link in report["links"]:
        yield from _of_link(own, link)
    for ended in report["ended_links"]:
        yield from _of_ended(own, ended)
    for channel in report["channels"]:
        yield from _of_channel(channel)


def _of_link(own: Mapping[str, str], link: Mapping[str, Any]) -> Iterator[Sample]:
    labels = {**own, "peer": link["remote"]}
    for direction in ("sent", "received"):
        way = {**labels, "direction": direction, "backend": link["device_backend"] or link["backend"]}
        yield Sample("aiorlinf_link_messages_total", link[f"messages_{direction}"], way)
        yield Sample("aiorlinf_link_bytes_total", link[f"bytes_{direction}"], way)
    yield Sample("aiorlinf_link_pending_sends", link["pending_sends"], labels)
    yield Sample("aiorlinf_link_unread_messages", link["unread_messages"], labels)
    yield Sample("aiorlinf_link_mismatches_total", link["mismatches"], labels)
    yield Sample("aiorlinf_link_reconnects_total", link["reconnects"], labels)


def _of_ended(own: Mapping[str, str], ended: Mapping[str, Any]) -> Iterator[Sample]:
    labels = {**own, "peer": ended["remote"]}
    yield Sample("aiorlinf_ended_links_total", ended["links"], labels)
    for direction in ("sent", "received"):
        yield Sample("aiorlinf_ended_link_messages_total", ended[f"messages_{direction}"], {**labels, "direction": direction})
        yield Sample("aiorlinf_ended_link_bytes_total", ended[f"bytes_{direction}"], {**labels, "direction": direction})


def _of_channel(channel: Mapping[str, Any]) -> Iterator[Sample]:
    figures = channel_figures(channel)
    labels = {"channel": channel["name"], "worker": channel["worker"]}
    yield Sample("aiorlinf_channel_items", figures.length, labels)
    yield Sample("aiorlinf_channel_bytes", figures.held_bytes, labels)
    yield Sample("aiorlinf_channel_oldest_seconds", figures.oldest_s, labels)
    yield Sample("aiorlinf_channel_puts_total", channel["puts"], labels)
    yield Sample("aiorlinf_channel_gets_total", channel["gets"], labels)
    yield Sample("aiorlinf_channel_redeliveries_total", channel["redeliveries"], labels)
    yield Sample("aiorlinf_channel_waiting_puts", figures.waiting_puts, labels)
    yield Sample("aiorlinf_channel_waiting_gets", figures.waiting_gets, labels)
    for name, quantile in (("wait_p50_seconds", "0.5"), ("wait_p90_seconds", "0.9"), ("wait_p99_seconds", "0.99")):
        if channel[name] is not None:
            yield Sample("aiorlinf_channel_wait_seconds", channel[name], {**labels, "quantile": quantile})
    if figures.balance is not None:
        yield Sample("aiorlinf_channel_balance", figures.balance, labels)
    for consumer in channel["consumers"]:
        whose = {**labels, "consumer": consumer["name"]}
        yield Sample("aiorlinf_channel_consumer_items_total", consumer["taken"], whose)
        yield Sample("aiorlinf_channel_consumer_busy_seconds_total", consumer["busy_seconds"], whose)


def of_job(state: JobState) -> Iterator[Sample]:
    """The figures of all workers of a job, and of the job itself."""
    yield Sample("aiorlinf_waiting_circles", len(state.circles), {"job": state.job})
    for worker in state.workers:
        record = worker.record
        yield from of_worker(worker.name, record.incarnation, record.labels.get("host", record.host), worker.report)
