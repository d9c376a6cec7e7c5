"""The gets of one `prefetch` loop on a channel that another worker holds: so many are under way, without a work for each."""

from __future__ import annotations

from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from aiorlinf.channel.entries import encode_key
from aiorlinf.work.base import AsyncWork

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiorlinf.channel.claims import Claims
    from aiorlinf.channel.landing import Wish
    from aiorlinf.channel.records import Key
    from aiorlinf.errors import AiorlinfError
    from aiorlinf.work.home import LoopHome

__all__ = ["GetStream"]


class _Port(Protocol):
    """The handle (`channel.remote`)."""

    home: LoopHome
    name: str
    number: int


class _Conversation(Protocol):
    """See `channel.client`."""

    streams: set[GetStream]
    claims: Claims
    cause: Callable[[], AiorlinfError] | None

    def start_get(self, call: GetStream, port: int, bits: int, value: float, extra: int, key: bytes) -> None: ...
    def stop_number(self, number: int, port: int) -> None: ...
    def send_values_back(self, number: int, values: Sequence[Any], messages: Sequence[int]) -> None: ...


class GetStream:
    """See the module. Home thread only. The conversation has it in place of a `GetCall` for each of its gets.

    Attributes:
        work: somebody waits for the next value; None if nobody does.
    """

    __slots__ = (
        "_asked",
        "_conversation",
        "_count",
        "_key",
        "_order",
        "_values",
        "key",
        "lease",
        "number",
        "port",
        "target",
        "wish",
        "work",
    )

    def __init__(self, port: _Port, conversation: _Conversation, key: Key, count: int, wish: Wish) -> None:
        self.port: _Port = port
        self.key: Key = key
        self.target: float | None = None
        self.lease: bool = False
        self.wish: Wish = wish
        self.number: int = 0  # of the last get
        self.work: AsyncWork[None] | None = None
        self._conversation = conversation
        self._key = b"" if key is None else encode_key(key)
        self._count = count
        self._order: deque[int] = deque()
        self._asked: dict[int, float] = {}  # when each get began, while a trace is recorded
        self._values: dict[int, tuple[Any, Sequence[int]] | BaseException] = {}
        conversation.streams.add(self)

    # ---- the loop's side

    def fill(self) -> None:
        """Let so many be under way. Raises what a call on a channel that is gone raises."""
        conversation, order = self._conversation, self._order
        if conversation.cause is not None:
            if not order:
                raise conversation.cause()
            return
        while len(order) < self._count:
            conversation.start_get(self, self.port.number, 0, 0.0, 0, self._key)
            order.append(self.number)
            if self.port.home.trace is not None:
                self._asked[self.number] = monotonic()

    @property
    def ready(self) -> bool:
        """The next value is here, or its error."""
        return bool(self._order) and self._order[0] in self._values

    def wait(self) -> AsyncWork[None]:
        """Done when the next value is here. Cancelling is harmless."""
        work = self.work = AsyncWork(self.port.home, "get", abort=self._left, detail=self)
        return work

    def _left(self, work: AsyncWork[None]) -> None:
        if self.work is work:
            self.work = None

    def take(self) -> Any:
        """The next value, which is there. Raises its error."""
        number = self._order.popleft()
        found = self._values.pop(number)
        if isinstance(found, BaseException):
            raise found
        self._conversation.claims.take(number)
        return found[0]

    def close(self) -> None:
        """What is under way goes back, the newest first: each goes back before the one that comes before it in the queue."""
        conversation = self._conversation
        conversation.streams.discard(self)
        order, self._order = self._order, deque()
        while order:
            number = order.pop()
            found = self._values.pop(number, None)
            if conversation.cause is not None or isinstance(found, BaseException):
                continue
            if found is None:
                conversation.stop_number(number, self.port.number)
            else:
                conversation.send_values_back(number, [found[0]], found[1])
        self._values.clear()
        self._asked.clear()

    # ---- the conversation's side

    def arrived(self, number: int, value: Any, messages: Sequence[int]) -> None:
        """What get `number` was given."""
        self._values[number] = (value, messages)
        if self._asked:
            self._trace(number, "done")
        self._tell(number)

    def failed(self, number: int, error: BaseException) -> None:
        """Get `number` has failed."""
        self._values[number] = error
        if self._asked:
            self._trace(number, "failed")
        self._tell(number)

    def _trace(self, number: int, how: str) -> None:
        asked, trace = self._asked.pop(number, None), self.port.home.trace
        if asked is not None and trace is not None:
            trace.ahead("prefetched get", f"channel {self.port.name!r}", asked, how)

    def _tell(self, number: int) -> None:
        work = self.work
        if work is not None and self._order and self._order[0] == number:
            self.work = None
            work._finish(None)

    def __str__(self) -> str:
        return repr(self.port.name) if self.key is None else f"{self.port.name!r} key {self.key!r}"
