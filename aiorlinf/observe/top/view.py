"""What is shown of a job, as tables of short texts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from aiorlinf.observe.job import JobState, WorkerState
from aiorlinf.observe.top.rates import Flow, channel_figures, ended_links, flows
from aiorlinf.observe.top.remarks import UNEVEN, remarks

__all__ = ["Cell", "Look", "Section", "as_json", "heading", "sections"]

Look = Literal["", "good", "warning", "bad", "faint"]


@dataclass(frozen=True, slots=True)
class Cell:
    """A text and how it looks; numbers are right-aligned."""

    text: str
    look: Look = ""
    right: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """A table. `more` says how many rows are left out. One without names of columns has whole sentences."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    more: int = 0


def heading(now: JobState) -> str:
    """One line."""
    silent = sum(worker.report is None for worker in now.workers)
    blocked = sum(worker.report is not None and worker.report["loop_blocked"] for worker in now.workers)
    parts = [f"job {now.job} at {now.manager}", _count(len(now.workers), "worker")]
    parts += [f"{silent} do not answer"] if silent else []
    parts += [f"{blocked} with a blocked loop"] if blocked else []
    parts += [_count(len(now.circles), "circle") + " of workers that wait for each other"] if now.circles else []
    return ", ".join(parts)


def sections(now: JobState, before: JobState | None, most: int) -> list[Section]:
    """The tables, each with at most so many rows; those that would be empty are left out."""
    tables = [_workers(now), _links(now, before), _ended(now), _channels(now), _keys(now), _consumers(now), _waits(now)]
    every = [_circles(now), _remarks(now, before), *tables]
    return [
        Section(title, columns, tuple(rows[:most]), max(0, len(rows) - most))
        for title, columns, rows in every
        if rows or title == "workers"
    ]


_Table = tuple[str, tuple[str, ...], Sequence[tuple[Cell, ...]]]


def _circles(now: JobState) -> _Table:
    rows = [
        (Cell(str(circle), "bad"), Cell(wait.worker, "bad"), Cell(wait.text, "bad"), _age(wait.age_s))
        for circle in now.circles
        for wait in circle.waits
    ]
    return "they wait for each other", ("circle", "worker", "operation", "for"), rows


def _remarks(now: JobState, before: JobState | None) -> _Table:
    return "what stands out", ("",), [(Cell(remark, "warning"),) for remark in remarks(now, before)]


def _workers(now: JobState) -> _Table:
    waiting = {worker for circle in now.circles for worker in circle.workers}
    return (
        "workers",
        ("worker", "life", "host", "pid", "loop", "links", "pending", "oldest"),
        [_worker(worker, worker.name in waiting) for worker in now.workers],
    )


def _worker(worker: WorkerState, in_circle: bool) -> tuple[Cell, ...]:
    record, report = worker.record, worker.report
    name = Cell(worker.name, "bad" if in_circle else "")
    who = (name, _number(record.incarnation), Cell(record.labels.get("host", record.host)), _number(record.pid))
    if report is None:
        return (*who, Cell(worker.problem or "", "bad"), Cell(""), Cell(""), Cell(""))
    if report["loop_blocked"]:
        where = report["busy_at"]
        loop = Cell("blocked" + (f" at {where[-1]}" if where else ""), "warning")
    else:
        loop = Cell("ok", "good")
    ages = [each["elapsed_s"] for each in report["pending"] if each["elapsed_s"] is not None]
    return (*who, loop, _number(report["links_total"]), _number(report["pending_total"]), _age(max(ages, default=None)))


def _links(now: JobState, before: JobState | None) -> _Table:
    rows = [
        (
            Cell(flow.source),
            Cell(flow.target),
            Cell(flow.backend if flow.state == "up" else flow.state, "" if flow.state == "up" else "warning"),
            _rate(flow.messages_per_s),
            Cell("" if flow.bytes_per_s is None else f"{_size(flow.bytes_per_s)}/s", right=True),
            _number(flow.messages),
            Cell(_size(flow.bytes), right=True),
            _number(flow.pending),
            Cell(_unread(flow), "warning" if flow.unread else "", True),
        )
        for flow in flows(now, before)
    ]
    return "links", ("from", "to", "way", "messages/s", "bytes/s", "messages", "bytes", "pending", "unread"), rows


def _ended(now: JobState) -> _Table:
    """What links have carried that are no more."""
    rows = [
        (
            Cell(each.worker),
            Cell(each.peer),
            _number(each.links),
            _number(each.messages_sent),
            Cell(_size(each.bytes_sent), right=True),
            _number(each.messages_received),
            Cell(_size(each.bytes_received), right=True),
        )
        for each in ended_links(now)
    ]
    return "links that have ended", ("worker", "peer", "links", "sent", "bytes", "received", "bytes"), rows


def _unread(flow: Flow) -> str:
    if flow.unread is None:
        return ""
    tags = flow.unread_tags
    return f"{flow.unread}" + (f" (tag{'' if len(tags) == 1 else 's'} {', '.join(map(str, tags))})" if tags else "")


