"""A script or a function as every worker of a job on Ray."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import aiorlinf.ray
from aiorlinf import Worker
from aiorlinf.errors import DeadlineExceeded, UsageError
from aiorlinf.launch import WorkerFailed
from tests.launch.programs import ROOT, alive, child_env, pids_in, script, wait_until

pytestmark = pytest.mark.timeout(150)  # the first one starts Ray, and its actors import torch

LIMIT_S = 60

PLACEMENT = {"left": {"num_cpus": 0, "resources": {"left": 1}}, "right": {"num_cpus": 0, "label_selector": {"example.org/rack": "right"}}}


async def meet(comm: Worker, folder: str) -> None:
    """Tell each other where we are."""
    labels = dict(part.split("=") for part in os.environ["AIORLINF_LABELS"].split(","))
    told = await comm.gather([str(comm.address), labels["rack"], os.environ["AIORLINF_WORKERS"], os.environ["LOOK"]], root="right:0")
    if told:
        Path(folder, "told.json").write_text(json.dumps(told))


def test_a_function_on_both_nodes(cluster: Any, tmp_path: Path) -> None:
    result = aiorlinf.ray.launch(
        meet, "left=1,right=1", placement=PLACEMENT, args=[str(tmp_path)], env={"LOOK": "here"}, timeout=LIMIT_S, check=True
    )
    assert result.ok
    assert result.returncodes == {"left:0": 0, "right:0": 0}
    assert json.loads((tmp_path / "told.json").read_text()) == [
        ["left:0", "left", "left=1,right=1", "here"],
        ["right:0", "right", "left=1,right=1", "here"],
    ]


ONE_FAILS = """
note(ME)
if ME == "left:0":
    while not os.path.exists(f"{sys.argv[1]}/right:0"):
        time.sleep(0.02)
    sys.exit("no more of this")
time.sleep(100)
"""


SLEEPS = """
note(ME)
time.sleep(100)
"""


def assert_gone(folder: Path, name: str) -> None:
    """The process that left its pid there ends."""
    (pid,) = pids_in(folder, [name])
    wait_until(lambda: not alive(pid), f"process {pid} of {name} ends")


def test_one_that_fails_ends_the_others(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="worker left:0 failed with exit code 1: no more of this") as caught:
        aiorlinf.ray.launch(
            script(tmp_path, ONE_FAILS), "left=1,right=1", placement=PLACEMENT, args=[str(tmp_path)], timeout=LIMIT_S, check=True
        )
    assert caught.value.stderr[-1:] == ("no more of this",)
    assert_gone(tmp_path, "right:0")


@pytest.mark.asyncio
async def test_cancelling_and_time_limits_end_all(cluster: Any, tmp_path: Path) -> None:
    sleeper = script(tmp_path, SLEEPS)
    running = asyncio.ensure_future(aiorlinf.ray.launch_async(sleeper, "left=1", placement={"left": {"num_cpus": 0}}, args=[str(tmp_path)]))
    await asyncio.to_thread(pids_in, tmp_path, ["left:0"])
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.to_thread(assert_gone, tmp_path, "left:0")
    with pytest.raises(DeadlineExceeded, match="did not end in time"):
        await aiorlinf.ray.launch_async(sleeper, "left=1", placement={"left": {"num_cpus": 0}}, args=[str(tmp_path)], timeout=1.0)


def test_what_cannot_be_started(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="placement: the job has no group 'rihgt'"):
        aiorlinf.ray.launch(meet, "left=1", placement={"rihgt": {}})
    with pytest.raises(UsageError, match="placement: 'left' has 3"):
        aiorlinf.ray.launch(meet, "left=1", placement={"left": 3})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="num_nonsense"):
        aiorlinf.ray.launch(script(tmp_path, SLEEPS), "right=1,left=1", placement={"left": {"num_nonsense": 3}}, args=[str(tmp_path)])


@pytest.mark.timeout(120)
def test_the_atari_example_from_the_command_line(cluster: Any, tmp_path: Path) -> None:
    """The very file that `aiorlinf run` runs, with rollout workers on one node and the trainer on the other."""
    placement = "{rollout: {num_cpus: 0, resources: {left: 1}}, trainer: {num_cpus: 0, resources: {right: 1}}}"
    command = ["run", "--workers", "rollout=2,trainer=1", "--ray", cluster.address, "--placement", placement]
    options = ["--seconds", "2", "--game", "Pong", "--envs", "2", "--length", "16", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "aiorlinf", *command, str(ROOT / "examples" / "async_rollout.py"), *options],
        env={**child_env(), "PYTHONASYNCIODEBUG": ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "out" / "async_rollout.json").read_text())["summary"]
    assert summary["rollout workers"] == 2
    assert summary["weight versions"] >= 2
    assert re.search(r"\[trainer:0\] .*steps per second", done.stdout + done.stderr), "Ray passes on what the workers print"


def test_a_signal_ends_what_the_command_line_began(cluster: Any, tmp_path: Path) -> None:
    sleeper = script(tmp_path, SLEEPS)
    command = ["run", "--workers", "left=1", "--ray", cluster.address, str(sleeper), str(tmp_path)]
    with subprocess.Popen([sys.executable, "-m", "aiorlinf", *command], env=child_env(), stdout=subprocess.DEVNULL) as running:
        pids_in(tmp_path, ["left:0"])
        running.send_signal(signal.SIGINT)
        assert running.wait(LIMIT_S) == 128 + signal.SIGINT
    assert_gone(tmp_path, "left:0")
