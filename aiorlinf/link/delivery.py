"""The last step of receiving: a complete, matched message becomes the value of a work."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from aiorlinf.errors import AiorlinfError, UsageError
from aiorlinf.link.incoming import Incoming, Receive
from aiorlinf.link.memory import Copy, byte_tensor, copy_bytes
from aiorlinf.link.parcel import Parcel, cannot_rebuild, encode_parcel
from aiorlinf.link.staging import Landing
from aiorlinf.wire.inline import decode_inline
from aiorlinf.wire.tree import assemble, rebuild

if TYPE_CHECKING:
    from aiorlinf.address import Identity
    from aiorlinf.link.tracing import LinkTrace
    from aiorlinf.work.home import LoopHome

__all__ = ["Answerer", "Delivery", "about", "undecodable_fact"]

_COPY_INLINE_BYTES = 1 << 20
"""Larger copies run in a private thread."""

_HEAVY_SKELETON_BYTES = 256 * 1024
"""Skeletons from this size on are unpickled in a private thread, so that the loop stays free."""


class Answerer(Protocol):
    """What delivery needs of the receiving half."""

    home: LoopHome
    remote: str
    trace: LinkTrace | None

    @property
    def identity(self) -> Identity | None: ...
    def accept(self, message: Incoming) -> None: ...
    def refuse_reply(self, message: Incoming, fact: dict[str, Any]) -> None: ...


class Delivery:
    """See the module. Home thread only.

    Attributes:
        landing: brings tensors to accelerators.
    """

    def __init__(self, answerer: Answerer, allow_pickle: bool) -> None:
        self.allow_pickle = allow_pickle
        self.landing: Landing = Landing(answerer.home)
        self._answerer = answerer

    def deliver(self, receive: Receive, message: Incoming) -> None:
        """End the receive's work with what the message holds; the message, which an inbox may remember for a while, lets go of it."""
        failure, value = message.error, message.value
        message.error = message.value = None
        if failure is not None:
            receive.fail(about(failure, receive))
        elif receive.memory is not None:
            self._deliver_tensor(receive, receive.memory, message)
        elif receive.opaque:
            self._deliver_parcel(receive, message, value)
        elif value is not None:
            self._finish(receive, value[0])
        elif not self._lands(receive, message):
            self._assemble(receive, message, None)

    def _lands(self, receive: Receive, message: Incoming) -> bool:
        """Some of its tensors were on an accelerator: they are brought to where this receive wants them, and then it goes on."""
        content = message.content
        if content is None or content.manifest is None or not content.manifest.on_devices:
            return False

        def landed(tensors: list[torch.Tensor] | None, error: Exception | None) -> None:
            if receive.message is not message:
                return  # cancelled meanwhile, and the message was given back whole
            receive.message = None
            if error is not None:
                self._fail(receive, message, error)
            else:
                self._assemble(receive, message, tensors)

        receive.message = message  # a cancel meanwhile gives it back
        try:
            target = self.landing.target(receive.device)
            if self.landing.bring(content.tensors, [spec.device for spec in content.manifest.specs], target, landed, receive.begun):
                return True
        except Exception as error:  # whatever the device says goes to the one message
            landed(None, error)
            return True
        receive.message = None
        return False

    def _assemble(self, receive: Receive, message: Incoming, tensors: list[torch.Tensor] | None) -> None:
        """Put the object together, over this memory if it is not that of the message."""
        if self._is_heavy(message):
            receive.message = message  # a cancel meanwhile gives it back
            rebuilding = self._answerer.home.submit(_outcome, self._rebuild, message, tensors)
            rebuilding.add_done_callback(lambda work: self._rebuilt(receive, message, work))
            return
        try:
            rebuilt = self._rebuild(message, tensors)
        except BaseException as error:  # whatever unpickled code raises, sys.exit() too, concerns this message only
            self._fail(receive, message, error)
            if isinstance(error, KeyboardInterrupt):
                raise
        else:
            self._hand_over(receive, message, rebuilt)

    def _deliver_parcel(self, receive: Receive, message: Incoming, value: list[Any] | None) -> None:
        if value is None:
            parcel = Parcel.of(message)
        else:  # a receive of the other kind gave it back
            try:
                parcel = encode_parcel(value[0], allow_pickle=self.allow_pickle)
            except Exception as error:  # the classes' own code runs here and may raise anything
                self._fail(receive, message, error)
                return
        parcel.sender = self._answerer.identity
        self._hand_over(receive, message, parcel)

    def small_parcel(self, body: bytes) -> Parcel:
        """A parcel of a whole small message."""
        parcel = Parcel(body)
        parcel.sender = self._answerer.identity
        return parcel

    def _is_heavy(self, message: Incoming) -> bool:
        content = message.content
        return content is not None and content.manifest is not None and content.manifest.codec_bytes > _HEAVY_SKELETON_BYTES

    def _rebuild(self, message: Incoming, tensors: list[torch.Tensor] | None) -> Any:
        content = message.content
        if content is not None and content.manifest is not None:
            if tensors is None and content.stores is not None:
                return assemble(content.manifest, content.stores, allow_pickle=self.allow_pickle)
            return rebuild(content.manifest, tensors or content.tensors, allow_pickle=self.allow_pickle)
        return decode_inline(memoryview(message.body or b""), allow_pickle=self.allow_pickle)

    def _rebuilt(self, receive: Receive, message: Incoming, work: Any) -> None:
        if receive.message is not message:
            return  # cancelled meanwhile, and the message was given back whole
        receive.message = None
        refused = work.exception()  # it was not even begun: the worker is closing
        value, error = work.result() if refused is None else (None, refused)
        if error is None:
            self._hand_over(receive, message, value)
        else:
            self._fail(receive, message, error)

    def _hand_over(self, receive: Receive, message: Incoming, value: Any) -> None:
        message.content = None
        message.body = None
        self._answerer.accept(message)
        self._finish(receive, value)

    def _finish(self, receive: Receive, value: Any) -> None:
        if self._answerer.trace is not None:
            self._answerer.trace.taken(receive)
        receive.finish((self._answerer.remote, value) if receive.with_sender else value)

    def _deliver_tensor(self, receive: Receive, out: torch.Tensor, message: Incoming) -> None:
        content = message.content
        assert content is not None
        if not content.direct and content.total:
            source = torch.frombuffer(bytearray(message.body), dtype=torch.uint8) if message.body is not None else content.tensors[0]
            if not (out.is_cpu and source.is_cpu):
                receive.message = message  # a cancel meanwhile gives it back
                self.landing.fill(out, source, receive.ready, lambda error: self._filled(receive, out, message, error), receive.begun)
                return
            if content.total > _COPY_INLINE_BYTES:
                receive.message = message  # a cancel meanwhile gives it back
                content.copying = copy = Copy(byte_tensor(out), source)
                copying = self._answerer.home.submit(copy)
                copying.add_done_callback(lambda work: self._copied(receive, out, message, work))
                return
            copy_bytes(byte_tensor(out), source)
        self._tensor_over(receive, out, message)

    def _filled(self, receive: Receive, out: torch.Tensor, message: Incoming, error: Exception | None) -> None:
        if receive.message is not message:
            return  # cancelled meanwhile, and the message was given back whole
        receive.message = None
        if error is not None:
            self._fail(receive, message, error)
        else:
            self._tensor_over(receive, out, message)

    def _copied(self, receive: Receive, out: torch.Tensor, message: Incoming, work: Any) -> None:
        if receive.message is not message:
            return  # cancelled meanwhile, and the message was given back whole
        receive.message = None
        error = work.exception()
        if error is not None:
            receive.fail(about(error, receive) if isinstance(error, AiorlinfError) else error)
        else:
            self._tensor_over(receive, out, message)

    def _tensor_over(self, receive: Receive, out: torch.Tensor, message: Incoming) -> None:
        message.content = None
        message.body = None
        if not out.is_inference():
            # Autograd must see that the tensor was written to, as with any in-place operation.
            torch.autograd.graph.increment_version(out)  # it shares its counter with the caller's
        self._answerer.accept(message)
        if self._answerer.trace is not None:
            self._answerer.trace.taken(receive)
        whole = receive.tensor_out
        assert whole is not None
        if whole.data_ptr() != out.data_ptr() or whole.shape != out.shape:
            text = "the tensor was given other memory or another shape while it was received into"
            receive.fail(about(UsageError(text, hint="leave it as it is until its receive is done"), receive))
        else:
            receive.finish(whole)

    def _fail(self, receive: Receive, message: Incoming, error: BaseException) -> None:
        message.content = None
        message.body = None
        failure = self.undecodable(error, receive)
        self._answerer.refuse_reply(message, undecodable_fact(failure))
        receive.fail(failure)

    def undecodable(self, error: BaseException, receive: Receive) -> AiorlinfError:
        """The error of a receive whose object cannot be rebuilt."""
        return about(cannot_rebuild(error), receive)


def _outcome(
    fn: Callable[[Incoming, list[torch.Tensor] | None], Any], message: Incoming, tensors: list[torch.Tensor] | None
) -> tuple[Any, BaseException | None]:
    """The value or the error; as data, for a work that ends with a CancelledError looks as if it had been cancelled."""
    try:
        return fn(message, tensors), None
    except BaseException as error:  # as in `Delivery.deliver`
        return None, error


def undecodable_fact(failure: AiorlinfError) -> dict[str, Any]:
    """What the sender is told of it."""
    cause = failure.__cause__ or failure
    return {"why": "undecodable", "message": failure.message, "type": type(cause).__name__}


def about(error: AiorlinfError, receive: Receive) -> AiorlinfError:
    """Say in the error which receive it concerns."""
    error.fill(operation=receive.operation, tag=receive.key & 0xFFFFFFFF)
    if receive.receiver is not None:
        error.fill(local=receive.receiver.local, remote=receive.receiver.remote)
    return error
