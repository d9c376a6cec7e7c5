"""Collectives in which every part has one sender and one receiver: gather and all-to-all.

Each part travels straight to its receiver. It crosses every boundary once that way, which nothing can improve on; only the order matters:
in each round of an all-to-all every member sends to one and receives from one, so that no member has all others talk to it at once.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Transfer", "plan_all_to_all", "plan_gather"]


class Transfer(NamedTuple):
    """One part on its way.

    Attributes:
        round: transfers of one round can happen at the same time.
        source, target: ranks.
    """

    round: int
    source: int
    target: int


def plan_gather(size: int, root: int) -> list[Transfer]:
    """Everybody's part to the root."""
    return [Transfer(1, member, root) for member in range(size) if member != root]


def plan_all_to_all(size: int) -> list[Transfer]:
    """A part from everybody to everybody else: in round `r` member `i` sends to member `i + r`."""
    return [Transfer(shift, member, (member + shift) % size) for shift in range(1, size) for member in range(size)]
