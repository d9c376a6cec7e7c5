"""Point-to-point operations of one worker: argument checks in the caller's thread, everything else on the home thread."""

from __future__ import annotations

import os
from _thread import get_ident
from asyncio import AbstractEventLoop, _get_running_loop
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from aiorlinf.address import WorkerAddress
from aiorlinf.collective.asking import Asking
from aiorlinf.collective.giving import Gift, encode_giving, give_one
from aiorlinf.config import CollectiveConfig
from aiorlinf.device.registry import parse_device
from aiorlinf.errors import AiorlinfError, ClosedError, DeadlineExceeded, ForkedHandle, UnsupportedObject, UsageError, WouldBlockLoop
from aiorlinf.link.incoming import ParcelReceive, Receive
from aiorlinf.link.link import LinkState
from aiorlinf.link.outgoing import Outgoing
from aiorlinf.link.parcel import Parcel, decode_parcel, encode_parcel
from aiorlinf.link.staging import Departure, callers_device, ready_now
from aiorlinf.link.unpacking import unpack_parcel
from aiorlinf.wire.flat import Flat, Kind
from aiorlinf.wire.frames import MAX_TAG, Flag, stream_key
from aiorlinf.wire.inline import encode_inline, inline_if_small, is_plain, tensor_manifest
from aiorlinf.wire.leaves import Device
from aiorlinf.wire.manifest import encode_manifest
from aiorlinf.wire.tensor_header import sendable_leaf
from aiorlinf.work.base import AsyncWork, pending
from aiorlinf.work.deadline import NO_DEADLINE, check_limit, current_deadline, effective_deadline, expire
from aiorlinf.work.finished import finished

if TYPE_CHECKING:
    from aiorlinf.link.link import Link
    from aiorlinf.link.sender import Sender
    from aiorlinf.link.table import LinkTable
    from aiorlinf.work.home import LoopHome

__all__ = ["Exchange", "cancel_receive"]

_UP = LinkState.UP  # looking up a member of an enum takes longer than all of the checks it is used in
_TENSOR = torch.Tensor
_ONE_TENSOR = Kind.TENSOR


