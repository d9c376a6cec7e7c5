"""A worker's bytes turned into whole lines. Pure: bytes and a time in, lines out.

What a line is:

* text up to a newline (``\\n`` or ``\\r\\n``), decoded as UTF-8 with replacement characters for what is not;
* a progress bar, which redraws itself with a lone ``\\r``, is shown as it stood when the line ended, and meanwhile at most
  once every `REFRESH_S` seconds;
* text without a newline is shown as a line of its own after `PATIENCE_S` seconds of silence, and at the end;
* a line longer than `MAX_LINE` bytes is cut into several, between two characters; nothing is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

__all__ = ["MAX_LINE", "PATIENCE_S", "REFRESH_S", "LineAssembler", "clean", "prefix_for", "render", "wants_colour"]

MAX_LINE = 65536
"""Bytes of one line; a longer one is cut."""

PATIENCE_S = 1.0
"""Seconds of silence after which text without a newline is shown."""

REFRESH_S = 1.0
"""Seconds between two showings of one progress bar."""

# Escape sequences that move the cursor, erase, or set a title would write into the lines of other workers. Those that set
# colours (they end in m) do not.
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~]?)")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")
_CONTROL_BUT_NEWLINE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_CONTROL_BUT_ESCAPE = re.compile(r"[\x00-\x07\x0a-\x1a\x1c-\x1f\x7f-\x9f]")
_RESET = "\x1b[0m"
_COLOURS = ("36", "33", "32", "35", "34", "31", "96", "93", "92", "95", "94", "91")


class LineAssembler:
    """Collects one stream of one worker and hands out its lines, without newline.

    The caller passes the time (seconds of any monotonic clock) with the data, and calls `tick` now and then while `pending`.
    """

    __slots__ = ("_clean", "_fed_at", "_limit", "_partial", "_shown", "_shown_at", "_swallow")

    def __init__(self, *, cleaned: bool = True, max_line: int = MAX_LINE) -> None:
        self._clean = cleaned
        self._limit = max_line
        self._partial = bytearray()  # what came after the last newline
        self._fed_at = 0.0  # when the last byte of it came
        self._shown: bytes | None = None  # the state of a progress bar that is on display already
        self._shown_at = float("-inf")  # when that was put there
        self._swallow = False  # the text before the coming newline was shown early: that newline ends nothing

    @property
    def pending(self) -> bool:
        """Whether there is text that a later `tick` may want to show."""
        return bool(self._partial) and self._state() != self._shown

    def feed(self, data: bytes, now: float) -> list[str]:
        """Take bytes, give back the lines they complete."""
        ended, newline, rest = data.rpartition(b"\n")
        lines: list[str] = []
        if newline:
            first, more, others = (bytes(self._partial) + ended).partition(b"\n")
            self._end_line(first, lines)
            if more:
                self._whole_lines(others, lines)
            self._partial.clear()
            self._shown, self._shown_at = None, float("-inf")
        if rest:
            self._partial += rest
            self._fed_at = now
            if b"\r" in rest or len(self._partial) > self._limit:
                self._shorten(lines)
        return lines

    def tick(self, now: float) -> list[str]:
        """Give back text that has waited long enough for its newline, and progress bars due for a look."""
        if not self._partial:
            return []
        lines: list[str] = []
        if b"\r" in self._partial:
            state = self._state()
            if state and state != self._shown and now - self._shown_at >= REFRESH_S:
                self._emit(state, lines)
                self._shown, self._shown_at = state, now
        elif now - self._fed_at >= PATIENCE_S:
            whole = _whole_characters(self._partial)
            if whole:
                self._emit(bytes(self._partial[:whole]), lines)
                del self._partial[:whole]
                self._swallow = not self._partial
        return lines

    def flush(self) -> list[str]:
        """The stream ended: give back what is left."""
        lines: list[str] = []
        if self._partial:
            state = self._state()
            if state and state != self._shown:
                self._emit(state, lines)
            self._partial.clear()
        self._shown, self._swallow = None, False
        return lines

    def _state(self) -> bytes:
        return _last_state(bytes(self._partial).removesuffix(b"\r"))

    def _end_line(self, raw: bytes, lines: list[str]) -> None:
        swallow, self._swallow = self._swallow, False
        state = _last_state(raw.removesuffix(b"\r"))
        if (swallow and not state) or (self._shown is not None and state == self._shown):
            return
        self._emit(state, lines)

    def _whole_lines(self, raw: bytes, lines: list[str]) -> None:
        if b"\r" not in raw and len(raw) <= self._limit:
            # The common case: one decode and one search for many lines. UTF-8 never has a newline inside a character.
            text = raw.decode("utf-8", "replace")
            if not self._clean or _CONTROL_BUT_NEWLINE.search(text) is None:
                lines += text.split("\n")
                return
        for line in raw.split(b"\n"):
            self._emit(_last_state(line.removesuffix(b"\r")), lines)

    def _shorten(self, lines: list[str]) -> None:
        # Keeps the memory bounded: of a progress bar only its latest state stays, of other long text less than one limit.
        partial = self._partial
        if b"\r" in partial:
            state = self._state()
            ending = b"\r" if partial.endswith(b"\r") else b""
            partial[:] = (b"\r" if len(state) < self._limit - 2 else b"") + state + ending
        while len(partial) > self._limit:
            cut = _cut(partial, self._limit)
            lines.append(self._decode(bytes(partial[:cut])))
            del partial[:cut]
            self._swallow = not partial

    def _emit(self, raw: bytes, lines: list[str]) -> None:
        while len(raw) > self._limit:
            cut = _cut(raw, self._limit)
            lines.append(self._decode(raw[:cut]))
            raw = raw[cut:]
        lines.append(self._decode(raw))

    def _decode(self, raw: bytes) -> str:
        text = raw.decode("utf-8", "replace")
        return clean(text) if self._clean else text


def clean(text: str) -> str:
    """Take out of one line what would reach beyond it on a terminal: cursor movements, titles, control characters.

    Colours stay, and are switched off at the line's end. Tabs stay. Other control characters become U+FFFD.
    """
    if _CONTROL.search(text) is None:
        return text
    coloured = False

    def keep_colour(match: re.Match[str]) -> str:
        nonlocal coloured
        sequence = match.group()
        if sequence.startswith("\x1b[") and sequence.endswith("m"):
            coloured = True
            return sequence
        return ""

    text = _ESCAPE.sub(keep_colour, text).replace("\b", "")
    text = _CONTROL_BUT_ESCAPE.sub("\ufffd", text)
    return text + _RESET if coloured and not text.endswith(_RESET) else text


def prefix_for(worker: str, index: int, *, colour: bool) -> str:
    """``[rollout:0] ``; with `colour`, in the colour that belongs to the worker's place in the job."""
    if not colour:
        return f"[{worker}] "
    return f"\x1b[{_COLOURS[index % len(_COLOURS)]}m[{worker}]{_RESET} "


