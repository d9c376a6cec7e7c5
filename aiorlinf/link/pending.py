"""What is under way on a link, for people: who waits for what, since when, begun where."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from aiorlinf.link.outgoing import State

if TYPE_CHECKING:
    from aiorlinf.link.incoming import Receive
    from aiorlinf.link.link import Link
    from aiorlinf.link.outgoing import Outgoing

__all__ = ["CALLS_BIT", "PendingOperation", "Reporter", "pending_on", "pending_receive", "since"]


@dataclass(frozen=True, slots=True)
class PendingOperation:
    """One operation that is not over.

    Attributes:
        operation: the public call: send, send_tensor, recv, recv_tensor, inbox, broadcast, gather, all_to_all, put, get, ...
        peer: the other worker; None for an inbox, which waits for anyone, a collective and a call of a channel.
        tag: as in the call; `context` is 0 for the unnamed group of two, else the number of its group.
        stage: what it waits for.
        bytes_done, bytes_expected: of the payload, as far as is known here; None before it is known.
        elapsed_s: since the call; None where the caller's handle is gone.
        site: ``file:line`` of the call, None as above.
        waits_for: addresses of the workers that must do something before it can end, as far as is known here. Empty for an inbox.
        moving: its bytes are on their way, so that it waits for nobody's call.
        subject: the members of a collective; the channel.
        channel: its name; whom its calls wait for only the channel worker knows.
    """

    operation: str
    peer: str | None
    tag: int
    context: int
    stage: str
    bytes_done: int | None
    bytes_expected: int | None
    elapsed_s: float | None
    site: str | None
    waits_for: tuple[str, ...] = ()
    moving: bool = False
    subject: str = ""
    channel: str = ""

    def __str__(self) -> str:
        if self.subject:
            parts = [f"{self.operation} {self.subject}"]
        else:
            arrow = "->" if self.operation.startswith("send") else "<-"
            parts = [f"{self.operation} {arrow} {self.peer or 'anyone'}", f"tag {self.tag}"]
            if self.context:
                parts.append(f"group {self.context:08x}")
        parts.append(self.stage)
        if self.bytes_expected is not None:
            parts.append(f"{self.bytes_done or 0} of {self.bytes_expected} bytes")
        if self.elapsed_s is not None:
            parts.append(f"for {self.elapsed_s:.1f} s")
        if self.site is not None:
            parts.append(f"begun at {self.site}")
        return ", ".join(parts)


CALLS_BIT = 1 << 31
"""Contexts with this bit are of collectives: also where nobody has called the collective yet, its messages are not a user's own."""


class Reporter(Protocol):
    """Something that is built on messages, and tells of its own calls instead: collectives, channels.

    Attributes:
        contexts: its messages have these; nobody wants to see them.
    """

    @property
    def contexts(self) -> Collection[int]: ...
    def pending(self) -> list[PendingOperation]: ...


def pending_on(link: Link, hidden: Collection[int] = ()) -> Iterator[PendingOperation]:
    """Sends first, in order, then receives: those whose message is on its way, then those that wait for one. None of `hidden` contexts."""
    peer = str(link.remote)
    connected = link.sender.connected
    for out in link.sender.unfinished():
        if out.key >> 32 not in hidden:
            yield _send(out, peer, connected)
    for message in list(link.receiver.opened.values()):
        if message.receive is not None and message.key >> 32 not in hidden:
            yield pending_receive(message.receive, peer, "its message is on its way", moving=True)
    for receive in link.mailbox.posted():
        if receive.key >> 32 not in hidden:
            yield pending_receive(receive, peer, "waits for a message" if connected else "waits for the connection")


def _send(out: Outgoing, peer: str, connected: bool) -> PendingOperation:
    return PendingOperation(
        operation=out.operation,
        peer=peer,
        tag=out.key & 0xFFFFFFFF,
        context=out.key >> 32,
        stage=out.stage if connected else "waits for the connection",
        bytes_done=out.position,
        bytes_expected=out.total,
        waits_for=(peer,),
        moving=out.state == State.STARTED,
        **since(out.work),
    )


def pending_receive(receive: Receive, peer: str | None, stage: str, *, moving: bool = False) -> PendingOperation:
    """A receive that is not over."""
    content = receive.message.content if receive.message is not None else None
    return PendingOperation(
        operation=receive.operation,
        peer=peer,
        tag=receive.key & 0xFFFFFFFF,
        context=receive.key >> 32,
        stage=stage,
        bytes_done=None if content is None or content.sink is None else content.sink.done,
        bytes_expected=None if content is None else content.total,
        waits_for=() if peer is None else (peer,),
        moving=moving,
        **since(receive.work),
    )


def since(work: Any) -> dict[str, Any]:
    """The age of an operation and where it was begun, as `PendingOperation` has them."""
    if work is None:
        return {"elapsed_s": None, "site": None}
    return {"elapsed_s": time.monotonic() - work._born, "site": work.site}
