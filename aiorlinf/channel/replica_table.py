"""The replicas of a spread channel that a handle knows, and which one each key belongs to."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiorlinf.channel.watching import watch
from aiorlinf.errors import AiorlinfError, ChannelClosed
from aiorlinf.work.base import AsyncWork

if TYPE_CHECKING:
    from aiorlinf.channel.records import Key
    from aiorlinf.channel.remote import RemotePort

__all__ = ["ReplicaTable", "Then", "outcome"]

Then = Callable[["RemotePort | AiorlinfError"], None]
"""Gets a replica's handle, or why there is none."""


class ReplicaTable:
    """Home thread only. What is looked for twice is asked once, and what is asked for one key is answered in order.

    Args:
        node: ours.
        primary: the first replica, which knows all others and the homes of keys.
        own: that of this node.
        open_replica: a handle of the replica of this name.
        on_opened: called with each further replica, before those who wait for it.
    """

    def __init__(
        self,
        node: str,
        primary: RemotePort,
        own: RemotePort,
        open_replica: Callable[[str], AsyncWork[RemotePort]],
        on_opened: Callable[[RemotePort], None],
    ) -> None:
        self._node = node
        self._primary = primary
        self._own = own
        self._open_replica = open_replica
        self._on_opened = on_opened
        self._known: dict[str, RemotePort] = {primary.name: primary, own.name: own}  # by their names
        self._opening: dict[str, list[Then]] = {}
        self._homes: dict[Key, str] = {}
        self._asking: dict[Key, list[Then]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def others(self) -> list[RemotePort]:
        """All but the first."""
        return [port for port in self._known.values() if port is not self._primary]

    def find(self, nodes: dict[str, str]) -> None:
        """Know the replicas of these nodes."""
        for name in nodes.values():
            if name not in self._known:
                self.with_replica(name, lambda _: None)

    def when_all_are_known(self, then: Callable[[], None]) -> None:
        """Call this when we know every replica that there is now."""

        def told(work: AsyncWork[Any]) -> None:
            nodes = outcome(work)
            missing = {name for name in nodes.values() if name not in self._known} if isinstance(nodes, dict) else set()
            if not missing:
                then()

            def opened(name: str) -> None:
                missing.discard(name)
                if not missing:
                    then()

            for name in list(missing):
                self.with_replica(name, lambda _, name=name: opened(name))  # type: ignore[misc]  # mypy sees no default here

        watch(self._primary.question(b"nodes"), told)

    def with_replica(self, name: str, then: Then) -> None:
        """Call this with the replica of this name, at once if it is known."""
        port = self._known.get(name)
        if port is not None:
            then(port)
            return
        waiting = self._opening.get(name)
        if waiting is not None:
            waiting.append(then)
            return
        self._opening[name] = [then]
        watch(self._open_replica(name), lambda work: self._opened(name, work))

    def _opened(self, name: str, work: AsyncWork[RemotePort]) -> None:
        waiting = self._opening.pop(name)
        found = outcome(work)
        if not isinstance(found, AiorlinfError):
            self._known[name] = found
            self._on_opened(found)
        for then in waiting:
            then(found)

    def alive(self) -> list[RemotePort]:
        """Those that can be asked: this node's first. The first replica is always one of them, for without it nothing is certain."""
        others = [port for port in self._known.values() if port is not self._own and (port is self._primary or port.lost is None)]
        return [*([self._own] if self._own.lost is None or self._own is self._primary else []), *others]

    def with_home(self, key: Key, then: Then) -> None:
        """Call this with the replica that a key belongs to; what has no key is at home on the own node."""
        if key is None:
            then(self._own)
            return
        name = self._homes.get(key)
        waiting = self._asking.get(key)
        if name is not None and waiting is None:
            self.with_replica(name, then)
            return
        if waiting is not None:
            waiting.append(then)
            return
        self._asking[key] = [then]
        watch(self._primary.question(b"place " + self._node.encode(), key), lambda work: self._placed(key, work))

    def _placed(self, key: Key, work: AsyncWork[Any]) -> None:
        name = outcome(work)
        waiting = self._asking.pop(key)
        for then in waiting:
            if isinstance(name, AiorlinfError):
                then(name)
            else:
                self._homes[key] = name
                self.with_replica(name, then)


def outcome(work: AsyncWork[Any]) -> Any:
    """The value, or the error as a value."""
    if work.cancelled():
        return ChannelClosed("the worker was closed")
    error = work.exception()
    if error is None:
        return work.result()
    return error if isinstance(error, AiorlinfError) else ChannelClosed(str(error))
