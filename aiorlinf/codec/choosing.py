"""``codec: auto``: which codec, if any, is the quickest for what one link carries. Pure: no clock, no threads.

Messages are told apart by kind (their dtypes, and roughly their size and how much smaller they get). For each kind every choice has a
cost, in seconds per byte:

- at first a prediction. Samples of real messages tell each codec's ratio and rates, messages that went as they are tell the link's rate,
  and sending is as quick as the slowest of compressing, the link and decompressing, for they overlap.
- then what was measured: the time from the moment a message began to be sent, or the one before it was over, until the peer had all of
  it; the best of the last few. So what a prediction leaves out (threads, other work on either machine) is in it. One measurement alone
  counts half, with the prediction. What it shows of one codec is expected of the others.

The cheapest is taken; another one has to be clearly cheaper than the one in use. What was used twice is known; what was not is tried even
if it should be a little dearer, for two messages can lose but little and all later ones may gain. The very first message finds cold
caches and a connection that is still gathering speed: sending as it is gets another chance if that could be all that spoke against it.
So does a codec, whose first use has to make its contexts, buffers and threads.
The world changes: measurements expire, samples are taken again now and then (and if the data has changed,
measurements of the kind are forgotten), and from time to time, when that costs little, a message goes as it is to see whether the link
has become quicker, which compressed messages cannot show as long as the codec is what they wait for.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiorlinf.codec.trial import Measured

__all__ = ["RAW", "Choice", "Chooser"]

RAW = "raw"
"""As it is."""

PROBE_BYTES = 16 * 1024 * 1024
"""A message of at most so many bytes may be the first of a link to be sent as it is, only to learn how quick the link is."""

_LARGE_BYTES = 256 * 1024
"""Smaller messages wait for the answer more than for the link: they tell little of its rate."""

_KINDS = 64
_REMEMBERED = 3
_EXPIRES_S = 30.0
_EXPIRES_MESSAGES = 100
"""What was measured is used until both have passed: to try everything again must stay a small part of all that is sent."""

_SAMPLE_AGAIN_S = 10.0
_SAMPLE_AGAIN_MESSAGES = (10, 200)
"""Not before so many, and after so many in any case."""
_WORTH_A_TRY = 1.01
"""A codec that makes samples less than so many times smaller can only be slower."""

_OTHER_RATIO = 1.25
_CLEARLY = 0.93
_PROBE_AGAIN_S = 20.0
_PROBE_SHARE = 0.02
_FIRST_PROBE_SHARE = 0.1
"""Of the time since the last probe, or since the beginning; so much may the next one cost."""

_SURE = 2
"""Measurements after which something is known."""
_HOPE = 0.8
"""What may come out of a first try, as a share of what is expected."""
_SECOND_HOPE = 0.5
"""What may come out of a second try, as a share of the first, which has to make contexts, buffers and threads."""
_COLD_S = 0.05
_COLD_SHARE = 0.8
"""So much of a link's very first message, but not more than this share of it, may be due to its being the first."""

_PIPELINED_BYTES = 2 * 1024 * 1024
"""Smaller messages are compressed, sent and decompressed one after the other."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What to do with one message.

    Attributes:
        label: of the codec, or `RAW`.
        sample: samples of it are wanted (`Chooser.sampled`).
    """

    label: str
    sample: bool


@dataclass
class _Kind:
    """What is known of one kind of message."""

    measured: Mapping[str, Measured] | None = None
    observed: dict[str, deque[tuple[float, int, float]]] = field(default_factory=dict)  # when, at which message, seconds per byte
    sampling: bool = False
    sampled_at: tuple[float, int] = (0.0, 0)  # when, at which message
    messages: int = 0
    choice: str | None = None
    settled: str | None = None  # the last choice among what is known
    why: str = "nothing is known yet"

    def observe(self, label: str, cost: float, now: float) -> None:
        """It has cost so much."""
        self.observed.setdefault(label, deque(maxlen=_REMEMBERED)).append((now, self.messages, cost))

    def costs(self, label: str, now: float) -> list[float]:
        """What was measured lately."""
        return [
            cost
            for when, message, cost in self.observed.get(label, ())
            if now - when < _EXPIRES_S or self.messages - message < _EXPIRES_MESSAGES
        ]

    def wants_sample(self, now: float) -> bool:
        """It is time to look at what such messages hold."""
        when, message = self.sampled_at
        few, many = _SAMPLE_AGAIN_MESSAGES
        since = self.messages - message
        return not self.sampling and (self.measured is None or since > many or (since > few and now - when > _SAMPLE_AGAIN_S))


