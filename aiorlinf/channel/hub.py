"""All channels that one worker uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aiorlinf.address import WorkerAddress
from aiorlinf.channel.channel import Channel
from aiorlinf.channel.client import Conversation
from aiorlinf.channel.remote import RemotePort
from aiorlinf.channel.settings import ChannelSettings
from aiorlinf.channel.watching import watch
from aiorlinf.errors import UsageError
from aiorlinf.work.base import AsyncWork

if TYPE_CHECKING:
    from aiorlinf.collective.exchange import Exchange

__all__ = ["ChannelHub", "Role"]


class Role:
    """Who a new handle is.

    Attributes:
        consumer, producer: names; None: the worker's address, with a number from the second handle on.
        joins: what it is from the beginning, not only from its first get or put on.
        share, labels: see `Channel.handle`.
    """

    def __init__(
        self,
        *,
        consumer: str | None = None,
        producer: str | None = None,
        share: float = 1.0,
        labels: Mapping[str, str] | None = None,
        joins: tuple[str, ...] = (),
    ) -> None:
        self.consumer = consumer
        self.producer = producer
        self.share = share
        self.labels: dict[str, str] = dict(labels or {})
        self.joins = joins

    @classmethod
    def make(cls, producer: Any, consumer: Any, share: Any, labels: Mapping[Any, Any] | None) -> Role:
        """Check what a user says.

        Raises:
            UsageError: with the argument concerned.
        """
        names: dict[str, str | None] = {}
        joins = []
        for what, value in (("producer", producer), ("consumer", consumer)):
            if type(value) is not bool and not (isinstance(value, str) and 0 < len(value) <= 200):
                raise UsageError(f"{what}={value!r} is neither true or false nor a name of at most 200 characters")
            names[what] = value if isinstance(value, str) else None
            if value:
                joins.append(what)
        if not (type(share) in (int, float) and 0 < share < 1e9):
            raise UsageError(f"share={share!r} is not a number above 0")
        for key, text in (labels or {}).items():
            if not isinstance(key, str) or not isinstance(text, str):
                raise UsageError(f"labels: {key!r}: {text!r}: both are text")
        return cls(consumer=names["consumer"], producer=names["producer"], share=float(share), labels=labels, joins=tuple(joins))

    def elsewhere(self) -> Role:
        """At a further replica: who it is, without being it from the beginning, but for a consumer that a policy shall know."""
        joins = tuple(join for join in self.joins if join == "consumer")
        return Role(consumer=self.consumer, producer=self.producer, share=self.share, labels=self.labels, joins=joins)

    def told(self, own: str) -> dict[str, Any]:
        """For the channel worker."""
        return {
            "consumer": self.consumer or own,
            "producer": self.producer or own,
            "share": self.share,
            "labels": self.labels,
            "joins": list(self.joins),
        }


class ChannelHub:
    """See the module. Home thread only."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._conversations: dict[WorkerAddress, Conversation] = {}
        self._handles: dict[str, int] = {}

    def open(self, settings: ChannelSettings, role: Role, *, create: bool = True) -> AsyncWork[Channel]:
        """A handle of this channel, made (`create`) if there is none; the work is done when its channel worker knows of it."""
        host = WorkerAddress(settings.worker)
        conversation = self._conversations.get(host)
        if conversation is None:
            conversation = self._conversations[host] = Conversation(self._exchange, host, self._ended)
        count = self._handles[settings.name] = self._handles.get(settings.name, 0) + 1
        own = str(self._exchange.local) if count == 1 else f"{self._exchange.local}/{count}"
        port = RemotePort(conversation, settings)
        home = self._exchange.home
        work: AsyncWork[Any] = AsyncWork(home, "connect_channel", abort=lambda _: port.give_up(), give_back=lambda _: port.give_up())
        answer: AsyncWork[Any] = AsyncWork(home, "connect_channel")
        watch(answer, lambda answer: _pass_on(answer, work, port))
        port.open(answer, {**role.told(own), "create": create})
        return work

    def _ended(self, conversation: Conversation) -> None:
        if self._conversations.get(conversation.host) is conversation:
            del self._conversations[conversation.host]

    def close(self, failure: str | None = None) -> None:
        """The worker is closing, perhaps because of a failure: then its channels count it as lost, not as done."""
        for conversation in list(self._conversations.values()):
            conversation.close(failure)


def _pass_on(answer: AsyncWork[Any], work: AsyncWork[Any], port: RemotePort) -> None:
    error = answer.exception()
    if error is None:
        work._finish(Channel(port))
        return
    port.refused()
    work._fail(error)
