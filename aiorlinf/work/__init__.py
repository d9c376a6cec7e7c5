"""AsyncWork, its kinds, chains and combinators, and the home loop that they belong to."""

from __future__ import annotations

from aiorlinf.work.base import AsyncWork
from aiorlinf.work.combine import wait_all, wait_first
from aiorlinf.work.deadline import NO_DEADLINE, Deadline, current_deadline, effective_deadline, expire
from aiorlinf.work.home import LoopHome
from aiorlinf.work.kinds import AsyncChannelWork, AsyncCollWork
from aiorlinf.work.poller import Completion, CompletionPoller
from aiorlinf.work.steps import AsyncFuncWork

__all__ = [
    "NO_DEADLINE",
    "AsyncChannelWork",
    "AsyncCollWork",
    "AsyncFuncWork",
    "AsyncWork",
    "Completion",
    "CompletionPoller",
    "Deadline",
    "LoopHome",
    "current_deadline",
    "effective_deadline",
    "expire",
    "wait_all",
    "wait_first",
]
