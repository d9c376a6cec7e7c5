"""The command line: ``aiorlinf run``, ``manager``, ``top``, ``trace``, ``metrics``, ``doctor``, ``config`` and ``completion``."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import signal
import sys
from collections.abc import Callable, Sequence

from aiorlinf.completion import SHELLS, completion_script
from aiorlinf.errors import AiorlinfError, ConfigError, UsageError
from aiorlinf.launch import manager_command, run_command, topology_command
from aiorlinf.observe import config_command, trace_command
from aiorlinf.observe.bench import command as bench_command
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
  aiorlinf bench                                        how fast two workers exchange messages here
  aiorlinf config check job.yaml                        say what is wrong with a configuration
  aiorlinf config show job.yaml                         print every key with its meaning, its value, and where that comes from
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
    bench_command.add_parser(commands)
    config_command.add_parser(commands)
    _add_completion(commands)
    return parser


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


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return "(not installed)"
