"""``aiorlinf manager``: a job's registry as a process of its own."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aiorlinf.config import load_config
from aiorlinf.errors import UsageError
from aiorlinf.launch.spec import worker_addresses
from aiorlinf.manager.embedded import manager_host, random_token
from aiorlinf.manager.service import ManagerService

if TYPE_CHECKING:
    from aiorlinf.address import WorkerAddress

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Run the registry of one job: who lives where, the job's configuration, news of deaths. It runs until Ctrl-C or SIGTERM.

The first line of the output is AIORLINF_MANAGER=host:port, for the environment of the workers; they need AIORLINF_TOKEN, too.

A job outlives its manager. Started again with the same --port, --job and token, the manager learns everything it needs, the configuration
too, from the workers, which try to reach it all the time. With --job, workers that are new to the job are let in after the first three
seconds, when those that live have come back."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the ``manager`` command."""
    parser = subparsers.add_parser(
        "manager",
        help="run the registry of a job",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--host", help="address to listen on (default: cluster.network.bind_host of the configuration, else 127.0.0.1: this machine only)"
    )
    parser.add_argument("--port", type=_port, default=0, help="port to listen on (default: a free one)")
    parser.add_argument("--config", metavar="YAML", help="the job's configuration")
    parser.add_argument(
        "--expect", metavar="WORKERS", help="all workers of the job, such as rollout=2,trainer=1: looking up any other fails at once"
    )
    parser.add_argument("--job", help="the job's id, so that the manager can be started again (default: a random one)")
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="holds the job's secret; made with a random one if it does not exist (default: AIORLINF_TOKEN, else a random one)",
    )
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the manager until it is told to end; return the exit status. Errors are for the command line to show."""
    token, recipe = _token(args.token_file)
    expected = None if args.expect is None else worker_addresses(args.expect)
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(_serve(args, token, recipe, expected))
    return 0


async def _serve(args: argparse.Namespace, token: bytes, recipe: str, expected: Sequence[WorkerAddress] | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    config = None if args.config is None else load_config(args.config)
    manager = ManagerService(config=config, token=token, job=args.job, expected=expected, recover=args.job is not None)
    await manager.start(args.host or manager_host(manager.config), args.port)
    try:
        print(f"AIORLINF_MANAGER={manager.address}", flush=True)
        first = expected[0] if expected else "rollout:0"
        join = f"AIORLINF_MANAGER={manager.address} {recipe} AIORLINF_ADDRESS={first} python script.py"
        print(f"job {manager.job}; a worker joins with: {join}", file=sys.stderr, flush=True)
        await stop.wait()
    finally:
        await manager.close()


def _token(file: str | None) -> tuple[bytes, str]:
    """The token, and how a worker is given it."""
    if file is not None:
        return _token_of_file(Path(file)), f'AIORLINF_TOKEN="$(cat {shlex.quote(file)})"'
    token = os.environ.get("AIORLINF_TOKEN")
    if token:
        return token.encode(), 'AIORLINF_TOKEN="$AIORLINF_TOKEN"'
    made = random_token()
    return made, f"AIORLINF_TOKEN={made.decode()}"


def _token_of_file(path: Path) -> bytes:
    try:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            token = path.read_bytes().strip()  # as "$(cat file)" gives it
        else:
            token = random_token()
            with os.fdopen(descriptor, "wb") as made:
                made.write(token + b"\n")
        token.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot use the token file {path}: {error}") from error
    if not token:
        raise UsageError(f"the token file {path} is empty")
    return token


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text[:6]) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")
    return int(text)
