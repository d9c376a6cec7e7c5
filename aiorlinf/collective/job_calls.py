"""The collectives of a worker with all others of its job, or with some."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from aiorlinf.work.base import AsyncWork

if TYPE_CHECKING:
    from aiorlinf.collective.calls import Members
    from aiorlinf.collective.collective import Collective

__all__ = ["JobCalls"]


class JobCalls:
    """`Worker.broadcast`, `gather` and `all_to_all`.

    The members are all workers that the job was started with, in the order of their addresses, and `root` a rank among them or an address.
    A job that anybody may join has no such list: name the members there, in the same order everywhere.
    """

    collective: Collective

    def _expected(self) -> Iterable[str]:
        raise NotImplementedError

    def _members(self, members: Iterable[str] | None) -> Members:
        return self.collective.whole_job(self._expected) if members is None else self.collective.members(members)

    @overload
    def broadcast(
        self,
        obj: Any = None,
        root: int | str = 0,
        *,
        members: Iterable[str] | None = None,
        into: Any = None,
        changed_only: bool = False,
        timeout: float | None = None,
        async_op: Literal[True] = True,
    ) -> AsyncWork[Any]: ...
    @overload
    def broadcast(
        self,
        obj: Any = None,
        root: int | str = 0,
        *,
        members: Iterable[str] | None = None,
        into: Any = None,
        changed_only: bool = False,
        timeout: float | None = None,
        async_op: Literal[False],
    ) -> Any: ...
    def broadcast(
        self,
        obj: Any = None,
        root: int | str = 0,
        *,
        members: Iterable[str] | None = None,
        into: Any = None,
        changed_only: bool = False,
        timeout: float | None = None,
        async_op: bool = True,
    ) -> Any:
        """As `CollectiveGroup.broadcast`, which says all about it, among `members`, or all workers of the job.

        ``await comm.broadcast(model.state_dict(), root="trainer:0", into=model)`` brings everybody's model up to date.

        Raises UsageError at the call, too, where the job has no list of its workers, and before the worker has joined.
        """
        calls = self._members(members)
        if async_op:
            return calls.broadcast(obj, root, into=into, changed_only=changed_only, timeout=timeout)
        return calls.broadcast(obj, root, into=into, changed_only=changed_only, timeout=timeout, async_op=False)

    @overload
    def gather(
        self,
        obj: Any,
        root: int | str = 0,
        *,
        members: Iterable[str] | None = None,
        return_exceptions: bool = False,
        timeout: float | None = None,
        async_op: Literal[True] = True,
    ) -> AsyncWork[list[Any] | None]: ...
    @overload
    def gather(
        self,
        obj: Any,
        root: int | str = 0,
        *,
        members: Iterable[str] | None = None,
        return_exceptions: bool = False,
        timeout: float | None = None,
        async_op: Literal[False],
    ) -> list[Any] | None: ...
    def gather(
        self,
        obj: Any,
        root: int | str = 0,
        *,
        members: Iterable[str] | None = None,
        return_exceptions: bool = False,
        timeout: float | None = None,
        async_op: bool = True,
    ) -> Any:
        """As `CollectiveGroup.gather`, among `members`, or all workers of the job."""
        calls = self._members(members)
        if async_op:
            return calls.gather(obj, root, return_exceptions=return_exceptions, timeout=timeout)
        return calls.gather(obj, root, return_exceptions=return_exceptions, timeout=timeout, async_op=False)

    @overload
    def all_to_all(
        self,
        objects: Sequence[Any],
        *,
        members: Iterable[str] | None = None,
        return_exceptions: bool = False,
        timeout: float | None = None,
        async_op: Literal[True] = True,
    ) -> AsyncWork[list[Any]]: ...
    @overload
    def all_to_all(
        self,
        objects: Sequence[Any],
        *,
        members: Iterable[str] | None = None,
        return_exceptions: bool = False,
        timeout: float | None = None,
        async_op: Literal[False],
    ) -> list[Any]: ...
    def all_to_all(
        self,
        objects: Sequence[Any],
        *,
        members: Iterable[str] | None = None,
        return_exceptions: bool = False,
        timeout: float | None = None,
        async_op: bool = True,
    ) -> Any:
        """As `CollectiveGroup.all_to_all`, among `members`, or all workers of the job."""
        calls = self._members(members)
        if async_op:
            return calls.all_to_all(objects, return_exceptions=return_exceptions, timeout=timeout)
        return calls.all_to_all(objects, return_exceptions=return_exceptions, timeout=timeout, async_op=False)
