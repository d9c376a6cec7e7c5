"""From device to device: the sending half.

The first message of a link with a tensor on an accelerator asks the peer what it has (DEVICE); what comes meanwhile waits for the answer.
Then each message goes by `cuda_ipc`, through a pair (`nccl`), or through host memory (`link.staging`), as `select_device_backend` says. Its
leaves in CPU memory go over the stream beside it.

A backend that fails, on either side, is given up for this link: the message that met the failure is sent again another way, one line is
logged, and the statistics say why. The receiver says AGAIN when it is the one that has failed.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from aiorlinf.backends.cuda_ipc import HANDLES_MAX_BYTES, encode_handles
from aiorlinf.backends.device_pairs import pair_maker
from aiorlinf.backends.select import Choice
from aiorlinf.device.turns import OUTWARD, turns_of
from aiorlinf.errors import AiorlinfError, BackendUnavailable, ClosedError
from aiorlinf.link.device_facts import DeviceFacts
from aiorlinf.link.memory import byte_tensor
from aiorlinf.link.outgoing import Outgoing, State
from aiorlinf.wire.frames import Start, Via

if TYPE_CHECKING:
    import torch

    from aiorlinf.device.runtime import Event
    from aiorlinf.device.turns import Turn
    from aiorlinf.link.staging import Departure
    from aiorlinf.link.ways import PayloadLane
    from aiorlinf.wire.flat import Flat
    from aiorlinf.wire.leaves import Leaf
    from aiorlinf.work.home import LoopHome

__all__ = ["EXPORT_INLINE", "DeviceHost", "DeviceOut", "DevicePlan", "Loan", "device_leaves", "exported"]

log: logging.Logger = logging.getLogger("aiorlinf.link")

_IPC_OUT = "ipc out"

EXPORT_INLINE = 32
"""More tensors of one object are exported in a private thread: each takes a while, and the loop has others to serve."""

_LOAN = 1 << 63
"""Keys of what is no message: message ids never come to that."""


class DeviceHost(Protocol):
    """What this half needs of the sending half of the link."""

    home: LoopHome
    local: str
    remote: str
    around_bytes: int

    def stage(self, out: Outgoing) -> None: ...
    def begin_stream(self, out: Outgoing, threshold: int | None = None, start: Start = ...) -> None: ...
    def trailer(self, out: Outgoing) -> None: ...
    def end_withdrawn(self, out: Outgoing) -> None: ...
    def void(self, out: Outgoing, error: AiorlinfError) -> None: ...
    def release(self, out: Outgoing) -> None: ...


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """What is known when the link comes up.

    Attributes:
        wanted, fallback: backend asked for, and whether another may stand in.
        same_host: the two workers share a host.
        emulated: why payloads have to stay on the link, None if they need not.
        pair_problem: why no sockets of another library may be opened between the two, None if they may.
    """

    wanted: str
    fallback: bool
    same_host: bool
    emulated: str | None = None
    pair_problem: str | None = None


def device_leaves(flat: Flat) -> list[Leaf]:
    """Those that are on accelerators and have bytes. The receiver finds the same by the manifest (`device_in.device_positions`)."""
    return [leaf for leaf in flat.leaves if leaf.nbytes and leaf.memory is not None and not leaf.memory.is_cpu]


@dataclass(frozen=True, slots=True)
class Loan:
    """Memory on our devices that peers copy from: all that has to be there until they are through.

    Attributes:
        departure: where it is, and how far the streams had come that fill it.
        leaves: what lies there.
        events: behind which it can be read; the peers have their handles.
    """

    departure: Departure
    leaves: Sequence[Leaf]
    events: Sequence[Event]

    @property
    def nbytes(self) -> int:
        """Of all leaves."""
        return sum(leaf.nbytes for leaf in self.leaves)

    def collect(self) -> None:
        """Let the devices free what was kept for processes that are through with it."""
        for runtime, _, _ in self.departure.devices.values():
            runtime.collect()


def exported(departure: Departure, leaves: Sequence[Leaf]) -> tuple[list[Event], bytes]:
    """How another process can read these leaves, all of them on the devices of `departure`: the events, to be kept, and the handles.

    Raises:
        RuntimeError: the memory cannot be shared.
    """
    events: list[Event] = []
    handles: dict[str, bytes] = {}
    for runtime, index, ready in departure.devices.values():
        stream = runtime.side_stream(index, _IPC_OUT)
        runtime.wait(stream, ready)
        event, handle = runtime.export_event(stream)
        events.append(event)
        handles[runtime.identity(index).uuid] = handle
    runtimes = {device: runtime for device, (runtime, _, _) in departure.devices.items()}
    memories = [leaf.memory for leaf in leaves if leaf.memory is not None]
    return events, encode_handles(handles, [runtimes[memory.device].export(byte_tensor(memory)) for memory in memories])


class DeviceOut:
    """See the module. Home thread only.

    Args:
        ask: sends what we have to the peer, and asks for what it has.
        facts: what we have.
        lane: the outgoing pair, None if this side can have none.

    Attributes:
        backend, reason: how tensors on accelerators travel, and why; empty before the first one.
        pair_index: our device at the end of the outgoing pair, None if there is none yet.
    """

    def __init__(
        self, host: DeviceHost, plan: DevicePlan, ask: Callable[[], None], facts: Callable[[], DeviceFacts], lane: PayloadLane | None
    ) -> None:
        self.backend: str = ""
        self.reason: str = ""
        self.pair_index: int | None = None
        self._host = host
        self._plan = plan
        self._ask = ask
        self._facts = facts
        self._lane = lane
        self._here: DeviceFacts | None = None
        self._peer: DeviceFacts | None = None
        self._problems: dict[str, str] = {}  # backends that have failed
        self._unanswered: deque[Outgoing] = deque()
        self._unprepared: deque[Outgoing] = deque()
        self._queued: dict[int, tuple[Outgoing, Turn]] = {}  # by message id: they wait for their turn on our device
        self._exporting: dict[int, Outgoing] = {}  # by message id: a private thread makes their handles
        self._turns: dict[int, Turn] = {}  # by message id: our device has been given them
        self._copying: dict[int, tuple[Outgoing, list[Event]]] = {}  # by message id: the peer copies from our memory

        self._curious: list[Callable[[], None]] = []  # they wait for what the peer has
        self._loans: dict[int, Loan] = {}  # by key
        self._over: dict[int, Callable[[], None]] = {}  # by key: who waits for its end
        self._numbers = itertools.count(1)
        self._closed = False

    # ---- which way

    def begin(self, out: Outgoing) -> None:
        """Carry a message with leaves on accelerators."""
        out.busy = True
        if self._peer is not None:
            self._go(out)
            return
        self._unanswered.append(out)
        if len(self._unanswered) == 1:
            self._ask()

    def on_facts(self, facts: DeviceFacts) -> None:
        """The peer says what it has."""
        self._peer = facts
        waiting, self._unanswered = self._unanswered, deque()
        for out in waiting:
            if self._wanted(out):
                self._go(out)
        self._tell_curious()

    def _tell_curious(self) -> None:
        curious, self._curious = self._curious, []
        for call in curious:
            call()

    def _wanted(self, out: Outgoing) -> bool:
        """Otherwise it is over, now that its memory is free again."""
        if out.withdrawn:
            out.busy = False
            self._host.end_withdrawn(out)
            return False
        if out.state != State.STARTED:
            out.busy = False
            self._host.release(out)
            return False
        return True

    def _go(self, out: Outgoing) -> None:
        try:
            choice = self._choose(out)
        except BackendUnavailable as error:
            out.busy = False
            self._host.void(out, error)
            return
        except RuntimeError as error:  # the device cannot even say what it is
            choice = Choice("staging", str(error), False)
        self.backend, self.reason = choice.name, choice.reason
        if choice.name == "cuda_ipc":
            self._lend(out)
        elif choice.name == "nccl" and self._fits_pair(out):
            self._unprepared.append(out)
            self._run_lane()
        else:
            self._stage(out)

    def _fits_pair(self, out: Outgoing) -> bool:
        """The pair of this link is made for the device of the first message that uses it."""
        assert out.departure is not None
        ((_, index, _),) = out.departure.devices.values()
        if self.pair_index is None:
            self.pair_index = index
        return index == self.pair_index

    def _choose(self, out: Outgoing) -> Choice:
        assert out.departure is not None
        choices = [self._choose_for(device) for device in out.departure.devices]
        first = choices[0]
        if len(choices) > 1 and (first.name == "nccl" or any(choice.name != first.name for choice in choices)):
            return Choice("staging", "the message has tensors of several devices", False)
        return first

    def _choose_for(self, device: torch.device) -> Choice:
        plan, peer = self._plan, self._peer
        assert peer is not None
        if self._here is None:
            self._here = self._facts()
        here = self._here
        source = here.uuids[device.index] if here.kind == device.type else ""
        failed = self._problems
        no_pair = plan.pair_problem or (None if self._lane is not None else "there is no lane")
        if no_pair is not None and (plan.pair_problem or "nccl" not in failed):
            failed = {**failed, "nccl": no_pair}
        return here.way_to(
            peer,
            source,
            wanted=plan.wanted,
            fallback=plan.fallback,
            same_host=plan.same_host,
            emulated=plan.emulated,
            failed=failed,
        )

    def _stage(self, out: Outgoing) -> None:
        out.carrier = ""
        out.lane_generation = 0
        self._host.stage(out)

    def _failed(self, out: Outgoing, backend: str, reason: str) -> None:
        """This way does not work: another one for this message, and for all later ones."""
        self._problem(backend, reason)
        out.carrier = ""
        out.lane_generation = 0
        self._go(out)

    def _problem(self, backend: str, reason: str) -> None:
        if backend not in self._problems:
            self._problems[backend] = reason
            host = self._host
            log.warning("%s: tensors on accelerators go to %s another way than %s: %s", host.local, host.remote, backend, reason)

    # ---- memory that the peer copies from

    @staticmethod
    def _leaves(out: Outgoing) -> list[Leaf]:
        assert out.flat is not None
        return device_leaves(out.flat)

    def _lend(self, out: Outgoing) -> None:
        assert out.departure is not None
        leaves = self._leaves(out)
        if len(leaves) <= EXPORT_INLINE:
            try:
                events, place = exported(out.departure, leaves)
            except RuntimeError as error:
                self._failed(out, "cuda_ipc", str(error).strip().partition("\n")[0])
            else:
                self._exported(out, leaves, events, place)
            return
        self._exporting[out.message_id] = out

        def done(work: Any) -> None:
            if self._exporting.pop(out.message_id, None) is None or not self._wanted(out):
                return  # the link has ended, or nobody wants it any more
            error = ClosedError("the worker was closed") if work.cancelled() else work.exception()
            if error is None:
                self._exported(out, leaves, *work.result())
            else:
                self._failed(out, "cuda_ipc", str(error).strip().partition("\n")[0])

        self._host.home.submit(exported, out.departure, leaves).add_done_callback(done)

    def _exported(self, out: Outgoing, leaves: list[Leaf], events: list[Event], place: bytes) -> None:
        if len(place) > HANDLES_MAX_BYTES:
            self._stage(out)
            return
        self._copying[out.message_id] = (out, events)
        out.carrier = "cuda_ipc"
        self._host.around_bytes += sum(leaf.nbytes for leaf in leaves)
        self._host.begin_stream(out, None, Start(Via.IPC, place=place))

    def on_copied(self, message_id: int) -> None:
        """The peer is through with our memory."""
        loan = self._loans.pop(message_id, None)
        if loan is not None:
            loan.collect()
            self._over.pop(message_id, _nothing)()
            return
        found = self._copying.pop(message_id, None)
        if found is None:
            return
        out, _ = found
        if out.departure is not None:
            for runtime, _, _ in out.departure.devices.values():
                runtime.collect()
        self._carried(out)

    def _carried(self, out: Outgoing) -> None:
        """The accelerators' part is over."""
        out.busy = False
        if self._wanted(out) and out.position >= out.stream_bytes:
            self._host.trailer(out)

    # ---- the same, for what is no message of this link (`collective.loan`)

    def when_known(self, call: Callable[[], None]) -> None:
        """Have it called once the peer has said what it has, or the link has ended; at once, if that is so already. The link is up."""
        if self._peer is not None or self._closed:
            call()
            return
        self._curious.append(call)
        if len(self._curious) == 1:
            self._ask()

    def reads(self, departure: Departure) -> bool:
        """The peer can copy from all of these devices itself, and nothing speaks for another way."""
        if self._peer is None or self._closed:
            return False
        try:
            choices = [self._choose_for(device) for device in departure.devices]
        except (BackendUnavailable, RuntimeError):
            return False
        if choices[0].name != "nccl":  # which is for one receiver
            self.backend, self.reason = choices[0].name, choices[0].reason
        return all(choice.name == "cuda_ipc" for choice in choices)

    @property
    def landing(self) -> DeviceFacts | None:
        """What the peer has said it has; None before that, and where workers do not lend each other memory of devices."""
        allowed = self._plan.wanted in ("auto", "cuda_ipc") and self._plan.emulated is None
        return self._peer if allowed and not self._closed else None

    def lend(self, loan: Loan, over: Callable[[], None] | None = None) -> int:
        """Keep this until the peer says that it is through with it (COPIED with this key), or the link ends; `over` is called then."""
        key = _LOAN | next(self._numbers)
        self._loans[key] = loan
        if over is not None:
            self._over[key] = over
        self._host.around_bytes += loan.nbytes
        return key

    def give_up(self, reason: str) -> None:
        """The peer could not read our memory: nobody tries again on this link."""
        self._problem("cuda_ipc", reason)

    # ---- pairs

    def _run_lane(self) -> None:
        """Start what waits, in order and when it is our turn on the device (`device.turns`): both sides post their transfers in the order
        of the START frames."""
        lane = self._lane
        if lane is None or not self._unprepared:
            return
        if lane.ready() is None:
            lane.prepare(self._prepared)
            return
        while self._unprepared:
            out = self._unprepared.popleft()
            if self._wanted(out):
                self._queue(out)

    def _queue(self, out: Outgoing) -> None:
        assert out.departure is not None
        ((runtime, index, _),) = out.departure.devices.values()
        come = False

        def go(turn: Turn) -> None:
            nonlocal come
            come = True
            self._queued.pop(out.message_id, None)
            self._come(out, turn)

        turn = turns_of(runtime, index, OUTWARD).take(self, go, self._host.home.call_soon)
        if not come:
            self._queued[out.message_id] = (out, turn)

    def _come(self, out: Outgoing, turn: Turn) -> None:
        """It is our turn."""
        lane = self._lane
        if lane is None or not self._wanted(out):
            turn.end()
            return
        generation = lane.ready()
        if generation is None:  # the pair was lost meanwhile
            turn.end()
            self._unprepared.append(out)
            if len(self._unprepared) == 1:
                self._run_lane()
            return
        self._turns[out.message_id] = turn
        self._transfer(lane, generation, out, turn)

    def _prepared(self, error: AiorlinfError | None) -> None:
        if error is None:
            self._run_lane()
            return
        waiting, self._unprepared = self._unprepared, deque()
        for out in waiting:
            if self._wanted(out):
                self._failed(out, "nccl", error.message)

    def _transfer(self, lane: PayloadLane, generation: int, out: Outgoing, turn: Turn) -> None:
        assert out.departure is not None
        ((device, (runtime, index, ready)),) = out.departure.devices.items()
        maker = pair_maker(device.type)
        assert maker is not None
        runtime.wait(runtime.side_stream(index, maker.out), ready)
        leaves = [byte_tensor(leaf.memory) for leaf in self._leaves(out) if leaf.memory is not None]
        for leaf in leaves:
            runtime.hold(leaf, runtime.side_stream(index, maker.out))
        out.lane_generation = generation
        out.carrier = "nccl"
        self._host.around_bytes += sum(leaf.numel() for leaf in leaves)
        self._host.begin_stream(out, None, Start(Via.NCCL, generation))

        def over(error: BaseException | None) -> None:
            self._end_turn(out, turn)
            self._transferred(out, generation, error)

        lane.send(generation, leaves, over)

    def _end_turn(self, out: Outgoing, turn: Turn | None) -> None:
        if turn is not None:
            turn.end()
            if self._turns.get(out.message_id) is turn:
                del self._turns[out.message_id]

    def _transferred(self, out: Outgoing, generation: int, error: BaseException | None) -> None:
        if out.lane_generation != generation:
            return  # the peer has lost it meanwhile, and the message goes another way
        if error is None:
            self._carried(out)
        elif self._wanted(out):
            self._failed(out, "nccl", str(error).strip().partition("\n")[0])

    # ---- the peer's word

    def again(self, out: Outgoing) -> None:
        """The peer could not receive it this way."""
        self._copying.pop(out.message_id, None)
        if out.lane_generation and self._lane is not None:
            self._lane.drop_out(out.lane_generation, "the peer could not receive through it")
            self._end_turn(out, self._turns.get(out.message_id))
        out.lane_generation = 0
        out.busy = True
        if out.state == State.SENT:
            out.state = State.STARTED
        if self._wanted(out):
            self._failed(out, out.carrier, "the peer could not receive this way")

    def close(self) -> None:
        """The link has ended."""
        self._closed = True
        self._loans.clear()
        ended, self._over = list(self._over.values()), {}
        for call in ended:
            call()
        self._tell_curious()
        queued = [out for out, _ in self._queued.values()]
        waiting = [*self._unanswered, *self._unprepared, *self._exporting.values(), *queued, *[out for out, _ in self._copying.values()]]
        turns = [*[turn for _, turn in self._queued.values()], *self._turns.values()]
        self._exporting.clear()
        self._queued.clear()
        self._turns.clear()
        for turn in turns:  # what the device was given is aborted with the pair
            turn.end()
        self._unanswered.clear()
        self._unprepared.clear()
        self._copying.clear()
        self._lane = None
        for out in waiting:
            out.busy = False
            self._host.release(out)


def _nothing() -> None:
    """Nobody waits."""
