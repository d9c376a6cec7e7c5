"""``aiorlinf doctor``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from functools import partial

from aiorlinf.config import JobConfig, load_config
from aiorlinf.observe.doctor.findings import Finding, Level, examine, lines
from aiorlinf.rendezvous.hosts import outward_host, parse_endpoint

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Look at this machine with the eyes of a job: packages, accelerators, memory files, limits, interfaces, ports, and the manager that the
environment names. With --listen here and --peer there, two machines also try whether each reaches the other, how fast, and whether their
clocks agree, and show which way tensors would take between their accelerators."""

_EPILOG = """\
exit codes: 0 nothing is wrong (there may be warnings), 1 a problem was found, 2 wrong usage or configuration."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the ``doctor`` command."""
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine, and the way to another one",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="YAML", help="the job's configuration, for interfaces and ports (default: the defaults)")
    other = parser.add_mutually_exclusive_group()
    other.add_argument(
        "--listen", nargs="?", const="", metavar="HOST:PORT", help="wait for the doctor of another machine (default: a free port)"
    )
    other.add_argument("--peer", metavar="HOST:PORT", help="meet the doctor that waits there")
    parser.add_argument("--wait", type=float, metavar="SECONDS", help="how long to --listen (default: until Ctrl-C)")
    parser.add_argument("--json", action="store_true", help="print the findings as a JSON list")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the findings; the exit code."""
    config = JobConfig() if args.config is None else load_config(args.config)
    found: list[Finding] = []
    for finding in _examine(args, config):
        found.append(finding)
        if not args.json:
            print("\n".join(lines([finding])), flush=True)
    if args.json:
        print(json.dumps([finding.as_dict() for finding in found], indent=2))
    problems = sum(finding.level is Level.PROBLEM for finding in found)
    if not args.json:
        warnings = sum(finding.level is Level.WARNING for finding in found)
        print(f"{problems} problem{'' if problems == 1 else 's'}, {warnings} warning{'' if warnings == 1 else 's'}")
    return 1 if problems else 0


def _examine(args: argparse.Namespace, config: JobConfig) -> Iterator[Finding]:
    # Here, for what they look at brings NumPy and more with it, and the other commands begin sooner without.
    from aiorlinf.observe.doctor import devices, memory, network, peer, software

    settings = config.cluster.network
    for subject, check in (
        ("python", software.check_python),
        ("torch", software.check_torch),
        ("accelerator", devices.check_devices),
        ("uvloop", software.check_uvloop),
        ("codecs", software.check_codecs),
        ("memory files", memory.check_memory_files),
        ("descriptor passing", memory.check_descriptors),
        ("huge pages", memory.check_huge_pages),
        ("limits", memory.check_limits),
        ("interfaces", partial(network.check_interfaces, settings)),
        ("host name", network.check_host_name),
        ("listening", partial(network.check_ports, settings)),
        ("manager", network.check_manager),
    ):
        yield from examine(subject, check)
    if args.peer is not None:
        yield from examine("peer", partial(peer.meet, *parse_endpoint(args.peer)))
    elif args.listen is not None:
        host, port = (outward_host(), 0) if not args.listen else parse_endpoint(args.listen)
        yield from examine("peer", partial(peer.wait_for_peer, host, port, _say, args.wait))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
