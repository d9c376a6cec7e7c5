"""The command line: ``aiorlinf run``, ``manager``, ``top``, ``trace``, ``metrics``, ``doctor``, ``config`` and ``completion``."""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from aiorlinf.completion import SHELLS, completion_script
from aiorlinf.config import config_to_dict, load_config, option_docs
from aiorlinf.errors import AiorlinfError, ConfigError, UsageError
from aiorlinf.launch import manager_command, run_command, topology_command
from aiorlinf.observe import trace_command
from aiorlinf.observe.doctor import command as doctor_command
from aiorlinf.observe.metrics import command as metrics_command
from aiorlinf.observe.top import command as top_command

__all__ = ["build_parser", "main"]

_DESCRIPTION = "Exchange of tensors and objects between the workers of a reinforcement-learning job."

_EPILOG = """\
examples:
  aiorlinf run --workers rollout=2,trainer=1 train.py   start a job on this machine
  aiorlinf manager --host 0.0.0.0 --port 4711           a registry that workers on several machines join
  aiorlinf top                                          what a running job is doing, and who waits for whom
  aiorlinf trace merge traces                           one picture of what `aiorlinf run --trace traces` has recorded
  aiorlinf doctor                                       check this machine; with --listen and --peer, two of them
  aiorlinf topology                                     where the workers of the job are, and what a broadcast would do
  aiorlinf config check job.yaml                        say what is wrong with a configuration
  aiorlinf config show                                  print every key with its meaning and default
  eval "$(aiorlinf completion bash)"                    let the shell complete this command; also zsh and fish

exit codes: 0 all went well, 1 an error, 2 wrong usage or configuration, 130 Ctrl-C; 'run' gives the failed worker's.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. Errors of this library are one line on stderr."""
    parser = build_parser()
    args = parser.parse_args(argv)
    handler: Callable[[argparse.Namespace], int] = args.run
    try:
        code = handler(args)
        sys.stdout.flush()
        return code
    except (UsageError, ConfigError) as error:
        print(f"aiorlinf: {error}", file=sys.stderr)
        return 2
    except AiorlinfError as error:
        print(f"aiorlinf: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read our output has seen enough, as in: aiorlinf config show | head -1
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter would try once more at its end
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="aiorlinf",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"aiorlinf {_version('aiorlinf')} (Python {platform.python_version()})")
    commands = parser.add_subparsers(metavar="command", required=True, title="commands")
    run_command.add_parser(commands)
    manager_command.add_parser(commands)
    top_command.add_parser(commands)
    trace_command.add_parser(commands)
    metrics_command.add_parser(commands)
    doctor_command.add_parser(commands)
    topology_command.add_parser(commands)
    _add_config(commands)
    _add_completion(commands)
    return parser


def _add_config(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    config = commands.add_parser("config", help="check or show a job's configuration", allow_abbrev=False)
    actions = config.add_subparsers(metavar="action", required=True, title="actions")
    check = actions.add_parser("check", help="say what is wrong with a configuration file, or that it is good", allow_abbrev=False)
    check.add_argument("file", help="a YAML file")
    check.set_defaults(run=_check_config)
    show = actions.add_parser("show", help="print every key with its meaning and value, as YAML", allow_abbrev=False)
    show.add_argument("file", nargs="?", help="a YAML file; without one, the defaults are shown")
    show.set_defaults(run=_show_config)


def _add_completion(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    completion = commands.add_parser(
        "completion",
        help="print a script that completes this command in your shell",
        description="Print a script that makes a shell complete this command. Put one line into the file that your shell reads when it "
        'starts: eval "$(aiorlinf completion bash)", the same with zsh, or in fish: aiorlinf completion fish | source',
        allow_abbrev=False,
    )
    completion.add_argument("shell", choices=sorted(SHELLS))
    completion.set_defaults(run=_print_completion)


def _print_completion(args: argparse.Namespace) -> int:
    print(completion_script(build_parser(), args.shell), end="")
    return 0


def _check_config(args: argparse.Namespace) -> int:
    load_config(args.file)
    print(f"{args.file}: good")
    return 0


def _show_config(args: argparse.Namespace) -> int:
    docs = {path: doc for path, doc, _ in option_docs()}
    print("\n".join(_yaml_lines(config_to_dict(load_config(args.file)), docs, "")))
    return 0


def _yaml_lines(section: Mapping[str, Any], docs: Mapping[str, str], path: str) -> Iterator[str]:
    indent = "  " * path.count(".")
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield f"{indent}{key}:"
            yield from _yaml_lines(value, docs, f"{path}{key}.")
        else:
            yield f"{indent}# {docs[path + key]}"
            shown = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=math.inf)
            yield f"{indent}{key}: {shown.removesuffix('...' + chr(10)).strip()}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return "(not installed)"
