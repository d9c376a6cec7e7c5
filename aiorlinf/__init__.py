"""aiorlinf: asyncio-first communication for reinforcement-learning workers.

Importing this package imports nothing else of weight: each public name below is fetched when it is first used. So the command line and
a program that only launches workers never load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiorlinf.lazy import fetcher

if TYPE_CHECKING:
    from aiorlinf import errors
    from aiorlinf.address import Identity, Incarnation, WorkerAddress
    from aiorlinf.channel.channel import Channel
    from aiorlinf.channel.policies import LoadBalancePolicy
    from aiorlinf.channel.stats import ChannelStats
    from aiorlinf.collective.collective import Collective
    from aiorlinf.collective.group import CollectiveGroup
    from aiorlinf.collective.inbox import Inbox
    from aiorlinf.config import JobConfig, load_config
    from aiorlinf.launch.api import launch, launch_async
    from aiorlinf.link.diagnosis import dump_all, dump_on_signal
    from aiorlinf.link.link import LinkStats
    from aiorlinf.link.pending import PendingOperation
    from aiorlinf.manager.membership import Membership, MembershipEvent, Peer
    from aiorlinf.wire.plain import register_dataclass
    from aiorlinf.work.base import AsyncWork
    from aiorlinf.work.combine import wait_all, wait_first
    from aiorlinf.worker import Worker, WorkerStats, init

__all__ = [
    "AsyncWork",
    "Channel",
    "ChannelStats",
    "Collective",
    "CollectiveGroup",
    "Identity",
    "Inbox",
    "Incarnation",
    "JobConfig",
    "LinkStats",
    "LoadBalancePolicy",
    "Membership",
    "MembershipEvent",
    "Peer",
    "PendingOperation",
    "Worker",
    "WorkerAddress",
    "WorkerStats",
    "dump_all",
    "dump_on_signal",
    "errors",
    "init",
    "launch",
    "launch_async",
    "load_config",
    "register_dataclass",
    "wait_all",
    "wait_first",
]

# Where each name lives; None: it is a module of this package. `launch` is both, see there.
_HOMES = {
    "AsyncWork": "work.base",
    "Channel": "channel.channel",
    "ChannelStats": "channel.stats",
    "Collective": "collective.collective",
    "CollectiveGroup": "collective.group",
    "Identity": "address",
    "Inbox": "collective.inbox",
    "Incarnation": "address",
    "JobConfig": "config",
    "LinkStats": "link.link",
    "LoadBalancePolicy": "channel.policies",
    "Membership": "manager.membership",
    "MembershipEvent": "manager.membership",
    "Peer": "manager.membership",
    "PendingOperation": "link.pending",
    "Worker": "worker",
    "WorkerAddress": "address",
    "WorkerStats": "worker",
    "dump_all": "link.diagnosis",
    "dump_on_signal": "link.diagnosis",
    "errors": None,
    "init": "worker",
    "launch": None,
    "launch_async": "launch.api",
    "load_config": "config",
    "register_dataclass": "wire.plain",
    "wait_all": "work.combine",
    "wait_first": "work.combine",
}


if not TYPE_CHECKING:  # a type checker would take it to mean that any name is there
    __getattr__ = fetcher(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
