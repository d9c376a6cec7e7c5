"""Channel workers as actors.

A process that a worker starts is ended by Ray with that worker's actor. So in a job on Ray, `comm.create_channel` has an actor started
instead: a detached one, since an actor that another one starts ends with it. Like the process, it ends when the job is over.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from aiorlinf.channel import spawn
from aiorlinf.errors import RendezvousError
from aiorlinf.launch.channel_worker import End
from aiorlinf.launch.ray.needs import ray_itself
from aiorlinf.launch.ray.ticket import Ticket

__all__ = ["NAMESPACE", "ChannelActor", "actor_options", "use_actors_for_channels"]

log: logging.Logger = logging.getLogger("aiorlinf.channel")

NAMESPACE = "aiorlinf"
"""Ray's namespace for the detached ones; their names have the job's token in no form, only its manager's address."""

_FAILED = 1


class ChannelActor:
    """The actor: what `launch.channel_worker` is as a program."""

    def __init__(self, ticket: Ticket) -> None:
        ticket.take()
        self._joined: asyncio.Future[None] | None = None
        self._serving: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Join, and hold channels until the job is over. Returns when it has joined.

        Raises:
            AiorlinfError: that failed; the actor has ended itself, or is about to.
        """
        loop = asyncio.get_running_loop()
        self._joined = loop.create_future()
        self._serving = loop.create_task(self._serve(), name="hold channels")
        await asyncio.shield(self._joined)

    async def _serve(self) -> None:
        from aiorlinf.worker import init

        assert self._joined is not None
        end = End(signals=False)
        try:
            async with init() as comm:
                end.watch(comm)
                self._joined.set_result(None)
                await end.event.wait()
        except RendezvousError as error:
            if self._joined.done() or "registered already" not in error.message:
                raise
            log.debug("somebody else started the same channel worker: %s", error)
            self._joined.set_result(None)
        except BaseException as error:  # whatever it is, whoever waits must hear of it
            if self._joined.done():
                raise
            self._joined.set_exception(error)
        finally:
            end.stop()
            asyncio.get_running_loop().call_later(0.5, _end_this_actor)  # the answer to `begin` leaves first


def _end_this_actor() -> None:
    ray = ray_itself()
    ray.kill(ray.get_runtime_context().current_actor)


def actor_options(name: str) -> dict[str, Any]:
    """Of the actors that workers start: on the worker's own node, where the process would have been."""
    ray = ray_itself()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )  # a soft one is not heeded for who needs no CPU
    return {"num_cpus": 0, "name": name, "namespace": NAMESPACE, "lifetime": "detached", "scheduling_strategy": here}


def use_actors_for_channels() -> None:
    """From now on, what this process starts for a channel is an actor."""
    spawn.start_with(_start)


def _start(env: Mapping[str, str]) -> Callable[[], int | None]:
    """Start one; whoever calls the result learns whether that has failed. Ray's calls block for some milliseconds, hence the thread."""
    failed: list[int] = []
    ticket = Ticket(
        env["AIORLINF_ADDRESS"],
        env["AIORLINF_MANAGER"],
        env["AIORLINF_TOKEN"],
        env={name: value for name, value in env.items() if name.startswith("AIORLINF_TLS_")},
    )

    def start() -> None:
        ray = ray_itself()
        name = f"{ticket.address} of {ticket.manager}"
        try:
            actor = ray.remote(ChannelActor).options(**actor_options(name)).remote(ticket)
            ray.get(actor.begin.remote())
        except ValueError as error:  # the name is taken: somebody else has just started it
            log.debug("%s: %s", name, error)
        except Exception as error:  # Ray has many of its own
            log.error("the channel worker %s could not be started: %s", ticket.address, error)
            failed.append(_FAILED)

    threading.Thread(target=start, name=f"start {ticket.address} in {os.getpid()}", daemon=True).start()
    return lambda: failed[0] if failed else None
