"""Names of workers and of their lives."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import NamedTuple, NewType

from aiorlinf.errors import UsageError

__all__ = ["AddressRange", "Identity", "Incarnation", "WorkerAddress"]

_GROUP = r"([A-Za-z_][A-Za-z0-9_.\-/]{0,63})"
_RANK = r"(0|[1-9][0-9]{0,8})"
_ADDRESS = re.compile(f"{_GROUP}:{_RANK}", re.ASCII)
_RANGE = re.compile(rf"{_GROUP}:(?:\*|{_RANK}(?:-{_RANK})?)", re.ASCII)

_CHECKED = 4096  # texts: programs name the same few peers in each call, and the check is a tenth of what a small message costs

Incarnation = NewType("Incarnation", int)
"""How many lives a worker has had under one address, counted from 1 by the manager."""


class WorkerAddress(str):
    """A worker's address, ``group:rank``. It is a plain string, checked once, so it can key any dict and travel as text.

        >>> address = WorkerAddress("rollout:3")
        >>> address == "rollout:3", address.group, address.rank
        (True, 'rollout', 3)

    Raises:
        UsageError: the text is not of the form ``group:rank``.
    """

    __slots__ = ()

    def __new__(cls, text: str) -> WorkerAddress:
        if type(text) is cls:
            return text
        return _checked(text) if type(text) is str else _check(text)

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


def _check(text: str) -> WorkerAddress:
    if _ADDRESS.fullmatch(str(text)) is None or not issubclass(type(text), str):
        raise UsageError(
            f"{text!r} is not a worker address",
            hint="an address is group:rank, such as 'rollout:0'; the group starts with a letter",
        )
    return str.__new__(WorkerAddress, text)


_checked = functools.lru_cache(_CHECKED)(_check)


class Identity(NamedTuple):
    """One life of one worker."""

    address: WorkerAddress
    incarnation: Incarnation

    def __str__(self) -> str:
        return f"{self.address}#{self.incarnation}"


@dataclass(frozen=True, slots=True)
class AddressRange:
    """Workers of one group: one (``trainer:0``), some in a row (``rollout:0-3``, both ends included) or all (``rollout:*``).

    Attributes:
        group: its name.
        first, last: ranks; `last` is None for all of them.
    """

    group: str
    first: int
    last: int | None

    @classmethod
    def parse(cls, text: str) -> AddressRange:
        """Raises UsageError if the text is no range."""
        match = _RANGE.fullmatch(text)
        if match is None or (match[3] and int(match[3]) < int(match[2])):
            near = _nearest_range(text)
            meant = f"; do you mean {near}?" if near else ""
            raise UsageError(f"{text!r} names no workers{meant} (allowed: group:rank, group:first-last, group:*)")
        group, first, last = match.groups()
        return cls(group, 0, None) if first is None else cls(group, int(first), int(last or first))

    def holds(self, address: WorkerAddress) -> bool:
        """Whether this worker is one of them."""
        return address.group == self.group and self.first <= address.rank and (self.last is None or address.rank <= self.last)

    def overlaps(self, other: AddressRange) -> bool:
        """Whether some worker is in both."""
        if self.group != other.group:
            return False
        return (self.last is None or other.first <= self.last) and (other.last is None or self.first <= other.last)

    def __str__(self) -> str:
        ranks = "*" if self.last is None else f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"
        return f"{self.group}:{ranks}"


def _nearest_range(text: str) -> str | None:
    """The range that was meant by `rollout`, `rollout:0..3`, `rollout[0-3]` and the like."""
    match = re.match(rf"\W*{_GROUP}", text, re.ASCII)
    if match is None:
        return None
    ranks = re.findall(r"\d+|\*", text[match.end() :]) or ["*"]
    if "*" in ranks:
        return f"{match[1]}:*"
    return f"{match[1]}:{'-'.join(map(str, sorted(int(rank) for rank in ranks[:2])))}"
