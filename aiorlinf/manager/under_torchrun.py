"""The manager of a job that torchrun has started: embedded in the process of rank 0, and found by all others."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from aiorlinf.config import JobConfig
from aiorlinf.errors import RendezvousError
from aiorlinf.manager.embedded import EmbeddedManager, Hosting, acquire_embedded
from aiorlinf.rendezvous.torchrun import Board, Torchrun

if TYPE_CHECKING:
    from aiorlinf.work.home import LoopHome

__all__ = ["host_manager", "meet_manager"]

log: logging.Logger = logging.getLogger("aiorlinf.manager")

_FIRST_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 0.5
_SILENCE_SECONDS = 10.0


def host_manager(job: Torchrun, config: JobConfig | None, token: bytes | None, by_rank: tuple[str, ...] | None) -> EmbeddedManager:
    """In the process of rank 0: use its manager, and say where it is. Blocks for some milliseconds.

    Args:
        token: the one that is in everybody's environment, if there is one. Otherwise a random one is told through torchrun's store, which
            asks nobody who he is.
        by_rank: the addresses of all ranks, if theirs come from their ranks, so that it is known who belongs to the job.

    Raises as `acquire_embedded` and `Board`.
    """
    network = (config or JobConfig()).cluster.network
    host = None if network.bind_host != "auto" or network.interface is not None else job.where_to_listen()
    embedded = acquire_embedded(config, token, job.job, Hosting(host=host, expected=by_rank, lives=job.restarts))
    try:
        Board(job, network.rendezvous_timeout_s).post(embedded.address, None if token else embedded.token)
    except BaseException:
        embedded.release()
        raise
    return embedded


async def meet_manager(home: LoopHome, job: Torchrun, config: JobConfig | None, token: bytes | None) -> tuple[str, bytes | None]:
    """In the process of another rank: the manager's address and the job's token, once rank 0 has said so.

    Raises RendezvousError when that takes longer than cluster.network.rendezvous_timeout_s. Cancelling is harmless.
    """
    limit = (config or JobConfig()).cluster.network.rendezvous_timeout_s
    end = home.loop.time() + limit
    pause = _FIRST_PAUSE_SECONDS
    news = home.loop.call_later(_SILENCE_SECONDS, log.warning, "rank %d waits for rank 0 to call aiorlinf.init()", job.rank)
    try:
        board = await home.submit(Board, job, limit)
        while True:
            found = await home.submit(board.look)
            if found is not None:
                manager, told = found
                return manager, token or told
            left = end - home.loop.time()
            if left <= 0:
                raise RendezvousError(
                    f"rank 0 has not called aiorlinf.init() within {limit:g} s", address=f"{job.host}:{job.port}", elapsed=limit
                )
            await asyncio.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    finally:
        news.cancel()
