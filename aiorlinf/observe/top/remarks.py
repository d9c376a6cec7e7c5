"""What stands out in the state of a job, in plain words: who does not receive, who cannot be reached, which channel is uneven. Pure.

Only what has lasted a moment is worth a word. Each remark says what is, whose line of the program it is about where that is known, and
leaves it to the reader whether it is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aiorlinf.observe.job import JobState, WorkerState
from aiorlinf.observe.top.rates import ChannelFigures, channel_figures

__all__ = ["UNEVEN", "remarks"]

UNEVEN = 0.7
"""A balance below this (`channel_figures`) is worth a look."""

_PATIENCE_S = 2.0
_FEW_ITEMS = 10
"""Of so few items nobody can say whether they go to all alike."""

_NAMES = 4
_NOT_CONNECTED = "not connected yet: "


def remarks(now: JobState, before: JobState | None) -> list[str]:
    """One sentence for each; `before` is an earlier look, without which some things are not seen."""
    workers = {worker.name: worker for worker in now.workers}
    earlier = {} if before is None else {worker.record.identity: worker for worker in before.workers}
    return [
        *_silent(now),
        *_blocked(now),
        *_absent(now, workers),
        *_unconnected(now, workers),
        *_unreceived(now, workers, earlier),
        *(remark for channel in now.channels() for remark in _of_channel(now, channel)),
    ]


# ---- workers


def _silent(now: JobState) -> Iterator[str]:
    for worker in now.workers:
        if worker.report is None:
            where = f"process {worker.record.pid} on {worker.record.labels.get('host', worker.record.host)}"
            waits = sum(worker.name in wait.targets for wait in now.waits)
            others = f"; {_waits(waits, 'operation', ' of others')} for it" if waits else ""
            yield f"{worker.name} {worker.problem}: its {where} is frozen or cut off{others}"


def _blocked(now: JobState) -> Iterator[str]:
    for worker in now.workers:
        if worker.report is not None and worker.report["loop_blocked"]:
            where = worker.report["busy_at"]
            yield f"the event loop of {worker.name} is blocked{f' at {where[-1]}' if where else ''}: nothing else that runs on it goes on"


def _absent(now: JobState, workers: Mapping[str, WorkerState]) -> Iterator[str]:
    oldest: dict[tuple[str, str], float] = {}
    for wait in now.waits:
        for target in wait.targets:
            if target not in workers and not wait.any_of:
                oldest[wait.worker, target] = max(oldest.get((wait.worker, target), 0.0), wait.age_s or 0.0)
    for (worker, target), age in oldest.items():
        if age >= _PATIENCE_S:
            yield f"{worker} has waited {age:.0f} s for {target}, which has not joined the job, or has left it"


def _unconnected(now: JobState, workers: Mapping[str, WorkerState]) -> Iterator[str]:
    for worker, link in _links(now):
        remote = link["remote"]
        ages = [each["elapsed_s"] or 0.0 for each in _pending(worker) if each["peer"] == remote]
        if link["state"] == "connecting" and remote in workers and max(ages, default=0.0) >= _PATIENCE_S:
            why = link["reason"].removeprefix(_NOT_CONNECTED) if link["reason"].startswith(_NOT_CONNECTED) else "no answer yet"
            yield (
                f"{worker.name} cannot connect to {remote} ({max(ages):.0f} s so far): {why}. Is that port blocked? "
                f"`aiorlinf doctor --listen` there and `aiorlinf doctor --peer` here try the way"
            )


def _unreceived(now: JobState, workers: Mapping[str, WorkerState], earlier: Mapping[Any, WorkerState]) -> Iterator[str]:
    """Messages and sends that nobody takes, at a worker that could."""
    for worker, link in _links(now):
        sender = workers.get(link["remote"])
        if link["state"] != "up" or worker.report is None or worker.report["loop_blocked"]:
            continue
        sends = [
            each
            for each in ([] if sender is None else _pending(sender))
            if each["operation"].startswith("send") and each["peer"] == worker.name and not each["moving"]
            if (each["elapsed_s"] or 0.0) >= _PATIENCE_S
        ]
        lies = link["unread_tags"] and _lies_still(link, earlier.get(worker.record.identity))
        if not sends and not lies:
            continue
        unread = link["unread_messages"]
        what = [f"{_count(unread, 'message')} of it {'lies' if unread == 1 else 'lie'} there unread"] if lies else []
        if sends:
            oldest = max(each["elapsed_s"] for each in sends)
            what.append(f"{_waits(len(sends), 'send')} for that, the oldest for {oldest:.0f} s")
        tags = sorted({*(link["unread_tags"] if lies else ()), *(each["tag"] for each in sends)})
        said = f"what {link['remote']} sends with {_tags(tags)}: {', and '.join(what)}"
        asked = [each for each in _pending(worker) if each["operation"] in ("recv", "recv_tensor") and each["peer"] == link["remote"]]
        other = sorted({each["tag"] for each in asked} - set(tags))
        if other:
            yield f"{worker.name} does not receive {said}. It waits for {_tags(other)} of {link['remote']}, {_begun(asked)}"
        elif asked:
            yield f"{worker.name} does not receive {said}. It waits for the same tag in another group, {_begun(asked)}"
        elif not any(each["operation"] == "inbox" for each in _pending(worker)):
            yield f"{worker.name} does not receive {said}. {_doing(now, worker)}"


def _doing(now: JobState, worker: WorkerState) -> str:
    """What it does instead."""
    waits = [wait for wait in now.waits if wait.worker == worker.name]
    shown = "; ".join(f"{wait.text}{f', begun at {_short(wait.site)}' if wait.site else ''}" for wait in waits[:_NAMES])
    return f"It waits for something else: {shown}" if shown else "It has no receive under way"


def _lies_still(link: Mapping[str, Any], earlier: WorkerState | None) -> bool:
    """The worker has taken nothing of the peer's since the look before, and there was something."""
    for was in () if earlier is None or earlier.report is None else earlier.report["links"]:
        if (was["remote"], was["incarnation"]) == (link["remote"], link["incarnation"]) and was["unread_messages"]:
            return bool(_taken(was) == _taken(link))
    return False


