"""With which codec a message goes, if with any: the one of the job, or the one that is the quickest on its link."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from aiorlinf.codec.choosing import RAW, Chooser
from aiorlinf.codec.encoder import THREADS
from aiorlinf.codec.provider import CodecUse
from aiorlinf.codec.trial import Measured, first_look, take_pieces, try_codecs
from aiorlinf.errors import AiorlinfError

if TYPE_CHECKING:
    from aiorlinf.codec.base import Context
    from aiorlinf.codec.payload import PayloadCompressor
    from aiorlinf.link.outgoing import Outgoing
    from aiorlinf.work.home import LoopHome

__all__ = ["Always", "Quickest", "Selector", "Trials", "kind_of"]


class Selector(Protocol):
    """Asked for each message of which some leaf is to be tried."""

    def select(self, out: Outgoing) -> CodecUse | None:
        """The codec; None: it goes as it is."""

    def begun(self, out: Outgoing, payload: PayloadCompressor | None) -> None:
        """It begins to be sent; None: as it is."""


class Always:
    """The job's codec."""

    def __init__(self, use: CodecUse) -> None:
        self._use = use

    def select(self, out: Outgoing) -> CodecUse | None:
        return self._use

    def begun(self, out: Outgoing, payload: PayloadCompressor | None) -> None:
        pass


class Trials:
    """Puts samples through all codecs of a worker, one message's at a time, in a private thread."""

    def __init__(self, home: LoopHome, uses: Sequence[CodecUse]) -> None:
        self._home = home
        self._contexts: dict[str, Context] = {}
        self._uses = uses
        self._busy = False

    def run(self, leaves: Sequence[memoryview], labels: Sequence[str], patience: float, then: Any) -> None:
        """Call `then` on the home thread with what was measured, or with None if that is not possible now. `patience`: see `try_codecs`."""
        if self._busy:
            then(None)
            return
        pieces = take_pieces(leaves)  # copies: the message's memory is its sender's again as soon as it is sent
        self._busy = True

        def over(work: Any) -> None:
            self._busy = False
            then(None if work.exception() is not None else work.result())

        try:
            self._home.submit(self._try, labels, pieces, patience).add_done_callback(over)
        except AiorlinfError:  # the worker is closing
            self._busy = False
            then(None)

    def _try(self, labels: Sequence[str], pieces: Sequence[bytes], patience: float) -> dict[str, Measured]:
        """In a thread, with contexts of its own: those of the worker are for messages."""
        for use in self._uses:
            if use.label not in self._contexts:
                self._contexts[use.label] = use.codec.context()
        return try_codecs({label: self._contexts[label] for label in labels}, pieces, patience)


class Quickest:
    """What `Chooser` says, fed with what the link does.

    Args:
        uses: those that the peer knows.
    """

    def __init__(self, uses: Sequence[CodecUse], trials: Trials) -> None:
        self.chooser: Chooser = Chooser([use.label for use in uses], threads=min(THREADS, os.cpu_count() or 1))
        self._uses = {use.label: use for use in uses}
        self._trials = trials
        self._begun: tuple[str, str, float] = ("", "", 0.0)

    def select(self, out: Outgoing) -> CodecUse | None:
        assert out.flat is not None
        assert out.tried is not None
        tried = [leaf for leaf, yes in zip(out.flat.leaves, out.tried, strict=True) if yes]
        views = [leaf.raw for leaf in tried if leaf.raw is not None]
        key = f"{kind_of([leaf.spec.dtype for leaf in tried], out.total)}, {self._look(views)}"
        chooser, now = self.chooser, time.monotonic()
        choice = chooser.choose(key, out.total, now)
        if choice.sample:
            self._trials.run(
                views, list(self._uses), chooser.patience(out.total), lambda found: chooser.sampled(key, found, time.monotonic())
            )
        self._begun = (key, choice.label, now)
        return None if choice.label == RAW else self._uses[choice.label]

    def _look(self, views: Sequence[memoryview]) -> str:
        """What tells apart messages that look the same from outside: a screen full of nothing from one full of noise."""
        looker = next(iter(self._uses.values())).codec.looker()
        try:
            return "not looked at" if looker is None else first_look(looker, views)
        except MemoryError:  # the message can be sent all the same
            return "not looked at"

    def begun(self, out: Outgoing, payload: PayloadCompressor | None) -> None:
        key, label, begin = self._begun
        chooser, total, other = self.chooser, out.total, out.on_over

        def over(delivered: bool, certain: bool) -> None:
            if delivered:
                chooser.sent(key, label, total, total if payload is None else payload.taken, begin, time.monotonic())
            else:
                chooser.lost(label)
            if other is not None:
                other(delivered, certain)

        out.on_over = over

    def describe(self) -> dict[str, Any]:
        """For people and for ``stats()``."""
        return self.chooser.describe(time.monotonic())  # uvloop's own clock knows milliseconds only


def kind_of(dtypes: Sequence[str], nbytes: int) -> str:
    """What messages are told apart by at first: their dtypes, and their size to a factor of four."""
    bits = (nbytes.bit_length() + 1) // 2 * 2
    size = f"{1 << bits - 20} MiB" if bits >= 20 else f"{max(1 << bits >> 10, 1)} KiB"
    return f"{'+'.join(sorted(set(dtypes)))}, up to {size}"
