"""What holds for every test: asyncio's debug mode everywhere, nothing left behind, and a time limit that works on uvloop too."""

from __future__ import annotations

import os

__all__ = ["pytest_plugins"]

# pytest-asyncio's own option reaches only the loops that it makes. This reaches loops in threads and child processes too.
os.environ["PYTHONASYNCIODEBUG"] = "1"

pytest_plugins = ["aiorlinf.testing.pytest_leaks", "tests.time_limit"]
