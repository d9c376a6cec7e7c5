"""Names of workers and of their lives."""

from __future__ import annotations

import re
from typing import NamedTuple, NewType

from aiorlinf.errors import UsageError

__all__ = ["Identity", "Incarnation", "WorkerAddress"]

_ADDRESS = re.compile(r"([A-Za-z_][A-Za-z0-9_.\-/]{0,63}):(0|[1-9][0-9]{0,8})", re.ASCII)

Incarnation = NewType("Incarnation", int)
"""How many lives a worker has had under one address, counted from 1 by the manager."""


class WorkerAddress(str):
    """A worker's address, ``group:rank``. It is a plain string, checked once, so it can key any dict and travel as text.

    Raises:
        UsageError: the text is not of the form ``group:rank``.
    """

    __slots__ = ()

    def __new__(cls, text: str) -> WorkerAddress:
        if type(text) is cls:
            return text
        if _ADDRESS.fullmatch(str(text)) is None or not issubclass(type(text), str):
            raise UsageError(
                f"{text!r} is not a worker address",
                hint="an address is group:rank, such as 'rollout:0'; the group starts with a letter",
            )
        return super().__new__(cls, text)

    @property
    def group(self) -> str:
        """The part before the colon."""
        return self.rpartition(":")[0]

    @property
    def rank(self) -> int:
        """The number after the colon."""
        return int(self.rpartition(":")[2])

    @property
    def sort_key(self) -> tuple[str, int]:
        """Orders ``a:2`` before ``a:10``."""
        return (self.group, self.rank)


class Identity(NamedTuple):
    """One life of one worker."""

    address: WorkerAddress
    incarnation: Incarnation

    def __str__(self) -> str:
        return f"{self.address}#{self.incarnation}"