def _channels(now: JobState) -> _Table:
    rows = []
    for each in map(channel_figures, now.channels()):
        full = each.maxsize and each.length >= each.maxsize
        starving = not each.length and each.waiting_gets
        rows.append(
            (
                Cell(each.name + (" (ended)" if each.ended else "")),
                Cell(each.worker),
                Cell(f"{each.length}/{each.maxsize}" if each.maxsize else f"{each.length}", "warning" if full or starving else "", True),
                Cell(_size(each.held_bytes), right=True),
                _age(each.oldest_s if each.length else None),
                _rate(each.puts_per_s),
                _rate(each.gets_per_s),
                Cell(_waiting(each.producers, each.waiting_puts), right=True),
                Cell(_waiting(each.consumers, each.waiting_gets), right=True),
                Cell("", right=True)
                if each.balance is None
                else Cell(f"{each.balance:.0%}", "warning" if each.balance < UNEVEN else "good", True),
            )
        )
    return "channels", ("channel", "at", "items", "bytes", "oldest", "puts/s", "gets/s", "producers", "consumers", "balance"), rows


def _keys(now: JobState) -> _Table:
    """Of channels that have other keys than the usual one."""
    rows = [
        (
            Cell(channel["name"]),
            Cell("" if key["key"] is None else f"{key['key']}"),
            _number(key["length"], "warning" if key["length"] and not takers else ""),
            Cell(_size(key["bytes"]), right=True),
            _age(key["oldest_age_seconds"] if key["length"] else None),
            _number(key["waiting_gets"]),
            Cell(", ".join(takers)),
        )
        for channel in now.channels()
        if any(key["key"] is not None for key in channel["keys"])
        for key in channel["keys"]
        for takers in [[name for name, keys in channel["takes"].items() if keys is None or key["key"] in keys]]
    ]
    return "keys of channels", ("channel", "key", "items", "bytes", "oldest", "gets wait", "taken by"), rows


def _consumers(now: JobState) -> _Table:
    """Of channels that have several."""
    rows = [
        (
            Cell(channel["name"]),
            Cell(each["name"]),
            Cell(channel["workers"]["consumers"].get(each["name"], "")),
            Cell(f"{each['taken'] / taken:.0%}" if taken else "", right=True),
            _number(each["taken"]),
            _rate(each["items_per_second"]),
            _number(each["pending"]),
        )
        for channel in now.channels()
        if len(channel["consumers"]) > 1
        for taken in [sum(each["taken"] for each in channel["consumers"])]
        for each in channel["consumers"]
    ]
    return "consumers of channels", ("channel", "consumer", "worker", "share", "items", "items/s", "pending"), rows


def _waiting(all_of_them: int, waiting: int) -> str:
    return f"{all_of_them} ({waiting} wait)" if waiting else f"{all_of_them}"


def _waits(now: JobState) -> _Table:
    in_circle = {id(wait) for circle in now.circles for wait in circle.waits}
    silent = {worker.name for worker in now.workers if worker.report is None}
    there = {worker.name for worker in now.workers}
    rows = []
    for wait in sorted(now.waits, key=lambda wait: -(wait.age_s or 0.0)):
        look: Look = "bad" if id(wait) in in_circle else ""
        states = {
            target: " (does not answer)" if target in silent else "" if target in there else " (is not there)" for target in wait.targets
        }
        targets = [target + states[target] for target in wait.targets[:4]]
        shown = (" or " if wait.any_of else ", ").join(targets) + (f" and {len(wait.targets) - 4} more" if len(wait.targets) > 4 else "")
        if not look and any(target in silent or target not in there for target in wait.targets):
            look = "warning"
        rows.append(
            (
                Cell(wait.worker, look),
                Cell(shown or "anyone", look),
                Cell(wait.text, look),
                _age(wait.age_s),
                Cell(wait.site.rpartition("/")[2], "faint"),
            )
        )
    return "who waits for whom", ("worker", "waits for", "operation", "for", "begun at"), rows


def as_json(now: JobState, before: JobState | None) -> dict[str, Any]:
    """All of it, as JSON values."""
    return {
        "job": now.job,
        "manager": now.manager,
        "workers": [
            {**worker.record.to_dict(), "answers": worker.report is not None, "problem": worker.problem, **_told(worker)}
            for worker in now.workers
        ],
        "links": [asdict(flow) for flow in flows(now, before)],
        "ended_links": [asdict(each) for each in ended_links(now)],
        "channels": [{**asdict(channel_figures(channel)), "details": channel} for channel in now.channels()],
        "waits": [asdict(wait) for wait in now.waits],
        "circles": [asdict(circle) for circle in now.circles],
        "remarks": remarks(now, before),
    }


def _told(worker: WorkerState) -> dict[str, Any]:
    report = worker.report
    if report is None:
        return {}
    return {name: report[name] for name in ("loop_blocked", "busy_at", "pending", "pending_total", "links_total", "channels_total")}


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _number(value: int | None, look: Look = "") -> Cell:
    return Cell("" if value is None else f"{value}", look, right=True)


def _rate(value: float | None) -> Cell:
    if value is None:
        return Cell("", right=True)
    return Cell(f"{value:.0f}" if value >= 10 or value == 0 else f"{value:.1f}", right=True)


def _age(seconds: float | None) -> Cell:
    if seconds is None:
        return Cell("", right=True)
    if seconds < 100:
        return Cell(f"{seconds:.1f} s", right=True)
    if seconds < 6000:
        return Cell(f"{seconds / 60:.0f} min", right=True)
    return Cell(f"{seconds / 3600:.1f} h", right=True)


def _size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if nbytes >= 10 or unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"
