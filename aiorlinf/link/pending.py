"""What is under way on a link, for people: who waits for what, since when, begun where."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiorlinf.link.outgoing import STATE_NAMES

if TYPE_CHECKING:
    from aiorlinf.link.incoming import Receive
    from aiorlinf.link.link import Link
    from aiorlinf.link.outgoing import Outgoing

__all__ = ["PendingOperation", "pending_on", "pending_receive"]


@dataclass(frozen=True, slots=True)
class PendingOperation:
    """One operation that is not over.

    Attributes:
        operation: the public call: send, send_tensor, recv, recv_tensor, inbox.
        peer: the other worker; None for an inbox, which waits for anyone.
        tag: as in the call; `context` is 0 for the unnamed group of two, else the number of its group.
        stage: what it waits for.
        bytes_done, bytes_expected: of the payload, as far as is known here; None before it is known.
        elapsed_s: since the call; None where the caller's handle is gone.
        site: ``file:line`` of the call, None as above.
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

    def __str__(self) -> str:
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


def pending_on(link: Link) -> Iterator[PendingOperation]:
    """Sends first, in order, then receives: those whose message is on its way, then those that wait for one."""
    peer = str(link.remote)
    connected = link.sender.connected
    for out in link.sender.unfinished():
        yield _send(out, peer, connected)
    for message in list(link.receiver.opened.values()):
        if message.receive is not None:
            yield pending_receive(message.receive, peer, "its message is on its way")
    for receive in link.mailbox.posted():
        yield pending_receive(receive, peer, "waits for a message" if connected else "waits for the connection")


def _send(out: Outgoing, peer: str, connected: bool) -> PendingOperation:
    return PendingOperation(
        operation=out.operation,
        peer=peer,
        tag=out.key & 0xFFFFFFFF,
        context=out.key >> 32,
        stage=STATE_NAMES[out.state] if connected else "waits for the connection",
        bytes_done=out.position,
        bytes_expected=out.total,
        **_since(out.work),
    )


def pending_receive(receive: Receive, peer: str | None, stage: str) -> PendingOperation:
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
        **_since(receive.work),
    )


def _since(work: Any) -> dict[str, Any]:
    if work is None:
        return {"elapsed_s": None, "site": None}
    return {"elapsed_s": time.monotonic() - work._born, "site": work.site}
