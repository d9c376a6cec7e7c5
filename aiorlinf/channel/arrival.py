"""What comes for one get: the items of a batch, or a large item, until all of it is here."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from aiorlinf.channel.landing import Wish, bring_leaves, leaves_of_small
from aiorlinf.link.parcel import Parcel, decode_parcel
from aiorlinf.wire.inline import decode_inline
from aiorlinf.wire.tree import assemble, rebuild

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiorlinf.link.lending import Stores
    from aiorlinf.wire.manifest import Manifest
    from aiorlinf.work.home import LoopHome

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

    __slots__ = ("_announced", "_landed", "_missing", "lease", "messages", "number", "parts")

    def __init__(self, number: int, lease: bool) -> None:
        self.number: int = number
        self.lease: bool = lease
        self.parts: list[bytes | Leaves | Parcel | BaseException | None] = []
        self.messages: list[int] = []
        self._missing = 0
        self._announced = False
        self._landed: dict[int, tuple[Manifest, list[torch.Tensor]]] = {}

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
        for index, part in enumerate(self.parts):
            if index in self._landed:
                manifest, tensors = self._landed[index]
                found.append(rebuild(manifest, tensors, allow_pickle=allow_pickle))
            elif isinstance(part, Leaves):
                found.append(assemble(part.manifest, part.memory, allow_pickle=allow_pickle))
            elif isinstance(part, Parcel):
                found.append(decode_parcel(part, allow_pickle=allow_pickle))
            elif isinstance(part, BaseException):
                raise part
            else:
                found.append(decode_inline(memoryview(part or b""), allow_pickle=allow_pickle))
        self.parts.clear()
        self._landed.clear()
        return found

    def land(self, home: LoopHome, wish: Wish, then: Callable[[Exception | None], None]) -> bool:
        """Bring tensors where they are wanted, and call back; the parts stay as they are. False: they are there. Home thread only.

        Raises:
            WireError, UnsupportedObject: as `values`.
        """
        missing = 0
        failure: Exception | None = None

        def landed(index: int, manifest: Manifest, tensors: list[torch.Tensor] | None, error: Exception | None) -> None:
            nonlocal missing, failure
            missing -= 1
            failure = failure or error
            if tensors is not None:
                self._landed[index] = (manifest, tensors)
            if not missing:
                then(failure)

        missing += 1  # until all have begun
        begun = False
        for index, part in enumerate(self.parts):
            taken = _apart(part, wish)
            if taken is not None:
                manifest, memory = taken
                missing += 1
                if bring_leaves(home, manifest, memory, wish, partial(landed, index, manifest)):
                    begun = True
                else:
                    missing -= 1
        missing -= 1
        if begun and not missing:
            then(failure)
        return begun


def _apart(part: bytes | Leaves | Parcel | BaseException | None, wish: Wish) -> tuple[Manifest, Sequence[torch.Tensor]] | None:
    """Description and leaves, if some of them may have to be brought anywhere."""
    if isinstance(part, Leaves):
        wanted = wish.everything or part.manifest.on_devices
        return (part.manifest, [torch.from_numpy(store) for store in part.memory]) if wanted else None
    if isinstance(part, Parcel):
        manifest = part.manifest
        if manifest is not None:
            return (manifest, part.memory) if wish.everything or manifest.on_devices else None
        part = part.small
    return leaves_of_small(part) if wish.everything and isinstance(part, bytes) else None
