"""A worker's handle of a channel, at the channel worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from aiorlinf.address import WorkerAddress
    from aiorlinf.channel.affinity import Affinity
    from aiorlinf.channel.handle import Handle
    from aiorlinf.channel.queue import ChannelQueue
    from aiorlinf.channel.records import Get, Put
    from aiorlinf.channel.settings import ChannelSettings
    from aiorlinf.collective.exchange import Exchange
    from aiorlinf.link.link import Link

__all__ = ["HostPort", "Hosted", "Talk"]


class Talk(Protocol):
    """The conversation with the worker (`channel.session`), as its parts see it.

    Attributes:
        peer: the worker; `link` to it.
        ended: nothing more is said.
        clock: seconds.
        work_off: passes on what the queues tell.
    """

    peer: WorkerAddress
    link: Link | None
    exchange: Exchange
    ended: bool
    clock: Callable[[], float]
    work_off: Callable[[], None]

    def write(self, data: bytes) -> None: ...
    def flush(self) -> None: ...
    def fail(self, port: int, number: int, error: BaseException) -> None: ...


class Hosted(NamedTuple):
    """One channel; `affinity` if it is the first replica of several."""

    settings: ChannelSettings
    queue: ChannelQueue
    affinity: Affinity | None = None


class HostPort:
    """One handle of the worker, on one channel.

    Attributes:
        puts: announced and not over, by number.
        admitted: those of them that have room, in order.
        gets: that wait, by number.
    """

    __slots__ = ("admitted", "gets", "handle", "hosted", "number", "puts", "session")

    def __init__(self, session: Talk, number: int, hosted: Hosted, handle: Handle) -> None:
        self.session: Talk = session
        self.number: int = number
        self.hosted: Hosted = hosted
        self.handle: Handle = handle
        self.puts: dict[int, Put] = {}
        self.admitted: deque[Put] = deque()
        self.gets: dict[int, Get] = {}
