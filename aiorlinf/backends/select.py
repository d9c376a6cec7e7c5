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


def select_backend(wanted: str, *, fallback: bool, same_host: bool, same_worker: bool, gloo_problem: str | None) -> Choice:
    """Choose for payloads that do not fit in a frame.

    Args:
        wanted: auto, stream or gloo.
        fallback: a named backend that cannot be had may be replaced.
        same_host: the two workers share a host.
        same_worker: a worker talks to itself.
        gloo_problem: why Gloo cannot be used, None if it can.

    Raises:
        BackendUnavailable: the named backend cannot be had and `fallback` is off.
    """
    if same_worker:
        return Choice("stream", "a worker's messages to itself stay in its memory", False)
    if wanted == "stream":
        return Choice("stream", "asked for", True)
    if wanted == "gloo":
        if gloo_problem is None:
            return Choice("gloo", "asked for", not fallback)
        if fallback:
            return Choice("stream", f"gloo was asked for, but {gloo_problem}", False)
        raise BackendUnavailable("the backend asked for cannot be used", {"gloo": gloo_problem})
    if same_host:
        return Choice("stream", "both workers are on one host", False)
    if gloo_problem is not None:
        return Choice("stream", f"the workers are on different hosts, but {gloo_problem}", False)
    return Choice("gloo", "the workers are on different hosts", False)
