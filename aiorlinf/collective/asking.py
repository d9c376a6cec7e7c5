"""What is the peer waiting for? Asked shortly before a time limit passes, so that the error can say it.

A question goes through the manager, and is answered by the peer's heartbeat thread even while its loop is blocked. Operations whose limits
pass in the same moment share one question. Without an answer in time the error just does not say.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from aiorlinf.errors import AiorlinfError

if TYPE_CHECKING:
    from aiorlinf.address import Identity
    from aiorlinf.work.home import LoopHome

__all__ = ["Asking", "Inspect", "what_it_waits_for"]

Inspect = Callable[["Identity", float], Awaitable[dict[str, Any]]]
"""As `manager.lifeline.Lifeline.inspect`."""

_ANSWER_S = 0.4
_SHOWN = 3


class Asking:
    """See the module. Home thread only.

    Attributes:
        inspect: None before the worker has joined.
    """

    def __init__(self, home: LoopHome) -> None:
        self.inspect: Inspect | None = None
        self._home = home
        self._asked: dict[Identity, list[list[str]]] = {}

    def ask(self, peer: Identity, answer: list[str]) -> None:
        """Ask this life of a worker; one line is put into `answer` when it is known."""
        waiting = self._asked.get(peer)
        if waiting is not None:
            waiting.append(answer)
        elif self.inspect is not None:
            self._asked[peer] = [answer]
            self._home.spawn(self._ask(peer, self.inspect), f"ask {peer} what it waits for")

    async def _ask(self, peer: Identity, inspect: Inspect) -> None:
        try:
            text = what_it_waits_for(await inspect(peer, _ANSWER_S))
        except AiorlinfError:
            text = ""
        finally:
            answers = self._asked.pop(peer)
        if text:
            for answer in answers:
                answer.append(text)


def what_it_waits_for(report: Mapping[str, Any]) -> str:
    """One line of a report (`link.report.make_report`) of a peer, which may say anything; "" if it makes no sense."""
    try:
        operations = [_operation(each) for each in report["pending"] if not each["moving"]]
        total = int(report["pending_total"]) - len(report["pending"]) + len(operations)
        busy = [str(line) for line in report["busy_at"]]
    except (KeyError, TypeError, ValueError):
        return ""
    if busy:
        return f"its loop is busy at {busy[-1][:300]}"
    shown = list(dict.fromkeys(operations))[:_SHOWN]
    if not shown:
        return "it waits for nothing"
    more = f" and {total - len(shown)} more" if total > len(shown) else ""
    return f"it waits for {', '.join(shown)}{more}"


def _operation(operation: Mapping[str, Any]) -> str:
    name, subject, peer = str(operation["operation"])[:40], str(operation["subject"])[:100], operation["peer"]
    if subject:
        return f"{name} {subject}"
    tag = f" tag {int(operation['tag'])}" if operation["tag"] else ""
    return f"{name} {'to' if name.startswith('send') else 'from'} {'anyone' if peer is None else str(peer)[:100]}{tag}"
