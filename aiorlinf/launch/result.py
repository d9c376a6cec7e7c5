"""How a job ended, and how to say it. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiorlinf.address import WorkerAddress
from aiorlinf.errors import AiorlinfError
from aiorlinf.launch.job import Stop

__all__ = [
    "UNKNOWN_EXIT",
    "LaunchResult",
    "WorkerFailed",
    "describe_exit",
    "failure_report",
    "is_consequence",
    "list_names",
    "shell_code",
    "signal_name",
]

UNKNOWN_EXIT = 255
"""Stands for a status that somebody else in this process collected before the launcher could."""


# As Python ends a traceback. A chained one may have it in the middle.
_PEER_ERROR = re.compile(r"\s*(\| )*aiorlinf\.errors\.Peer(Lost|Left|Restarted)\b")


class WorkerFailed(AiorlinfError):
    """A worker of a launched job failed, and with it the job.

    Attributes:
        worker: its address.
        returncode: its exit code, or ``-N`` when signal N ended it; None when it could not be started.
        stderr: the last lines it wrote to its standard error, without newlines.
    """

    def __init__(self, worker: str, returncode: int | None, stderr: Sequence[str] = (), message: str | None = None, **fields: Any) -> None:
        if message is None:
            message = f"worker {worker} {describe_exit(returncode or 0)}"
        last = next((line.strip() for line in reversed(stderr) if line.strip()), None)
        super().__init__(f"{message}: {last}" if last else message, **fields)
        self.worker = worker
        self.returncode = returncode
        self.stderr: tuple[str, ...] = tuple(stderr)


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """The end of a job.

    Attributes:
        returncodes: of every worker, by address: its exit code, or ``-N`` when signal N ended it.
        failed: the worker that failed first and so ended the job, or None.
        stderr: the last lines that worker wrote to its standard error, without newlines.
        elapsed: seconds from the start of the first worker to the end of the last.
        stopped: why the job ended early, or None when all workers were done.
        failed_after: seconds from the start to the failure of that worker.
    """

    returncodes: Mapping[str, int]
    failed: str | None
    stderr: tuple[str, ...]
    elapsed: float
    stopped: Stop | None = None
    failed_after: float | None = None

    @property
    def ok(self) -> bool:
        """Whether every worker returned 0."""
        return self.stopped is None and not any(self.returncodes.values())

    @property
    def returncode(self) -> int:
        """One exit code for all, as a shell gives it: 0, the failed worker's, or 128 + N for signal N."""
        if self.failed is not None:
            return shell_code(self.returncodes[self.failed])
        if self.stopped is not None and self.stopped.signal is not None:
            return 128 + self.stopped.signal
        if self.stopped is not None and self.stopped.kind == "timeout":
            return 124
        return 0 if self.ok else 1

    def check(self) -> LaunchResult:
        """This result, if the job went well.

        Raises:
            WorkerFailed: a worker failed.
        """
        if self.failed is not None:
            raise WorkerFailed(self.failed, self.returncodes[self.failed], self.stderr, elapsed=self.failed_after)
        return self


def shell_code(returncode: int) -> int:
    """A process's return code as a shell shows it: 128 + N for signal N."""
    return 128 - returncode if returncode < 0 else returncode


def signal_name(number: int) -> str:
    """``SIGTERM`` for 15; ``signal 64`` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_exit(returncode: int) -> str:
    """How a process ended, as the end of a sentence that begins with its name."""
    if returncode >= 0:
        if returncode == UNKNOWN_EXIT:
            return f"failed with exit code {UNKNOWN_EXIT}, or somebody else in this process collected its status"
        return f"failed with exit code {returncode}" if returncode else "ended well"
    number = -returncode
    text = f"was killed by {signal_name(number)} ({number})"
    if number == signal.SIGKILL:
        text += ", perhaps by the system for want of memory"
    return text


def list_names(workers: Iterable[str], limit: int = 8) -> str:
    """Workers in order, and how many more when there are many."""
    names = sorted(workers, key=lambda worker: WorkerAddress(worker).sort_key)
    more = len(names) - limit
    return ", ".join(names) if more <= 0 else f"{', '.join(names[:limit])} and {more} more"


def is_consequence(stderr: Iterable[str]) -> bool:
    """Whether these last lines of a worker's stderr say that it failed for the loss of another one."""
    return any(_PEER_ERROR.match(line) is not None for line in stderr)


def failure_report(result: LaunchResult, *, shown: bool = False) -> list[str]:
    """The lines that a launcher prints last when a worker failed: who, how, and what it said; empty when none did.

    With `shown`, what it said stands right above, and its last line is enough.
    """
    if result.failed is None:
        return []
    others = len(result.returncodes) - 1
    ending = {0: "", 1: "; the other worker was ended"}.get(others, f"; the other {others} workers were ended")
    after = "" if result.failed_after is None else f" after {result.failed_after:.1f} s"
    lines = [f"aiorlinf: worker {result.failed} {describe_exit(result.returncodes[result.failed])}{after}{ending}"]
    last = next((line.strip() for line in reversed(result.stderr) if line.strip()), None)
    if shown and last is not None:
        lines.append(f"    {last}")
    elif result.stderr:
        lines.append(f"aiorlinf: the last lines of its stderr ({result.failed}):")
        lines += [f"    {line}" for line in result.stderr]
    else:
        lines.append("aiorlinf: it wrote nothing to its stderr")
    return lines
