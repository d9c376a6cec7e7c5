"""What holds for every test: asyncio's debug mode everywhere."""

from __future__ import annotations

import os

# pytest-asyncio's own option reaches only the loops that it makes. This reaches loops in threads and child processes too.
os.environ["PYTHONASYNCIODEBUG"] = "1"
