"""What was sent, what arrived, what was done to whom and when; and what of it may not be. Pure: it is told the times."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import Literal

from scripts.chaoses.messages import Head, Stream

__all__ = ["Ledger", "Lives", "Outcome"]

SLACK_S = 4.0
"""How much later than its cause something may be seen, on a machine that is short of time."""

Outcome = Literal["done", "failed", "cancelled"]


@dataclass
class Span:
    """A worker's life, as its process told.

    Attributes:
        life: its number.
        began, ended: when it had joined; when its end began (infinite while it lives).
    """

    life: int
    began: float
    ended: float = math.inf


class Lives:
    """Who lived when, and whose links were cut when."""

    def __init__(self) -> None:
        self._spans: dict[str, list[Span]] = defaultdict(list)
        self._cuts: dict[frozenset[str], list[float]] = defaultdict(list)

    def joined(self, address: str, life: int, when: float) -> None:
        """A worker has joined."""
        self._spans[address].append(Span(life, when))

    def ends(self, address: str, when: float) -> None:
        """What ends its present life is done to it now, if it has one."""
        spans = self._spans[address]
        if spans:
            spans[-1].ended = min(spans[-1].ended, when)

    def cut(self, one: str, other: str, when: float) -> None:
        """The link of two workers was cut, and ended by that. A cut after which it goes on is none: that must not be felt."""
        self._cuts[frozenset((one, other))].append(when)

    def life_at(self, address: str, when: float) -> Span | None:
        """The life that it had then."""
        return next((span for span in reversed(self._spans[address]) if span.began <= when < span.ended), None)

    def present(self, address: str) -> Span | None:
        """The life that it has."""
        spans = self._spans[address]
        return spans[-1] if spans and spans[-1].ended == math.inf else None

    def steady(self, address: str, begin: float, end: float) -> bool:
        """It lived one life all that time, and a while before and after."""
        span = self.life_at(address, begin)
        return span is not None and span.began <= begin - SLACK_S and span.ended >= end + SLACK_S

    def cut_between(self, one: str, other: str, begin: float, end: float) -> bool:
        """Their link was cut in that time, or shortly before or after."""
        return any(begin - SLACK_S <= when <= end + SLACK_S for when in self._cuts[frozenset((one, other))])

    def forget_before(self, when: float) -> None:
        """Nothing that was before will be asked for."""
        for cuts in self._cuts.values():
            cuts[:] = [each for each in cuts if each >= when]
        for spans in self._spans.values():
            spans[:] = [span for span in spans if span.ended >= when]


@dataclass
class Sent:
    """One message on its way."""

    begun: float
    over: float = math.inf
    outcome: Outcome | None = None
    received: bool = False


@dataclass
class Items:
    """What went through one channel."""

    put: dict[str, Outcome | None] = field(default_factory=dict)
    over: dict[str, float] = field(default_factory=dict)
    got: Counter[str] = field(default_factory=Counter)


class Ledger:
    """See the module.

    Attributes:
        lives: of the workers.
        counts: for people.
        wrong: what may not be, in words.
    """

    def __init__(self) -> None:
        self.lives = Lives()
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._sent: dict[Head, Sent] = {}
        self._early: set[Head] = set()  # arrived, and its sender has not told yet that it was sent
        self._items: dict[str, Items] = defaultdict(Items)
        self._losable: Counter[str] = Counter()
        self._gone: set[str] = set()
        self._failed: deque[tuple[Head, Sent, str]] = deque()

    # ---- messages

    def sends(self, head: Head, when: float) -> None:
        """It begins."""
        self._sent[head] = Sent(when, received=head in self._early)
        self._early.discard(head)

    def sent(self, head: Head, when: float, outcome: Outcome, error: str = "") -> None:
        """It is over for its sender."""
        entry = self._sent.get(head)
        if entry is None:
            return
        self.counts[f"sends {outcome}"] += 1
        entry.outcome, entry.over = outcome, when
        if outcome == "failed":
            self._failed.append((head, entry, error))
        self._settle(head, entry)

    def judge(self, now: float) -> None:
        """Look at what has failed some time ago: by now all has been told that could be the reason."""
        while self._failed and self._failed[0][1].over < now - SLACK_S:
            head, entry, error = self._failed.popleft()
            if self._unexplained(head.stream, entry):
                self.wrong.append(f"{_name(head)} failed, and nothing was done to either or to their link: {error}")

    def received(self, head: Head) -> None:
        """It is with its receiver."""
        self.counts["received"] += 1
        entry = self._sent.get(head)
        if entry is None:
            self._early.add(head)
            return
        entry.received = True
        self._settle(head, entry)

    def _settle(self, head: Head, entry: Sent) -> None:
        if entry.outcome is not None and (entry.received or entry.outcome != "done"):
            if entry.received and entry.outcome == "failed":
                self.counts["received although the send failed"] += 1
            del self._sent[head]

    def _unexplained(self, stream: Stream, entry: Sent) -> bool:
        lives = self.lives
        return (
            lives.steady(stream.receiver, entry.begun, entry.over)
            and lives.steady(stream.sender, entry.begun, entry.over)
            and not lives.cut_between(stream.sender, stream.receiver, entry.begun, entry.over)
        )

    def all_at_rest(self, now: float) -> None:
        """Nobody sends, and all that was under way has come to its end: what is missing?"""
        lives = self.lives
        lost: Counter[tuple[str, str]] = Counter()
        for head, entry in list(self._sent.items()):
            stream = head.stream
            sender, receiver = lives.present(stream.sender), lives.present(stream.receiver)
            if sender is None or sender.life != stream.life or receiver is None or receiver.began > entry.begun - SLACK_S:
                del self._sent[head]  # one of the two has gone since
                continue
            if entry.outcome is None:
                self.wrong.append(f"{_name(head)} is not over, {now - entry.begun:.1f} s after it began")
            elif not lives.cut_between(stream.sender, stream.receiver, entry.begun, now):
                lost[f"{stream.sender}#{stream.life}", f"{stream.receiver}#{receiver.life} tag {stream.tag}"] += 1
                if lost.total() <= 5:
                    self.wrong.append(f"{_name(head)} was done, and has not arrived")
            else:
                self.counts["lost with a link that was cut"] += 1
            del self._sent[head]
        for (sender_name, receiver_name), count in lost.items():
            self.wrong.append(f"{count} messages of {sender_name} to {receiver_name} are lost")
        self._early.clear()

    # ---- channels

    def _cut_off(self, item: str, channel: str, when: float) -> bool:
        """Who put it could not tell the channel any more that he had thought better of it."""
        producer = item.partition("#")[0]
        lives = self.lives
        return lives.cut_between(producer, f"channel.{channel}:0", when, when) or not lives.steady(producer, when, when)

    def puts(self, channel: str, item: str) -> None:
        """A put begins."""
        self._items[channel].put.setdefault(item, None)

    def was_put(self, channel: str, item: str, outcome: Outcome, when: float) -> None:
        """The put is over."""
        self.counts[f"puts {outcome}"] += 1
        self._items[channel].put[item] = outcome
        self._items[channel].over[item] = when

    def got(self, channel: str, item: str) -> None:
        """Somebody has it, or is done with it."""
        self.counts["gets"] += 1
        self._items[channel].got[item] += 1

    def may_lose(self, channel: str, items: int) -> None:
        """A consumer that takes without leases was killed or cut off: so many of its items may be gone."""
        self._losable[channel] += items

    def channel_lost(self, channel: str) -> None:
        """It is gone with all that was in it."""
        self._gone.add(channel)

    def drained(self, channel: str, *, leased: bool) -> None:
        """Nothing is in it, and nobody puts or gets: what is missing, what came twice?"""
        items = self._items.pop(channel, Items())
        for item, count in items.got.items():
            outcome = items.put.get(item, "unknown")
            if outcome == "cancelled" and self._cut_off(item, channel, items.over[item]):
                self.counts["cancelled puts that happened, for the link was cut before the word of it"] += 1
            elif outcome == "cancelled":
                self.wrong.append(f"{channel}: {item} was got, although its put was cancelled")
            if count > 1 and not leased:
                self.wrong.append(f"{channel}: {item} came {count} times")
            elif count > 1:
                self.counts["leased again"] += count - 1
        missing = [item for item, outcome in items.put.items() if outcome == "done" and not items.got[item]]
        losable = self._losable.pop(channel, 0)
        allowed = len(missing) if channel in self._gone else 0 if leased else losable
        self._gone.discard(channel)
        if len(missing) > allowed:
            self.wrong.append(f"{channel}: {len(missing)} items are lost ({allowed} may be): {', '.join(missing[:5])}")
        self.counts["items lost with a consumer or the channel"] += min(len(missing), allowed)


def _name(head: Head) -> str:
    stream = head.stream
    return f"message {head.number} of {stream.sender}#{stream.life} to {stream.receiver} (tag {stream.tag})"
