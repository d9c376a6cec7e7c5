"""The type of a channel's items, for type checkers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    T = TypeVar("T", default=Any)
else:  # Python's own has a default from 3.13 on
    from typing import TypeVar

    T = TypeVar("T")

__all__ = ["T"]
