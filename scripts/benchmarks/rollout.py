"""``scripts/bench rollout``: one and the same Atari job with only the transport exchanged.

Rollout workers play with the newest weights they have, a trainer learns from as many trajectories as there are workers and publishes
its weights after each update: the job of examples/async_rollout.py. Environments, policy, batch and seeds are the same for all; a run ends
after so many updates. Each run is made of processes of its own, and the transports take turns.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from scripts.benchmarks import plot

__all__ = ["SUMMARY", "TRANSPORTS", "main"]

SUMMARY = "the same Atari job over aiorlinf, Ray's queue, torch.multiprocessing and pyzmq"

ROOT: Final = Path(__file__).resolve().parents[2]
LIMIT_S: Final = 900.0

TRANSPORTS: Final = {
    "aiorlinf": ("rollout_ours", "aiorlinf"),
    "torch": ("rollout_torch", "torch.multiprocessing queues"),
    "zmq": ("rollout_zmq", "pyzmq, pickled"),
    "ray": ("rollout_ray", "ray.util.queue, object store"),
}
"""Name to module and title."""

QUICK: Final = {"envs": 2, "length": 8, "warm_up": 1, "updates": 3}

Values = dict[str, float]


def main(arguments: Sequence[str]) -> int:
    """Run and print; 1 when a run failed."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench rollout", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few short trajectories: shows that all of it works, not how fast it is")
    parser.add_argument("--rounds", type=int, default=None, help="runs of each transport; medians are printed (default 3, with --quick 1)")
    parser.add_argument("--peers", nargs="+", choices=list(TRANSPORTS), default=list(TRANSPORTS), metavar="NAME", help="only these")
    parser.add_argument("--envs", type=int, help="environments of each of the two rollout workers (default 8)")
    parser.add_argument("--length", type=int, help="steps of a trajectory (default 32)")
    parser.add_argument("--updates", type=int, help="updates that are measured in each run (default 20)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every run's figures here")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="also draw the figures (needs matplotlib)")
    asked = parser.parse_args(arguments)
    if asked.plot is not None and (missing := plot.missing()) is not None:
        parser.error(f"--plot needs matplotlib: {missing}")
    named = {name: getattr(asked, name) for name in ("envs", "length", "updates") if getattr(asked, name) is not None}
    options = {**(QUICK if asked.quick else {}), **named}
    found: dict[str, list[Values]] = {name: [] for name in asked.peers}
    skipped: dict[str, str] = {}
    failed = False
    for _ in range(asked.rounds or (1 if asked.quick else 3)):
        for name in asked.peers:
            if name in skipped:
                continue
            reason = _missing(name)
            if reason is not None:
                skipped[name] = reason
                continue
            values, problem = _run(name, options)
            if values is None:
                failed, skipped[name] = True, f"failed: {problem}"
            else:
                found[name].append(values)
    print(_table(found, skipped), end="")
    if asked.json is not None:
        asked.json.write_text(json.dumps({"options": options, "runs": found, "skipped": skipped}, indent=1) + "\n")
    if asked.plot is not None:
        _draw(found, asked.plot)
    return 1 if failed else 0


def _missing(name: str) -> str | None:
    needs = {"aiorlinf": (), "torch": (), "zmq": ("zmq",), "ray": ("ray",)}[name]
    for module in ("gymnasium", "ale_py", *needs):
        try:
            importlib.import_module(module)
        except ImportError as error:
            return f"not installed: {error}"
    return None


def _run(name: str, options: Mapping[str, int]) -> tuple[Values | None, str]:
    """One run, in a process that starts all others; its figures, or what went wrong."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("AIORLINF_")}
    paths = [str(ROOT), str(ROOT / "examples"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**kept, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONASYNCIODEBUG": ""}
    command = [sys.executable, "-m", "scripts.benchmarks.rollout_run", TRANSPORTS[name][0], json.dumps(options)]
    done = subprocess.run(
        command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return None, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    values: Values = json.loads(lines[-1])
    return values, ""


def _table(found: Mapping[str, Sequence[Values]], skipped: Mapping[str, str]) -> str:
    head = f"{'':30} {'steps/s':>9} {'(of all runs)':>17} {'trainer idle':>13} {'publishing':>11} {'lag mean':>9} {'worst':>6}"
    lines = [head, "-" * len(head)]
    medians: dict[str, float] = {}
    for name, runs in found.items():
        title = TRANSPORTS[name][1]
        if not runs:
            lines.append(f"{title:30} {skipped.get(name, 'not run')}")
            continue
        rates = [run["steps_per_s"] for run in runs]
        medians[name] = median(rates)
        lines.append(
            f"{title:30} {medians[name]:9.0f} {f'{min(rates):.0f} to {max(rates):.0f}':>17} {_percent(runs, 'idle'):>13} "
            f"{_percent(runs, 'publishing'):>11} {median(run['lag'] for run in runs):9.1f} {max(run['worst_lag'] for run in runs):6.0f}"
        )
    ours = medians.pop("aiorlinf", None)
    if ours is not None:
        lines += [
            f"aiorlinf makes {ours / theirs:.2f} times the steps per second of {TRANSPORTS[name][1]}" for name, theirs in medians.items()
        ]
    sizes = [run["megabytes"] for runs in found.values() for run in runs]
    if sizes:
        lines.append(f"a trajectory has {sizes[0]:.1f} MB of frames")
    return "\n".join(lines) + "\n"


def _percent(runs: Sequence[Values], name: str) -> str:
    return f"{100 * median(run[name] for run in runs):.1f} %"


def _draw(found: Mapping[str, Sequence[Values]], target: Path) -> None:
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    ran = {name: runs for name, runs in found.items() if runs}
    figure, axes = pyplot.subplots(1, 3, figsize=(14, 1.5 + 0.5 * max(1, len(ran))), layout="constrained")
    for axis, (title, values) in zip(
        axes,
        {
            "environment steps per second": {name: [run["steps_per_s"] for run in runs] for name, runs in ran.items()},
            "trainer waits for trajectories, %": {name: [100 * run["idle"] for run in runs] for name, runs in ran.items()},
            "weight versions behind, mean": {name: [run["lag"] for run in runs] for name, runs in ran.items()},
        }.items(),
        strict=True,
    ):
        titles = [TRANSPORTS[name][1] for name in reversed(values)]
        heights = [median(each) for each in reversed(values.values())]
        colours = [plot.OURS if name == "aiorlinf" else plot.PEER for name in reversed(values)]
        axis.barh(titles, heights, color=colours)
        for line, each in enumerate(reversed(values.values())):
            axis.plot(each, [line] * len(each), "k|")
        axis.set_title(title, fontsize=10)
    figure.savefig(target, dpi=110, format="png")
    pyplot.close(figure)
