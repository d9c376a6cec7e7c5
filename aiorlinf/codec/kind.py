"""What `codec.choosing` knows of one kind of message on one link: its samples, its outcomes, and what tries may still cost. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from aiorlinf.codec.outcomes import Outcomes
from aiorlinf.codec.trial import Measured

__all__ = ["RAW", "Kind"]

RAW = "raw"
"""As it is."""

_SAMPLE_AGAIN_S = 10.0
_SAMPLE_AGAIN_MESSAGES = (10, 200)
"""Not before so many, and after so many in any case."""

_WORTH_A_TRY = 1.01
"""A codec that makes samples less than so many times smaller can only be slower."""
_OTHER_RATIO = 1.25
_CLEARLY = 0.93
_AS_GOOD = 1.03

_CREDIT_MESSAGES = 4
"""Tries may cost as much as so many messages at first, and later never more than this at a time."""
_CREDIT_SHARE = 0.03
"""Of the time that is spent sending, for more of them."""


class Kind:
    """See the module.

    Attributes:
        able: what samples say of the codecs that make them smaller; None: there are none yet.
        measured: of all codecs.
        messages: how many there were.
        best: the choice that is the best of what was used, None if none was.
        choice: the last one.
        forecast: what was expected of choices, when this was last of interest.
        hope: what the last choice may cost if it was made to find out, else None.
        note: what else is to be said of the last choice.
        sampling: samples are being looked at.
    """

    def __init__(self) -> None:
        self.able: Mapping[str, Measured] | None = None
        self.measured: Mapping[str, Measured] = {}
        self.messages = 0
        self.best: str | None = None
        self.choice: str | None = None
        self.forecast: dict[str, float] = {}
        self.hope: float | None = None
        self.note = "nothing is known yet"
        self.sampling = False
        self._sampled_at = (0.0, 0)  # when, at which message
        self._outcomes: dict[str, Outcomes] = {}
        self._credit: float | None = None  # seconds; None: as much as there is at first

    # ---- samples

    def wants_sample(self, now: float) -> bool:
        """It is time to look at what such messages hold."""
        when, message = self._sampled_at
        few, many = _SAMPLE_AGAIN_MESSAGES
        since = self.messages - message
        return not self.sampling and (self.able is None or since > many or (since > few and now - when > _SAMPLE_AGAIN_S))

    def sampled(self, measured: Mapping[str, Measured], now: float) -> None:
        """Samples were tried. If they are not what they were, what messages have cost is forgotten."""
        before, self.measured = self.measured, measured
        self.able = {label: found for label, found in measured.items() if found.ratio >= _WORTH_A_TRY}
        self._sampled_at = (now, self.messages)
        if any(
            _differ(found.ratio, old.ratio) for label, found in measured.items() if (old := before.get(label)) and old.whole and found.whole
        ):
            self._outcomes.clear()
            self.forecast.clear()
            self.best = self._credit = None

    # ---- outcomes

    def of(self, label: str) -> Outcomes:
        """What is remembered of a choice."""
        found = self._outcomes.get(label)
        if found is None:
            found = self._outcomes[label] = Outcomes()
        return found

    def observe(self, label: str, nbytes: int, seconds: float, now: float) -> None:
        """A message took so long."""
        self._pay(label, nbytes, seconds)
        if self.of(label).note(seconds / nbytes, now, self.messages):
            self._outcomes = {label: self.of(label)}  # what has slowed this down may have slowed down the others

    def settle(self, labels: Iterable[str], now: float) -> float | None:
        """Find the `best` of these, the easiest first, and what it costs, None if none was used.

        The best so far stays if it is about as good and not harder. What is easier leaves more of the machine to others, and suffers less
        where others use it.
        """
        costs = {}
        for label in labels:
            outcomes = self.of(label)
            outcomes.forget_old(now, self.messages)
            if outcomes.cost is not None:
                costs[label] = outcomes.cost
        if not costs:
            self.best = None
            return None
        least = min(costs.values())
        best = next(label for label, cost in costs.items() if cost <= least * _AS_GOOD)
        before = None if self.best is None else costs.get(self.best)
        if before is None or costs[best] <= before * _CLEARLY or (costs[best] <= before and self._is_easier(best)):
            self.best = best
        best = self.best or best
        self.of(best).tries = 0
        return costs[best]

    def _is_easier(self, label: str) -> bool:
        """Than the best."""
        labels = self.labels
        return self.best in labels and labels.index(label) < labels.index(self.best)

    # ---- the price of tries

    def affords(self, extra: float, usual: float) -> bool:
        """Whether a try may cost so many seconds more than the best, which costs the usual."""
        return max(extra, 0.0) <= (_CREDIT_MESSAGES * usual if self._credit is None else self._credit)

    def _pay(self, label: str, nbytes: int, seconds: float) -> None:
        known = None if self.best is None else self.of(self.best).cost
        if known is None:
            return
        usual = known * nbytes
        most = _CREDIT_MESSAGES * usual
        credit = most if self._credit is None else self._credit
        if label == self.best:
            self._credit = min(credit + _CREDIT_SHARE * seconds, most)
        else:
            self._credit = max(credit - max(seconds - usual, 0.0), -usual)

    # ---- for people

    @property
    def why(self) -> str:
        """Of the last choice."""
        if self.choice is None or self.able is None:
            return self.note
        said = []
        for label in self.labels:
            known = self.of(label).cost
            cost, mark = (self.forecast.get(label), "~") if known is None else (known, "")
            if cost is not None:
                said.append((cost, f"{mark}{cost * 1e9:.3g} s/GB", label))
        chosen = "".join(f"{figure}" for _, figure, label in said if label == self.choice)
        others = ", ".join(f"{label} {figure}" for _, figure, label in sorted(said) if label != self.choice)
        parts = [chosen + (f", against {others}" if others else "")]
        if not self.able:
            parts.append("nothing makes it smaller")
        if self.hope is not None:
            parts.append(f"to find out: it may be {self.hope * 1e9:.3g} s/GB")
        if self.note:
            parts.append(self.note)
        return "; ".join(part for part in parts if part)

    @property
    def labels(self) -> list[str]:
        """Of what there is to choose from, as far as samples tell: as it is, and the codecs that make it smaller."""
        return [RAW, *(self.able or ())]


def _differ(one: float, other: float) -> bool:
    return not other / _OTHER_RATIO < one < other * _OTHER_RATIO
