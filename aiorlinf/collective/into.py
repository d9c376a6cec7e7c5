"""Where a broadcast goes that is received in place: a module, a state dict, a tensor, or a list of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from aiorlinf.collective.devices import filled
from aiorlinf.errors import Mismatch, UsageError
from aiorlinf.link.memory import byte_tensor, copy_bytes
from aiorlinf.link.staging import Ready, ready_now

if TYPE_CHECKING:
    from aiorlinf.work.home import LoopHome

__all__ = ["Pair", "PairAbroad", "Target"]

_COPY_INLINE_BYTES = 1 << 20
_ONLY = ""

Pair = tuple[torch.Tensor, torch.Tensor]
"""A tensor of ours, and what is copied into it."""

PairAbroad = tuple[torch.Tensor, torch.Tensor, Ready]
"""The same for one on an accelerator, and what is to be over there before."""


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
        self._ready: dict[str, Ready] = {}  # of tensors on accelerators: what is to be over before they are written to
        for name, tensor in self._tensors.items():
            if not isinstance(tensor, torch.Tensor) or tensor.is_cpu:
                continue
            if tensor.device.type == "meta":
                raise UsageError(f"into: {name!r} is on device 'meta' and has no memory")
            if not tensor.is_contiguous():
                hint = "receive into a contiguous tensor and copy from it"
                raise UsageError(f"into: {name!r} is on {tensor.device} and not contiguous", hint=hint)
            self._ready[name] = ready_now(tensor)

    async def fill(self, home: LoopHome, value: Any, partial: bool) -> Any:
        """Copy the tensors of `value` over. Large ones in a private thread. Gives `into` itself.

        Args:
            partial: what is not in `value` stays as it is.

        Raises:
            Mismatch: names or shapes differ; nothing was written.
        """
        pairs, abroad = self.match(value, partial)
        return await self.finish(home, pairs, abroad, [])

    async def finish(self, home: LoopHome, pairs: list[Pair], abroad: list[PairAbroad], written: list[torch.Tensor]) -> Any:
        """The second half of `fill`; `written`: of our tensors, those that have been filled already."""
        if sum(source.nbytes for _, source in pairs) <= _COPY_INLINE_BYTES:
            _copy(pairs)
        else:
            await home.submit(_copy, pairs)
        if abroad:
            await filled(home, [(target, _as_bytes(source, target.dtype), ready) for target, source, ready in abroad])
        for target in [*written, *(target for target, _, _ in abroad)]:
            _written(target)
        return self._into

    def match(self, value: Any, partial: bool) -> tuple[list[Pair], list[PairAbroad]]:
        """The first half of `fill`: which tensor is to be copied into which: those of ours in host memory, and those on accelerators."""
        found = _named(value)
        ours = self._tensors
        assert ours is not None
        if found is None:
            raise Mismatch(f"a {type(value).__name__}", f"tensors for a {type(self._into).__name__}")
        unknown = [name for name in found if name not in ours]
        missing = [] if partial else [name for name in ours if name not in found]
        if unknown or missing:
            raise Mismatch(_listed(unknown, "also") or "less", _listed(missing, "also") or "less")
        pairs: list[Pair] = []
        abroad: list[PairAbroad] = []
        for name, source in found.items():
            target = ours[name]
            if not isinstance(source, torch.Tensor) or not isinstance(target, torch.Tensor):
                if source is not target and source != target:
                    raise Mismatch(f"{name} as a {type(source).__name__}", f"{name} as a {type(target).__name__}")
                continue
            if source.shape != target.shape:
                raise Mismatch(f"{name} of shape {list(source.shape)}", f"{name} of shape {list(target.shape)}")
            if target.is_cpu:
                pairs.append((target, source))
            elif source.numel():
                abroad.append((target, source, self._ready[name]))
        return pairs, abroad


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


def _as_bytes(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In host memory."""
    with torch.no_grad():
        return byte_tensor(source if source.dtype is dtype else source.to(dtype))


def _written(target: torch.Tensor) -> None:
    """Autograd, and whoever asks what has changed, must see that the tensor was written to."""
    if not target.is_inference():
        torch.autograd.graph.increment_version(target)


def _copy(pairs: list[Pair]) -> None:
    with torch.no_grad():
        for target, source in pairs:
            if target.dtype is source.dtype and target.is_contiguous():
                copy_bytes(byte_tensor(target), byte_tensor(source))
                _written(target)
            else:
                target.copy_(source)


def _listed(names: list[str], word: str) -> str:
    if not names:
        return ""
    return f"{word} {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
