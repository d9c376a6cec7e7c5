"""CollectiveGroup: workers that exchange messages in order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from aiorlinf.address import WorkerAddress
from aiorlinf.collective.calls import CollectiveCalls
from aiorlinf.collective.circle import Circle
from aiorlinf.errors import UsageError
from aiorlinf.link.link import LinkStats
from aiorlinf.link.pending import CALLS_BIT
from aiorlinf.work.base import AsyncWork

if TYPE_CHECKING:
    from aiorlinf.collective.exchange import Exchange

__all__ = ["CollectiveGroup", "circle_context", "context_of"]


def context_of(members: Sequence[WorkerAddress], name: str | None) -> int:
    """The number that keeps a group's messages apart from others between the same two workers.

    0 is the unnamed group of two, which `comm.send`, `comm.recv` and `comm.inbox` share.
    """
    if name is None and len(members) == 2:
        return 0
    return _number([name or "", *sorted(members)]) & ~CALLS_BIT or 1


def circle_context(members: Sequence[WorkerAddress], name: str | None) -> int:
    """As `context_of`, for the collectives of these workers."""
    return _number(["collectives", name or "", *sorted(members)]) | CALLS_BIT


def _number(parts: Sequence[str]) -> int:
    return int.from_bytes(hashlib.blake2b("\n".join(parts).encode(), digest_size=4).digest(), "little")


class CollectiveGroup(CollectiveCalls):
    """Two or more workers. Made by `comm.collective.create_collective_group`.

    Attributes:
        members: their addresses; a member's rank is its place here.
        rank: our own.
        name: the group's name, None if it has none.
    """

    def __init__(self, exchange: Exchange, members: Sequence[WorkerAddress], name: str | None, context: int) -> None:
        self.members: tuple[WorkerAddress, ...] = tuple(members)
        self.name: str | None = name
        self.rank: int = self.members.index(exchange.local)
        self._exchange = exchange
        self._context = context
        self._other = self.members[1 - self.rank] if len(self.members) == 2 else None
        self._own_circle: Circle | None = None

    @property
    def _circle(self) -> Circle:
        circle = self._own_circle
        if circle is None:
            circle = self._own_circle = Circle(self._exchange, self.members, circle_context(self.members, self.name))
        return circle

    def _peer(self, which: int | str | None, word: str) -> WorkerAddress:
        if which is None:
            if self._other is None:
                raise UsageError(
                    f"a group of {len(self.members)} needs {word}=", hint=f"{word} is a rank or one of {', '.join(self.members)}"
                )
            return self._other
        if isinstance(which, str):
            if which in self.members:
                return WorkerAddress(which)
        elif type(which) is int and 0 <= which < len(self.members):
            return self.members[which]
        raise UsageError(f"{word}={which!r} is no member of the group", hint=f"members are {', '.join(self.members)}")

    @overload
    def send(
        self, obj: Any, dst: int | str | None = None, *, tag: int = 0, timeout: float | None = None, async_op: Literal[True] = True
    ) -> AsyncWork[None]: ...
    @overload
    def send(
        self, obj: Any, dst: int | str | None = None, *, tag: int = 0, timeout: float | None = None, async_op: Literal[False]
    ) -> None: ...
    def send(
        self, obj: Any, dst: int | str | None = None, *, tag: int = 0, timeout: float | None = None, async_op: bool = True
    ) -> AsyncWork[None] | None:
        """Send any object; it starts at once.

        Tensors, arrays and large bytes travel raw, the rest is pickled. The work is done when the memory of the object may be changed
        again: for small objects at once, for larger ones when they are on their way. Until then do not write to the tensors, and do not
        resize their storage (``untyped_storage().resize_``): that takes away memory that is being read, which nothing can prevent without
        marking the storage for good. Afterwards both are free to be done.

        Args:
            obj: tensors must be contiguous.
            dst: rank or address of the receiver; may be left out in a group of two.
            tag: 0 to 2**32-1; messages of one tag arrive in order.
            timeout: seconds; None waits as long as the peer lives.
            async_op: False waits and returns None.

        Raises:
            NonContiguousTensor, UnsupportedObject, UsageError, ClosedError: at the call; nothing was sent.
            Mismatch: the receiver called `recv_tensor`.
            PeerLost, PeerLeft, DeadlineExceeded, RendezvousError: by the work.

        Cancelling withdraws the message. A receive that has taken it before the peer hears of that keeps it, whole, although `cancel` has
        returned True: nobody here can know yet.
        """
        if not async_op:
            self._exchange.check_may_block()
        peer = (self._other if dst is None else None) or self._peer(dst, "dst")
        work = self._exchange.send(peer, self._context, obj, tag, timeout)
        return work if async_op else work.wait()

    @overload
    def recv(
        self,
        src: int | str | None = None,
        *,
        tag: int = 0,
        timeout: float | None = None,
        device: str | int | torch.device | None = None,
        async_op: Literal[True] = True,
    ) -> AsyncWork[Any]: ...
    @overload
    def recv(
        self,
        src: int | str | None = None,
        *,
        tag: int = 0,
        timeout: float | None = None,
        device: str | int | torch.device | None = None,
        async_op: Literal[False],
    ) -> Any: ...
    def recv(
        self,
        src: int | str | None = None,
        *,
        tag: int = 0,
        timeout: float | None = None,
        device: str | int | torch.device | None = None,
        async_op: bool = True,
    ) -> Any:
        """Receive the next object sent with `send` under this tag.

        Containers, dataclasses, parameters and flags come back as what they were; everything is writable and owned by the caller.
        Large payloads from a worker of the same host lie in memory that it shares with us, and that is not used again before the last
        view of it is gone. Of one message that is all or nothing: a small tensor that is kept for long keeps all of its message's memory
        (`shared_bytes_held` in `stats`); `clone()` it to keep it alone. A fork of this process sees the same memory, not a copy of it.

        Args:
            src: rank or address of the sender; may be left out in a group of two.
            tag: 0 to 2**32-1.
            timeout: seconds; None waits as long as the peer lives.
            device: where tensors come to that are on an accelerator at the sender; None: the worker's `device`. Other tensors stay in CPU
                memory.
            async_op: False waits and returns the object.

        Raises:
            UsageError: at the call: no such device in this process.
            Mismatch: the sender called `send_tensor`.
            UnsupportedObject: the object cannot be rebuilt here, for instance because its class is missing.
            RemoteError: the sender failed in the middle.
            PeerLost, PeerLeft, DeadlineExceeded, RendezvousError.

        Cancelling takes nothing: a message that was on its way to this call goes to the next one.
        """
        if not async_op:
            self._exchange.check_may_block()
        peer = (self._other if src is None else None) or self._peer(src, "src")
        if device is None:
            work = self._exchange.recv(peer, self._context, tag, timeout)
        else:
            work = self._exchange.recv_to(peer, self._context, tag, timeout, device)
        return work if async_op else work.wait()

    @overload
    def send_tensor(
        self,
        tensor: torch.Tensor,
        dst: int | str | None = None,
        *,
        tag: int = 0,
        timeout: float | None = None,
        async_op: Literal[True] = True,
    ) -> AsyncWork[None]: ...
    @overload
    def send_tensor(
        self, tensor: torch.Tensor, dst: int | str | None = None, *, tag: int = 0, timeout: float | None = None, async_op: Literal[False]
    ) -> None: ...
    def send_tensor(
        self, tensor: torch.Tensor, dst: int | str | None = None, *, tag: int = 0, timeout: float | None = None, async_op: bool = True
    ) -> AsyncWork[None] | None:
        """Send one contiguous tensor to a `recv_tensor`, straight into the receiver's buffer.

        The work is done when the receiver has it. When tensors wait for their receive in both directions between two workers, they are
        accepted into memory of the library instead, so that sending first on both sides is no deadlock.

        Args:
            dst, tag, timeout: as for `send`; the time is in seconds.

        Raises:
            NonContiguousTensor, UnsupportedObject, UsageError, ClosedError: at the call.
            Mismatch: the receiver expects another dtype or shape, or called `recv`; on both sides, and nothing was written.
            PeerLost, PeerLeft, DeadlineExceeded, RendezvousError: by the work.

        Cancelling withdraws the tensor, as with `send`: a receive that has taken it before the peer hears of that keeps it, whole.
        """
        if not async_op:
            self._exchange.check_may_block()
        work = self._exchange.send_tensor(self._peer(dst, "dst"), self._context, tensor, tag, timeout)
        return work if async_op else work.wait()

    @overload
    def recv_tensor(
        self, out: torch.Tensor, src: int | str | None = None, *, tag: int = 0, timeout: float | None = None, async_op: Literal[True] = True
    ) -> AsyncWork[torch.Tensor]: ...
    @overload
    def recv_tensor(
        self, out: torch.Tensor, src: int | str | None = None, *, tag: int = 0, timeout: float | None = None, async_op: Literal[False]
    ) -> torch.Tensor: ...
    def recv_tensor(
        self, out: torch.Tensor, src: int | str | None = None, *, tag: int = 0, timeout: float | None = None, async_op: bool = True
    ) -> AsyncWork[torch.Tensor] | torch.Tensor:
        """Receive the next tensor sent with `send_tensor` into `out`, a contiguous tensor of the same dtype and shape.

        Returns `out` itself.

        Args:
            src, tag, timeout: as for `recv`; the time is in seconds.

        Raises:
            NonContiguousTensor, UnsupportedObject, UsageError, ClosedError: at the call.
            Mismatch: on both sides; `out` is untouched and the next exchange works.
            RemoteError: the sender changed the tensor while it was being sent; what `out` holds is undefined.
            PeerLost, PeerLeft, DeadlineExceeded, RendezvousError.

        Cancelling takes nothing; `out` may have been written to in part, and a transfer through Gloo that has begun goes on writing
        to its end.
        """
        if not async_op:
            self._exchange.check_may_block()
        work = self._exchange.recv_tensor(self._peer(src, "src"), self._context, out, tag, timeout)
        return work if async_op else work.wait()

    def stats(self) -> tuple[LinkStats, ...]:
        """Counters of the links to the other members, in their order; those never used are left out. Home thread only."""
        links = [self._exchange.table.peek(member) for member in self.members if member != self._exchange.local]
        return tuple(link.stats() for link in links if link is not None)

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        return f"<CollectiveGroup{name} of {', '.join(self.members)}; rank {self.rank}>"
