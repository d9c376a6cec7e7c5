"""What the model sends: objects that take each of the ways a message can go, and that show when and whence they come.

Every tensor is filled with one number, which is another one after each write. So a received tensor tells whether it is torn, and which
of the sender's states it shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

__all__ = ["HEAVY", "INLINE", "OBJECTS", "TENSORS", "THRESHOLD", "WINDOW", "Shape", "fills"]

WINDOW = 1024
INLINE = 64
HEAVY = 500
"""Skeletons from this size on are rebuilt in a private thread, in the model."""
THRESHOLD = 300
"""Of the lanes."""


class Bomb:
    """Can be sent, but not received."""

    def __reduce__(self) -> Any:
        return (int, ("no number",))


Build = Callable[[int], tuple[Any, list[torch.Tensor]]]


@dataclass(frozen=True)
class Shape:
    """One kind of message.

    Attributes:
        build: the object of this number, and its tensors.
        parts: tensors and other parts of a received object.
        tensor: dtype and shape, for `send_tensor`; None for `send`.
        bomb: it cannot be rebuilt.
        heavy: it may be rebuilt, or copied, in a private thread.
    """

    name: str
    build: Build
    parts: Callable[[Any], tuple[list[torch.Tensor], list[Any]]]
    tensor: tuple[torch.dtype, tuple[int, ...]] | None = None
    bomb: bool = False
    heavy: bool = False

    def __repr__(self) -> str:
        return self.name


def fills(tensors: list[torch.Tensor]) -> tuple[int, ...]:
    """The number in each tensor that is not empty; -1 for one that is torn."""
    return tuple(int(tensor.view(-1)[0]) if bool((tensor == tensor.view(-1)[0]).all()) else -1 for tensor in tensors if tensor.numel())


def _full(number: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.full(shape, number * 100, dtype=dtype)


def _note(number: int) -> tuple[Any, list[torch.Tensor]]:
    return {"n": number}, []


def _text(number: int) -> tuple[Any, list[torch.Tensor]]:
    return {"n": number, "text": "x" * (WINDOW + 500)}, []


def _few(number: int) -> tuple[Any, list[torch.Tensor]]:
    tensor = _full(number, 5)
    return {"n": number, "t": tensor}, [tensor]


def _one(number: int) -> tuple[Any, list[torch.Tensor]]:
    tensor = _full(number, 200)
    return tensor, [tensor]


def _big(number: int) -> tuple[Any, list[torch.Tensor]]:
    tensor = _full(number, 900)
    return [tensor], [tensor]


def _leaves(number: int) -> tuple[Any, list[torch.Tensor]]:
    tensors = [_full(number, size) for size in (60, 0, 3, 70, 1)]
    return tuple(tensors), tensors


def _mixed(number: int) -> tuple[Any, list[torch.Tensor]]:
    tensor, other = _full(number, 100), _full(number, 10, 3)
    return {"n": number, "a": tensor, "b": np.full(50, number), "c": bytes([number % 256]) * 100, "d": other}, [tensor, other]


def _heavy(number: int) -> tuple[Any, list[torch.Tensor]]:
    tensor = _full(number, 100)
    return {"n": number, "text": "y" * 600, "t": tensor}, [tensor]


def _bomb(number: int) -> tuple[Any, list[torch.Tensor]]:
    return {"n": number, "bomb": Bomb()}, []


def _big_bomb(number: int) -> tuple[Any, list[torch.Tensor]]:
    tensor = _full(number, 150)
    return [number, Bomb(), tensor], [tensor]


def _parts(obj: Any) -> tuple[list[torch.Tensor], list[Any]]:
    if isinstance(obj, torch.Tensor):
        return [obj], []
    values = list(obj.values()) if isinstance(obj, dict) else list(obj)
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return tensors, [value.tolist() if isinstance(value, np.ndarray) else value for value in values if not isinstance(value, torch.Tensor)]


def _tensor(name: str, *shape: int, dtype: torch.dtype = torch.int32, heavy: bool = False) -> Shape:
    def build(number: int) -> tuple[Any, list[torch.Tensor]]:
        tensor = _full(number, *shape, dtype=dtype)
        return tensor, [tensor]

    return Shape(name, build, _parts, (dtype, shape), heavy=heavy)


OBJECTS = (
    Shape("note", _note, _parts),
    Shape("few", _few, _parts),
    Shape("one", _one, _parts),
    Shape("big", _big, _parts),
    Shape("leaves", _leaves, _parts),
    Shape("mixed", _mixed, _parts),
    Shape("text", _text, _parts),
    Shape("heavy", _heavy, _parts, heavy=True),
    Shape("bomb", _bomb, _parts, bomb=True),
    Shape("big bomb", _big_bomb, _parts, bomb=True),
)

TENSORS = (
    _tensor("tensor", 100),
    _tensor("small tensor", 4),
    _tensor("big tensor", 400, heavy=True),
    _tensor("empty tensor", 0),
    _tensor("other tensor", 100, dtype=torch.float32),
)
