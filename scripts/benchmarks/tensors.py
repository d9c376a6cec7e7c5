"""Tensors to send, and what every contender does to a tensor's bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

import torch

from scripts.benchmarks.contender import SMALL_DICT, Effort

__all__ = [
    "STREAM_BYTES",
    "both_rates",
    "byte_view",
    "check_bulk",
    "check_kept",
    "check_nested",
    "check_small_dict",
    "check_stream",
    "copied_bytes",
    "made_from",
    "make_bulk",
    "make_nested",
    "make_stream",
    "nested_tensors",
]

STREAM_ELEMENTS: Final = 64
STREAM_BYTES: Final = STREAM_ELEMENTS * 4
NESTED_TENSORS: Final = 10
_DISTINCT: Final = 16


def make_bulk(nbytes: int) -> torch.Tensor:
    """A float32 tensor whose content shows shifted or missing parts."""
    return torch.arange(nbytes // 4, dtype=torch.float32)


def check_bulk(tensor: torch.Tensor, nbytes: int) -> None:
    """Raise unless ``tensor`` is what ``make_bulk`` made."""
    if not torch.equal(tensor.view(torch.float32), make_bulk(nbytes)):
        raise AssertionError("the tensor that arrived is not the one that was sent")


def check_small_dict(back: Any) -> None:
    """Raise unless ``back`` is the small dict."""
    if back != SMALL_DICT:
        raise AssertionError("another object came back")


def check_kept(kept: Sequence[torch.Tensor], messages: int) -> None:
    """Raise unless ``kept`` are the last of that many messages, each with its number in its first element."""
    if [int(tensor[0]) for tensor in kept] != list(range(messages - len(kept), messages)):
        raise AssertionError("a tensor that was kept has changed")


def make_stream(elements: int = STREAM_ELEMENTS) -> list[torch.Tensor]:
    """The few distinct small tensors that a stream of messages cycles through."""
    return [torch.arange(elements, dtype=torch.float32) + index for index in range(_DISTINCT)]


def check_stream(tensor: torch.Tensor, index: int, elements: int = STREAM_ELEMENTS) -> None:
    """Raise unless ``tensor`` is the one that message ``index`` carried."""
    if tensor.dtype != torch.float32 or tensor.tolist() != [float(index % _DISTINCT + i) for i in range(elements)]:
        raise AssertionError(f"message {index} does not hold what was sent")


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The tensor's own memory as flat bytes, without a copy."""
    view: memoryview = tensor.numpy().data
    return view.cast("B")


def copied_bytes(tensor: torch.Tensor) -> bytes:
    """The tensor's bytes in memory of their own: what has to happen before ``send`` may return."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def made_from(data: bytes | memoryview) -> torch.Tensor:
    """A writable float32 tensor that owns a copy of ``data``."""
    return torch.frombuffer(bytearray(data), dtype=torch.float32)


def make_nested(nbytes: int) -> dict[str, Any]:
    """What a trainer sends: ten tensors that are ``nbytes`` together, and what belongs to them."""
    each = nbytes // NESTED_TENSORS
    tensors = [make_bulk(each) + index for index in range(NESTED_TENSORS)]
    return {
        "version": 17,
        "name": "policy",
        "layers": {f"layer.{index}.weight": tensor for index, tensor in enumerate(tensors[:8])},
        "state": [{"step": 4000, "lr": 3e-4, "tensor": tensor} for tensor in tensors[8:]],
        "metrics": {"loss": 0.25, "lengths": [3, 1, 4, 1, 5], "done": False, "note": None},
    }


def nested_tensors(nested: dict[str, Any]) -> list[torch.Tensor]:
    """The ten tensors of what ``make_nested`` made."""
    return [*nested["layers"].values(), *(part["tensor"] for part in nested["state"])]


def check_nested(nested: dict[str, Any], nbytes: int) -> None:
    """Raise unless ``nested`` is what ``make_nested`` made."""
    made = make_nested(nbytes)
    whole = all(torch.equal(*pair) for pair in zip(nested_tensors(nested), nested_tensors(made), strict=True))
    if not whole or (nested["metrics"], nested["name"], nested["state"][0]["lr"]) != (made["metrics"], "policy", 3e-4):
        raise AssertionError("the object that arrived is not the one that was sent")


def both_rates(effort: Effort, took: float) -> float:
    """GB/s of both directions together, when each passed the effort's messages within ``took`` seconds."""
    return 2 * effort.both_ways_messages * effort.both_ways_bytes / took / 1e9
