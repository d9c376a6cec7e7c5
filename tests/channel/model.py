"""What a channel without a policy should do, in the plainest words: lists that are looked through from the beginning after each event."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["MGet", "MItem", "Model"]


@dataclass
class MItem:
    seq: int
    key: Any
    weight: float
    nbytes: int
    number: int


@dataclass
class MGet:
    number: int
    key: Any
    target: float | None
    lease: bool


@dataclass
class Model:
    maxsize: int
    max_bytes: int | None
    puts: list[MItem] = field(default_factory=list)  # wait for room
    uncommitted: list[MItem] = field(default_factory=list)
    items: list[MItem] = field(default_factory=list)
    gets: list[MGet] = field(default_factory=list)
    held: dict[int, list[MItem]] = field(default_factory=dict)  # by number of the get: handed out, and its bytes count
    gone: dict[int, list[MItem]] = field(default_factory=dict)  # and taken
    outcome: dict[int, Any] = field(default_factory=dict)
    next_seq: int = 1
    pressing: bool = False  # a put that does not wait has just been refused

    def room(self, nbytes: int) -> bool:
        here = [*self.items, *self.uncommitted]
        used = sum(item.nbytes for item in here) + sum(item.nbytes for items in self.held.values() for item in items)
        if self.maxsize and len(here) >= self.maxsize:
            return False
        return self.max_bytes is None or not used or used + nbytes <= self.max_bytes

    def settle(self, on_admit: Any = None) -> None:
        """Admit and serve until nothing moves."""
        moving = True
        while moving:
            moving = False
            if self.puts and self.room(self.puts[0].nbytes):
                item = self.puts.pop(0)
                item.seq = self.next_seq
                self.next_seq += 1
                self.uncommitted.append(item)
                moving = True
                continue
            for key in {get.key for get in self.gets}:
                get = next(get for get in self.gets if get.key == key)
                batch = self.batch(get)
                if batch:
                    self.gets.remove(get)
                    for item in batch:
                        self.items.remove(item)
                    self.held[get.number] = batch
                    self.outcome[get.number] = [item.number for item in batch]
                    moving = True
                    break

    def batch(self, get: MGet) -> list[MItem]:
        lane = sorted((item for item in self.items if item.key == get.key), key=lambda item: item.seq)
        if get.target is None:
            return lane[:1]
        taken: list[MItem] = []
        total = 0.0
        for item in lane:
            if taken and total + item.weight > get.target:
                return taken
            taken.append(item)
            total += item.weight
            if total >= get.target:
                return taken
        return taken if self.puts or self.pressing else []
