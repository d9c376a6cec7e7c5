"""Where in the user's program a work was made, remembered as cheaply as possible."""

from __future__ import annotations

import os
from types import CodeType, FrameType

__all__ = ["INSIDE", "describe_site", "is_inside", "outermost"]

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

INSIDE: set[str] = {__file__}
"""File names known to belong to this package; grows by one name per source file that makes works."""


def is_inside(filename: str) -> bool:
    """Whether the file belongs to this package; remembers those that do."""
    if filename in INSIDE:
        return True
    if filename.startswith(_PACKAGE):
        INSIDE.add(filename)
        return True
    return False


def describe_site(code: CodeType | None, lasti: int) -> str:
    """``file:line`` of an instruction. The line is looked up here, not when the work is made, because that is the slow part."""
    if code is None:
        return "unknown place"
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= lasti < end:
            line = number or line
            break
    return f"{code.co_filename}:{line}"


def outermost(frame: FrameType) -> FrameType:
    """The first caller outside this package, or the last frame if there is none."""
    while is_inside(frame.f_code.co_filename):
        back = frame.f_back
        if back is None:
            break
        frame = back
    return frame
