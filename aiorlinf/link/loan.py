"""Memory that a peer has lent us, to be lent on.

Who passes messages on (`link.parcel`) hands the peer's memory itself to the next one, without a copy: the descriptor of the memory file
goes on, and START names the same place in it. When the last view there is gone, RELEASE comes to us; with that our own hold ends, and its
finalizer sends RELEASE to the one whose memory it is. So it goes through any number of workers.

If the next one ends without a word, he may still look at it and write to it: our own RELEASE says so (ABANDONED), and its owner puts
nothing into that memory any more. If we end, he takes us for one who still looks.

Whoever gets a memory file can read all of it, and with it messages to others. All workers of a job that share memory belong to one user.
"""

from __future__ import annotations

import resource
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from aiorlinf.errors import AiorlinfError
from aiorlinf.link.placement import Lendable, Place, Placement, offsets

if TYPE_CHECKING:
    from aiorlinf.backends.shm.segment import Segment
    from aiorlinf.work.home import LoopHome

__all__ = ["Held", "Hold", "Keeper", "Loan", "Part"]

_SHARE_OF_DESCRIPTORS = 4
"""At most one in so many of the descriptors that the process may have is kept for passing memory files on."""


class Hold:
    """That somebody here, or somebody it was lent on to, looks at a part of a peer's memory. The finalizer of that part refers to it.

    Attributes:
        abandoned: one who may look at it will never say when he is done.
    """

    __slots__ = ("abandoned", "place", "size")

    def __init__(self, place: Place, size: int) -> None:
        self.place: Place = place
        self.size: int = size
        self.abandoned: bool = False


class Part:
    """Part of a peer's memory that is held, and at which nobody here looks unless he asks for an array over it.

    Attributes:
        hold: ends with this object.
    """

    __slots__ = ("__weakref__", "_gone", "_segment", "hold")

    def __init__(self, segment: Segment, hold: Hold, gone: Callable[[Hold], None]) -> None:
        self._segment = segment
        self.hold: Hold = hold
        self._gone = gone

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """For NumPy, whose arrays then refer to this object."""
        hold = self.hold
        return {"version": 3, "shape": (hold.size,), "typestr": "|u1", "data": (self._segment.address + hold.place[1], False)}

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _ending():
            self._gone(self.hold)


class Loan:
    """A part of a peer's memory. It is held as long as this object, or a view of the memory, is there. Stands for a `Region`.

    Attributes:
        segment: where it lies; its number is one of ours.
        offset, size: bytes.
        lent: how many peers have it from us.
        shown: how many look at it privately (`backends.shm.private`): they do not write to it, and it may not be written to.
    """

    __slots__ = ("_hold", "_root", "lent", "offset", "segment", "shown", "size")

    def __init__(self, segment: Segment, root: Any, hold: Hold) -> None:
        self.segment: Segment = segment
        self.offset: int = hold.place[1]
        self.size: int = hold.size
        self.lent: int = 0
        self.shown: int = 0
        self._root = root
        self._hold = hold

    @property
    def free(self) -> bool:
        """It can be lent on. Only to one at a time: what one gets he may write to."""
        return self.segment.fd >= 0 and not self.lent and not self.shown and not self._hold.abandoned

    @property
    def visible(self) -> bool:
        """It can be shown."""
        return self.segment.fd >= 0 and not self.lent and not self._hold.abandoned

    def memory(self) -> torch.Tensor:
        """The bytes; they are held as long as the tensor is there."""
        return torch.from_numpy(np.asarray(self._root))

    def hold(self) -> None:
        """A peer has it from us."""
        self.lent += 1

    def release(self) -> None:
        """He has given it back."""
        self.lent -= 1

    def abandon(self) -> None:
        """He will never say when he is done."""
        self.lent -= 1
        self._hold.abandoned = True


class _Shown:
    """A loan that is shown, not lent. Stands for a `Region`."""

    __slots__ = ("_loan", "offset", "segment", "size")

    def __init__(self, loan: Loan) -> None:
        self.segment = loan.segment
        self.offset = loan.offset
        self.size = loan.size
        self._loan = loan

    def hold(self) -> None:
        """See `Loan.hold`."""
        self._loan.shown += 1

    def release(self) -> None:
        """See `Loan.release`."""
        self._loan.shown -= 1

    def abandon(self) -> None:
        """See `Loan.abandon`."""
        self._loan.shown -= 1
        self._loan._hold.abandoned = True


class Held:
    """Where all of a message lies in memory of a peer: as in its `Placement` there."""

    __slots__ = ("_owned", "_packed")

    def __init__(self, packed: Loan | None, owned: dict[int, Loan]) -> None:
        self._packed = packed
        self._owned = owned

    @property
    def free(self) -> bool:
        """All of it can be lent on."""
        return (self._packed is None or self._packed.free) and (not self._owned or all(loan.free for loan in self._owned.values()))

    @property
    def one_loan(self) -> Loan | None:
        """That which all of the message lies in, None if there are several or none."""
        return None if self._owned else self._packed

    @property
    def visible(self) -> bool:
        """All of it can be shown."""
        return (self._packed is None or self._packed.visible) and all(loan.visible for loan in self._owned.values())

    def placement(self, *, private: bool = False) -> Placement:
        """For the next one; `private`: who will look at it privately."""
        if not private:
            return Placement(self._packed, self._owned)
        owned: dict[int, Lendable] = {index: _Shown(loan) for index, loan in self._owned.items()}
        return Placement(None if self._packed is None else _Shown(self._packed), owned)

    def memory(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """The leaves of the message, one-dimensional uint8."""
        owned = self._owned
        *starts, _ = offsets([0 if index in owned else size for index, size in enumerate(sizes)])
        packed = None if self._packed is None else self._packed.memory()
        found = []
        for index, size in enumerate(sizes):
            if index in owned:
                found.append(owned[index].memory())
            elif packed is not None and size:
                found.append(packed[starts[index] : starts[index] + size])
            else:
                found.append(torch.empty(0, dtype=torch.uint8, device="cpu"))
        return found


class Keeper:
    """Which memory files of peers one worker can pass on: it takes an open descriptor for each, of which there are few.

    Home thread only.

    Args:
        new_number: for a segment, one that was never given before in this worker.
        gone: called with that number once nothing of a kept segment can be lent on any more.

    Attributes:
        wanted: this worker passes messages on; otherwise nothing is kept.
    """

    def __init__(self, home: LoopHome, new_number: Callable[[], int], gone: Callable[[int], None]) -> None:
        self.wanted = False
        self._home = home
        self._new_number = new_number
        self._gone = gone
        self._kept = 0

    def number(self) -> int | None:
        """The number under which a segment that has come is to be kept; None if it is not."""
        return self._new_number() if self.wanted and self._kept < _most() else None

    def watch(self, segment: Segment) -> None:
        """This one is kept."""
        self._kept += 1
        finalizer = weakref.finalize(segment, self._ended, segment.number)
        finalizer.atexit = False

    def _ended(self, number: int) -> None:
        """Called in whatever thread let go of it."""
        try:
            self._home.call_soon(self._forget, number)
        except AiorlinfError:  # the loop is gone, or we are a fork: nobody is left to tell
            pass

    def _forget(self, number: int) -> None:
        self._kept -= 1
        self._gone(number)


def _most() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (1 << 16 if soft == resource.RLIM_INFINITY else soft) // _SHARE_OF_DESCRIPTORS