def _taken(link: Mapping[str, Any]) -> int:
    return int(link["messages_received"] - link["unread_messages"])


# ---- channels


def _of_channel(now: JobState, channel: Mapping[str, Any]) -> Iterator[str]:
    figures = channel_figures(channel)
    name = f"channel {channel['name']!r}"
    if figures.maxsize and figures.length >= figures.maxsize and figures.waiting_puts:
        rate = f"its consumers take {figures.gets_per_s:.1f} items/s" if figures.gets_per_s else "nobody takes anything from it"
        yield f"{name} is full ({figures.length} of {figures.maxsize}): {_waits(figures.waiting_puts, 'put')}, and {rate}"
    if not figures.length and figures.waiting_gets and not figures.puts_per_s and not figures.ended and _waits_long(now, channel):
        open_ones = [f"{each['name']}" for each in channel["producers"] if each["state"] == "open"]
        who = f"its producers ({_names(open_ones)}) put nothing" if open_ones else "it has no producer"
        yield f"{name} is empty: {_waits(figures.waiting_gets, 'get')}, and {who}"
    yield from _uneven(name, channel, figures)
    for key in channel["keys"]:
        takers = [consumer for consumer, keys in channel["takes"].items() if keys is None or key["key"] in keys]
        if key["length"] and channel["takes"] and not takers and key["oldest_age_seconds"] >= _PATIENCE_S:
            shown = "without a key" if key["key"] is None else f"of key {key['key']!r}"
            yield f"{name}: {_count(key['length'], 'item')} {shown} lie there, which no consumer has asked for"


def _uneven(name: str, channel: Mapping[str, Any], figures: ChannelFigures) -> Iterator[str]:
    consumers = channel["consumers"]
    taken = sum(each["taken"] for each in consumers)
    if figures.balance is None or figures.balance >= UNEVEN or taken < _FEW_ITEMS:
        return
    most = max(consumers, key=lambda each: each["items_per_second"])
    least = min(consumers, key=lambda each: each["items_per_second"])
    idle = sum(each["waiting_gets"] > 0 for each in consumers if each is not most)
    policy = f"its policy is {channel['policy']}" if channel["policy"] else "it has no policy: whoever asks first gets the next item"
    if 2 * least["queued"] > figures.length:  # whoever is quicker cannot have them
        doing = f"{least['queued']} of the {_count(figures.length, 'item')} that lie there are meant for {least['name']} already"
    else:
        doing = f"{_waits(idle, 'other')} for items meanwhile" if idle else "nobody waits: the others are slower"
    rates = f"{_who(most, channel)} gets {most['items_per_second']:.1f} items/s, {_who(least, channel)} {least['items_per_second']:.1f}"
    yield f"{name} is uneven: {rates}, of {len(consumers)} consumers; {doing}; {policy}{''.join(_other_keys(most, channel))}"


def _other_keys(most: Mapping[str, Any], channel: Mapping[str, Any]) -> Iterator[str]:
    """Consumers that want nothing of what the busiest one gets."""
    wanted = channel["takes"].get(most["name"])
    for consumer in channel["consumers"]:
        keys = channel["takes"].get(consumer["name"])
        if keys and wanted and set(keys).isdisjoint(wanted):
            shown = _names(["no key" if key is None else repr(key) for key in keys])
            yield f"; {_who(consumer, channel)} has asked for key{'' if len(keys) == 1 else 's'} {shown} only"


def _who(consumer: Mapping[str, Any], channel: Mapping[str, Any]) -> str:
    worker = channel["workers"]["consumers"].get(consumer["name"])
    return str(consumer["name"]) if worker in (None, consumer["name"]) else f"{consumer['name']} ({worker})"


def _waits_long(now: JobState, channel: Mapping[str, Any]) -> bool:
    calls = (each for worker in now.workers for each in _pending(worker) if each["channel"] == channel["name"])
    return any((each["elapsed_s"] or 0.0) >= _PATIENCE_S for each in calls)


# ---- words


def _links(now: JobState) -> Iterator[tuple[WorkerState, Mapping[str, Any]]]:
    for worker in now.workers:
        for link in () if worker.report is None else worker.report["links"]:
            yield worker, link


def _pending(worker: WorkerState) -> Sequence[Mapping[str, Any]]:
    return () if worker.report is None else worker.report["pending"]


def _begun(operations: Sequence[Mapping[str, Any]]) -> str:
    sites = sorted({_short(each["site"]) for each in operations if each["site"]})
    return f"begun at {_names(sites)}" if sites else "nobody knows since when"


def _short(site: str) -> str:
    return site.rpartition("/")[2]


def _tags(tags: Sequence[int]) -> str:
    return f"tag{'' if len(tags) == 1 else 's'} {_names([f'{tag}' for tag in tags])}"


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMES]) + (f" and {len(names) - _NAMES} more" if len(names) > _NAMES else "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _waits(number: int, what: str, of_whom: str = "") -> str:
    return f"{_count(number, what)}{of_whom} {'waits' if number == 1 else 'wait'}"
