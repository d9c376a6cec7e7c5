"""``aiorlinf topology``: where the workers of a job are, and what a broadcast would do."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiorlinf.errors import UsageError
from aiorlinf.plans.broadcast import Place
from aiorlinf.plans.show import Member, show_topology

if TYPE_CHECKING:
    from aiorlinf.manager.protocol import WorkerRecord

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Print the racks, hosts and workers of a running job, with their labels, and the ways that a small and a large broadcast would take.

Labels come from AIORLINF_RACK and AIORLINF_LABELS (name=value,name=value) in a worker's environment, from cluster.topology.labels of the
job's configuration, and from init(labels=...)."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the ``topology`` command."""
    parser = subparsers.add_parser(
        "topology",
        help="show where workers are and what a broadcast would do",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--manager", metavar="HOST:PORT", help="the job's manager (default: AIORLINF_MANAGER); the token is AIORLINF_TOKEN")
    parser.add_argument("--root", metavar="WORKER", help="whose broadcast (default: the first worker's)")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Ask the manager and print; return the exit status. Errors are for the command line to show."""
    manager = args.manager or os.environ.get("AIORLINF_MANAGER")
    if not manager:
        raise UsageError("no manager", hint="give --manager HOST:PORT, or set AIORLINF_MANAGER")
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        records = runner.run(_ask(manager, os.environ.get("AIORLINF_TOKEN", "")))
    print("\n".join(_lines(records, args.root)))
    return 0


async def _ask(manager: str, token: str) -> list[WorkerRecord]:
    from aiorlinf.manager.client import ManagerClient

    client = await ManagerClient.connect(manager, token.encode("utf-8", "surrogateescape"))
    try:
        return await client.workers()
    finally:
        await client.close()


def _lines(records: Sequence[WorkerRecord], root: str | None) -> list[str]:
    if not records:
        return ["no workers have joined"]
    addresses = [str(record.address) for record in records]
    if root is not None and root not in addresses:
        raise UsageError(f"{root} is no worker of this job", hint=f"it has {', '.join(addresses)}")
    members = [
        Member(str(record.identity), Place(record.host_id, record.labels.get("rack", "")), record.labels, record.devices)
        for record in records
    ]
    return show_topology(members, 0 if root is None else addresses.index(root))
