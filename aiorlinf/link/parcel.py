"""Parcel: a message that was received and not looked into, to be kept and sent on.

Who passes messages between others (a channel) need not know what is in them: a parcel is the description that the sender made, as bytes,
and the memory of the payload. It is never unpickled or rebuilt on its way. The sender used plain `send`, and who receives a parcel that was
sent on uses plain `recv`; neither knows of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from aiorlinf.errors import AiorlinfError, UnsupportedObject, UsageError
from aiorlinf.link.incoming import Content, Incoming
from aiorlinf.link.memory import byte_view, fresh_bytes
from aiorlinf.link.outgoing import Outgoing
from aiorlinf.wire.flat import Flat
from aiorlinf.wire.inline import decode_inline, encode_inline
from aiorlinf.wire.leaves import Device, Leaf
from aiorlinf.wire.manifest import Limits, Manifest, decode_manifest, encode_manifest
from aiorlinf.wire.tree import rebuild

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiorlinf.address import Identity
    from aiorlinf.codec.pool import TensorBufferPool
    from aiorlinf.link.loan import Held
    from aiorlinf.work.base import AsyncWork

__all__ = ["Contents", "Parcel", "cannot_rebuild", "decode_parcel", "encode_parcel"]

_INLINE_MAX_BYTES = 64 * 1024
_ANY_SIZE = Limits(max_manifest_bytes=2**32 - 1, max_message_bytes=2**64 - 1)


def cannot_rebuild(error: BaseException) -> AiorlinfError:
    """The error of a receive whose object cannot be rebuilt for this reason."""
    if isinstance(error, AiorlinfError):
        return error
    text = f"the object cannot be rebuilt here: {type(error).__name__}: {error}"
    failure = UnsupportedObject(text, hint="its class must be importable on both sides")
    failure.__cause__ = error
    return failure


class Contents(NamedTuple):
    """What is in a parcel: a small message as it is, or the description and the leaves, one-dimensional uint8."""

    body: bytes | None
    manifest: Manifest | None
    memory: Sequence[torch.Tensor]

    def rebuild(self, tensors: Sequence[torch.Tensor] | None, *, allow_pickle: bool) -> Any:
        """The object, over other tensors than its own memory if some are given. Any thread."""
        if self.body is not None:
            return decode_inline(memoryview(self.body), allow_pickle=allow_pickle)
        assert self.manifest is not None
        return rebuild(self.manifest, self.memory if tensors is None else tensors, allow_pickle=allow_pickle)


class Parcel:
    """See the module. Made by `Exchange.recv_parcel`, a `ParcelInbox` and `encode_parcel`.

    A parcel is whole, being sent, or empty: a send that succeeds empties it (unless it was told to keep it), one that fails or is cancelled
    leaves it whole. Its memory is free again when it is empty or garbage.

    Attributes:
        nbytes: payload and description.
        sender: whose message it was, None for one of `encode_parcel`.
        held: the memory of a peer that it lies in, if it can be lent on.
        uncertain: a send failed or was cancelled when the peer may have had everything already. Who must not deliver twice has to find
            out; who sends it on takes the risk that the peer saw the message, too, and even wrote to its memory before it was copied.
    """

    __slots__ = ("__weakref__", "_alone", "_body", "_head", "_manifest", "_memory", "_sends", "held", "nbytes", "sender", "uncertain")

    def __init__(
        self, body: bytes | None, head: bytes = b"", manifest: Manifest | None = None, memory: list[torch.Tensor] | None = None
    ) -> None:
        self._body = body
        self._head = head
        self._manifest = manifest
        self._memory: Sequence[torch.Tensor] | None = memory or ()
        self.held: Held | None = None
        self._sends = 0  # under way
        self._alone = False  # one of them will empty it
        self.nbytes: int = len(body) if body is not None else len(head) + (0 if manifest is None else manifest.payload_bytes)
        self.sender: Identity | None = None
        self.uncertain: bool = False

    @property
    def small(self) -> bytes | None:
        """The message as it came, if it is a small one."""
        return self._body

    @classmethod
    def of(cls, message: Incoming) -> Parcel:
        """What a complete message holds. The message must be let go of afterwards."""
        content = message.content
        if content is None or content.manifest is None:
            body = message.body
            return cls(body if type(body) is bytes else bytes(body or b""))
        parcel = cls(None, content.head, content.manifest, list(content.tensors))
        parcel.held = content.held
        return parcel

    @classmethod
    def of_held(cls, head: bytes, manifest: Manifest, held: Held) -> Parcel:
        """What lies in memory of a peer, at which nobody has looked."""
        parcel = cls(None, head, manifest)
        parcel.held = held
        parcel._memory = None
        return parcel

    @property
    def memory(self) -> Sequence[torch.Tensor]:
        """The leaves, one-dimensional uint8."""
        memory = self._memory
        if memory is None:
            assert self.held is not None
            assert self._manifest is not None
            memory = self._memory = self.held.memory([spec.nbytes for spec in self._manifest.specs])
        return memory

    @property
    def head(self) -> bytes:
        """The description as the sender made it; empty for a small message."""
        return self._head

    @property
    def manifest(self) -> Manifest | None:
        """The description; None for a small message, and of an empty parcel."""
        return self._manifest

    @property
    def closed(self) -> bool:
        """It is empty: sent on, decoded or closed."""
        return self._body is None and self._manifest is None

    def close(self) -> None:
        """Let go of the memory. A send under way goes on. May be called again. Any thread."""
        self._body = self._manifest = self.held = None
        self._memory = ()

    # ---- sending on

    def outgoing(self, work: AsyncWork[None], key: int, *, keep: bool) -> Outgoing:
        """A message of what the parcel holds. The parcel is being sent from here on, until `Outgoing.over` is called.

        Raises:
            UsageError: it is empty, or it is being sent by somebody who does not keep it; or it is being sent at all, without `keep`.
        """
        self._check_whole()
        if self._alone or (self._sends and not keep):
            raise UsageError("the parcel is being sent", hint="wait for that, or send with keep=True each time")
        body, manifest = self._body, self._manifest
        if body is not None:
            out = Outgoing(work, key, body=body, total=len(body))
        else:
            assert manifest is not None
            leaves = [Leaf(spec, None, memory, None) for spec, memory in zip(manifest.specs, self.memory, strict=True)]
            out = Outgoing(work, key, flat=Flat(manifest.kind, (), leaves), manifest=self._head, total=manifest.payload_bytes)
            out.held = None if keep else self.held
        self._sends += 1
        self._alone = not keep
        out.on_over = self._over
        return out

    def whole_body(self, *, keep: bool) -> bytes | None:
        """All of a small message that could be sent now, None for others. Who sends it without `keep` calls `close` after that."""
        return None if self._alone or (self._sends and not keep) else self._body

    def _over(self, delivered: bool, certain: bool) -> None:
        """A send is over. Home thread."""
        self._sends -= 1
        if not self._alone:
            return
        self._alone = False
        if delivered:
            self.close()
        elif not certain:
            self.uncertain = True

    # ---- looking into it after all

    def message(self, key: int, order: int) -> Incoming:
        """As it was when it came: nobody has taken it after all. Empties the parcel."""
        self._check_whole()
        message = Incoming(key, order, 0, is_tensor=False, want_reply=False)
        message.complete = True
        if self._body is not None:
            message.body = self._body
        else:
            manifest = self._manifest
            assert manifest is not None
            message.content = content = Content(manifest, None, manifest.payload_bytes)
            content.head = self._head
            content.tensors = list(self.memory)
            content.held = self.held
        self.close()
        return message

    def take(self) -> Contents:
        """Somebody looks into it, and nobody else may use it until `done_with`.

        Raises:
            UsageError: it is empty or in use.
        """
        self._check_whole()
        if self._sends:
            raise UsageError("the parcel is being sent or unpacked")
        self._sends = 1
        self._alone = True
        return Contents(self._body, self._manifest, self.memory)

    def done_with(self, *, empty: bool) -> None:
        """He has what was in it, or leaves it as it was."""
        self._sends = 0
        self._alone = False
        if empty:
            self.close()

    def _check_whole(self) -> None:
        if self.closed:
            raise UsageError("the parcel is empty: it was sent on, decoded or closed")

    def __repr__(self) -> str:
        state = "empty" if self.closed else "being sent" if self._sends else "whole"
        return f"<Parcel of {self.nbytes} bytes, {state}>"


def encode_parcel(
    obj: Any, *, inline_max: int = _INLINE_MAX_BYTES, allow_pickle: bool = True, copy: bool = True, pool: TensorBufferPool | None = None
) -> Parcel:
    """A parcel of any object that can be sent.

    Args:
        inline_max: payloads up to so many bytes are one run of bytes.
        copy: False: the parcel shows the object's own memory, which must not be written to while the parcel exists.
        pool: where the copy's memory comes from.

    Raises:
        NonContiguousTensor, UnsupportedObject: as `send`.
    """
    encoded = encode_inline(obj, inline_max, allow_pickle=allow_pickle)
    if isinstance(encoded, bytes):
        return Parcel(encoded)
    head = encode_manifest(encoded)
    memory = [_memory_of(leaf, index, copy, pool) for index, leaf in enumerate(encoded.leaves)]
    return Parcel(None, head, decode_manifest(head, limits=_ANY_SIZE), memory)


def decode_parcel(parcel: Parcel, *, allow_pickle: bool = True) -> Any:
    """The object that the parcel holds, over its memory, without a copy of large parts. The parcel is empty afterwards, unless it raises.

    Tensors that were on an accelerator at the sender are in CPU memory; `link.unpacking` brings them to one.

    Raises:
        UsageError: the parcel is empty or in use.
        UnsupportedObject, WireError: as `recv`; and whatever the classes' own code raises.
    """
    contents = parcel.take()
    empty = False
    try:
        value = contents.rebuild(None, allow_pickle=allow_pickle)
        empty = True
    finally:
        parcel.done_with(empty=empty)
    return value


def _memory_of(leaf: Leaf, index: int, copy: bool, pool: TensorBufferPool | None) -> torch.Tensor:
    if leaf.spec.device is not Device.CPU:
        raise UnsupportedObject(f"tensor {index} of the object is on {leaf.spec.device.name.lower()}", hint="send tensor.cpu()")
    if not leaf.nbytes:
        return fresh_bytes(0, None)
    raw = leaf.raw
    assert raw is not None
    if not copy and not raw.readonly:
        return torch.frombuffer(raw, dtype=torch.uint8)
    fresh = fresh_bytes(leaf.nbytes, pool)
    byte_view(fresh)[:] = raw
    return fresh
