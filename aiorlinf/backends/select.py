"""Which backend carries large CPU payloads between two workers: a pure decision with its reason."""

from __future__ import annotations

from typing import NamedTuple

from aiorlinf.errors import BackendUnavailable

__all__ = ["Choice", "select_backend"]


class Choice(NamedTuple):
    """The backend's name, why it was chosen, and whether another may stand in when it cannot be made."""

    name: str
    reason: str
    required: bool


def select_backend(
    wanted: str, *, fallback: bool, same_host: bool, same_worker: bool, shm_problem: str | None, gloo_problem: str | None
) -> Choice:
    """Choose for payloads that do not fit in a frame.

    Args:
        wanted: auto, stream, shm or gloo.
        fallback: a named backend that cannot be had may be replaced.
        same_host: the two workers share a host.
        same_worker: a worker talks to itself.
        shm_problem, gloo_problem: why that backend cannot be used between the two, None if it can.

    Raises:
        BackendUnavailable: the named backend cannot be had and `fallback` is off.
    """
    if same_worker:
        return Choice("stream", "a worker's messages to itself stay in its memory", False)
    if wanted == "stream":
        return Choice("stream", "asked for", True)
    problems = {"shm": shm_problem, "gloo": gloo_problem}
    if wanted in problems:
        problem = problems[wanted]
        if problem is None:
            return Choice(wanted, "asked for", not fallback)
        if fallback:
            return Choice("stream", f"{wanted} was asked for, but {problem}", False)
        raise BackendUnavailable("the backend asked for cannot be used", {wanted: problem})
    if same_host:
        if shm_problem is None:
            return Choice("shm", "both workers are on one host", False)
        return Choice("stream", f"both workers are on one host, but {shm_problem}", False)
    if gloo_problem is None:
        return Choice("gloo", "the workers are on different hosts", False)
    return Choice("stream", f"the workers are on different hosts, but {gloo_problem}", False)
