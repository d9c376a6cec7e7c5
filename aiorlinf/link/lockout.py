"""The lock-out rule: two workers that both send a tensor first and receive second get past each other.

`send_tensor` is done when a `recv_tensor` takes it, so each would wait for the other for ever. When tensors wait unmatched in both
directions, they are accepted into our memory, and their sends are done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from aiorlinf.wire.frames import Flag

if TYPE_CHECKING:
    from aiorlinf.link.incoming import Content, Incoming
    from aiorlinf.link.window import ReceiveWindow

__all__ = ["Accepter", "LockOut"]


class Accepter(Protocol):
    """What the rule needs of the receiving half."""

    window: ReceiveWindow

    def accept(self, message: Incoming, flags: int = 0) -> None: ...
    def ask(self, message: Incoming, content: Content) -> None: ...


class LockOut:
    """See the module. Home thread only.

    Attributes:
        unmatched: tensors of the peer that no receive of ours has been matched with, and whose sends wait for that.
        sends_waiting: asks the sending half whether a `send_tensor` of ours waits for its match.
        spent: bytes of our memory that the rule uses at the moment, at most the window.
    """

    def __init__(self, accepter: Accepter) -> None:
        self.unmatched: set[Incoming] = set()
        self.sends_waiting: Callable[[], bool] = lambda: False
        self.spent: int = 0
        self._accepter = accepter

    def look(self) -> None:
        """Apply the rule; also called when a `send_tensor` of ours starts to wait."""
        if self.unmatched and self.sends_waiting():
            self.relieve()

    def relieve(self) -> None:
        """Accept the tensors that wait unmatched, as far as our memory goes: now, or when their payload is complete."""
        for message in sorted(self.unmatched, key=lambda message: message.order):
            content = message.content
            assert content is not None
            if message.complete:
                self.accept(message)
            elif content.attempt or content.begun:
                content.relief = True  # its payload is on the way within the window, or in memory of the peer
            elif not content.asked and self.spent + content.total <= self._accepter.window.size:
                content.relief = True
                content.relieved = content.total
                self.spent += content.total
                self._accepter.ask(message, content)

    def accept(self, message: Incoming) -> None:
        """It is complete, and no receive is there for it."""
        self.unmatched.discard(message)
        self._accepter.accept(message, Flag.RELIEVED)

    def free(self, message: Incoming) -> None:
        """The message is somebody's now, or gone: so is the memory that the rule has used for it."""
        content = message.content
        if content is not None and content.relieved:
            self.spent -= content.relieved
            content.relieved = 0
