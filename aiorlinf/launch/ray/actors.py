"""Actors that are workers."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from aiorlinf.errors import AiorlinfError, UsageError
from aiorlinf.launch.ray.channels import use_actors_for_channels
from aiorlinf.launch.ray.needs import ray_itself
from aiorlinf.launch.ray.ticket import Ticket

if TYPE_CHECKING:
    from aiorlinf.worker import Worker

__all__ = ["ActorMaker", "JoinOptions", "Joined", "WorkerActor", "comm", "join_options", "plain_class"]

_CLOSE_SECONDS = 2.0

_comm: Worker | None = None  # of this process, which is one actor's


def comm() -> Worker:
    """The worker that this process is.

    Raises:
        UsageError: it is none, or one that has been told to join by itself.
    """
    if _comm is None:
        raise UsageError("this process is no worker that Ray has started", hint="start the actor with aiorlinf.ray.worker(...)")
    return _comm


class WorkerActor:
    """For type checkers, and for readers: a class whose actors are workers. `worker` works with any class.

    Attributes:
        comm: the worker, from before `__init__` on.
    """

    comm: Worker


JoinOptions = Mapping[str, Any]
"""Keyword arguments of `aiorlinf.init` for an actor; None: it does not join by itself."""


class Joined:
    """Stands before the user's class in the classes of our actors: joins the job, then makes the rest.

    An actor with coroutine methods has a loop, on which Ray makes it, too: the worker lives there. For others it has one in a thread.
    """

    def __init__(self, ticket: Ticket, options: JoinOptions | None, *args: Any, **kwargs: Any) -> None:
        global _comm
        ticket.take()
        use_actors_for_channels()
        if options is not None:
            from aiorlinf.worker import init  # torch, which is as heavy as Ray

            _comm = init(**options)
            if not hasattr(type(self), "comm"):
                self.comm: Worker = _comm
        super().__init__(*args, **kwargs)

    def __ray_shutdown__(self) -> None:
        """Called by Ray when nobody needs the actor any more, not when it is killed: leave the job, so that others hear of no death."""
        of_the_user = getattr(super(), "__ray_shutdown__", None)
        if of_the_user is not None:
            of_the_user()
        if _comm is not None and not _comm.closed:
            _leave(_comm)


def _leave(comm: Worker) -> None:
    """Close it before the process ends, within some seconds."""
    home = comm.home
    try:
        if home.loop.is_running():
            closing = comm.close(_CLOSE_SECONDS)
            if not home.on_home():
                closing.wait(2 * _CLOSE_SECONDS)
        elif not home.loop.is_closed():  # of an async actor: Ray has stopped it, and calls us in another thread
            home.bind()
            home.loop.run_until_complete(asyncio.wait_for(_closed(comm), 2 * _CLOSE_SECONDS))
    except (AiorlinfError, TimeoutError):  # nobody is left to tell, and the process ends
        pass


async def _closed(comm: Worker) -> None:
    await comm.close(_CLOSE_SECONDS)


def plain_class(given: Any) -> tuple[type, dict[str, Any]]:
    """The class itself, and the options that ``@ray.remote`` was given for it, if it was used.

    Raises:
        UsageError: not a class.
    """
    made = getattr(given, "__ray_metadata__", None)
    if made is not None:
        return made.modified_class.__ray_actor_class__, dict(given._default_options)
    if not isinstance(given, type):
        raise UsageError(f"{given!r} is no class", operation="worker", hint="pass an actor's class, with @ray.remote or without")
    return given, {}


@functools.lru_cache(maxsize=256)
def _joined(given: type) -> type:
    """The class that Ray gets. Its name is that of the user's, so that logs and dashboard show it."""
    return type(given.__name__, (Joined, given), {"__module__": given.__module__, "__doc__": given.__doc__})


class ActorMaker:
    """An actor's class with its place in a job, ready to be started: as Ray's own ``ActorClass``, with `remote` and `options`."""

    def __init__(self, given: Any, ticket: Callable[[], Ticket], join: JoinOptions | None, options: Mapping[str, Any]) -> None:
        self._class, remembered = plain_class(given)
        self._ticket = ticket
        self._join = join
        self._options = {**remembered, **options}

    def __repr__(self) -> str:
        return f"<worker actor {self._class.__name__}>"

    def options(self, **options: Any) -> ActorMaker:
        """The same with other options of Ray's, such as ``num_cpus``, ``resources`` or ``label_selector``."""
        return ActorMaker(self._class, self._ticket, self._join, {**self._options, **options})

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Start the actor; its handle. The arguments are those of the class.

        Raises:
            TypeError: they do not fit.
            ValueError: Ray does not know an option.
        """
        inspect.signature(self._class).bind(*args, **kwargs)
        made = ray_itself().remote(_joined(self._class))
        return (made.options(**self._options) if self._options else made).remote(self._ticket(), self._join, *args, **kwargs)


def join_options(join: bool, backend: str | None, device: Any, loop: Literal["auto", "thread"]) -> dict[str, Any] | None:
    """What an actor passes to `aiorlinf.init`; None: it does not call it."""
    return {"backend": backend, "device": device, "loop": loop} if join else None
