"""Every error that aiorlinf raises on purpose.

AiorlinfError
├─ UsageError            (also ValueError) you asked for something that cannot be done
│  ├─ NonContiguousTensor   names where in the object the tensor sits
│  ├─ UnsupportedObject     (also TypeError) cannot be pickled, or a tensor kind that cannot travel
│  ├─ Mismatch              sender and receiver disagree; both sides shown
│  ├─ WouldBlockLoop        a blocking wait on the loop's own thread
│  └─ ForkedHandle          used in a child process after fork
├─ ConfigError           (also ValueError) path of the key, what is allowed
├─ ClosedError           you closed it
├─ DeclaredDead          this worker was given up by the others: its process stood still, or was cut off, for too long
├─ PeerError
│  ├─ PeerLost              the peer died or cannot be reached any more
│  ├─ PeerLeft              the peer said goodbye
│  ├─ PeerRestarted         the handle belongs to an earlier life of the peer
│  └─ RemoteError           the peer failed at it; its traceback as text
├─ LinkError
│  ├─ RendezvousError       the two never met; who waited for whom, at which address
│  ├─ AuthenticationError   the token proof failed
│  ├─ BackendUnavailable    each candidate with its reason
│  └─ WireError             bytes that do not follow the protocol
├─ DeadlineExceeded      (also TimeoutError) which step used the time
├─ ChannelError
│  ├─ ChannelFull           (also asyncio.QueueFull)
│  ├─ ChannelEmpty          (also asyncio.QueueEmpty)
│  ├─ ChannelClosed
│  └─ ProducerLost
└─ InternalError         our bug; carries the history of the operation

Errors carry data; `__str__` renders it in one line. A caller can match on the fields instead of the text.
"""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = [
    "AiorlinfError",
    "AuthenticationError",
    "BackendUnavailable",
    "ChannelClosed",
    "ChannelEmpty",
    "ChannelError",
    "ChannelFull",
    "ClosedError",
    "ConfigError",
    "DeadlineExceeded",
    "DeclaredDead",
    "ForkedHandle",
    "InternalError",
    "LinkError",
    "Mismatch",
    "NonContiguousTensor",
    "PeerError",
    "PeerLeft",
    "PeerLost",
    "PeerRestarted",
    "ProducerLost",
    "RemoteError",
    "RendezvousError",
    "UnsupportedObject",
    "UsageError",
    "WireError",
    "WouldBlockLoop",
]


