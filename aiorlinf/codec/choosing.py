"""``codec: auto``: which codec, if any, is the quickest for what one link carries. Pure: no clock, no threads.

Messages are told apart by kind (their dtypes, and roughly their size and how much smaller they get). For each kind and each choice, what
messages have cost counts: the time from the moment that one began to be sent, or the one before it was over, until the peer had all of it
(`outcomes`). So everything is in it, threads and other work on either machine too. The cheapest is taken; another one has to be clearly
cheaper than the one in use.

What was not used yet, or only once, is tried if it may be cheaper. Samples of real messages and the link's rate say so (`forecast`), for
nobody is to pay for trying what cannot win. They leave much out, and a first use may find cold caches, have to make its contexts, or have
bad luck: so it is a hope that decides, better than what is expected, and what is far dearer than that gets another chance, also later.
What such tries cost beyond the choice in use is paid from a small share of all the time that is spent sending.

The world changes: measurements expire; where messages suddenly take much longer, all others are forgotten, too; samples are taken again
now and then (and if the data has changed, so are measurements of the kind); and from time to time, when that costs little, a message goes
as it is to see whether the link has become quicker, which compressed messages cannot show as long as the codec is what they wait for.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiorlinf.codec.forecast import at_best, expected, on_the_wire
from aiorlinf.codec.kind import RAW, Kind
from aiorlinf.codec.trial import Measured

__all__ = ["RAW", "Choice", "Chooser"]

PROBE_BYTES = 16 * 1024 * 1024
"""A message of at most so many bytes may be the first of a link to be sent as it is, only to learn how quick the link is."""

_LARGE_BYTES = 256 * 1024
"""Smaller messages wait for the answer more than for the link: they tell little of its rate."""

_KINDS = 64
_RATES = 3

_CLEARLY = 0.93
_PROBE_AGAIN_S = 20.0
_PROBE_SHARE = 0.02
_FIRST_PROBE_SHARE = 0.1
"""Of the time since the last probe, or since the beginning; so much may the next one cost."""

_SURE = 2
"""Messages after which something is known."""
_HOPE = 0.8
"""What may come out of a first try, as a share of what is expected."""
_DOUBT = (0.75, 0.95)
"""Less than this share of what the link is said to take it will not take: by one message as it is, or by several."""
_AS_HOPEFUL = 0.97
"""Of what is about as hopeful, the easiest is tried first."""
_SECOND_HOPE = 0.5
"""What may come out of a second try, as a share of the first, which has to make contexts, buffers and threads."""
_WORTH_ANOTHER = 0.85
"""What has been dearer than this share of the best, though it is expected to be cheaper, gets another chance."""
_BAD_LUCK = 0.85
"""What else may come out of another chance, as a share of what is known."""
_ANOTHER_AFTER = 4
"""Messages, times the square of how often it was tried in vain."""
_COLD_S = 0.05
_COLD_SHARE = 0.8
"""So much of a link's very first message, but not more than this share of it, may be due to its being the first."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What to do with one message.

    Attributes:
        label: of the codec, or `RAW`.
        sample: samples of it are wanted (`Chooser.sampled`).
    """

    label: str
    sample: bool


class Chooser:
    """See the module. One per link and direction. Times are in seconds, of any one clock.

    Args:
        labels: of the codecs, the cheapest first.
        threads: that compress, and that decompress.
    """

    def __init__(self, labels: Sequence[str], *, threads: int) -> None:
        self._labels = list(labels)
        self._threads = threads
        self._kinds: OrderedDict[Hashable, Kind] = OrderedDict()
        self._rates: deque[float] = deque(maxlen=_RATES)
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
            kind = self._kinds[key] = Kind()
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

    def _choose(self, kind: Kind, nbytes: int, now: float) -> str:
        rate = self.rate(nbytes)
        kind.hope = None
        if rate is None:
            if nbytes <= PROBE_BYTES and not self._probing:
                self._probing = True
                kind.choice, kind.note = RAW, "to learn how quick the link is"
                return RAW
            kind.choice, kind.note = self._labels[0], "the quickest codec, until the link's rate is known"
            return self._labels[0]
        if kind.able is None:
            kind.choice, kind.note = kind.choice or RAW, "until its first samples are looked at"
            return kind.choice
        kind.note = ""
        usual = kind.settle(kind.labels, now)
        kind.choice, kind.hope = self._try(kind, nbytes, rate, usual)
        settled = usual is not None and kind.choice == kind.best and kind.of(kind.choice).count >= _SURE
        if settled and kind.best != RAW and self._may_probe(nbytes, nbytes * max(1 / rate - (usual or 0.0), 0.0), now):
            kind.note = "this once as it is, to see whether the link has become quicker"
            return RAW
        return kind.choice

    def _try(self, kind: Kind, nbytes: int, rate: float, usual: float | None) -> tuple[str, float | None]:
        """What is the most hopeful, and how much so; if that is the best, it and None."""
        limit = math.inf if usual is None else usual * _CLEARLY
        chosen, most = kind.best or RAW, None
        if kind.best is not None:
            # Used once, it may well become better; that another might is no reason to leave it now.
            limit = min(limit, self._hope(kind, kind.best, nbytes, rate, usual))
        for label in kind.labels:
            if label == kind.best:
                continue
            hope = self._hope(kind, label, nbytes, rate, usual)
            if hope < limit and (usual is None or self._affords(kind, label, nbytes, rate, usual)):
                chosen, limit, most = label, hope * _AS_HOPEFUL, hope
        return chosen, most

    def _affords(self, kind: Kind, label: str, nbytes: int, rate: float, usual: float) -> bool:
        """Whether trying this costs little enough, by all that is known."""
        known, forecast = kind.of(label).cost, self._expect(kind, label, nbytes, rate)
        likely = forecast if known is None else known
        if known is not None and kind.of(label).count < _SURE:
            likely = min(known, math.sqrt(known * forecast))
        return kind.affords((likely - usual) * nbytes, usual * nbytes)

    def _hope(self, kind: Kind, label: str, nbytes: int, rate: float, usual: float | None) -> float:
        """What it may cost if all goes well."""
        outcomes = kind.of(label)
        known, latest = outcomes.cost, outcomes.latest
        if known is None or latest is None:
            hope = self._expect(kind, label, nbytes, rate) * _HOPE
            return hope if label == RAW or kind.able is None else max(hope, on_the_wire(kind.able[label], rate) * self._doubt)
        hope, unsure = min(known, latest), outcomes.count < _SURE
        if unsure and label == RAW:
            share = 1 - _COLD_SHARE if len(self._rates) == 1 else _SECOND_HOPE
            hope = max(known - _COLD_S / nbytes, known * share)
        elif unsure:
            hope = min(known, max(known * _SECOND_HOPE, self._at_best(kind, label, nbytes, rate / self._doubt)))
        if (
            usual is None
            or label == kind.best
            or not (unsure or outcomes.since(kind.messages) > _ANOTHER_AFTER * max(outcomes.tries, 1) ** 2)
        ):
            return hope
        hope = min(hope, known * _BAD_LUCK)
        if label == RAW:
            return hope
        forecast = self._expect(kind, label, nbytes, rate)
        if label == self._most_able(kind, nbytes, rate):  # all of them may have had bad luck, and then none speaks for the others
            forecast = self._at_best(kind, label, nbytes, rate)
        return min(hope, forecast) if forecast < usual * _WORTH_ANOTHER else hope

    def _most_able(self, kind: Kind, nbytes: int, rate: float) -> str:
        return min(kind.able or (), key=lambda label: self._at_best(kind, label, nbytes, rate))

    def _at_best(self, kind: Kind, label: str, nbytes: int, rate: float) -> float:
        assert kind.able is not None
        return at_best(kind.able[label], nbytes, rate, self._threads)

    @property
    def _doubt(self) -> float:
        return _DOUBT[len(self._rates) > 1]

    def _expect(self, kind: Kind, label: str, nbytes: int, rate: float) -> float:
        """What it will cost by all but its own outcomes."""
        assert kind.able is not None
        if label == RAW:
            forecast = 1 / rate
        else:
            known = [(other, cost) for other in kind.able if other != label and (cost := kind.of(other).cost) is not None]
            forecast = expected(kind.able[label], nbytes, rate, self._threads, kind.able, known)
        kind.forecast[label] = forecast
        return forecast

    def _may_probe(self, nbytes: int, extra: float, now: float) -> bool:
        """Whether a message may take so many seconds longer as it is."""
        since = 0.0 if self._probed_at is None else now - self._probed_at
        first = not self._rates
        lately = since < _PROBE_AGAIN_S and not first
        share = _FIRST_PROBE_SHARE if first else _PROBE_SHARE
        if self._probing or nbytes < _LARGE_BYTES or lately or extra > share * since:
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
        if measured:
            kind.sampled(measured, now)

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
            kind.observe(label, nbytes, seconds, now)

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

    @staticmethod
    def _describe(kind: Kind, now: float) -> dict[str, Any]:
        choices: dict[str, dict[str, Any]] = {RAW: {}}
        for label, found in kind.measured.items():
            choices[label] = {"ratio": found.ratio, "compress_rate": found.compress, "decompress_rate": found.decompress}
        for label, facts in choices.items():
            outcomes = kind.of(label)
            outcomes.forget_old(now, kind.messages)
            facts["seconds_per_gb"] = None if outcomes.cost is None else outcomes.cost * 1e9
        return {"choice": kind.choice, "why": kind.why, "choices": choices}
