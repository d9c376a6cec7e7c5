"""Tensors made with `comm.empty` are given away by the send that takes them.

They lie in shared memory already, so nothing is copied: the receiver gets the very memory. A handle here that could still write to it
would change what the receiver has; so from the call of `send` on the handle is empty (no elements), and sending it again is an error.
This holds whatever the size and whichever way the message goes. A send that fails or is cancelled gives the memory back to the handle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from aiorlinf.errors import UsageError
from aiorlinf.wire.inline import pack_inline
from aiorlinf.wire.leaves import Leaf
from aiorlinf.wire.tree import flatten

if TYPE_CHECKING:
    from aiorlinf.backends.shm.arena import Region
    from aiorlinf.link.host_memory import HostMemory
    from aiorlinf.link.outgoing import Outgoing
    from aiorlinf.wire.flat import Flat

__all__ = ["Gift", "encode_giving"]

_MARK = "_aiorlinf_given_away"


class Gift:
    """The tensors of one message that are given away by it.

    Attributes:
        leaves: the message's leaves; those given away show their memory through a second handle.
    """

    def __init__(self, leaves: list[Leaf], moved: list[tuple[torch.Tensor, torch.Tensor]], owned: dict[int, Region]) -> None:
        self.leaves = leaves
        self._moved = moved
        self._owned = owned

    @classmethod
    def of(cls, memory: HostMemory, leaves: Sequence[Leaf]) -> Gift | None:
        """What these leaves give away, None if nothing.

        Raises:
            UsageError: one was given away before.
        """
        fresh = list(leaves)
        moved: list[tuple[torch.Tensor, torch.Tensor]] = []
        owned: dict[int, Region] = {}
        for index, leaf in enumerate(leaves):
            tensor = leaf.tensor
            if tensor is None:
                continue
            if not leaf.nbytes:
                if hasattr(tensor, _MARK):
                    raise UsageError("the tensor was given away by an earlier send", hint="a tensor made with comm.empty can be sent once")
                continue
            region = memory.owned(tensor)
            if region is not None:
                handle = tensor.detach()
                fresh[index] = Leaf(leaf.spec, handle, handle, None)
                moved.append((tensor, handle))
                owned[index] = region
        return cls(fresh, moved, owned) if moved else None

    def give(self, out: Outgoing | None = None) -> None:
        """Empty the handles: the message is accepted. Without `out` its bytes have been copied already."""
        for tensor, _ in self._moved:
            with torch.no_grad():
                tensor.set_()  # type: ignore[call-overload]  # the stubs miss the form without arguments
            setattr(tensor, _MARK, True)
        if out is not None:
            out.moved = self._moved
            if out.flat is not None:
                out.owned = self._owned
                out.versions = out.flat.versions()  # emptying the handles counted as a write


def encode_giving(obj: Any, memory: HostMemory, limit: int, allow_pickle: bool) -> tuple[bytes | Flat, Gift | None]:
    """As `encode_inline`, and what the message gives away."""
    flat = flatten(obj, allow_pickle=allow_pickle)
    gift = Gift.of(memory, flat.leaves)
    if gift is not None:
        flat.leaves = gift.leaves
    if flat.payload_bytes <= limit and all(leaf.raw is not None for leaf in flat.leaves):
        return pack_inline(flat), gift
    return flat, gift
