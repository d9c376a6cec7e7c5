"""From device to device: the receiving half. Memory on our device is filled from the peer's, by a copy of ours or through a pair."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from aiorlinf.backends.cuda_ipc import decode_handles
from aiorlinf.backends.device_pairs import pair_maker
from aiorlinf.device.openings import IDLE_S, Openings, Use
from aiorlinf.device.registry import accelerator, runtime_of
from aiorlinf.device.turns import INWARD, turns_of
from aiorlinf.errors import WireError
from aiorlinf.link.memory import byte_view, fresh_bytes
from aiorlinf.link.sink import Sink
from aiorlinf.link.staging import IN, Trip, travel
from aiorlinf.wire.frames import FrameType, Start, Via

if TYPE_CHECKING:
    import asyncio

    from aiorlinf.codec.pool import TensorBufferPool
    from aiorlinf.device.runtime import Runtime, Shared
    from aiorlinf.device.turns import Turn
    from aiorlinf.link.incoming import Content, Incoming
    from aiorlinf.link.staging import Landing, Ready
    from aiorlinf.wire.leaves import LeafSpec
    from aiorlinf.work.home import LoopHome

__all__ = ["DeviceIn", "DeviceReceiveLane", "DeviceReceiver", "Read", "device_positions"]

log: logging.Logger = logging.getLogger("aiorlinf.link")


Read = tuple["torch.Tensor", "Shared", "torch.dtype | None"]
"""A one-dimensional tensor of ours, the peer's memory that comes into it, and the type of what lies there; None: ours is uint8, so that
does not matter."""


class DeviceReceiveLane(Protocol):
    """The receiving end of a pair (`rendezvous.pairs.Pairs`)."""

    def receive(self, generation: int, leaves: list[torch.Tensor], then: Callable[[BaseException | None], None]) -> bool: ...


class DeviceReceiver(Protocol):
    """What this half needs of the receiving half of the link."""

    home: LoopHome
    pool: TensorBufferPool | None
    local: str
    remote: str

    def reply(self, kind: int, key: int, body: bytes = b"", flags: int = 0) -> None: ...
    def still_open(self, message: Incoming) -> bool: ...
    def around_over(self, message: Incoming) -> None: ...


class DeviceIn:
    """See the module. Home thread only.

    Args:
        lane: the pair through which the peer sends, None if there can be none.

    Attributes:
        pair_index: our device at the end of that pair.
        openings: the peer's memory that is open here.
    """

    def __init__(self, receiver: DeviceReceiver, landing: Landing, lane: DeviceReceiveLane | None) -> None:
        self.pair_index = 0
        self._receiver = receiver
        self._landing = landing
        self._lane = lane
        self._turns: set[Turn] = set()
        self.openings: Openings = Openings(receiver.home.loop.time, _let_go)
        self._sweeping: asyncio.TimerHandle | None = None

    def start(self, message: Incoming, content: Content, start: Start) -> None:
        """The payload of a message begins."""
        if content.refused:
            self._refuse(message, content, start)
            return
        runtime = accelerator()
        if runtime is None:
            raise WireError("a payload for an accelerator, but this side has told of none")
        around = _around(content)
        attempt = content.attempt
        content.lane_pending = True
        content.direct = False
        try:
            index = self._index(message, runtime, start)
            maker = pair_maker(runtime.kind)
            purpose = IN if start.via == Via.IPC or maker is None else maker.into
            stream, user = runtime.side_stream(index, purpose), runtime.current_stream(index)
            content.tensors = []
            for position, size in enumerate(content.sizes()):
                if position in around:
                    memory = runtime.empty(size, index, stream)
                    runtime.hold(memory, user)
                else:
                    memory = fresh_bytes(size, self._receiver.pool)
                content.tensors.append(memory)
        except RuntimeError as error:  # there is no memory left on the device; perhaps there is in the host
            self._again(message, content, error)
            return
        content.sink = Sink([byte_view(tensor) for position, tensor in enumerate(content.tensors) if position not in around])
        targets = [content.tensors[position] for position in around]

        def over(error: BaseException | None) -> None:
            if content.attempt != attempt or not self._receiver.still_open(message):
                return
            if error is not None:
                self._again(message, content, error)
                return
            content.lane_pending = False
            if start.via == Via.IPC:
                self._receiver.reply(FrameType.COPIED, message.message_id)
            self._receiver.around_over(message)

        if start.via == Via.IPC:
            self._copy(runtime, index, targets, start, over)
        else:
            self._receive(runtime, start.generation, lambda: targets, over)

    def _receive(
        self, runtime: Runtime, generation: int, targets: Callable[[], list[torch.Tensor]], over: Callable[[BaseException | None], None]
    ) -> None:
        """Post the transfer when it is our turn on the device (`device.turns`): the sender has had its own."""

        def go(turn: Turn) -> None:
            self._turns.add(turn)

            def ended(error: BaseException | None) -> None:
                turn.end()
                self._turns.discard(turn)
                over(error)

            try:
                posted = self._lane is not None and self._lane.receive(generation, targets(), ended)
            except RuntimeError as error:
                ended(error)
                return
            if not posted:
                ended(RuntimeError(f"pair {generation} is not there"))

        turn = turns_of(runtime, self.pair_index, INWARD).take(self, go, self._receiver.home.call_soon)
        if not turn.over:
            self._turns.add(turn)

    def close(self) -> None:
        """The link has ended, and its pairs with it."""
        self._lane = None
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        self.openings.close()
        turns, self._turns = self._turns, set()
        for turn in turns:
            turn.end()

    def _index(self, message: Incoming, runtime: Runtime, start: Start) -> int:
        """Our device that the payload comes to."""
        if start.via == Via.NCCL:
            return self.pair_index
        target = self._landing.target(None if message.receive is None else message.receive.device)
        return runtime.current_device() if target.type != runtime.kind else target.index or 0

    def _copy(
        self, runtime: Runtime, index: int, targets: list[torch.Tensor], start: Start, over: Callable[[BaseException | None], None]
    ) -> None:
        events, leaves = decode_handles(memoryview(start.place), [target.numel() for target in targets])
        self.read(runtime, index, [(target, leaf, None) for target, leaf in zip(targets, leaves, strict=True)], events, (), over)

    def read(
        self,
        runtime: Runtime,
        index: int,
        reads: Sequence[Read],
        events: dict[str, bytes],
        users: Sequence[Ready],
        over: Callable[[BaseException | None], None],
    ) -> None:
        """Copy from the peer's memory, and call back once it is free again: the copies are over, or it cannot be read.

        Args:
            reads: what is copied to where, on device `index`.
            events: as `decode_handles` gives them, as the leaves of `reads`.
            users: what is to be over before the targets are written to, if they are not new ones of our stream's.
        """
        openings = self.openings
        leaves = [leaf for _, leaf, _ in reads]
        trouble: list[Exception] = []
        uses: list[Use] = []

        def begin() -> Trip:
            stream = runtime.side_stream(index, IN)
            try:
                for user in users:
                    runtime.wait(stream, user.event)
                if users:
                    for target, _, _ in reads:
                        runtime.hold(target, stream)
                _copy_shared(runtime, index, reads, events, openings, uses)
            except Exception as error:  # told when what was begun is over
                trouble.append(error.with_traceback(None))  # its frames hold what was opened
            return [tensor for use in uses for tensor in use.tensors], [(runtime, runtime.record(stream))]

        def copied(opened: list[torch.Tensor] | None, error: Exception | None) -> None:
            if opened is not None:
                opened.clear()
            for use in uses:  # before the peer is told
                use.end()
            self._sweep_later()
            over(trouble[0] if trouble else error)

        # To open memory takes long, so that is not done on the loop, however little there is to copy.
        nbytes = sum(leaf.nbytes for leaf in leaves) if openings.has(leaves) else sys.maxsize
        travel(self._receiver.home, nbytes, begin, copied)

    def _sweep_later(self) -> None:
        if self._sweeping is None and len(self.openings):
            self._sweeping = self._receiver.home.loop.call_later(IDLE_S, self._sweep)

    def _sweep(self) -> None:
        self._sweeping = None
        self.openings.sweep()
        self._sweep_later()

    def _refuse(self, message: Incoming, content: Content, start: Start) -> None:
        """Nobody wants it any more. What was begun must still be ended."""
        if start.via == Via.IPC:
            self._receiver.reply(FrameType.COPIED, message.message_id)
            return
        runtime = accelerator()
        sizes = content.sizes()
        if runtime is not None and self._lane is not None:
            maker = pair_maker(runtime.kind)
            stream = runtime.side_stream(self.pair_index, IN if maker is None else maker.into)
            wanted = [sizes[position] for position in _around(content)]
            index = self.pair_index
            self._receive(runtime, start.generation, lambda: [runtime.empty(size, index, stream) for size in wanted], lambda error: None)

    def _again(self, message: Incoming, content: Content, error: BaseException) -> None:
        log.info("%s: a payload of %s has to be sent another way: %s", self._receiver.local, self._receiver.remote, error)
        content.tensors = []
        self._receiver.reply(FrameType.AGAIN, message.message_id)


def _let_go(memories: list[torch.Tensor]) -> None:
    """Close them in a thread of their own: what waits for the worker's private threads when it closes would be dropped in the loop's."""
    runtime = runtime_of(memories[0].device.type)
    assert runtime is not None  # it has opened them
    try:
        threading.Thread(target=runtime.let_go, args=(memories,), name="aiorlinf-close", daemon=True).start()
    except RuntimeError:  # no more threads can be had
        runtime.let_go(memories)


def _around(content: Content) -> list[int]:
    """Which leaves come from device to device."""
    return device_positions([content.spec] if content.manifest is None else content.manifest.specs)


def device_positions(specs: Sequence[LeafSpec | None]) -> list[int]:
    """Which leaves were on accelerators at the sender, and have bytes (`device_out.device_leaves`)."""
    return [position for position, spec in enumerate(specs) if spec is not None and spec.device and spec.nbytes]


def _copy_shared(
    runtime: Runtime, index: int, reads: Sequence[Read], events: dict[str, bytes], openings: Openings, uses: list[Use]
) -> None:
    """Begin the copies. Any thread. What is used has to be kept until they are over."""
    stream = runtime.side_stream(index, IN)
    where = {runtime.identity(number).uuid: number for number in range(runtime.count())}
    missing = [uuid for uuid in events if uuid not in where]
    if missing:
        raise RuntimeError(f"this process does not see the device {missing[0]}")
    for uuid, handle in events.items():
        if where[uuid] != index and not runtime.peer_access(index, where[uuid]):
            raise RuntimeError(f"device {index} cannot read the memory of device {where[uuid]}")
        runtime.wait(stream, runtime.open_event(handle, where[uuid]))
    use = openings.use(runtime, [leaf for _, leaf, _ in reads], where)
    uses.append(use)
    for source, (target, _, dtype) in zip(use.tensors, reads, strict=True):
        runtime.copy(target, source if dtype is None else source.view(dtype), stream)