class Exchange:
    """See the module. All methods may be called from any thread.

    Attributes:
        config: the job's settings; the defaults until the worker is registered.
        device: where tensors from accelerators come to; None: the device that is current where `recv` is called.
        asking: what a peer waits for whose answer a time limit will not wait for.
    """

    def __init__(self, home: LoopHome, table: LinkTable, config: CollectiveConfig, device: torch.device | None = None) -> None:
        self.home = home
        self.table = table
        self.local: WorkerAddress = table.address
        self.device = device
        self._links = table.by_address
        self._left_behind = table.left_behind
        self.asking: Asking = Asking(home)
        self.configure(config)
        self._pid = os.getpid()
        self._closed = False

    def configure(self, config: CollectiveConfig) -> None:
        """The job's settings have come."""
        self.config = config
        compression = config.tensor_compression
        # Payloads up to so many bytes hold no tensor that a codec would be tried on.
        self._untried_max = (
            min(config.inline_max_bytes, max(compression.min_bytes - 1, 0)) if compression.enabled else config.inline_max_bytes
        )
        self._inline_max = min(config.inline_max_bytes, config.max_message_bytes)
        self._coded_max = min(self._untried_max, config.max_message_bytes)
        self._frame_max = min(config.inline_max_bytes + (1 << 16), config.max_message_bytes)
        self._given_min = config.inline_max_bytes + 1  # less rides in its frame, as bytes
        self._allow_pickle = config.allow_pickle

    def close(self) -> None:
        """Refuse new operations."""
        self._closed = True

    def check(self, tag: int) -> None:
        """Raise what every operation raises at its call."""
        if self._closed or _get_running_loop() is not self.home.loop:
            self._check_caller()
        if type(tag) is not int or not 0 <= tag <= MAX_TAG:
            raise UsageError(f"tag {tag!r} is not a whole number from 0 to {MAX_TAG}")

    def _check_caller(self) -> None:
        """Not called from the home loop, or closed."""
        if self._pid != os.getpid():
            raise ForkedHandle(f"{self.local} was made before a fork", hint="call aiorlinf.init() in the child")
        if self._closed:
            raise ClosedError("the worker was closed", local=self.local)
        home = self.home
        if get_ident() == home.thread_id and (running := _get_running_loop()) is not home.loop:
            self._check_loop(running)

    def _check_loop(self, running: AbstractEventLoop | None) -> None:
        """On the home thread, but not from its loop: that one is between two runs, or has ended, or waits for this one to end."""
        hint = "make the worker with loop='thread' to use it from several loops"
        if self.home.loop.is_closed():
            raise ClosedError("the event loop that the worker lives on was closed", local=self.local, hint=hint)
        if running is not None:
            raise UsageError("the worker lives on another event loop of this thread, which cannot run now", local=self.local, hint=hint)

    def check_may_block(self) -> None:
        """Raise WouldBlockLoop on the home thread: before the operation begins, for it could not be taken back whole."""
        if self.home.on_home():
            raise WouldBlockLoop("async_op=False on the loop's own thread would never return", hint="await the operation instead")

    # ---- sending

    def send(self, peer: WorkerAddress, context: int, obj: Any, tag: int, timeout: float | None) -> AsyncWork[None]:
        """Start to send any object."""
        link = self._links.get(peer)
        if (
            link is not None
            and timeout is None
            and type(tag) is int
            and 0 <= tag <= MAX_TAG
            and _get_running_loop() is self.home.loop
            and not self._closed
            and current_deadline.get() is NO_DEADLINE
        ):
            # The common cases in one go: the peer takes small messages of this stream, so this one is done when it is written; and a
            # tensor that is given away.
            sender = link.sender
            key = context << 32 | tag
            memory = self.table.memory
            if memory is not None and memory.used and not is_plain(obj):
                if type(obj) is _TENSOR and link.state is _UP and self.table.coding is None:
                    out = give_one(self.home, memory, obj, key, self._withdraw, self._given_min, self.config.max_message_bytes)
                    if out is not None:
                        return _sent(sender, out)
            elif key in sender.flowing:
                body = encode_inline(obj, self._coded_max if link.codes else self._inline_max, allow_pickle=self._allow_pickle)
                if type(body) is bytes and len(body) <= self._frame_max and sender.send_now(key, body):
                    return finished(self.home)
        self.check(tag)
        check_limit(timeout)
        message, gift = self._encode(link, obj)
        work: AsyncWork[None] = AsyncWork(self.home, "send", abort=self._withdraw)
        key = stream_key(context, tag)
        if type(message) is bytes and len(message) <= self._largest_frame():
            self._check_size(len(message))
            if gift is None:
                self._run(work, self._send_small, peer, work, key, message)
            else:
                self._start(work, peer, Outgoing(work, key, body=message, total=len(message)), gift)
        else:
            self._start(work, peer, self._large(work, key, message), gift)
        self._limit(work, timeout, peer, tag)
        return work

    def _encode(self, link: Link | None, obj: Any) -> tuple[bytes | Flat, Gift | None]:
        """The object as bytes if it is to ride in its frame, else taken apart; and what it gives away."""
        config, memory, coding = self.config, self.table.memory, self.table.coding
        # What a codec may be tried on does not ride in a frame. Before the link is up nobody knows whether it will be.
        codes = coding is not None and (link is None or link.codes or link.state is not LinkState.UP)
        limit = self._untried_max if codes else config.inline_max_bytes
        gift: Gift | None = None
        message: bytes | Flat
        if memory is not None and memory.used:
            message, gift = encode_giving(obj, memory, limit, config.allow_pickle)
        else:
            message = encode_inline(obj, limit, allow_pickle=config.allow_pickle)
        if coding is not None and isinstance(message, Flat) and not coding.would_try(message):
            message = inline_if_small(message, config.inline_max_bytes)
        return message, gift

    def _largest_frame(self) -> int:
        return self.config.inline_max_bytes + (1 << 16)

    def _check_size(self, size: int) -> None:
        if size > self.config.max_message_bytes:
            raise UsageError(
                f"a message of {size} bytes is over the limit",
                hint=f"cluster.collective.max_message_bytes is {self.config.max_message_bytes}",
            )

    def _large(self, work: AsyncWork[None], key: int, message: bytes | Flat) -> Outgoing:
        if isinstance(message, bytes):  # a small payload with a long description
            self._check_size(len(message))
            return Outgoing(work, key, body=message, total=len(message))
        total = message.payload_bytes
        out = Outgoing(work, key, flat=message, manifest=self.describe(message, total), total=total)
        out.departure = Departure.of(message)
        return out

    def describe(self, flat: Flat, total: int) -> bytes:
        """The description of a message. Raises UsageError if this, or the payload of `total` bytes, is over its limit."""
        self._check_size(total)
        manifest = tensor_manifest(flat.leaves[0].spec) if flat.kind is _ONE_TENSOR else encode_manifest(flat)
        if len(manifest) > self.config.max_manifest_bytes:
            raise UsageError(
                f"the object without its tensors and arrays takes {len(manifest)} bytes",
                hint=f"put bulk data into tensors or arrays; cluster.collective.max_manifest_bytes is {self.config.max_manifest_bytes}",
            )
        return manifest

    def send_flat(
        self, peer: WorkerAddress, context: int, tag: int, flat: Flat, head: bytes, departure: Departure | None
    ) -> AsyncWork[None]:
        """As `send`, without a time limit, of an object that was taken apart before, for a plain `recv`. Nothing of it is given away.

        Args:
            flat: it must be held, and within the limits.
            head: its description.
            departure: how far the streams of the one who made it had come, None if nothing of it is on an accelerator.
        """
        self.check(tag)
        work: AsyncWork[None] = AsyncWork(self.home, "send", abort=self._withdraw)
        out = Outgoing(work, stream_key(context, tag), flat=flat, manifest=head, total=flat.payload_bytes)
        out.departure = departure
        self._run(work, self._send, peer, out)
        return work

    def send_tensor(self, peer: WorkerAddress, context: int, tensor: torch.Tensor, tag: int, timeout: float | None) -> AsyncWork[None]:
        """Start to send one tensor to a `recv_tensor`."""
        self.check(tag)
        check_limit(timeout)
        leaf = sendable_leaf(tensor)
        self._check_size(leaf.nbytes)
        work: AsyncWork[None] = AsyncWork(self.home, "send_tensor", abort=self._withdraw)
        key = stream_key(context, tag)
        memory = self.table.memory
        gift = Gift.of(memory, [leaf]) if memory is not None and memory.used else None
        head = leaf.spec.entry
        if leaf.nbytes <= self.config.inline_max_bytes and leaf.spec.device is Device.CPU:
            body = head + leaf.tobytes()
            out = Outgoing(work, key, flags=Flag.TENSOR, body=body, head=len(head), total=leaf.nbytes)
        else:
            flat = Flat(Kind.TENSOR, [], [leaf])
            out = Outgoing(work, key, flags=Flag.TENSOR, flat=flat, manifest=head, total=leaf.nbytes)
            out.departure = Departure.of(flat)
        self._start(work, peer, out, gift)
        self._limit(work, timeout, peer, tag)
        return work

    def send_parcel(
        self, peer: WorkerAddress, context: int, tag: int, parcel: Parcel, timeout: float | None = None, *, keep: bool = False
    ) -> AsyncWork[None]:
        """Start to send a message on that was received as a parcel; the peer receives it with a plain `recv`.

        The parcel is given away: it is empty once the send is done. If the send fails or is cancelled, it is whole again by the time that
        the work says so, and can be sent again (see `Parcel.uncertain`). On one host the peer gets the memory that the parcel lies in.

        Args:
            keep: the parcel stays whole, so that it can be sent again; the peer gets a copy, which costs one.

        Raises:
            UsageError: the parcel is empty or being sent.
        """
        link = self._links.get(peer)
        if link is not None and timeout is None and type(tag) is int and 0 <= tag <= MAX_TAG and self._at_home():
            # As in `send`.
            body = parcel.whole_body(keep=keep)
            key = context << 32 | tag
            if body is not None and key in link.sender.flowing and len(body) <= self._frame_max and link.sender.send_now(key, body):
                if not keep:
                    parcel.close()
                return finished(self.home)
        self.check(tag)
        work: AsyncWork[None] = AsyncWork(self.home, "send_parcel", abort=self._withdraw)
        out = parcel.outgoing(work, stream_key(context, tag), keep=keep)
        try:
            self._check_size(out.total)
            self._run(work, self._send, peer, out)
        except BaseException:
            out.restore()
            raise
        self._limit(work, timeout, peer, tag)
        return work

    def _at_home(self) -> bool:
        """We are on the home loop, open, under no deadline."""
        return _get_running_loop() is self.home.loop and not self._closed and current_deadline.get() is NO_DEADLINE

    def _start(self, work: AsyncWork[None], peer: WorkerAddress, out: Outgoing, gift: Gift | None) -> None:
        if gift is None:
            if out.flat is not None:
                out.flat.hold()
            self._run(work, self._send, peer, out)
            return
        gift.give(out)
        if out.flat is not None:
            out.flat.hold()
        try:
            self._run(work, self._send, peer, out)
        except BaseException:
            out.restore()
            raise

    def _send_small(self, peer: WorkerAddress, work: AsyncWork[None], key: int, body: bytes) -> None:
        if not work.done():  # cancelled on its way to this thread
            self.table.obtain(peer).sender.send_small(work, key, body)

    def _send(self, peer: WorkerAddress, out: Outgoing) -> None:
        if out.work is not None and out.work.done():  # as above
            out.restore()
            return
        try:
            link = self.table.obtain(peer)
        except AiorlinfError:
            out.restore()
            raise
        link.sender.send(out)
        if out.flags & Flag.TENSOR:
            link.receiver.lockout.look()

    def _withdraw(self, work: AsyncWork[Any]) -> None:
        out = work._detail
        if isinstance(out, Outgoing) and out.sender is not None:
            out.sender.withdraw(out)

    # ---- receiving

    def recv(self, peer: WorkerAddress, context: int, tag: int, timeout: float | None) -> AsyncWork[Any]:
        """Ask for the next object of a stream."""
        link = self._links.get(peer)
        if (
            link is not None
            and timeout is None
            and type(tag) is int
            and 0 <= tag <= MAX_TAG
            and _get_running_loop() is self.home.loop
            and not self._closed
            and current_deadline.get() is NO_DEADLINE
            and link.state is _UP
            and (not self._left_behind or peer not in self._left_behind)
        ):
            key = context << 32 | tag
            done = link.receiver.ready(key)
            if done is not None:
                return done
            receive = Receive(key)
            work = pending(self.home, "recv", cancel_receive, receive.give_back, receive)
            receive.work = work
            link.receiver.post(receive)
            return work
        self.check(tag)
        return self._receive("recv", peer, Receive(stream_key(context, tag)), timeout)

    def recv_to(
        self, peer: WorkerAddress, context: int, tag: int, timeout: float | None, device: str | int | torch.device | None
    ) -> AsyncWork[Any]:
        """As `recv`; tensors that were on an accelerator at the sender come to this device (None: `Landing.target`).

        Raises:
            UsageError: no such device in this process.
        """
        if device is None:
            return self.recv(peer, context, tag, timeout)
        self.check(tag)
        receive = Receive(stream_key(context, tag))
        receive.device = parse_device(device)
        return self._receive("recv", peer, receive, timeout)

    def recv_tensor(self, peer: WorkerAddress, context: int, out: torch.Tensor, tag: int, timeout: float | None) -> AsyncWork[torch.Tensor]:
        """Ask for the next tensor of a stream, into `out`."""
        self.check(tag)
        leaf = sendable_leaf(out, name="out", hint="receive into a contiguous tensor and copy from it")
        if leaf.memory is not out:
            raise UnsupportedObject("out is a lazy conjugate or negative view", hint="receive into a plain tensor")
        receive = Receive(stream_key(context, tag), out)
        if leaf.spec.device is not Device.CPU:
            receive.ready = ready_now(out)
        return self._receive("recv_tensor", peer, receive, timeout)

    def recv_parcel(self, peer: WorkerAddress, context: int, tag: int, timeout: float | None = None) -> AsyncWork[Parcel]:
        """Ask for the next object of a stream, without looking into it: messages of `send`, as `recv` would get them.

        The sender's work is done when the message is whole in our hands. Cancelling gives the message back to the next receive.
        """
        link = self._links.get(peer)
        if (
            link is not None
            and timeout is None
            and type(tag) is int
            and 0 <= tag <= MAX_TAG
            and self._at_home()
            and link.state is LinkState.UP
            and peer not in self._left_behind
        ):
            # As in `recv`.
            key = context << 32 | tag
            done = link.receiver.ready_parcel(key)
            if done is not None:
                return done
        self.check(tag)
        self.table.pass_on()
        return self._receive("recv_parcel", peer, ParcelReceive(stream_key(context, tag)), timeout)

    def encode_parcel(self, obj: Any) -> Parcel:
        """A parcel of an object, with a copy of its tensors. Raises as `send`."""
        return encode_parcel(obj, inline_max=self.config.inline_max_bytes, allow_pickle=self.config.allow_pickle, pool=self.table.pool)

    def decode_parcel(self, parcel: Parcel) -> Any:
        """The object that a parcel holds; the parcel is empty afterwards. Raises as `recv`."""
        return decode_parcel(parcel, allow_pickle=self.config.allow_pickle)

    def unpack_parcel(self, parcel: Parcel, device: str | int | torch.device | None = None) -> AsyncWork[Any]:
        """The object that a parcel holds, its tensors where `recv` would bring them; the parcel is empty afterwards.

        Cancelling leaves the parcel whole.

        Raises:
            UsageError: the parcel is empty or in use; no such device in this process.
        """
        self.check(0)
        target = parse_device(device) if device is not None else self.device or (None if self.home.on_home() else callers_device())
        return unpack_parcel(self.home, parcel, allow_pickle=self.config.allow_pickle, device=target)

    def _receive(self, operation: str, peer: WorkerAddress, receive: Receive, timeout: float | None) -> AsyncWork[Any]:
        check_limit(timeout)
        work: AsyncWork[Any] = AsyncWork(self.home, operation, abort=cancel_receive, give_back=receive.give_back, detail=receive)
        receive.work = work
        if receive.device is None and self.device is None and not self.home.on_home():
            receive.device = callers_device()
        self._run(work, self._post, peer, receive)
        self._limit(work, timeout, peer, receive.key & MAX_TAG)
        return work

    def _post(self, peer: WorkerAddress, receive: Receive) -> None:
        if receive.cancelled:
            return
        link = self.table.unread(peer, receive.key)
        if link is None:
            link = self.table.obtain(peer)
        link.receiver.post(receive)

    # ---- both

    def _run(self, work: AsyncWork[Any], fn: Callable[..., None], *args: Any) -> None:
        """Go on on the home thread: there errors are raised at the call, from elsewhere they end the work."""
        if self.home.on_home():
            fn(*args)
        else:
            self.home.call(_guarded, work, fn, args)

    def _limit(self, work: AsyncWork[Any], timeout: float | None, peer: WorkerAddress, tag: int) -> None:
        if timeout is None and current_deadline.get() is NO_DEADLINE:
            return
        said: list[str] = []
        expire(
            work,
            effective_deadline(timeout),
            lambda elapsed: self._too_late(work, peer, tag, elapsed, said),
            lambda: self._ask(work, peer, said),
        )

    def _ask(self, work: AsyncWork[Any], peer: WorkerAddress, said: list[str]) -> None:
        """A time limit will soon pass: what does the peer wait for, if this waits for a call of its?"""
        link = self.table.peek(peer)
        moving = work._detail.position if isinstance(work._detail, Outgoing) else isinstance(work._detail, Receive) and work._detail.message
        if not moving and link is not None and link.state is LinkState.UP and link.identity is not None and peer != self.local:
            self.asking.ask(link.identity, said)

    def _too_late(self, work: AsyncWork[Any], peer: WorkerAddress, tag: int, elapsed: float, said: Sequence[str]) -> DeadlineExceeded:
        """Say which step used the time, and what the peer did meanwhile."""
        detail = work._detail
        if isinstance(detail, Receive) and detail.with_sender:
            if detail.receiver is None:
                text = f"nothing has come within {elapsed:.3g} s"
                return DeadlineExceeded(text, step="match", operation=work.operation, tag=tag, local=self.local, elapsed=elapsed)
            peer = WorkerAddress(detail.receiver.remote)
        link = self.table.peek(peer)
        done: int | None = None
        expected: int | None = None
        if link is None or link.state is LinkState.CONNECTING:
            step = "connect"
            missing = link is not None and link.missing
            text = f"{peer} did not join the job within {elapsed:.3g} s" if missing else f"no connection to {peer} within {elapsed:.3g} s"
        elif isinstance(detail, Outgoing):
            step = "transfer" if detail.position else "match"
            done, expected = detail.position, detail.total
            what = "is alive but has posted no matching receive" if step == "match" else "is alive"
            text = f"{peer} {what}; not over within {elapsed:.3g} s"
        else:
            message = detail.message if isinstance(detail, Receive) else None
            step = "match" if message is None else "transfer"
            text = (
                f"{peer} is alive but has sent nothing that matches within {elapsed:.3g} s"
                if message is None
                else f"not over within {elapsed:.3g} s"
            )
            if message is not None and message.content is not None:
                expected = message.content.total
                done = message.content.sink.done if message.content.sink is not None else 0
        if step == "match" and said:
            text += f"; {said[0]}"
        return DeadlineExceeded(
            text,
            step=step,
            operation=work.operation,
            tag=tag,
            local=self.local,
            remote=peer,
            address=None if link is None else link.address,
            bytes_done=done,
            bytes_expected=expected,
            elapsed=elapsed,
        )


def _sent(sender: Sender, out: Outgoing) -> AsyncWork[None]:
    """Home thread only."""
    work = out.work
    assert work is not None
    try:
        sender.send(out)
    except BaseException:
        out.restore()
        raise
    return work


def cancel_receive(work: AsyncWork[Any]) -> None:
    """The abort of every receive."""
    receive = work._detail
    assert isinstance(receive, Receive)
    receive.cancelled = True
    receive.work = None
    if receive.receiver is not None:
        receive.receiver.returns.cancel(receive)


def _guarded(work: AsyncWork[Any], fn: Callable[..., None], args: tuple[Any, ...]) -> None:
    try:
        fn(*args)
    except AiorlinfError as error:
        work._fail(error)
