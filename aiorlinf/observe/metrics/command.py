"""``aiorlinf metrics``: the figures of a whole job, for Prometheus."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import signal
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from aiorlinf.errors import AiorlinfError, UsageError
from aiorlinf.observe.manager import Access, connect, find_access, manager_options

if TYPE_CHECKING:
    from aiorlinf.manager.client import ManagerClient
    from aiorlinf.observe.metrics.samples import Sample

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Answer the scrapes of Prometheus with the figures of all workers and channels of a running job, asked through its manager at that moment.
Needs: pip install 'aiorlinf[observe]'. config/grafana-dashboard.json is a dashboard of them.

A worker can also be scraped itself, without its manager:
  from aiorlinf.observe.metrics.prometheus import serve, worker_collector
  with serve(worker_collector(comm), port=9465): ..."""

_LIMIT_S = 8.0  # of a scrape; Prometheus waits ten seconds


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the ``metrics`` command."""
    parser = subparsers.add_parser(
        "metrics",
        help="answer Prometheus with the figures of a running job",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    manager_options(parser)
    parser.add_argument("--port", type=int, default=9464, help="to listen on, 0 for a free one (default: %(default)d)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; who asks needs no token (default: %(default)s)")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM; the exit code. Errors are for the command line to show."""
    if importlib.util.find_spec("prometheus_client") is None:
        raise UsageError("prometheus_client is not installed", hint="pip install 'aiorlinf[observe]'")
    if not 0 <= args.port <= 65535:
        raise UsageError(f"--port is {args.port}", hint="from 0 to 65535")
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(_serve(args, find_access(args.manager, args.pid)))
    return 0


async def _serve(args: argparse.Namespace, access: Access) -> None:
    from aiorlinf.observe.metrics.prometheus import Collector, serve

    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    job = _Job(access)
    await job.ask()

    def read() -> Iterable[Sample]:
        return asyncio.run_coroutine_threadsafe(job.ask(), loop).result(_LIMIT_S)

    try:
        with serve(Collector(read), args.port, args.host) as port:
            print(f"http://{args.host}:{port}/metrics", flush=True)
            await stop.wait()
            job.ended = True
    except OSError as error:
        raise UsageError(f"cannot listen on {args.host}:{args.port}: {error}") from error
    finally:
        await job.close()


class _Job:
    """The connection to the manager; made anew when it was lost."""

    def __init__(self, access: Access) -> None:
        self.ended = False
        self._access = access
        self._client: ManagerClient | None = None
        self._lock = asyncio.Lock()

    async def ask(self) -> list[Sample]:
        """The figures of the moment. Raises what `connect` and `ask_job` do."""
        from aiorlinf.observe.job import ask_job
        from aiorlinf.observe.metrics.samples import of_job

        async with self._lock, asyncio.timeout(_LIMIT_S):
            if self.ended:
                return []
            if self._client is None or self._client.is_closed():
                self._client = await connect(self._access)
            try:
                return list(of_job(await ask_job(self._client)))
            except AiorlinfError as error:
                print(f"aiorlinf metrics: {error}", file=sys.stderr, flush=True)
                raise

    async def close(self) -> None:
        """Hang up."""
        async with self._lock:
            if self._client is not None:
                with contextlib.suppress(AiorlinfError):
                    await self._client.close()
