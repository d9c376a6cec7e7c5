"""What a worker tells of itself when somebody asks through the manager: JSON values, bounded, made without waiting for anything."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import orjson

from aiorlinf.link.diagnosis import busy_at, hidden_contexts, pending
from aiorlinf.link.pending import CALLS_BIT

if TYPE_CHECKING:
    from aiorlinf.link.link import Link, LinkStats
    from aiorlinf.link.pending import PendingOperation
    from aiorlinf.link.table import LinkTable
    from aiorlinf.work.home import LoopHome

__all__ = ["MAX_REPORT_BYTES", "make_report"]

MAX_REPORT_BYTES = 240 * 1024
"""Many of them may be on their way from the manager to who asks at once."""

_ENTRIES = 1024
"""Of each kind at first; fewer if that is too much."""

_TAGS = 8

_OF_A_LINK = (
    *("remote", "incarnation", "state", "backend", "reason", "device_backend", "pending_sends", "unread_messages"),
    *("messages_sent", "messages_received", "bytes_sent", "bytes_received", "around_bytes_sent", "mismatches", "reconnects"),
)


def make_report(table: LinkTable, home: LoopHome, channels: Callable[[], list[dict[str, Any]]]) -> dict[str, Any]:
    """What the worker is doing. Any thread; from another one than the worker's it may raise RuntimeError, and can be tried again.

    `clock` is this process's monotonic time in seconds, so that two reports give rates. `pending` are the oldest operations, as
    `PendingOperation` has them; `links` have most of what `LinkStats` has, and some of the tags of what is unread; `ended_links` are those
    of `EndedLinks` that ended last; `channels` is what is given for those held here. `..._total` say how many there are if not all of them
    are told of.
    """
    operations = sorted(pending(table), key=lambda each: -(each.elapsed_s or 0.0))
    hidden = hidden_contexts(table)
    links = [{**_link(link.stats()), "unread_tags": _unread_tags(link, hidden)} for link in table.links()]
    ended = [asdict(each) for each in reversed(table.carried.all())]
    held = channels()
    where = busy_at(home)
    entries = _ENTRIES
    while True:
        report = {
            "clock": time.monotonic(),
            "busy_at": where,
            "pending": [_operation(each, entries) for each in operations[:entries]],
            "pending_total": len(operations),
            "links": links[:entries],
            "links_total": len(links),
            "ended_links": ended[:entries],
            "channels": [_channel(channel, entries) for channel in held[:entries]],
            "channels_total": len(held),
        }
        if not entries or len(orjson.dumps(report)) <= MAX_REPORT_BYTES:
            return report
        entries //= 4


def _operation(operation: PendingOperation, entries: int) -> dict[str, Any]:
    facts = asdict(operation)
    return {**facts, "waits_for": facts["waits_for"][:entries], "subject": operation.subject[:500]}


def _link(link: LinkStats) -> dict[str, Any]:
    return {name: getattr(link, name) for name in _OF_A_LINK}


def _unread_tags(link: Link, hidden: Collection[int]) -> list[int]:
    shown = (key for key in link.mailbox.unread_keys() if key >> 32 not in hidden and not key >> 32 & CALLS_BIT)
    return sorted({key & 0xFFFFFFFF for key in shown})[:_TAGS]


def _channel(channel: dict[str, Any], entries: int) -> dict[str, Any]:
    cut = {name: channel[name][:entries] for name in ("keys", "consumers", "producers")}
    workers = {kind: dict(list(names.items())[:entries]) for kind, names in channel["workers"].items()}
    return {**channel, **cut, "workers": workers}
