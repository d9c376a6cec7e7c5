"""How often a test that looks for rare things tries.

AIORLINF_TRIES multiplies it in the tests that ask here (`examples`); with CI set, hypothesis tries the same examples each time.
"""

from __future__ import annotations

import os

from hypothesis import settings

__all__ = ["examples"]

TRIES = float(os.environ.get("AIORLINF_TRIES", "1"))

settings.register_profile("aiorlinf", deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("aiorlinf")


def examples(count: int) -> int:
    """The number of examples that a test should try, which is `count` unless more are asked for."""
    return max(1, round(count * TRIES))
