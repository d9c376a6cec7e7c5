"""A job on Ray begins and ends."""

from __future__ import annotations

import os
from typing import Any

import pytest

import aiorlinf
import aiorlinf.ray
from aiorlinf.errors import AuthenticationError, RendezvousError, UsageError
from tests.launch.programs import alive, wait_until
from tests.ray.actors import Player

pytestmark = pytest.mark.timeout(150)  # the first one starts Ray, and its actors import torch

LIMIT_S = 50


def test_channel_workers_end_with_the_job(cluster: Any) -> None:
    """They are detached actors, which nobody else would end."""
    with aiorlinf.ray.start("driver=1") as job, aiorlinf.init("driver:0", loop="thread") as driver:
        channel: aiorlinf.Channel[int] = driver.create_channel("short").wait(timeout=LIMIT_S)
        channel.put(1).wait(timeout=LIMIT_S)
        assert channel.get().wait(timeout=LIMIT_S) == 1
        (pid,) = [peer.pid for peer in driver.peers().wait(timeout=LIMIT_S)]
        assert f"manager {job.manager}" in repr(job)
        assert driver.gather(1, timeout=LIMIT_S).wait() == [1], "who belongs to the job is known"
    wait_until(lambda: not alive(pid), "the actor ends", LIMIT_S)


def test_one_job_at_a_time(cluster: Any) -> None:
    with aiorlinf.ray.start() as job:
        with pytest.raises(RendezvousError, match="the embedded manager of this process runs job ray-"):
            aiorlinf.ray.start()
        assert aiorlinf.ray.worker(Player, "player:0") is not None
        assert job.env("player:1")["AIORLINF_ADDRESS"] == "player:1"
    job.close()
    with pytest.raises(UsageError, match="this job was closed"):
        job.worker(Player, "player:0")
    with pytest.raises(UsageError, match="this process has no job on Ray"):
        aiorlinf.ray.worker(Player, "player:0")
    assert "closed" in repr(job)


def test_a_manager_that_runs_elsewhere(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="a manager that runs elsewhere has a token"):
        aiorlinf.ray.start(manager="127.0.0.1:1")
    monkeypatch.setenv("AIORLINF_TOKEN", "a" * 64)
    with aiorlinf.init("keeper:0", loop="thread") as keeper, aiorlinf.ray.start(manager=keeper.manager_address) as job:
        env = job.env("driver:0")
        with aiorlinf.init("driver:0", manager=env["AIORLINF_MANAGER"], token=env["AIORLINF_TOKEN"], loop="thread") as driver:
            assert driver.job == keeper.job
        with pytest.raises(AuthenticationError):
            aiorlinf.init("driver:0", manager=job.manager, token="b" * 64, loop="thread").__enter__()
    assert os.environ["AIORLINF_TOKEN"] == "a" * 64
