"""Ways around the stream, as the sending half uses them.

The sender asks each way whether it takes a message and leaves the payload to the first that does. A way that cannot do it after
all hands the message back (`begin_stream`); nothing was committed then. While `Outgoing.busy` is set, the way still uses the
message's memory: a cancelled message is thrown away only when it is done with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from aiorlinf.errors import AiorlinfError, BackendUnavailable
from aiorlinf.link.memory import byte_tensor
from aiorlinf.link.outgoing import Outgoing, State, goes_around, put_back
from aiorlinf.link.packing import PACK_INLINE_BYTES, pack, pack_in_threads
from aiorlinf.link.placement import Placement, packed_size
from aiorlinf.link.shared import SharedOut
from aiorlinf.wire.frames import Start, Via

if TYPE_CHECKING:
    import torch

    from aiorlinf.backends.shm.arena import Region
    from aiorlinf.wire.leaves import Leaf
    from aiorlinf.work.home import LoopHome

__all__ = ["LaneWay", "PayloadLane", "SharedWay", "Way", "WayHost"]


class Way(Protocol):
    """One way around the stream.

    Attributes:
        eager: a `send_tensor` need not wait for its receive, and `place` and `begin_at_once` may be tried.
    """

    eager: bool

    def takes(self, out: Outgoing) -> bool:
        """Whether this message's payload goes this way."""

    def begin(self, out: Outgoing) -> None:
        """Carry the payload."""

    def place(self, out: Outgoing, ahead: bool) -> bytes | None:
        """Bring the payload to where the peer can see it, if that takes next to no time, and say where that is. None: it has to be begun.

        `ahead`: the message is larger than the whole window. No more than a few of those may be in the peer's hands before their receives
        ask for them, or the window would bound nothing."""

    def begin_at_once(self, out: Outgoing) -> bool:
        """Carry the payload of a message that is larger than the whole window, before its receive asks for it. False: it has to wait for
        that. They count as those of `place` do."""

    def again(self, out: Outgoing) -> bool:
        """The peer could not receive it this way. False if it did not go this way; else the sender sends it over the stream."""

    def revoke(self, out: Outgoing) -> bool:
        """It was withdrawn. True if the peer may have it all the same: this way gives the tensors back when it knows better."""

    def accepted(self, message_id: int) -> None:
        """A message that was withdrawn was in the peer's hands already."""

    def dropped(self, message_id: int) -> None:
        """The peer had it, but nobody had taken it before it heard that it was withdrawn."""

    def close(self) -> None:
        """The link has ended."""


class WayHost(Protocol):
    """What a way needs of the sending half."""

    home: LoopHome
    around_bytes: int

    def begin_stream(self, out: Outgoing, threshold: int | None = None, start: Start = ...) -> None: ...
    def announce(self, out: Outgoing, start: Start) -> None: ...
    def trailer(self, out: Outgoing) -> None: ...
    def hand_over(self, out: Outgoing, start: Start) -> None: ...
    def end_withdrawn(self, out: Outgoing) -> None: ...
    def void(self, out: Outgoing, error: AiorlinfError) -> None: ...
    def release(self, out: Outgoing) -> None: ...


class PayloadLane(Protocol):
    """A pair of process groups for large leaves, one direction of one link (`rendezvous.pairs`)."""

    via: Via
    threshold: int

    def ready(self) -> int | None:
        """The generation that can be used now, None when it has to be prepared first."""

    def prepare(self, then: Callable[[AiorlinfError | None], None]) -> None:
        """Make it usable, then call back on the home thread; with an error it cannot be."""

    def send(self, generation: int, leaves: list[torch.Tensor], then: Callable[[BaseException | None], None]) -> None:
        """Send these one-dimensional uint8 tensors in order, then call back once on the home thread."""

    def drop_out(self, generation: int, reason: str) -> None:
        """Forget this generation."""