class Chooser:
    """See the module. One per link and direction. Times are in seconds, of any one clock.

    Args:
        labels: of the codecs, the cheapest first.
        threads: that compress, and that decompress.
    """

    def __init__(self, labels: Sequence[str], *, threads: int) -> None:
        self._labels = list(labels)
        self._threads = threads
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()
        self._rates: deque[float] = deque(maxlen=_REMEMBERED)
        self._seen_rate = 0.0
        self._small_rate: float | None = None
        self._last_end = 0.0
        self._probed_at: float | None = None
        self._probing = False

    def patience(self, nbytes: int = _LARGE_BYTES) -> float:
        """Seconds of one core per byte at which a codec can no more pay."""
        rate = self.rate(nbytes)
        return math.inf if rate is None else 2 * self._threads / rate

    def rate(self, nbytes: int = _LARGE_BYTES) -> float | None:
        """Bytes per second that the link carries of messages of this size; None: not known."""
        known = max(max(self._rates, default=0.0), self._seen_rate) or None
        return known if known is not None or nbytes >= _LARGE_BYTES else self._small_rate

    # ---- before

    def choose(self, key: Hashable, nbytes: int, now: float) -> Choice:
        """For a message of this kind that begins to be sent."""
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind()
            if len(self._kinds) > _KINDS:
                self._kinds.popitem(last=False)
        self._kinds.move_to_end(key)
        kind.messages += 1
        if self._probed_at is None:
            self._probed_at = now
        label = self._choose(kind, nbytes, now)
        sample = kind.wants_sample(now)
        kind.sampling |= sample
        return Choice(label, sample)

    def _choose(self, kind: _Kind, nbytes: int, now: float) -> str:
        rate = self.rate(nbytes)
        if rate is None:
            if nbytes <= PROBE_BYTES and not self._probing:
                self._probing = True
                kind.choice, kind.why = RAW, "to learn how quick the link is"
                return RAW
            kind.choice, kind.why = self._labels[0], "the quickest codec, until the link's rate is known"
            return self._labels[0]
        if kind.measured is None:
            kind.choice, kind.why = kind.choice or RAW, "until its first samples are looked at"
            return kind.choice
        factor = self._factor(kind, nbytes, rate, now)
        able = [label for label, found in kind.measured.items() if found.ratio >= _WORTH_A_TRY]
        tries = {label: len(kind.costs(label, now)) for label in (RAW, *able)}
        costs = {label: self._cost(kind, label, nbytes, rate, factor, now) for label in tries}
        hopes = {label: self._hope(kind, label, nbytes, rate, cost, now) for label, cost in costs.items()}
        best = min(hopes, key=hopes.__getitem__)
        if tries[best] >= _SURE:
            if kind.settled in costs and costs[best] > costs[kind.settled] * _CLEARLY:
                best = kind.settled
            kind.settled = best
        kind.choice = best
        others = sorted((cost, label) for label, cost in costs.items() if label != best)
        kind.why = f"{_per_gb(costs[best])}, against " + ", ".join(f"{label} {_per_gb(cost)}" for cost, label in others)
        if best != RAW and tries[best] >= _SURE and self._may_probe(nbytes, nbytes * max(1 / rate - costs[best], 0.0), now):
            kind.why += "; this once as it is, to see whether the link has become quicker"
            return RAW
        return best

    def _factor(self, kind: _Kind, nbytes: int, rate: float, now: float) -> float:
        """How many times as long codecs take in messages as they took with samples, by the best of those that were used lately."""
        assert kind.measured is not None
        found = []
        for label, measured in kind.measured.items():
            known = min(kind.costs(label, now), default=0.0)
            if 1 / (measured.ratio * rate) < known / 2:  # it was the codec that the message waited for
                found.append(known / self._predict(measured, nbytes, math.inf, 1.0))
        return max(min(found, default=1.0), 1.0)

    def _cost(self, kind: _Kind, label: str, nbytes: int, rate: float, factor: float, now: float) -> float:
        known = kind.costs(label, now)
        if len(known) > 1:
            return min(known)
        assert kind.measured is not None
        predicted = 1 / rate if label == RAW else self._predict(kind.measured[label], nbytes, rate, factor)
        # One alone may have been bad luck, and a codec's first use takes longer: it gets another chance, if it may be worth it.
        return math.sqrt(predicted * known[0]) if known else predicted

    def _hope(self, kind: _Kind, label: str, nbytes: int, rate: float, cost: float, now: float) -> float:
        """What it may cost if all goes well: little is known of what was hardly used."""
        known = kind.costs(label, now)
        if len(known) >= _SURE:
            return cost
        if not known:
            return cost * _HOPE
        if label == RAW and len(self._rates) == 1:
            return max(cost - _COLD_S / nbytes, cost * (1 - _COLD_SHARE))
        assert kind.measured is not None
        ideal = 1 / rate if label == RAW else self._predict(kind.measured[label], nbytes, rate, 1.0)
        return min(cost, max(known[0] * _SECOND_HOPE, ideal))

    def _predict(self, found: Measured, nbytes: int, rate: float, factor: float) -> float:
        steps = (factor / found.compress, 1 / (found.ratio * rate), factor / found.decompress)
        if nbytes < _PIPELINED_BYTES:
            return sum(steps)
        return max(steps[0] / self._threads, steps[1], steps[2] / self._threads)

    def _may_probe(self, nbytes: int, extra: float, now: float) -> bool:
        """Whether a message may take so many seconds longer as it is."""
        since = 0.0 if self._probed_at is None else now - self._probed_at
        first = not self._rates
        lately = since < _PROBE_AGAIN_S and not first
        share = _FIRST_PROBE_SHARE if first else _PROBE_SHARE
        if self._probing or nbytes < _LARGE_BYTES or (extra > 0 and (lately or extra > share * since)):
            return False
        self._probing = True
        return True

    # ---- after

    def sampled(self, key: Hashable, measured: Mapping[str, Measured] | None, now: float) -> None:
        """The samples of a message were tried; None: that was not possible."""
        kind = self._kinds.get(key)
        if kind is None:
            return
        kind.sampling = False
        if not measured:
            return
        kind.sampled_at = (now, kind.messages)
        before, kind.measured = kind.measured, measured
        if before is not None and any(_differ(found.ratio, before[label].ratio) for label, found in measured.items() if label in before):
            kind.observed.clear()
            kind.settled = None

    def sent(self, key: Hashable, label: str, nbytes: int, stored: int, begin: float, now: float) -> None:
        """A message has arrived.

        Args:
            label: how it was sent.
            nbytes: of its payload.
            stored: bytes that travelled for them.
            begin: when it began to be sent.
        """
        seconds = max(now - max(begin, self._last_end), 1e-6)
        self._last_end = max(self._last_end, now)
        rate = stored / seconds
        if stored < _LARGE_BYTES:
            self._small_rate = max(rate, self._small_rate or 0.0)
        elif label == RAW:
            self._rates.append(rate)
            self._seen_rate = 0.0
            self._probed_at = now
        else:  # it may have waited for the codec and not for the link, which carries at least this
            self._seen_rate = max(rate, self._seen_rate)
        if label == RAW:
            self._probing = False
        kind = self._kinds.get(key)
        if kind is not None and nbytes:
            kind.observe(label, seconds / nbytes, now)

    def lost(self, label: str) -> None:
        """A message has not arrived; nothing can be learnt from it."""
        if label == RAW:
            self._probing = False

    def describe(self, now: float) -> dict[str, Any]:
        """For people and for ``stats()``."""
        return {
            "link_rate": self.rate(0),
            "kinds": {str(key): self._describe(kind, now) for key, kind in self._kinds.items()},
        }

    def _describe(self, kind: _Kind, now: float) -> dict[str, Any]:
        choices: dict[str, dict[str, Any]] = {RAW: {}}
        for label, found in (kind.measured or {}).items():
            choices[label] = {"ratio": found.ratio, "compress_rate": found.compress, "decompress_rate": found.decompress}
        for label, facts in choices.items():
            known = kind.costs(label, now)
            facts["seconds_per_gb"] = min(known) * 1e9 if known else None
        return {"choice": kind.choice, "why": kind.why, "choices": choices}


def _differ(one: float, other: float) -> bool:
    return not other / _OTHER_RATIO < one < other * _OTHER_RATIO


def _per_gb(cost: float) -> str:
    return f"{cost * 1e9:.3g} s/GB"
