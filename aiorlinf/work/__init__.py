"""AsyncWork, its kinds, chains and combinators, and the home loop that they belong to."""

from __future__ import annotations

from aiorlinf.work.base import AsyncWork
from aiorlinf.work.deadline import Deadline
from aiorlinf.work.home import LoopHome
from aiorlinf.work.steps import AsyncFuncWork

__all__ = ["AsyncFuncWork", "AsyncWork", "Deadline", "LoopHome"]
