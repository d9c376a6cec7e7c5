"""asyncio's debug mode records where each future and handle was made. Here it records the end of that stack only, and looks at no file.

The C future records the whole stack, with pytest's fifty frames, and asks the file system about each source file in it: a fifth of all
the time that tests of the event loop took. What is left says where it was made as well, and its lines are read when they are printed.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

__all__ = ["FRAMES", "shorten"]

FRAMES = 12
"""How many calls are recorded where nobody says how many; asyncio itself records 10 of a handle."""


def shorten() -> None:
    """From now on, in this process."""
    traceback.StackSummary.extract = _extract  # type: ignore[method-assign]


def _extract(
    frame_gen: Iterable[tuple[FrameType, int]], *, limit: int | None = None, lookup_lines: bool = True, capture_locals: bool = False
) -> traceback.StackSummary:
    if capture_locals or (limit is not None and limit < 0):
        return _WHOLE(frame_gen, limit=limit, lookup_lines=lookup_lines, capture_locals=capture_locals)
    frames: Iterator[Any] = itertools.islice(frame_gen, FRAMES if limit is None else limit)
    return traceback.StackSummary(
        traceback.FrameSummary(frame.f_code.co_filename, line, frame.f_code.co_name, lookup_line=False) for frame, line in frames
    )


_WHOLE = traceback.StackSummary.extract