class AiorlinfError(Exception):
    """Base of all errors of this library.

    Attributes (each may be None when it does not apply):
        message: what went wrong, one sentence without a final period.
        operation: the public call, such as ``"recv"``.
        tag: the message tag.
        local, remote: the two workers, as ``group:rank`` text.
        address: the network address concerned, as ``host:port``.
        bytes_done, bytes_expected: progress of the payload in bytes.
        elapsed: seconds since the operation began.
        hint: what to do about it, where a remedy is known.
    """

    def __init__(
        self,
        message: str = "",
        *,
        operation: str | None = None,
        tag: int | None = None,
        local: str | None = None,
        remote: str | None = None,
        address: str | None = None,
        bytes_done: int | None = None,
        bytes_expected: int | None = None,
        elapsed: float | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.operation = operation
        self.tag = tag
        self.local = local
        self.remote = remote
        self.address = address
        self.bytes_done = bytes_done
        self.bytes_expected = bytes_expected
        self.elapsed = elapsed
        self.hint = hint

    def fill(self, **fields: Any) -> None:
        """Set those of the named fields that are still None (the layer that raised knew more than we do)."""
        for name, value in fields.items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    def __str__(self) -> str:
        head = self.message
        if self.operation is not None:
            head = f"{self.operation}: {head}" if head else self.operation
        facts = []
        if self.local is not None and self.remote is not None:
            facts.append(f"{self.local} with {self.remote}")
        elif self.remote is not None:
            facts.append(f"peer {self.remote}")
        elif self.local is not None:
            facts.append(f"at {self.local}")
        if self.address is not None:
            facts.append(f"address {self.address}")
        if self.tag is not None:
            facts.append(f"tag {self.tag}")
        if self.bytes_expected is not None:
            facts.append(f"{self.bytes_done or 0} of {self.bytes_expected} bytes")
        elif self.bytes_done is not None:
            facts.append(f"{self.bytes_done} bytes")
        if self.elapsed is not None:
            facts.append(f"after {self.elapsed:.3f} s")
        if facts:
            head = f"{head} [{', '.join(facts)}]"
        if self.hint is not None:
            head = f"{head} (hint: {self.hint})"
        return head

    def __reduce__(self) -> tuple[Any, ...]:
        # Subclasses take other positional arguments than `message`; restoring the fields is exact for all.
        return (_restore, (type(self), self.args, self.__dict__.copy()))


def _restore(cls: type[AiorlinfError], args: tuple[Any, ...], fields: dict[str, Any]) -> AiorlinfError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(fields)
    return error


class UsageError(AiorlinfError, ValueError):
    """The call cannot be carried out as it was made; nothing was sent and everything stays usable."""


class NonContiguousTensor(UsageError):
    """A tensor in the object is not contiguous. ``path`` says where, such as ``obj['a'][3]``."""

    def __init__(self, path: str, shape: tuple[int, ...], stride: tuple[int, ...], **fields: Any) -> None:
        if fields.get("hint") is None:
            fields["hint"] = f"send {path}.contiguous()"
        super().__init__(f"{path} is not contiguous (shape {shape}, stride {stride})", **fields)
        self.path = path
        self.shape = shape
        self.stride = stride


class UnsupportedObject(UsageError, TypeError):
    """The object, or a part of it, cannot travel. ``path`` says which part, if known."""

    def __init__(self, message: str, *, path: str | None = None, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.path = path


class Mismatch(UsageError):
    """Sender and receiver disagree on kind, size or dtype. Raised on both sides; no byte was written.

    ``sent`` and ``expected`` describe the two sides, such as ``"tensor float32[4]"``.
    """

    def __init__(self, sent: str, expected: str, **fields: Any) -> None:
        super().__init__(f"sent {sent}, but the receiver expected {expected}", **fields)
        self.sent = sent
        self.expected = expected


class WouldBlockLoop(UsageError):
    """A blocking wait was called on the thread of the loop that has to finish the work."""


class ForkedHandle(UsageError):
    """The handle was made before a fork and is used in the child."""


class ConfigError(AiorlinfError, ValueError):
    """A configuration key is unknown or its value not allowed. ``path`` is the key's full path."""

    def __init__(self, path: str, message: str, **fields: Any) -> None:
        super().__init__(f"{path}: {message}" if path else message, **fields)
        self.path = path


class ClosedError(AiorlinfError):
    """This side closed the worker, group or link."""


class DeclaredDead(AiorlinfError):
    """The job goes on without this worker, which was not heard of for longer than ``cluster.network.heartbeat_timeout_s``: its process
    stood still (SIGSTOP, a suspended machine) or was cut off. Nothing can be done with it any more; `init` makes a new life of it."""


class PeerError(AiorlinfError):
    """Something about the other worker."""


class PeerLost(PeerError):
    """The peer died, or its connection broke."""


class PeerLeft(PeerError):
    """The peer closed in an orderly way and sends nothing more."""


class PeerRestarted(PeerError):
    """The peer lives in a new incarnation; this handle belongs to the old one."""


class RemoteError(PeerError):
    """The peer failed at the operation. ``remote_type`` and ``remote_traceback`` are text."""

    def __init__(self, message: str, *, remote_type: str | None = None, remote_traceback: str | None = None, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.remote_type = remote_type
        self.remote_traceback = remote_traceback


class LinkError(AiorlinfError):
    """Two workers cannot talk, for a reason that is not a death."""


class RendezvousError(LinkError):
    """The two sides never met."""


class AuthenticationError(LinkError):
    """The other side did not prove that it knows the job's token."""


class BackendUnavailable(LinkError):
    """No way to carry the payload. ``candidates`` maps each backend to the reason against it."""

    def __init__(self, message: str, candidates: dict[str, str] | None = None, **fields: Any) -> None:
        candidates = candidates or {}
        reasons = "; ".join(f"{name}: {reason}" for name, reason in candidates.items())
        super().__init__(f"{message}: {reasons}" if reasons else message, **fields)
        self.candidates = candidates


class WireError(LinkError):
    """The bytes received do not follow the protocol, or exceed its bounds."""


class DeadlineExceeded(AiorlinfError, TimeoutError):
    """The time limit passed. ``step`` says which step used the time."""

    def __init__(self, message: str, *, step: str | None = None, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.step = step


class ChannelError(AiorlinfError):
    """Something about a channel."""


class ChannelFull(ChannelError, asyncio.QueueFull):
    """A nowait put on a channel at its bound."""


class ChannelEmpty(ChannelError, asyncio.QueueEmpty):
    """A nowait get on an empty channel."""


class ChannelClosed(ChannelError):
    """The channel was closed and its items are drained."""


class ProducerLost(ChannelError):
    """The last producer died without closing."""


class InternalError(AiorlinfError):
    """A bug in aiorlinf, please report it. ``history`` holds the recorded steps of the operation."""

    def __init__(self, message: str, *, history: tuple[str, ...] = (), **fields: Any) -> None:
        super().__init__(message, **fields)
        self.history = history
