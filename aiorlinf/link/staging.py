"""Tensors that are on accelerators, on their way through host memory.

Out: a `Departure` notes at the call of `send` how far the caller's streams have come. When the payload may leave, a stream of ours waits
for that and copies into pinned host memory, and once that has happened the message goes on as if its tensors had been there always.
In: a `Landing` copies what has arrived to where the receive wants it, on a stream of ours. Each side records an event behind its copies,
and the loop's one poller asks for it; nothing waits, and no thread is parked.

Lifetimes: the memory of a tensor that is copied out is held for our stream, so the caller may drop the tensor at any time; memory that is
copied into is held for the stream that was current in the loop's thread when the message had come. Who uses it on other streams says so
to torch (`record_stream`), as for any tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from aiorlinf.device.registry import accelerator, started_accelerator, usable_runtime
from aiorlinf.errors import BackendUnavailable, UnsupportedObject
from aiorlinf.link.device_events import watch_events
from aiorlinf.link.memory import byte_tensor, copy_bytes
from aiorlinf.wire.flat import Flat
from aiorlinf.wire.leaves import Device, Leaf

if TYPE_CHECKING:
    from aiorlinf.device.runtime import Event, Runtime, Stream
    from aiorlinf.work.home import LoopHome

__all__ = [
    "IN",
    "OUT",
    "Departure",
    "Landing",
    "OnBegun",
    "Ready",
    "StreamOrdered",
    "Trip",
    "callers_device",
    "callers_streams",
    "make_wait",
    "place_of",
    "ready_now",
    "travel",
]

_INLINE_BYTES = 1 << 20
"""Smaller copies are begun on the loop; larger ones in a private thread, for memory has to be pinned or filled."""

_PIECE_BYTES = 4 << 20
"""Host memory that is not pinned passes through pinned memory in such pieces."""

OUT, IN = "out", "in"
"""Purposes of our streams."""


@dataclass(frozen=True, slots=True)
class Ready:
    """How far a device had come at some call: what it was given before that is to be over first."""

    runtime: Runtime
    event: Event


def place_of(device: torch.device) -> tuple[Runtime, int]:
    """The runtime of a device, and its index there.

    Raises:
        UnsupportedObject: it cannot be used in this process.
    """
    runtime = usable_runtime(device.type)
    if runtime is None:
        raise UnsupportedObject(f"tensors on device {str(device)!r} cannot be sent from this process", hint="send tensor.cpu()")
    return runtime, device.index or 0


def callers_device() -> torch.device | None:
    """The accelerator device that is current in the calling thread, if this process uses one already."""
    runtime = started_accelerator()
    return None if runtime is None else torch.device(runtime.kind, runtime.current_device())


def ready_now(tensor: torch.Tensor) -> Ready:
    """The calling thread's stream on the tensor's device, as far as it has come."""
    runtime, index = place_of(tensor.device)
    return Ready(runtime, runtime.record(runtime.current_stream(index)))


Trip = tuple[list[torch.Tensor], list[tuple["Runtime", "Event"]]]
"""Where the bytes are, or will be once these events have happened."""

OnBegun = Callable[[Trip, Callable[[], None]], None]
"""Gets the copies that have begun, and what ends the waiting for them early."""


def travel(
    home: LoopHome,
    nbytes: int,
    begin: Callable[[], Trip],
    then: Callable[[list[torch.Tensor] | None, Exception | None], None],
    on_begun: OnBegun | None = None,
) -> None:
    """Begin the copies, and call back on the home thread when they are over.

    Args:
        on_begun: called on the home thread when they have begun, with what calls back at once instead.
    """
    settled = False

    def begun(trip: Trip) -> None:
        tensors, events = trip

        def settle(error: BaseException | None) -> None:
            nonlocal settled
            if settled:
                return
            settled = True
            if error is None:
                then(tensors, None)
            else:
                then(None, _failure(error))

        if on_begun is not None:
            on_begun(trip, lambda: settle(None))
        watch_events(home, list(events), settle, tensors)

    if nbytes <= _INLINE_BYTES:
        try:
            trip = begin()
        except Exception as error:  # whatever the device says goes to the one message
            then(None, _failure(error))
        else:
            begun(trip)
        return

    def done(work: Any) -> None:
        error = None if work.cancelled() else work.exception()
        if work.cancelled() or error is not None:
            then(None, _failure(error))
        else:
            begun(work.result())

    home.submit(begin).add_done_callback(done)


class StreamOrdered:
    """The detail of a work that can be done before its copies are."""

    __slots__ = ()

    def order_after(self, streams: list[tuple[Runtime, Stream]]) -> None:
        """These streams wait for the copies, and the work need not. Home thread."""
        raise NotImplementedError

    def order_after_caller(self, call: Callable[..., None]) -> None:
        """As `order_after`, for the calling thread's streams; `call` takes it to the home thread."""
        streams = callers_streams()
        if streams:
            call(self.order_after, streams)


