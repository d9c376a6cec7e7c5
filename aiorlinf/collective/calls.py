"""The collectives as they are called: arguments are checked in the caller's thread, the rest goes on on the home thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from aiorlinf.address import WorkerAddress
from aiorlinf.collective.broadcast import BroadcastMember, BroadcastRoot
from aiorlinf.collective.gather import AllToAll, GatherMember, GatherRoot, Part
from aiorlinf.collective.into import Target
from aiorlinf.errors import UnsupportedObject, UsageError
from aiorlinf.link.staging import Departure
from aiorlinf.wire.flat import Flat
from aiorlinf.wire.inline import encode_inline
from aiorlinf.wire.manifest import encode_manifest
from aiorlinf.work.base import AsyncWork

if TYPE_CHECKING:
    from aiorlinf.collective.circle import Circle
    from aiorlinf.collective.exchange import Exchange
    from aiorlinf.collective.operation import Operation

__all__ = ["CollectiveCalls", "Members"]


class CollectiveCalls:
    """Broadcast, gather and all-to-all among some workers. Every member calls the same ones in the same order; several may be under way.

    A member that fails, whose call is cancelled, whose time is over, or that dies, tells the others: whoever still waits raises, with that
    member's cause. After that the next collective works. Errors of the arguments that say who takes part are raised before anything begins;
    all others are failures that the others are told of.
    """

    @property
    def _circle(self) -> Circle:
        raise NotImplementedError

    @overload
    def broadcast(
        self,
        obj: Any = None,
        root: int | str = 0,
        *,
        into: Any = None,
        changed_only: bool = False,
        timeout: float | None = None,
        async_op: Literal[True] = True,
    ) -> AsyncWork[Any]: ...
    @overload
    def broadcast(
        self,
        obj: Any = None,
        root: int | str = 0,
        *,
        into: Any = None,
        changed_only: bool = False,
        timeout: float | None = None,
        async_op: Literal[False],
    ) -> Any: ...
    def broadcast(
        self,
        obj: Any = None,
        root: int | str = 0,
        *,
        into: Any = None,
        changed_only: bool = False,
        timeout: float | None = None,
        async_op: bool = True,
    ) -> Any:
        """The root's object at every member, as `recv` would give it. The root gets its own object back, when all others have theirs.

        It enters each rack and each host once (labels, see the README); a large one goes along a chain of the hosts, in pieces, and inside
        a host all look at the same shared memory until they write to it. It is never compressed. Tensors on an accelerator come to the
        member's device (as with `recv`; `init(device=...)`): a member on the root's host that can read the root's devices copies from there
        itself (`cuda_ipc`), into memory of its own or straight into `into`, unless there is more than 1 MiB in CPU memory beside them; all
        others have them through host memory.

        Args:
            obj: at the root any object whose tensors are contiguous; ignored elsewhere. Do not write to it until the work is done.
            root: rank or address.
            into: at the others: a module, a dict of tensors by name (a state dict), a tensor or a list of tensors, that the root's tensors
                are copied into, in place and without fresh memory for each; shapes must be equal, dtypes are converted. It is the result.
            changed_only: at the root, for a dict of tensors by name: send only those that were written to since this member's last
                broadcast with `changed_only` to the same workers, as their version counters tell, and those of up to 16 KiB; all of
                them if one of the workers is a new life, or if any broadcast came between or failed. The others get a smaller dict, or
                with `into` the rest stays as it is.
            timeout: seconds; None waits as long as all live.
            async_op: False waits and returns the object.

        Raises:
            NonContiguousTensor, UnsupportedObject, UsageError, ClosedError: at the call.
            Mismatch: `into` does not fit, and nothing was written to it; or a member has called something else.
            PeerLost, PeerLeft, RemoteError: a member is gone or has failed; `remote` says which.
            DeadlineExceeded, RendezvousError.

        A member that has the object returns it, whatever becomes of the others; the root raises then. One that others get it from goes on
        handing it on, which needs its loop: work that blocks that (of a worker without ``loop="thread"``) keeps them waiting.
        Cancelling gives it up for all who do not have the object yet.
        """
        circle = self._circle
        source, exchange = _member(circle, root), circle.exchange
        _check(exchange, async_op)
        operation: Operation
        if source != circle.local:
            operation = BroadcastMember(circle, timeout, source, None if into is None else Target(into))
            return _start(circle, operation, async_op)
        noted = None
        message: bytes | Flat | None = None
        error: UsageError | None = None
        departure: Departure | None = None
        what = obj
        try:
            if changed_only:
                if not isinstance(obj, Mapping) or not all(isinstance(name, str) for name in obj):
                    raise UsageError(f"changed_only=True with a {type(obj).__name__}", hint="it is for a dict of tensors by name")
                noted = circle.changes.note(obj)
                what = circle.changes.since(obj)
            message, _ = _message(exchange, what)
            departure = _departure(message)
            if not isinstance(message, bytes):
                message.hold()
        except UsageError as failure:
            error = failure
        partial = changed_only and error is None and len(what) < len(obj)
        operation = BroadcastRoot(circle, timeout, obj, message, partial, noted, departure)
        return _start(circle, operation, async_op, error)

    @overload
    def gather(
        self,
        obj: Any,
        root: int | str = 0,
        *,
        return_exceptions: bool = False,
        timeout: float | None = None,
        async_op: Literal[True] = True,
    ) -> AsyncWork[list[Any] | None]: ...
    @overload
    def gather(
        self,
        obj: Any,
        root: int | str = 0,
        *,
        return_exceptions: bool = False,
        timeout: float | None = None,
        async_op: Literal[False],
    ) -> list[Any] | None: ...
    def gather(
        self,
        obj: Any,
        root: int | str = 0,
        *,
        return_exceptions: bool = False,
        timeout: float | None = None,
        async_op: bool = True,
    ) -> Any:
        """Everybody's object at the root, as a list in the order of the members; None at the others, when the root has everything.

        Args:
            obj: any, of another kind at each member if you like. The root's own is in the list as it is, not as a copy.
            root: rank or address.
            return_exceptions: at the root: the error of a member that failed or is gone stands in its place.
            timeout: seconds; None waits as long as all live.
            async_op: False waits and returns the list.

        Raises as `broadcast`. Cancelling gives it up for all.
        """
        circle = self._circle
        target, exchange = _member(circle, root), circle.exchange
        _check(exchange, async_op)
        if target == circle.local:
            return _start(circle, GatherRoot(circle, timeout, obj, return_exceptions), async_op)
        part, error = _parts(exchange, {target: obj})
        return _start(circle, GatherMember(circle, timeout, target, part.get(target)), async_op, error)

    @overload
    def all_to_all(
        self,
        objects: Sequence[Any],
        *,
        return_exceptions: bool = False,
        timeout: float | None = None,
        async_op: Literal[True] = True,
    ) -> AsyncWork[list[Any]]: ...
    @overload
    def all_to_all(
        self, objects: Sequence[Any], *, return_exceptions: bool = False, timeout: float | None = None, async_op: Literal[False]
    ) -> list[Any]: ...
    def all_to_all(
        self, objects: Sequence[Any], *, return_exceptions: bool = False, timeout: float | None = None, async_op: bool = True
    ) -> Any:
        """One object from everybody to everybody: element `i` goes to member `i`; the result's element `i` is from member `i`.

        Args:
            objects: one for each member, of any kinds. Our own is in the result as it is, not as a copy.
            return_exceptions: the error of a member that failed or is gone stands in its place.
            timeout: seconds; None waits as long as all live.
            async_op: False waits and returns the list.

        Raises as `broadcast`. Cancelling gives it up for all.
        """
        circle = self._circle
        exchange = circle.exchange
        _check(exchange, async_op)
        error: UsageError | None = None
        parts: dict[WorkerAddress, Part] = {}
        own: Any = None
        given: Any = objects  # it may be anything, whatever its type says
        if not isinstance(given, Sequence) or isinstance(given, (str, bytes)) or len(given) != len(circle.members):
            count = f"{len(given)} objects" if isinstance(given, Sequence) else f"something of type {type(given).__name__}"
            error = UsageError(f"all_to_all got {count} for {len(circle.members)} members", hint="give a list with one for each")
        else:
            by_member = dict(zip(circle.members, objects, strict=True))
            own = by_member.pop(circle.local)
            parts, error = _parts(exchange, by_member)
        return _start(circle, AllToAll(circle, timeout, parts, own, return_exceptions), async_op, error)


class Members(CollectiveCalls):
    """Some workers, or all of the job."""

    def __init__(self, circle: Circle) -> None:
        self._own_circle = circle

    @property
    def addresses(self) -> tuple[WorkerAddress, ...]:
        """The members, by rank."""
        return self._own_circle.members

    @property
    def _circle(self) -> Circle:
        return self._own_circle


def _member(circle: Circle, which: int | str) -> WorkerAddress:
    if isinstance(which, str):
        if which in circle.members:
            return WorkerAddress(which)
    elif type(which) is int and 0 <= which < len(circle.members):
        return circle.members[which]
    raise UsageError(f"root={which!r} is no member", hint=f"members are {', '.join(circle.members)}")


def _check(exchange: Exchange, async_op: bool) -> None:
    exchange.check(0)
    if not async_op:
        exchange.check_may_block()


def _start(circle: Circle, operation: Operation, async_op: bool, error: UsageError | None = None) -> Any:
    work = operation.work
    assert work is not None
    circle.begin(operation, error)
    if error is not None:
        work.add_done_callback(_look)  # it is raised here
        raise error
    return work if async_op else work.wait()


def _parts(exchange: Exchange, objects: Mapping[WorkerAddress, Any]) -> tuple[dict[WorkerAddress, Part], UsageError | None]:
    parts: dict[WorkerAddress, Part] = {}
    try:
        for member, obj in objects.items():
            message, head = _message(exchange, obj)
            departure = _departure(message)
            if isinstance(message, bytes):
                parts[member] = Part(message)
            else:
                message.hold()
                parts[member] = Part(message, head, departure, message.versions())
    except UsageError as error:
        return {}, error
    return parts, None


def _message(exchange: Exchange, obj: Any) -> tuple[bytes | Flat, bytes]:
    """The object as bytes if it is small, else taken apart, with its description. Raises UsageError if it cannot travel."""
    config = exchange.config
    message = encode_inline(obj, config.inline_max_bytes, allow_pickle=config.allow_pickle)
    size = len(message) if isinstance(message, bytes) else message.payload_bytes
    if size > config.max_message_bytes:
        raise UsageError(
            f"an object of {size} bytes is over the limit",
            hint=f"cluster.collective.max_message_bytes is {config.max_message_bytes}",
        )
    head = b""
    if not isinstance(message, bytes):
        head = encode_manifest(message)
        described = len(head)
        if described > config.max_manifest_bytes:
            raise UsageError(
                f"the object without its tensors and arrays takes {described} bytes",
                hint=f"put bulk data into tensors or arrays; cluster.collective.max_manifest_bytes is {config.max_manifest_bytes}",
            )
    return message, head


def _departure(message: bytes | Flat) -> Departure | None:
    """What of it is on accelerators, and how far the caller's streams have come there. Raises UsageError if that cannot be used."""
    if isinstance(message, bytes):
        return None
    try:
        return Departure.of(message)
    except RuntimeError as error:  # of the device
        reason = str(error).strip().partition("\n")[0]
        raise UnsupportedObject(f"a device of the object's tensors cannot be used: {reason}") from error


def _look(work: AsyncWork[Any]) -> None:
    if not work.cancelled():
        work.exception()