class LaneWay:
    """Large tensor leaves through a lane, the rest over the stream.

    Args:
        required: fail messages that the lane cannot take, instead of handing them back to the stream.
        lost: told once why the lane is not tried again.
    """

    eager = False

    def __init__(self, host: WayHost, lane: PayloadLane, required: bool, lost: Callable[[str], None] = lambda reason: None) -> None:
        self._host = host
        self._lane: PayloadLane | None = lane
        self._required = required
        self._lost = lost
        self._queue: deque[Outgoing] = deque()  # begun, but the lane is being prepared

    def takes(self, out: Outgoing) -> bool:
        lane = self._lane
        return lane is not None and out.flat is not None and any(goes_around(leaf, lane.threshold) for leaf in out.flat.leaves)

    def begin(self, out: Outgoing) -> None:
        out.busy = True
        self._queue.append(out)
        self._run()

    def place(self, out: Outgoing, ahead: bool) -> bytes | None:
        return None

    def begin_at_once(self, out: Outgoing) -> bool:
        return False

    def _run(self) -> None:
        """Start what waits, in order; both sides post their transfers in the order of the START frames."""
        lane = self._lane
        if lane is None or not self._queue:
            return
        generation = lane.ready()
        if generation is None:
            lane.prepare(self._prepared)
            return
        while self._queue:
            out = self._queue.popleft()
            if self._still_wanted(out):
                self._start(lane, generation, out)

    def _still_wanted(self, out: Outgoing) -> bool:
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

    def _prepared(self, error: AiorlinfError | None) -> None:
        if error is None:
            self._run()
            return
        queue, self._queue = self._queue, deque()
        if not self._required and self._lane is not None:
            self._lane = None
            self._lost(error.message)
        for out in queue:
            if not self._still_wanted(out):
                continue
            out.busy = False
            if self._required:
                self._host.void(out, error)
            else:
                self._host.begin_stream(out)

    def _start(self, lane: PayloadLane, generation: int, out: Outgoing) -> None:
        assert out.flat is not None
        leaves = [byte_tensor(leaf.memory) for leaf in out.flat.leaves if leaf.memory is not None and goes_around(leaf, lane.threshold)]
        out.lane_generation = generation
        self._host.around_bytes += sum(leaf.numel() for leaf in leaves)
        self._host.begin_stream(out, lane.threshold, Start(lane.via, generation, lane.threshold))
        lane.send(generation, leaves, lambda error: self._over(out, generation, error))

    def _over(self, out: Outgoing, generation: int, error: BaseException | None) -> None:
        """The lane is done with its part of the message, well or not."""
        if out.lane_generation != generation:
            return  # the peer has lost it meanwhile, and the message goes over the stream
        out.busy = False
        if not self._still_wanted(out):
            return
        if error is not None:
            out.lane_generation = 0
            self._host.begin_stream(out)  # the pair is gone, the stream is not
        elif out.position >= out.stream_bytes:
            self._host.trailer(out)

    def again(self, out: Outgoing) -> bool:
        generation = out.lane_generation
        if not generation:
            return False
        if self._lane is not None:
            self._lane.drop_out(generation, "the peer could not receive through it")
        out.lane_generation = 0
        out.busy = False
        return True

    def revoke(self, out: Outgoing) -> bool:
        return False

    def accepted(self, message_id: int) -> None:
        pass

    def dropped(self, message_id: int) -> None:
        pass

    def close(self) -> None:
        self._lane = None
        queue, self._queue = self._queue, deque()
        for out in queue:
            out.busy = False
            self._host.release(out)


_MOST_PLACES = 1024
"""So many places fit into a frame besides the description of their message."""

_AHEAD = 2
"""Messages larger than the window that may be in the peer's hands before it asks for them: one that it looks at, and the next."""


def _not_given_back(out: Outgoing) -> bool:
    placement = out.in_shared
    return out.state != State.DONE if placement is None else placement.lent > 0


