"""``aiorlinf run``: a job on this machine, or in a Ray cluster, from the command line."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from typing import NoReturn

from aiorlinf.config import load_config
from aiorlinf.errors import UsageError
from aiorlinf.launch.api import DEFAULT_GRACE_S, JobSpec, check_seconds, new_loop, run_job
from aiorlinf.launch.job import Stop
from aiorlinf.launch.result import LaunchResult
from aiorlinf.launch.spec import parse_env, worker_addresses
from aiorlinf.launch.supervisor import Supervisor
from aiorlinf.launch.target import module_target, script_target
from aiorlinf.rendezvous.settings import TRACE_ENV

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Start the workers of a job on this machine, each in a process of its own that runs the same script. The script joins the job with
aiorlinf.init(). What the workers print is printed here, each line after the worker's name.

The first worker that fails ends the job: the others get SIGTERM, and SIGKILL after the grace. The exit code is that worker's, or 128
plus the number of the signal that killed it. Ctrl-C ends all of them; a second Ctrl-C does not wait for the grace.

In a worker that has called aiorlinf.init(), the first SIGTERM raises SystemExit in the main thread, so that `finally` and `with` do their
part, and SIGUSR1, which this command passes on, prints what it waits for; unless the script has handlers of its own. While the job runs,
`aiorlinf top` in another terminal shows what it does.
"""

_EPILOG = """\
examples:
  aiorlinf run --workers rollout=2,trainer=1 train.py --steps 100
  aiorlinf run --workers rollout=8,trainer=1 --config job.yaml --env LOG=debug -m my.package.train
  aiorlinf run --workers rollout=8,trainer=1 --ray auto --placement '{trainer: {num_gpus: 1}}' train.py

environment of a worker, besides this command's own:
  AIORLINF_ADDRESS, AIORLINF_MANAGER, AIORLINF_TOKEN   who it is, and how it joins
  AIORLINF_WORKERS                                     who belongs to the job, as --workers says it
  PYTHONUNBUFFERED=1                                   its output is seen at once
  PYTHONFAULTHANDLER=1 (unless set)                    a crash in C code prints a traceback
  OMP_NUM_THREADS (unless set, with several workers)   CPUs / workers, at least 1: the threads that torch uses
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "run",
        help="run a job's workers on this machine",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="aiorlinf run --workers GROUP=COUNT[,...] [options] [-m] script [args...]",
        allow_abbrev=False,
    )
    parser.add_argument("--workers", "-w", metavar="GROUP=COUNT,...", help="how many workers of each group, e.g. rollout=2,trainer=1")
    parser.add_argument("--config", metavar="FILE", help="the job's configuration, a YAML file (see: aiorlinf config show)")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable for all workers; may be repeated")
    parser.add_argument("--no-prefix", action="store_true", help="print the workers' lines as they are")
    parser.add_argument(
        "--grace", type=float, default=DEFAULT_GRACE_S, metavar="SECONDS", help="time between SIGTERM and SIGKILL (default: %(default)g)"
    )
    parser.add_argument("--trace", metavar="FOLDER", help="have each worker write a trace there; see: aiorlinf trace merge --help")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="end the job after this time, with exit code 124")
    parser.add_argument(
        "--ray", metavar="ADDRESS", help="start the workers in this Ray cluster: host:port, auto, or local for one of its own"
    )
    parser.add_argument(
        "--placement",
        metavar="YAML",
        help="Ray's options for each group, such as '{trainer: {num_gpus: 1}, rollout: {num_cpus: 2}}'",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="script is a module's name, as with python -m")
    parser.add_argument("script", help="the Python script that every worker runs; options of aiorlinf come before it")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments").required = False
    plain = parser.error

    def error(message: str) -> NoReturn:
        required = "the following arguments are required: script"
        plain(message.replace(required, f"{required}, and --workers before it, such as --workers rollout=2,trainer=1"))

    parser.error = error  # type: ignore[method-assign]
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the job; the exit code.

    Raises:
        UsageError, ConfigError: before anything is started.
        WorkerFailed: a worker could not be started.
    """
    if args.workers is None:
        late = any(arg == "--workers" or arg.startswith("--workers=") for arg in args.args)
        raise UsageError("--workers is missing", hint="it comes before the script" if late else "such as --workers rollout=2,trainer=1")
    target = module_target if args.module else script_target
    grace = check_seconds("--grace", args.grace)
    assert grace is not None
    spec = JobSpec(
        workers=worker_addresses(args.workers),
        target=target(args.script, args.args),
        config=load_config(args.config),
        env={**parse_env(args.env), **({} if args.trace is None else {TRACE_ENV: os.path.abspath(args.trace)})},
        grace=grace,
        prefix=not args.no_prefix,
        timeout=check_seconds("--timeout", args.timeout, allow_none=True),
    )
    if args.ray is not None:
        from aiorlinf.launch.ray.command import run_there  # heavy

        return run_there(spec, args.ray, args.placement)
    if args.placement is not None:
        raise UsageError("--placement is for workers in a Ray cluster", hint="name it: --ray auto")
    # Whoever started us may have ignored it; the kernel would then throw the workers' exit codes away.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(_with_signals(spec)).returncode


async def _with_signals(spec: JobSpec) -> LaunchResult:
    loop = asyncio.get_running_loop()
    early: list[int] = []  # came before there was a job to stop
    supervisors: list[Supervisor] = []

    def on_signal(number: int) -> None:
        if supervisors:
            supervisors[0].stop(Stop("signal", number))
        else:
            early.append(number)

    def pass_on() -> None:
        for supervisor in supervisors:
            supervisor.pass_on(signal.SIGUSR1)

    def on_start(supervisor: Supervisor) -> None:
        supervisors.append(supervisor)
        for number in early:
            loop.call_soon(on_signal, number)

    handled = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    handled = [number for number in handled if signal.getsignal(number) is not signal.SIG_IGN]  # nohup asks us not to listen
    for number in handled:
        loop.add_signal_handler(number, on_signal, number)
    handled.append(signal.SIGUSR1)
    loop.add_signal_handler(signal.SIGUSR1, pass_on)
    try:
        return await run_job(spec, on_start)
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