def render(lines: Iterable[str], prefix: str = "") -> str:
    """Lines as one text to be written in one go, each with the prefix and a newline."""
    return "".join([f"{prefix}{line}\n" for line in lines])


def wants_colour(is_terminal: bool, environ: Mapping[str, str]) -> bool:
    """Whether to colour, by the usual conventions: ``NO_COLOR`` and ``FORCE_COLOR``, else only on a terminal that can."""
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR"):
        return True
    return is_terminal and environ.get("TERM") != "dumb"


def _last_state(raw: bytes) -> bytes:
    """What a terminal shows of text that returns to the line's start: its last part that is not blank."""
    if b"\r" not in raw:
        return raw
    return next((part for part in reversed(raw.split(b"\r")) if part.strip()), b"")


def _cut(raw: bytes | bytearray, limit: int) -> int:
    """The largest cut up to `limit` that does not go through a character, as far as `raw` is UTF-8."""
    for cut in range(limit, max(limit - 4, 0), -1):
        if raw[cut] & 0xC0 != 0x80:
            return cut
    return limit


def _whole_characters(raw: bytes | bytearray) -> int:
    """How many bytes to take so that a character of which only the beginning has come stays behind."""
    for back in range(1, min(3, len(raw)) + 1):
        byte = raw[-back]
        if byte & 0xC0 == 0x80:
            continue
        needed = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return len(raw) - back if needed > back else len(raw)
    return len(raw)
