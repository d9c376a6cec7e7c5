"""Where in the user's program a work was made, remembered as cheaply as possible."""

from __future__ import annotations

import os
from types import CodeType

__all__ = ["INSIDE", "describe_site"]

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class _Inside(dict[str, bool]):
    """Whether a source file belongs to this package, by its name; worked out when first asked for."""

    def __missing__(self, filename: str) -> bool:
        if len(self) > 4096:  # a notebook makes a file name per cell
            self.clear()
        inside = self[filename] = filename.startswith(_PACKAGE)
        return inside


INSIDE = _Inside()
"""Looking a file name up here is much cheaper than comparing the beginnings of paths, and every work that is made does it."""


def describe_site(code: CodeType, lasti: int) -> str:
    """``file:line`` of an instruction. The line is looked up here, not when the work is made, because that is the slow part."""
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= lasti < end:
            line = number or line
            break
    return f"{code.co_filename}:{line}"
