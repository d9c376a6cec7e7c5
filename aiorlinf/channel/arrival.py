"""What comes for one get: the items of a batch, or a large item, until all of it is here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from aiorlinf.link.parcel import Parcel, decode_parcel
from aiorlinf.wire.inline import decode_inline
from aiorlinf.wire.tree import assemble

if TYPE_CHECKING:
    from aiorlinf.link.lending import Stores
    from aiorlinf.wire.manifest import Manifest

__all__ = ["Arrival", "Leaves"]


class Leaves(NamedTuple):
    """A large item in memory of the channel worker, or of who put it."""

    manifest: Manifest
    memory: Stores


class Arrival:
    """Parts in order.

    Attributes:
        number: of the get.
        lease: the channel worker keeps the items.
        parts: bytes of small items, leaves or parcels of large ones, None where one is on its way, or the error of one that was lost on it.
        messages: which of them have come as messages: the channel worker has them no more.
    """

    __slots__ = ("_announced", "_missing", "lease", "messages", "number", "parts")

    def __init__(self, number: int, lease: bool) -> None:
        self.number = number
        self.lease = lease
        self.parts: list[bytes | Leaves | Parcel | BaseException | None] = []
        self.messages: list[int] = []
        self._missing = 0
        self._announced = False

    @property
    def complete(self) -> bool:
        """All of it is here."""
        return self._announced and not self._missing

    def expect(self, small: bytes | None, *, last: bool) -> int:
        """The next item, here already or (None) still on its way; its index."""
        index = len(self.parts)
        self.parts.append(small)
        if small is None:
            self._missing += 1
        self._announced = last
        return index

    def part(self, index: int, part: Leaves | Parcel | BaseException) -> None:
        """One that was on its way."""
        self.parts[index] = part
        self._missing -= 1

    def values(self, allow_pickle: bool) -> list[Any]:
        """The items. Raises what the first one raises that is not there or cannot be rebuilt."""
        found: list[Any] = []
        for part in self.parts:
            if isinstance(part, Leaves):
                found.append(assemble(part.manifest, part.memory, allow_pickle=allow_pickle))
            elif isinstance(part, Parcel):
                found.append(decode_parcel(part, allow_pickle=allow_pickle))
            elif isinstance(part, BaseException):
                raise part
            else:
                found.append(decode_inline(memoryview(part or b""), allow_pickle=allow_pickle))
        self.parts.clear()
        return found
