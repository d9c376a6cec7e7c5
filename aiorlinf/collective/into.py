"""Where a broadcast goes that is received in place: a module, a state dict, a tensor, or a list of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from aiorlinf.errors import Mismatch, UsageError
from aiorlinf.link.memory import byte_tensor, copy_bytes

if TYPE_CHECKING:
    from aiorlinf.work.home import LoopHome

__all__ = ["Target"]

_COPY_INLINE_BYTES = 1 << 20
_ONLY = ""


class Target:
    """The tensors that are written to, by name.

    Args:
        into: a `torch.nn.Module` (its parameters and persistent buffers), a mapping of tensors by name, such as a state dict, a tensor, or
            a list of tensors.

    Raises:
        UsageError: it is something else.
    """

    def __init__(self, into: Any) -> None:
        self._into = into
        self._tensors = _named(into)
        if self._tensors is None:
            raise UsageError(
                f"into= is a {type(into).__name__}", hint="give a module, a dict of tensors by name, a tensor or a list of them"
            )
        for name, tensor in self._tensors.items():
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta":
                raise UsageError(f"into: {name!r} is on device 'meta' and has no memory")

    async def fill(self, home: LoopHome, value: Any, partial: bool) -> Any:
        """Copy the tensors of `value` over. Large ones in a private thread. Gives `into` itself.

        Args:
            partial: what is not in `value` stays as it is.

        Raises:
            Mismatch: names or shapes differ; nothing was written.
        """
        pairs = self._pairs(value, partial)
        if sum(source.nbytes for _, source in pairs) <= _COPY_INLINE_BYTES:
            _copy(pairs)
        else:
            await home.submit(_copy, pairs)
        return self._into

    def _pairs(self, value: Any, partial: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
        found = _named(value)
        ours = self._tensors
        assert ours is not None
        if found is None:
            raise Mismatch(f"a {type(value).__name__}", f"tensors for a {type(self._into).__name__}")
        unknown = [name for name in found if name not in ours]
        missing = [] if partial else [name for name in ours if name not in found]
        if unknown or missing:
            raise Mismatch(_listed(unknown, "also") or "less", _listed(missing, "also") or "less")
        pairs = []
        for name, source in found.items():
            target = ours[name]
            if not isinstance(source, torch.Tensor) or not isinstance(target, torch.Tensor):
                if source is not target and source != target:
                    raise Mismatch(f"{name} as a {type(source).__name__}", f"{name} as a {type(target).__name__}")
                continue
            if source.shape != target.shape:
                raise Mismatch(f"{name} of shape {list(source.shape)}", f"{name} of shape {list(target.shape)}")
            pairs.append((target, source))
        return pairs


def _named(value: Any) -> dict[str, Any] | None:
    if isinstance(value, torch.nn.Module):
        return dict(value.state_dict())
    if isinstance(value, torch.Tensor):
        return {_ONLY: value}
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and all(isinstance(each, torch.Tensor) for each in value):
        return {str(index): each for index, each in enumerate(value)}
    return None


def _copy(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for target, source in pairs:
            if target.dtype is source.dtype and target.is_cpu and target.is_contiguous():
                copy_bytes(byte_tensor(target), byte_tensor(source))
                if not target.is_inference():
                    # Autograd, and whoever asks what has changed, must see that the tensor was written to.
                    torch.autograd.graph.increment_version(target)
            else:
                target.copy_(source)


def _listed(names: list[str], word: str) -> str:
    if not names:
        return ""
    return f"{word} {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