def make_wait(streams: Sequence[tuple[Runtime, Stream]], trip: Trip) -> bool:
    """Let these streams wait until the bytes have arrived, and say that they use them. False if there are none."""
    tensors, events = trip
    for runtime, stream in streams:
        for _, event in events:
            runtime.wait(stream, event)
        for tensor in tensors:
            if not tensor.is_cpu and tensor.numel():
                runtime.hold(tensor, stream)
    return bool(streams)


def callers_streams() -> list[tuple[Runtime, Stream]]:
    """The stream that is current in the calling thread on its current device; none if no accelerator is in use."""
    runtime = started_accelerator()
    if runtime is None:
        return []
    return [(runtime, runtime.current_stream(runtime.current_device()))]


def _failure(error: BaseException | None) -> Exception:
    if isinstance(error, BackendUnavailable):
        return error
    text = "the worker was closed" if error is None else f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    failure = BackendUnavailable("the device does not copy", {"staging": text})
    failure.__cause__ = error
    return failure


class Departure:
    """The leaves of one message that are on devices.

    Attributes:
        devices: where they are: for each device its runtime, index, and how far the caller's stream had come.
    """

    __slots__ = ("_flat", "devices")

    def __init__(self, flat: Flat, devices: dict[torch.device, tuple[Runtime, int, Event]]) -> None:
        self._flat = flat
        self.devices: dict[torch.device, tuple[Runtime, int, Event]] = devices

    @classmethod
    def of(cls, flat: Flat) -> Departure | None:
        """None if all leaves are in CPU memory. In the caller's thread.

        Raises:
            UnsupportedObject: a device that cannot be used in this process.
        """
        devices: dict[torch.device, tuple[Runtime, int, Event]] = {}
        for leaf in flat.leaves:
            memory = leaf.memory
            if memory is not None and not memory.is_cpu and memory.device not in devices:
                runtime, index = place_of(memory.device)
                devices[memory.device] = (runtime, index, runtime.record(runtime.current_stream(index)))
        return cls(flat, devices) if devices else None

    def begin(self, home: LoopHome, then: Callable[[Flat | None, Exception | None], None], on_begun: OnBegun | None = None) -> None:
        """Copy to host memory; then the same message with its leaves there, or why that is not possible. Home thread."""
        flat = self._flat

        def arrived(hosts: list[torch.Tensor] | None, error: Exception | None) -> None:
            if hosts is None:
                then(None, error)
                return
            left = iter(hosts)
            leaves = [leaf if _at_home(leaf) else Leaf(leaf.spec, None, next(left), None) for leaf in flat.leaves]
            then(Flat(flat.kind, flat.skeleton, leaves, flat.flags), None)

        travel(home, sum(leaf.nbytes for leaf in flat.leaves if not _at_home(leaf)), self._copy, arrived, on_begun)

    def _copy(self) -> Trip:
        """Any thread."""
        hosts: list[torch.Tensor] = []
        streams: dict[torch.device, tuple[Runtime, Stream]] = {}
        for device, (runtime, index, event) in self.devices.items():
            stream = runtime.side_stream(index, OUT)
            runtime.wait(stream, event)
            streams[device] = (runtime, stream)
        for leaf in self._flat.leaves:
            memory = leaf.memory
            if memory is None or _at_home(leaf):
                continue
            runtime, stream = streams[memory.device]
            host = runtime.pinned(leaf.nbytes)
            if leaf.nbytes:
                runtime.copy(host, byte_tensor(memory), stream)
                runtime.hold(memory, stream)
            hosts.append(host)
        return hosts, [(runtime, runtime.record(stream)) for runtime, stream in streams.values()]


def _at_home(leaf: Leaf) -> bool:
    memory = leaf.memory
    return memory is None or memory.is_cpu


