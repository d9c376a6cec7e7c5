"""What rollouts and trainers send each other, as far as compressing it is a question. Each is made anew from a seed: both sides have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from scripts.benchmarks import codecs

__all__ = ["FRAME_BYTES", "PAYLOADS", "check_payload", "make_payload", "payload_bytes"]

FRAME_BYTES: Final = 210 * 160 * 3
_SEED: Final = 20


def _frames(nbytes: int) -> dict[str, torch.Tensor]:
    return {"frames": codecs.frames(nbytes)}


def _tokens(nbytes: int) -> dict[str, torch.Tensor]:
    ids = codecs.token_ids(nbytes * 8 // 9)
    return {"ids": ids, "mask": ids != 0}


def _masks(nbytes: int) -> dict[str, torch.Tensor]:
    return {"masks": codecs.masks(nbytes)}


def _weights(nbytes: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    each = nbytes // dtype.itemsize // 8
    return {f"layer.{index}.weight": (torch.randn(each) * 0.02).to(dtype) for index in range(8)}


def _random(nbytes: int) -> dict[str, torch.Tensor]:
    return {"bytes": torch.randint(0, 256, (nbytes,), dtype=torch.uint8)}


PAYLOADS: Final[dict[str, tuple[str, Callable[[int], dict[str, torch.Tensor]]]]] = {
    "frames": ("Atari frames, uint8", _frames),
    "token_ids": ("token ids, int64, with their mask", _tokens),
    "masks": ("masks, bool", _masks),
    "float32": ("weights, float32: excluded by default", lambda nbytes: _weights(nbytes, torch.float32)),
    "bfloat16": ("weights, bfloat16", lambda nbytes: _weights(nbytes, torch.bfloat16)),
    "random": ("random bytes, uint8", _random),
}
"""Name to what it is, and what makes about so many bytes of it."""


def make_payload(name: str, nbytes: int) -> dict[str, torch.Tensor]:
    """The message of this name: the same one each time, in whatever process."""
    torch.manual_seed(_SEED)
    return PAYLOADS[name][1](nbytes)


def payload_bytes(payload: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in payload.values())


def check_payload(got: Any, made: dict[str, torch.Tensor]) -> None:
    """Raise unless ``got`` is ``made``, bit by bit."""
    if not isinstance(got, dict) or list(got) != list(made):
        raise AssertionError(f"another object arrived: {type(got)}")
    for name, tensor in made.items():
        if got[name].dtype != tensor.dtype or not torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8)):
            raise AssertionError(f"{name} is not what was sent")
