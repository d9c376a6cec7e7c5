"""A Ray `ObjectRef` as a work: chained, awaited from any loop, waited for in any thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiorlinf.errors import UsageError
from aiorlinf.launch.ray.needs import ray_itself
from aiorlinf.work.kinds import AsyncChannelWork

if TYPE_CHECKING:
    from aiorlinf.worker import Worker

__all__ = ["work_of"]


def work_of(ref: Any, comm: Worker, *, cancel: bool = True) -> AsyncChannelWork[Any]:
    """The outcome of an actor's call, a task, or an object of the store, as a work of this worker:
    ``work_of(actor.evaluate.remote(weights), comm).then(report)``.

    Args:
        ref: a Ray ``ObjectRef``.
        comm: whose loop ends it.
        cancel: cancelling the work, or the passing of its deadline, also cancels the call in Ray; False: it goes on there.

    Raises:
        UsageError: at the call: not an ``ObjectRef``.
        Ray's own errors, unchanged: by the work.

    Cancelling asks Ray to cancel the call (a method of an async actor is ended, one that has not begun does not begin, others go on).
    """
    ray = ray_itself()
    if not isinstance(ref, ray.ObjectRef):
        raise UsageError(
            f"something of type {type(ref).__name__} is no ObjectRef",
            operation="work_of",
            hint="pass what actor.method.remote(...) returned",
        )

    def give_up(_: object) -> None:
        ray.cancel(ref, recursive=False)

    return AsyncChannelWork(comm.home, "ray", ref.future(), abort=give_up if cancel else None, detail=ref.hex()[:16])
