"""aiorlinf: asyncio-first communication for reinforcement-learning workers."""

from __future__ import annotations

from aiorlinf import errors
from aiorlinf.address import Identity, Incarnation, WorkerAddress
from aiorlinf.collective.collective import Collective
from aiorlinf.collective.group import CollectiveGroup
from aiorlinf.collective.inbox import Inbox
from aiorlinf.config import JobConfig, load_config
from aiorlinf.link.link import LinkStats
from aiorlinf.work.base import AsyncWork
from aiorlinf.work.combine import wait_all, wait_first
from aiorlinf.worker import Worker, WorkerStats, init

__all__ = [
    "AsyncWork",
    "Collective",
    "CollectiveGroup",
    "Identity",
    "Inbox",
    "Incarnation",
    "JobConfig",
    "LinkStats",
    "Worker",
    "WorkerAddress",
    "WorkerStats",
    "errors",
    "init",
    "load_config",
    "wait_all",
    "wait_first",
]
