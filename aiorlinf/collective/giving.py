"""Tensors made with `comm.empty` are given away by the send that takes them.

They lie in shared memory already, so nothing is copied: the receiver gets the very memory. A handle here that could still write to it
would change what the receiver has; so from the call of `send` on the handle is empty (no elements), and sending it again is an error.
This holds whatever the size and whichever way the message goes. What counts as the handle: the tensor that `empty` returned, and a
`Parameter` made of it. Views of it (slices, `view`, `detach`, NumPy arrays) are not: they are sent like any tensor, by copy, and where
one is still there when the handle is sent, the payload is copied instead of given, so that the view goes on showing memory of its own.

A send that fails or is cancelled gives the memory back to the handle, unless the peer may have it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from aiorlinf.errors import UnsupportedObject, UsageError
from aiorlinf.link.host_memory import GivenLeaf, Root
from aiorlinf.link.outgoing import GIVEN_AWAY, Kept, Outgoing
from aiorlinf.wire.flat import Flat, Kind
from aiorlinf.wire.inline import pack_inline, tensor_manifest
from aiorlinf.wire.leaves import Device, Leaf, known_spec
from aiorlinf.wire.tree import flatten
from aiorlinf.work.base import AsyncWork

if TYPE_CHECKING:
    from aiorlinf.backends.shm.arena import Region
    from aiorlinf.link.host_memory import HostMemory, Made
    from aiorlinf.work.home import LoopHome

__all__ = ["Gift", "encode_giving", "give_one"]


class Gift:
    """The tensors of one message that are given away by it. Any thread."""

    def __init__(self, memory: HostMemory, given: list[tuple[int, Leaf, Made]]) -> None:
        self._memory = memory
        self._given = given

    @classmethod
    def of(cls, memory: HostMemory, leaves: Sequence[Leaf]) -> Gift | None:
        """What these leaves give away, None if nothing.

        Raises:
            UsageError: one was given away before.
        """
        given = []
        for index, leaf in enumerate(leaves):
            tensor = leaf.tensor
            if tensor is None:
                continue
            if leaf.nbytes:
                made = memory.made(tensor)
                if made is not None:
                    given.append((index, leaf, made))
            elif hasattr(tensor, GIVEN_AWAY):
                raise UsageError("the tensor was given away by an earlier send", hint="a tensor made with comm.empty can be sent once")
        return cls(memory, given) if given else None

    def give(self, out: Outgoing) -> None:
        """Empty the handles: the message is accepted."""
        moved: list[tuple[torch.Tensor, Kept]] = []
        owned: dict[int, Region] = {}
        for index, leaf, made in self._given:
            tensor = leaf.tensor
            assert tensor is not None
            root = Root(self._memory, made, leaf.spec)
            if tensor.requires_grad or torch.is_inference_mode_enabled():
                with torch.inference_mode(False), torch.no_grad():
                    memory = _empty(tensor, root)
            else:
                memory = _empty(tensor, root)
            setattr(tensor, GIVEN_AWAY, True)
            moved.append((tensor, root if memory is None else memory))
            if out.flat is None:
                continue  # its bytes have been copied already
            if memory is None:
                owned[index] = made.region
                out.flat.leaves[index] = GivenLeaf(leaf.spec, root)
            else:
                out.flat.leaves[index] = Leaf(leaf.spec, memory, memory, None)
        out.moved = moved
        out.owned = owned
        if out.flat is not None:
            out.versions = out.flat.versions()  # emptying the handles counted as a write


def _empty(tensor: torch.Tensor, root: Root) -> torch.Tensor | None:
    """Empty a handle; None if nobody looks at its memory now, else another handle on that."""
    tensor.set_()  # type: ignore[call-overload]  # the stubs miss the form without arguments
    if root.alone:
        return None
    # A detached tensor shares its version counter with the views, so that writing to one during the copy is noticed.
    tensor.set_(root.tensor())  # type: ignore[call-overload]
    memory = tensor.detach()
    tensor.set_()  # type: ignore[call-overload]
    return memory


def give_one(
    home: LoopHome, memory: HostMemory, tensor: torch.Tensor, key: int, abort: Callable[[AsyncWork[None]], None], least: int, most: int
) -> Outgoing | None:
    """A message that is one tensor made with `empty`, of `least` to `most` bytes, taken from its handle: the common case of `Gift`, and of
    all that has to be asked of other objects. None: it is no such tensor, or there is something about it; nothing was done."""
    made = memory.made(tensor)
    if made is None or tensor.requires_grad or torch.is_inference_mode_enabled():
        return None
    spec = known_spec(tensor)
    if spec is None or not least <= spec.nbytes <= most:
        return None
    root = Root(memory, made, spec)
    shown = _empty(tensor, root)
    setattr(tensor, GIVEN_AWAY, True)
    leaf = GivenLeaf(spec, root) if shown is None else Leaf(spec, shown, shown, None)
    flat = Flat(Kind.TENSOR, (), [leaf])
    work: AsyncWork[None] = AsyncWork(home, "send", abort=abort)
    out = Outgoing(work, key, flat=flat, manifest=tensor_manifest(spec), total=spec.nbytes)
    out.moved = [(tensor, root if shown is None else shown)]
    if shown is None:
        out.owned = {0: made.region}
    else:
        flat.hold()
    return out


def encode_giving(obj: Any, memory: HostMemory, limit: int, allow_pickle: bool) -> tuple[bytes | Flat, Gift | None]:
    """As `encode_inline`, and what the message gives away."""
    flat = flatten(obj, allow_pickle=allow_pickle)
    gift = Gift.of(memory, flat.leaves)
    if flat.payload_bytes <= limit and all(leaf.spec.device is Device.CPU for leaf in flat.leaves):
        try:
            return pack_inline(flat), gift
        except UnsupportedObject:  # the manifest is too large for that
            pass
    return flat, gift
