"""The statistics of a channel's replicas as those of one channel. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from aiorlinf.channel.stats import ChannelStats, ConsumerStats, KeyStats, ProducerStats

__all__ = ["sum_stats"]

_SUMS = (
    "length",
    "weight",
    "bytes",
    "held_bytes",
    "puts_per_second",
    "gets_per_second",
    "puts",
    "gets",
    "redeliveries",
    "open_leases",
    "waiting_puts",
)

Part = TypeVar("Part", KeyStats, ConsumerStats, ProducerStats)


def sum_stats(name: str, parts: Sequence[ChannelStats]) -> ChannelStats:
    """Of at least one replica, the first one first. Waiting times are those of the replica with the longest.

    The bounds are of each replica. A producer is open as long as it is somewhere.
    """
    changes: dict[str, Any] = {what: sum(getattr(part, what) for part in parts) for what in _SUMS}
    for what in ("wait_p50_seconds", "wait_p90_seconds", "wait_p99_seconds"):
        changes[what] = max((value for part in parts if (value := getattr(part, what)) is not None), default=None)
    changes["name"] = name
    changes["worker"] = ", ".join(part.worker for part in parts)
    changes["keys"] = _joined((each for part in parts for each in part.keys), lambda each: each.key)
    changes["consumers"] = _joined((each for part in parts for each in part.consumers), lambda each: each.name)
    changes["producers"] = _joined((each for part in parts for each in part.producers), lambda each: each.name)
    return replace(parts[0], **changes)


def _joined(parts: Iterable[Part], of: Callable[[Part], Any]) -> tuple[Part, ...]:
    found: dict[Any, Part] = {}
    for part in parts:
        known = found.get(of(part))
        found[of(part)] = part if known is None else _sum(known, part)
    return tuple(found.values())


def _sum(one: Part, two: Part) -> Part:
    """Numbers are added, but ages and speeds; of texts the first one stays, but a producer is open if it is open in one."""
    changes: dict[str, Any] = {}
    for each in fields(one):
        left, right = getattr(one, each.name), getattr(two, each.name)
        if each.name == "oldest_age_seconds":
            changes[each.name] = max(left, right)
        elif each.name == "weight_per_second":
            changes[each.name] = right if left is None else left if right is None else (left + right) / 2
        elif each.name == "state":
            changes[each.name] = "open" if "open" in (left, right) else left
        elif each.name not in ("key", "name"):
            changes[each.name] = left + right
    return replace(one, **changes)