class Landing:
    """See the module. Home thread only.

    Attributes:
        default: where received tensors go that were on an accelerator at their sender; None: to the accelerator of this process, if
            it has one, on the device that is current in the loop's thread.
    """

    def __init__(self, home: LoopHome) -> None:
        self.default: torch.device | None = None
        self._home = home

    def target(self, wanted: torch.device | None) -> torch.device:
        """Where a receive's tensors go that were on an accelerator at their sender."""
        device = wanted or self.default
        if device is not None:
            return device
        runtime = accelerator()
        if runtime is None:
            return torch.device("cpu")
        try:
            return torch.device(runtime.kind, runtime.current_device())
        except RuntimeError:  # a driver that is there and does not work, as the peer is told, too (`equip_devices`)
            return torch.device("cpu")

    def bring(
        self,
        sources: Sequence[torch.Tensor],
        devices: Sequence[Device],
        target: torch.device,
        then: Callable[[list[torch.Tensor] | None, Exception | None], None],
        on_begun: OnBegun | None = None,
    ) -> bool:
        """Bring the leaves that were on accelerators to a device, or to CPU memory, and call back with all leaves.

        Args:
            sources: the leaves as one-dimensional uint8 tensors, wherever they are.
            devices: where they were at the sender.
            on_begun: see `travel`; not for tensors that come to CPU memory.

        Returns:
            False if all of them are where they should be; nothing is called then.
        """
        moves = [index for index, kind in enumerate(devices) if kind is not Device.CPU and sources[index].device != target]
        if not moves:
            return False
        users = [(runtime, runtime.current_stream(index)) for runtime, index in self._places([target])]

        def begin() -> Trip:
            tensors = list(sources)
            events = []
            for index in moves:
                tensors[index], happened = _move(sources[index], target, users)
                events.append(happened)
            return tensors, events[-1:] if _one_stream(sources, moves) else events

        early = None if target.type == "cpu" else on_begun
        travel(self._home, sum(sources[index].numel() for index in moves), begin, then, early)
        return True

    @staticmethod
    def _places(devices: Sequence[torch.device]) -> list[tuple[Runtime, int]]:
        return [place_of(device) for device in devices if device.type != "cpu"]

    def fill(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        ready: Ready | None,
        then: Callable[[Exception | None], None],
        on_begun: OnBegun | None = None,
    ) -> None:
        """Copy into the caller's own tensor, one of the two being on a device; `ready`: what is to be over before that is written to."""
        target = byte_tensor(out)

        def begin() -> Trip:
            if target.is_cpu:
                host, happened = _move(source, target.device, [])
                return [host], [happened]
            return [], [_copy_in(target, source, ready)]

        def over(tensors: list[torch.Tensor] | None, error: Exception | None) -> None:
            if tensors and target.numel():
                copy_bytes(target, tensors[0])
            then(error)

        travel(self._home, target.numel(), begin, over, None if target.is_cpu else on_begun)

    @staticmethod
    def snapshot(tensor: torch.Tensor) -> torch.Tensor:
        """A copy of what `fill` has written, on its device. What the current stream is given from now on may change the tensor."""
        runtime, index = place_of(tensor.device)
        current, stream = runtime.current_stream(index), runtime.side_stream(index, IN)
        copy = runtime.empty(tensor.nbytes, index, stream)
        if tensor.nbytes:
            runtime.copy(copy, byte_tensor(tensor), stream)  # `fill` has said already that the stream uses this memory
        runtime.wait(current, runtime.record(stream))
        return copy


def _one_stream(sources: Sequence[torch.Tensor], moves: Sequence[int]) -> bool:
    """All these copies are made on one stream: the last event stands for all."""
    return len({sources[index].device for index in moves}) == 1


def _move(
    source: torch.Tensor, target: torch.device, users: Sequence[tuple[Runtime, Stream]]
) -> tuple[torch.Tensor, tuple[Runtime, Event]]:
    """Copy bytes to another device or to CPU memory, for use by these streams. Any thread."""
    if target.type == "cpu":
        runtime, index = place_of(source.device)
        stream = runtime.side_stream(index, IN)
        host = runtime.pinned(source.numel())
        if source.numel():
            runtime.copy(host, source, stream)
            runtime.hold(source, stream)
        return host, (runtime, runtime.record(stream))
    runtime, index = place_of(target)
    out = runtime.empty(source.numel(), index, runtime.side_stream(index, IN))
    for user_runtime, stream in users:
        if out.numel():
            user_runtime.hold(out, stream)
    return out, _copy_in(out, source, None)


def _copy_in(out: torch.Tensor, source: torch.Tensor, ready: Ready | None) -> tuple[Runtime, Event]:
    """Copy bytes to a device. Any thread."""
    runtime, index = place_of(out.device)
    stream = runtime.side_stream(index, IN)
    if ready is not None:
        runtime.wait(stream, ready.event)
        if out.numel():
            runtime.hold(out, stream)
    if not source.is_cpu and source.numel():
        other, other_index = place_of(source.device)
        if source.device != out.device:  # it was written by a stream of ours over there
            runtime.wait(stream, other.record(other.side_stream(other_index, IN)))
        runtime.copy(out, source, stream)
        other.hold(source, stream)
    elif source.numel():
        for start in range(0, source.numel(), _PIECE_BYTES):
            piece = source[start : start + _PIECE_BYTES]
            bounce = runtime.pinned(piece.numel())
            copy_bytes(bounce, piece)
            runtime.copy(out[start : start + _PIECE_BYTES], bounce, stream)
    return runtime, runtime.record(stream)
