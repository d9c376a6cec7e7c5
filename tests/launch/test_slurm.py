"""The batch script of the README, with the variables that SLURM sets and an `srun` that starts all tasks on this machine."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.programs import ROOT

SRUN = """#!/bin/sh
rank=0
while [ $rank -lt $SLURM_NTASKS ]; do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NODEID=0 SLURM_TOPOLOGY_ADDR=switch0.rack$((rank % 2)).node0 "$@" &
    rank=$((rank + 1))
done
wait
"""

TRAIN = """
import asyncio, torch, aiorlinf

async def main():
    async with aiorlinf.init() as comm:
        got = await comm.broadcast(torch.arange(50_000) if comm.address == "worker:0" else None, root=0, timeout=30)
        assert torch.equal(got, torch.arange(50_000))
        everybody = await comm.gather(str(comm.address), timeout=30)
        if everybody:
            print(*everybody, flush=True)

asyncio.run(main())
"""


def test_the_batch_script_of_the_readme(tmp_path: Path) -> None:
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        pytest.skip("this machine's name has no address")
    found = re.search(r"```sh\n# job\.sh.*?\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found
    (tmp_path / "job.sh").write_text(found[1])
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "aiorlinf").write_text(f'#!/bin/sh\nexec {sys.executable} -m aiorlinf "$@"\n')
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for name in ("srun", "aiorlinf", "python"):
        (tmp_path / name).chmod(0o755)
    with socket.socket() as probe:  # the script chooses its port by the number of the job
        for job in range(os.getpid(), os.getpid() + 100):
            try:
                probe.bind(("0.0.0.0", 20000 + job % 10000))
                break
            except OSError:
                continue
    env = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "SLURM_JOB_ID": str(job),
        "SLURM_NTASKS": "3",
        "SLURM_JOB_NODELIST": "node0",
    }
    done = subprocess.run(["sh", "job.sh"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=55, check=False)
    assert "worker:0 worker:1 worker:2" in done.stdout, done.stderr
