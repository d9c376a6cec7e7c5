"""``aiorlinf config``: is a job's configuration good, what is in effect, and where does each value come from."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from aiorlinf.config import JobConfig, config_errors, config_to_dict, option_docs, read_config_file
from aiorlinf.errors import UsageError
from aiorlinf.observe.manager import Access, connect, find_access, manager_options
from aiorlinf.rendezvous.tls import TLS_VARIABLES

__all__ = ["add_parser", "origins"]

_SHOW = """\
Print every key of a job's configuration with its meaning, its value, and where that comes from, as YAML that can be loaded again:
'default', a line of the file, or a variable of the environment (the files of TLS).

With --job, --manager or --pid it is the configuration of a running job, as its manager hands it to the workers. Where the manager has it
from it does not say: a file, or the config= of the program that started it."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the ``config`` command."""
    config = subparsers.add_parser("config", help="check or show a job's configuration", allow_abbrev=False)
    actions = config.add_subparsers(metavar="action", required=True, title="actions")
    check = actions.add_parser("check", help="say what is wrong with a configuration file, or that it is good", allow_abbrev=False)
    check.add_argument("file", help="a YAML file")
    check.set_defaults(run=_check)
    show = actions.add_parser(
        "show",
        help="print every key with its meaning, its value and where that comes from, as YAML",
        description=_SHOW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    show.add_argument("file", nargs="?", help="a YAML file; without one, the defaults are shown")
    show.add_argument("--job", action="store_true", help="of the job that runs: that of the environment, or your one job on this machine")
    manager_options(show)
    show.set_defaults(run=_show)
    return config


def _check(args: argparse.Namespace) -> int:
    errors = config_errors(args.file)
    for error in errors:
        print(f"aiorlinf: {error}", file=sys.stderr)
    if errors:
        return 2
    print(f"{args.file}: good")
    return 0


def _show(args: argparse.Namespace) -> int:
    environment: Mapping[str, str] = os.environ
    lines: Mapping[str, int] | None
    if args.job or args.manager is not None or args.pid is not None:
        if args.file is not None:
            raise UsageError("either a file or a running job", hint="leave one of the two out")
        access = find_access(args.manager, args.pid)
        environment = access
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            config = runner.run(_ask(access))
        lines, where = None, "the job"
    elif args.file is None:
        config, lines, where = JobConfig(), {}, ""
    else:
        config, lines = read_config_file(args.file)
        where = args.file
    values = config_to_dict(config)
    known = origins(config, lines, where)
    for path, (variable, value) in _of_environment(environment).items():
        _set(values, path, value)
        known[path] = f"{variable} of the environment"
    docs = {path: doc for path, doc, _ in option_docs()}
    print("\n".join(_yaml_lines(values, docs, known, "")))
    return 0


async def _ask(access: Access) -> JobConfig:
    client = await connect(access)
    try:
        return await client.ask_config()
    finally:
        await client.close()


def origins(config: JobConfig, lines: Mapping[str, int] | None, where: str) -> dict[str, str]:
    """Where each value of a configuration comes from, by the full path of its key.

    Args:
        lines: of the keys in the file `where`; None: it is not known, so what is not the default comes from `where`.
    """
    found: dict[str, str] = {}
    for path, value, default in _leaves(config_to_dict(config), config_to_dict(JobConfig()), ""):
        if lines is None:
            found[path] = "default" if value == default else where
        else:
            line = lines.get(path)
            found[path] = "default" if line is None else f"{where}:{line}"
    return found


def _leaves(values: Mapping[str, Any], defaults: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    for key, value in values.items():
        default = defaults.get(key) if isinstance(defaults, Mapping) else None
        if isinstance(value, Mapping):
            yield from _leaves(value, default, f"{path}{key}.")
        else:
            yield path + key, value, default


def _of_environment(environment: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    return {
        f"cluster.network.tls.{name}": (variable, environment[variable])
        for name, variable in TLS_VARIABLES.items()
        if environment.get(variable)
    }


def _set(values: dict[str, Any], path: str, value: str) -> None:
    *sections, key = path.split(".")
    for section in sections:
        inner = values.get(section)
        if not isinstance(inner, dict):
            inner = values[section] = {}
        values = inner
    values[key] = value


def _yaml_lines(section: Mapping[str, Any], docs: Mapping[str, str], known: Mapping[str, str], path: str) -> Iterator[str]:
    indent = "  " * path.count(".")
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield f"{indent}{key}:"
            yield from _yaml_lines(value, docs, known, f"{path}{key}.")
        else:
            yield f"{indent}# {docs[path + key]} [{known.get(path + key, 'default')}]"
            shown = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=math.inf)
            yield f"{indent}{key}: {shown.removesuffix('...' + chr(10)).strip()}"
