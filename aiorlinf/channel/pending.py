"""Calls of channels that are under way, for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from aiorlinf.channel.entries import GETS, LIFE, PUTS, REPLIES, REQUESTS, RETURNS
from aiorlinf.channel.records import KEYS_KEPT
from aiorlinf.link.pending import PendingOperation, since

if TYPE_CHECKING:
    from aiorlinf.address import WorkerAddress
    from aiorlinf.channel.calls import GetCall, PutCall
    from aiorlinf.channel.records import Key
    from aiorlinf.channel.stream import GetStream
    from aiorlinf.work.base import AsyncWork

__all__ = ["CONTEXTS", "Holder", "asks_under_way", "calls_under_way", "seen_channels", "shown_key"]

CONTEXTS = (REQUESTS, REPLIES, PUTS, GETS, RETURNS, LIFE)
"""What channels' own messages have."""


class Holder(Protocol):
    """A channel worker (`channel.host`): its sessions, and each channel that it holds with its `ChannelStats`."""

    @property
    def sessions(self) -> Mapping[WorkerAddress, Any]: ...
    def stats(self) -> list[tuple[Any, Any]]: ...


def calls_under_way(calls: Iterable[GetCall | GetStream | PutCall], stage: str) -> Iterator[PendingOperation]:
    """Puts or gets that somebody still waits for."""
    for call in dict.fromkeys(calls):  # a stream of gets is there once for each
        work: AsyncWork[Any] | None = call.work
        if work is not None:
            key = "" if call.key is None else f", key {call.key!r}"
            yield PendingOperation(
                operation=work.operation,
                peer=None,
                tag=0,
                context=0,
                stage=stage,
                bytes_done=None,
                bytes_expected=None,
                subject=f"of channel {call.port.name!r}{key}",
                channel=call.port.name,
                **since(work),
            )


def asks_under_way(asks: Iterable[AsyncWork[Any]], host: WorkerAddress) -> Iterator[PendingOperation]:
    """Questions to a channel worker."""
    for work in asks:
        yield PendingOperation(
            operation=work.operation,
            peer=None,
            tag=0,
            context=0,
            stage="waits for the channel worker",
            bytes_done=None,
            bytes_expected=None,
            waits_for=(str(host),),
            subject=f"of a channel at {host}",
            **since(work),
        )


def seen_channels(host: Holder) -> list[dict[str, Any]]:
    """The channels that a channel worker holds, as JSON values: what `channel.stats()` tells, and which workers are behind the names.

    `workers` has two tables, `producers` and `consumers`: by name, the address of the worker. `takes` has, by the name of the consumer, the
    keys that it has asked for so far, or None if they are many.
    """
    found = []
    for hosted, stats in host.stats():
        workers: dict[str, dict[str, str]] = {"producers": {}, "consumers": {}}
        for session in list(host.sessions.values()):
            for port in list(session.ports.values()):
                if port.hosted is not hosted:
                    continue
                if port.handle.producer is not None:
                    workers["producers"][port.handle.producer_name] = str(session.peer)
                if port.handle.consumer is not None:
                    workers["consumers"][port.handle.consumer_name] = str(session.peer)
        takes = {each.name: _keys(list(each.keys)) for each in list(hosted.queue.dispatch.consumers)}
        data = stats.to_dict()
        for told, each in zip(data["keys"], stats.keys, strict=True):
            told["key"] = shown_key(each.key)
        found.append({**data, "workers": workers, "takes": takes})
    return found


def _keys(keys: list[Key]) -> list[str | int | None] | None:
    return None if len(keys) >= KEYS_KEPT else sorted(map(shown_key, keys), key=str)


def shown_key(key: Key) -> str | int | None:
    """A key as a JSON value, for people: bytes, and what no JSON number or text can hold, as Python writes them."""
    if isinstance(key, int):
        return key if abs(key) < 1 << 53 else repr(key)
    if isinstance(key, str):
        return key if key.isprintable() else repr(key)
    return None if key is None else repr(key)
