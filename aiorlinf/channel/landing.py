"""Items on their way to an accelerator.

A tensor that was on an accelerator where it was put comes to one where it is got, as with `recv`; if the consumer names a device, all
tensors of the item come there. The copies run on a stream of ours (`link.staging`), while the loop, and what it prefetched, goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from aiorlinf.link.memory import byte_tensor
from aiorlinf.link.staging import Landing
from aiorlinf.wire.leaves import Device
from aiorlinf.wire.manifest import Limits, Manifest, read_manifest

if TYPE_CHECKING:
    from aiorlinf.work.home import LoopHome

__all__ = ["ANYWHERE", "Wish", "bring_leaves", "bring_value", "leaves_of_small", "tensors_of"]

_ANY_SIZE = Limits(max_manifest_bytes=2**32 - 1, max_message_bytes=2**64 - 1)
_DEEPEST = 8


class Wish(NamedTuple):
    """Where a consumer wants tensors.

    Attributes:
        device: None: to the accelerator that `recv` would bring them to.
        everything: also what was in CPU memory where it was put.
    """

    device: torch.device | None
    everything: bool


ANYWHERE = Wish(None, False)


def leaves_of_small(body: bytes) -> tuple[Manifest, list[torch.Tensor]]:
    """A small message taken apart; the leaves are copies. Raises WireError."""
    manifest, at = read_manifest(memoryview(body), _ANY_SIZE)
    leaves = []
    for spec in manifest.specs:
        end = at + spec.nbytes
        raw = bytearray(body[at:end])
        leaves.append(torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8, device="cpu"))
        at = end
    return manifest, leaves


def bring_leaves(
    home: LoopHome,
    manifest: Manifest,
    leaves: Sequence[torch.Tensor],
    wish: Wish,
    then: Callable[[list[torch.Tensor] | None, Exception | None], None],
) -> bool:
    """Bring the leaves of a message where they are wanted, and call back on the home thread. False: they are there. Home thread only.

    Raises:
        UnsupportedObject: that device cannot be used in this process.
    """
    kinds = [_MOVES if wish.everything and spec.is_tensor else spec.device for spec in manifest.specs]
    landing = Landing(home)
    return landing.bring(leaves, kinds, landing.target(wish.device), then)


_MOVES = Device.OTHER


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Those that `bring_value` finds, each once."""
    found: dict[int, torch.Tensor] = {}
    _walk(value, lambda tensor: found.setdefault(id(tensor), tensor))
    return list(found.values())


def bring_value(
    home: LoopHome,
    value: Any,
    device: torch.device,
    then: Callable[[Any, Exception | None], None],
    only: Sequence[torch.Tensor] | None = None,
) -> bool:
    """As `bring_leaves`, for the tensors in an object of this process: itself, in lists, tuples, dicts and dataclasses, which are made anew
    then; tensors in anything else, and those that are not contiguous, stay where they are.

    Args:
        only: these; None: all.
    """
    tensors = [tensor for tensor in (tensors_of(value) if only is None else only) if tensor.device != device and tensor.is_contiguous()]
    if not tensors:
        return False

    def landed(copies: list[torch.Tensor] | None, error: Exception | None) -> None:
        if copies is None:
            then(None, error)
            return
        with torch.no_grad():
            moved = {
                id(tensor): copy.view(tensor.dtype).reshape(tensor.shape) if tensor.numel() else torch.empty_like(tensor, device=device)
                for tensor, copy in zip(tensors, copies, strict=True)
            }
        then(_walk(value, lambda tensor: moved.get(id(tensor), tensor)), None)

    return Landing(home).bring([byte_tensor(tensor.detach()) for tensor in tensors], [_MOVES] * len(tensors), device, landed)


def _walk(obj: Any, fn: Callable[[torch.Tensor], Any], depth: int = 0) -> Any:
    """The object with each tensor replaced by what the function makes of it; parts in which nothing changes stay the same objects."""
    if isinstance(obj, torch.Tensor):
        return fn(obj)
    if depth == _DEEPEST:
        return obj
    kind = type(obj)
    if kind is list or kind is tuple:
        parts = [_walk(part, fn, depth + 1) for part in obj]
        return obj if all(new is old for new, old in zip(parts, obj, strict=True)) else kind(parts)
    if isinstance(obj, tuple) and hasattr(kind, "_fields"):
        parts = [_walk(part, fn, depth + 1) for part in obj]
        return obj if all(new is old for new, old in zip(parts, obj, strict=True)) else kind(*parts)
    if kind is dict:
        table = {key: _walk(part, fn, depth + 1) for key, part in obj.items()}
        return obj if all(table[key] is obj[key] for key in obj) else table
    if is_dataclass(obj) and not isinstance(obj, type):
        changes = {}
        for each in fields(obj):
            if each.init:
                old = getattr(obj, each.name)
                new = _walk(old, fn, depth + 1)
                if new is not old:
                    changes[each.name] = new
        return replace(obj, **changes) if changes else obj
    return obj