class SharedWay:
    """Whole payloads from `threshold` bytes on in shared memory.

    Args:
        required: fail messages that it cannot take, instead of handing them back to the stream. It does not wait until a receiver lets go
            of memory: that may be never.

    Attributes:
        carries: told of each message that goes this way, once; None: nobody is.
    """

    eager = True

    def __init__(self, host: WayHost, shared: SharedOut, threshold: int, required: bool = False) -> None:
        self._host = host
        self._shared = shared
        self._threshold = threshold
        self._required = required
        self.carries: Callable[[Outgoing], None] | None = None
        self._ahead: list[Outgoing] = []  # begun at once, and perhaps not given back
        self._revoked: dict[int, tuple[Placement, bool]] = {}  # by message; and whether the peer has it, as far as we know

    def takes(self, out: Outgoing) -> bool:
        return out.flat is not None and (self._required or self._shared.usable) and (out.total >= self._threshold or bool(out.owned))

    def begin(self, out: Outgoing) -> None:
        assert out.flat is not None
        if self.carries is not None:
            self.carries(out)
        size = self._size(out)
        if not size:
            self._place(out, None)
            return
        region = self._shared.arena.take(size)
        if region is not None:
            self._fill(out, region)
            return
        out.busy = True
        if not self._shared.arena.grow(size, lambda region: self._grown(out, region)):
            out.busy = False
            self._otherwise(out, "receivers hold all of it (cluster.collective.shared_memory.max_bytes)")

    def place(self, out: Outgoing, ahead: bool) -> bytes | None:
        size = self._size(out)
        if size > PACK_INLINE_BYTES or len(out.owned) > _MOST_PLACES or (ahead and not self._has_room_ahead()):
            return None
        region = None
        if size:
            region = self._shared.arena.take(size)
            if region is None:
                return None
            pack(region.segment.address + region.offset, self._packed(out))
            if not out.unchanged():  # what lies there already nobody else looks at
                region.release()
                return None  # who begins it finds the same, and says so
        place = self._lend(out, region)
        if place is None:
            return None  # as before
        if self.carries is not None:
            self.carries(out)
        if ahead:
            self._ahead.append(out)
        return place

    def begin_at_once(self, out: Outgoing) -> bool:
        if not self._has_room_ahead():
            return False
        # Memory that we have anyway: it grows for what the window or a receive admits only.
        size = self._size(out)
        region = self._shared.arena.take(size) if size else None
        if size and region is None:
            return False
        self._ahead.append(out)
        out.state = State.STARTED
        if self.carries is not None:
            self.carries(out)
        if region is None:
            self._place(out, None)
        else:
            self._fill(out, region)
        return True

    def _has_room_ahead(self) -> bool:
        if len(self._ahead) >= _AHEAD:
            self._ahead = [other for other in self._ahead if _not_given_back(other)]
        return len(self._ahead) < _AHEAD

    def _size(self, out: Outgoing) -> int:
        """Bytes that have to be copied, with the gaps between them."""
        assert out.flat is not None
        if out.held is not None and not out.held.free:
            out.held = None  # somebody else has it, or it cannot be lent on
        if out.held is not None or len(out.owned) == len(out.flat.leaves):
            return 0
        return packed_size([leaf.nbytes for leaf in self._packed(out)])

    def _packed(self, out: Outgoing) -> list[Leaf]:
        """Those leaves that do not lie in shared memory already."""
        assert out.flat is not None
        leaves, owned = out.flat.leaves, out.owned
        return [leaf for index, leaf in enumerate(leaves) if index not in owned] if owned else leaves

    def _grown(self, out: Outgoing, region: Region | None) -> None:
        out.busy = False
        if not self._wanted(out, region):
            return
        if region is None:
            self._otherwise(out, "the system has no memory for it")
        else:
            self._fill(out, region)

    def _otherwise(self, out: Outgoing, why: str) -> None:
        """It cannot go this way; never wait for a garbage collection."""
        if self._required:
            self._host.void(out, _unavailable(why))
        else:
            self._host.begin_stream(out)

    def _wanted(self, out: Outgoing, region: Region | None) -> bool:
        if out.state == State.STARTED and not out.withdrawn:
            return True
        if region is not None:
            self._shared.arena.release(region)
        if out.withdrawn:
            self._host.end_withdrawn(out)
        else:
            self._host.release(out)
        return False

    def _fill(self, out: Outgoing, region: Region) -> None:
        leaves = self._packed(out)
        address = region.segment.address + region.offset
        if region.size <= PACK_INLINE_BYTES:
            pack(address, leaves)
            self._place(out, region)
            return
        out.busy = True
        pack_in_threads(self._host.home, address, leaves, lambda error: self._filled(out, region, error))

    def _filled(self, out: Outgoing, region: Region, error: BaseException | None) -> None:
        out.busy = False
        if not self._wanted(out, region):
            return
        if error is not None:
            self._shared.arena.release(region)
            self._otherwise(out, "the worker is closing")
        else:
            self._place(out, region)

    def _place(self, out: Outgoing, region: Region | None) -> None:
        """Everything is in shared memory: say where."""
        if not out.unchanged():
            if region is not None:
                self._shared.arena.release(region)
            self._host.trailer(out)  # it was written to meanwhile, and the trailer says so
            return
        place = self._lend(out, region)
        if place is not None:
            self._host.hand_over(out, Start(Via.SHM, place=place))
        else:
            self._otherwise(out, "the peer cannot be given the memory file")

    def _lend(self, out: Outgoing, region: Region | None) -> bytes | None:
        """Let the peer have it, and only him: where it is. None: it cannot get the memory file."""
        held = out.held
        placement = Placement(region, out.owned) if held is None else held.placement()
        place = self._shared.lend(placement, anyway=self._required)
        if region is not None:
            region.release()
        if held is not None:
            placement.let_go()
        if place is not None:
            out.in_shared = placement
            self._host.around_bytes += out.total
        return place

    def again(self, out: Outgoing) -> bool:
        if out.in_shared is None:
            return False
        self._shared.lost(out.in_shared)
        out.in_shared = None
        if self._required and not out.withdrawn:
            self._host.void(out, _unavailable("the peer could not map the memory file"))
        return True

    def revoke(self, out: Outgoing) -> bool:
        placement = out.in_shared
        if placement is None or not placement.lent or not out.moved:
            return False
        moved, out.moved = out.moved, []

        def back() -> None:
            if not self._revoked.pop(out.message_id)[1]:
                put_back(moved)

        placement.back = back
        self._revoked[out.message_id] = (placement, False)
        return True

    def accepted(self, message_id: int) -> None:
        self._note_taken(message_id, True)

    def dropped(self, message_id: int) -> None:
        self._note_taken(message_id, False)  # it comes before the memory is given back

    def _note_taken(self, message_id: int, taken: bool) -> None:
        if message_id in self._revoked:
            self._revoked[message_id] = (self._revoked[message_id][0], taken)

    def close(self) -> None:
        self._ahead.clear()
        revoked, self._revoked = self._revoked, {}
        for placement, _ in revoked.values():
            placement.back = None  # for all we know it was taken
        self._shared.close()


def _unavailable(why: str) -> BackendUnavailable:
    return BackendUnavailable("the payload cannot go through the backend asked for", {"shm": why})
