"""The state of a whole job at one moment: every worker is asked through the manager, for a limited time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiorlinf.errors import AiorlinfError
from aiorlinf.manager.client import ManagerClient
from aiorlinf.manager.protocol import WorkerRecord
from aiorlinf.observe.waiting import Circle, Wait, find_circles

__all__ = ["JobState", "WorkerState", "ask_job", "waits_of"]

_AT_ONCE = 64
"""Workers that are asked at a time: all that they answer together is less than what the manager keeps for one who reads slowly."""

_MIN_AGE_S = 1.0
"""A wait that has just begun is no reason to look for a circle: what would end it may be on its way, or in a report a moment older."""


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One worker.

    Attributes:
        record: as the manager has it.
        report: in its own words (see `link.report`), None if it did not answer; `problem` says why then.
    """

    record: WorkerRecord
    report: Mapping[str, Any] | None
    problem: str | None = None

    @property
    def name(self) -> str:
        """Its address."""
        return str(self.record.address)


@dataclass(frozen=True, slots=True)
class JobState:
    """All of them, in order of address.

    Attributes:
        manager, job: where was asked, and the job's id.
        waits: what their operations wait for.
        circles: who waits for himself, over others.
    """

    manager: str
    job: str
    workers: tuple[WorkerState, ...]
    waits: tuple[Wait, ...]
    circles: tuple[Circle, ...]

    @classmethod
    def of(cls, manager: str, job: str, workers: Sequence[WorkerState]) -> JobState:
        """With what follows from what the workers say."""
        waits = waits_of(workers)
        ripe = [wait for wait in waits if wait.age_s is None or wait.age_s >= _MIN_AGE_S]
        return cls(manager, job, tuple(workers), tuple(waits), tuple(find_circles(ripe)))

    def channels(self) -> list[Mapping[str, Any]]:
        """All channels, as their workers tell of them, in order of name."""
        found = [channel for worker in self.workers if worker.report is not None for channel in worker.report["channels"]]
        return sorted(found, key=lambda channel: str(channel["name"]))


async def ask_job(client: ManagerClient, timeout: float = 2.0) -> JobState:
    """Ask the manager for its workers, and all of them what they are doing.

    Args:
        client: connected to the manager.
        timeout: seconds for a worker to answer. Its loop may be blocked; only one that is frozen, or cut off, does not answer.

    Raises:
        RendezvousError: the manager is lost or does not answer.

    Cancelling is harmless.
    """
    records = await client.workers()
    limit = asyncio.Semaphore(_AT_ONCE)

    async def ask(record: WorkerRecord) -> WorkerState:
        async with limit:
            try:
                return WorkerState(record, await client.inspect(record.identity, timeout))
            except AiorlinfError as error:
                if client.is_closed():
                    raise
                return WorkerState(record, None, _problem(error, timeout))

    asking = [asyncio.ensure_future(ask(record)) for record in records]
    try:
        workers = await asyncio.gather(*asking)
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    return JobState.of(client.address, client.job, workers)


def _problem(error: AiorlinfError, timeout: float) -> str:
    return f"does not answer within {timeout:g} s" if "did not answer" in error.message else error.message


def waits_of(workers: Sequence[WorkerState]) -> list[Wait]:
    """What their operations wait for; those whose bytes are on their way wait for nobody."""
    channels: dict[str, list[Mapping[str, Any]]] = {}  # several replicas may have one name
    for worker in workers:
        for channel in () if worker.report is None else worker.report["channels"]:
            channels.setdefault(channel["name"], []).append(channel)
    waits = []
    for worker in workers:
        unread = {link["remote"]: link["unread_tags"] for link in ([] if worker.report is None else worker.report["links"])}
        for each in () if worker.report is None else worker.report["pending"]:
            if each["moving"]:
                continue
            targets, any_of = tuple(each["waits_for"]), False
            if each["channel"] in channels:
                found = {target for channel in channels[each["channel"]] for target in _of_channel(each, channel)}
                targets, any_of = tuple(sorted(found)), True
            waits.append(Wait(worker.name, targets, any_of, _text(each, unread), each["elapsed_s"], each["site"] or ""))
    return waits


def _of_channel(call: Mapping[str, Any], channel: Mapping[str, Any]) -> set[str]:
    """Whom a call of a channel waits for: a get for those who may still put, a put for those who take what fills the channel."""
    workers = channel["workers"]
    if call["operation"].startswith("put"):
        full_of = {each["key"] for each in channel["keys"] if each["length"]}
        takes = channel["takes"]
        able = {name for name in workers["consumers"] if not (known := takes.get(name)) or not full_of.isdisjoint(known)}
        return {worker for name, worker in workers["consumers"].items() if name in able or not able}
    open_ones = {each["name"] for each in channel["producers"] if each["state"] == "open"}
    return {worker for name, worker in workers["producers"].items() if name in open_ones}


def _text(operation: Mapping[str, Any], unread: Mapping[str, Sequence[int]]) -> str:
    """The operation; of a receive also what lies there from the same peer, under tags that it does not ask for."""
    name, peer, subject = operation["operation"], operation["peer"], operation["subject"]
    if subject:
        return f"{name} {subject}"
    others = [] if name.startswith("send") else [tag for tag in unread.get(peer or "", ()) if tag != operation["tag"]]
    tag = f" tag {operation['tag']}" if operation["tag"] or others else ""
    unread_too = f", unread is tag {', '.join(map(str, others))}" if others else ""
    context = f" group {operation['context']:08x}" if operation["context"] else ""
    return f"{name} {'to' if name.startswith('send') else 'from'} {peer or 'anyone'}{tag}{context}{unread_too}"
