"""Which tensors of a state have been written to since it was sent last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["ALWAYS_BYTES", "Changes"]

ALWAYS_BYTES = 16 * 1024
"""Tensors up to this size are always sent."""


class Changes:
    """Remembers what was sent, by name.

    A tensor counts as unchanged if it lies where it lay, in the same form, and its version counter says that no operation of torch has
    written to it. What is written past the counters (``tensor.data``, NumPy) goes unnoticed. Small tensors always count as changed: batch
    normalisation, for one, writes its running statistics past the counters.
    """

    def __init__(self) -> None:
        # The tensors themselves are kept: their memory cannot become that of others, which would look unchanged.
        self._sent: dict[str, tuple[torch.Tensor, int]] = {}

    def since(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The entries that have changed, or are new, or are no tensors."""
        return {name: value for name, value in state.items() if not self._unchanged(name, value)}

    def _unchanged(self, name: str, value: Any) -> bool:
        sent = self._sent.get(name)
        if sent is None or not isinstance(value, torch.Tensor) or value.is_inference() or value.nbytes <= ALWAYS_BYTES:
            return False
        tensor, version = sent
        return (
            tensor.data_ptr() == value.data_ptr()
            and tensor.dtype is value.dtype
            and tensor.shape == value.shape
            and tensor.stride() == value.stride()
            and value._version == version
        )

    def note(self, state: Mapping[str, Any]) -> dict[str, tuple[torch.Tensor, int]]:
        """What there is to remember of this state as it is now."""
        return {
            name: (value, value._version) for name, value in state.items() if isinstance(value, torch.Tensor) and not value.is_inference()
        }

    def remember(self, noted: dict[str, tuple[torch.Tensor, int]]) -> None:
        """It was sent, and all have it."""
        self._sent = noted

    def clear(self) -> None:
        """Somebody does not have it: everything has changed."""
        self._sent = {}
