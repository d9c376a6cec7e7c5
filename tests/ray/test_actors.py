"""Actors as workers: they find each other, are where they were asked to be, die and come back."""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest

import aiorlinf
import aiorlinf.ray
from aiorlinf.errors import UsageError
from tests.launch.programs import child_env
from tests.ray.actors import ByItself, Player, Trainer

pytestmark = pytest.mark.timeout(150)  # the first one starts Ray, and its actors import torch

LIMIT_S = 50


class Company(NamedTuple):
    """One job for all tests of this file: an actor on each node, and this process."""

    ray: Any
    job: aiorlinf.ray.Job
    player: Any
    trainer: Any
    driver: aiorlinf.Worker

    def get(self, refs: Any) -> Any:
        """What the calls gave."""
        return self.ray.get(refs, timeout=LIMIT_S)


@pytest.fixture(scope="module")
def company(cluster: Any) -> Iterator[Company]:
    ray = importlib.import_module("ray")
    with aiorlinf.ray.start() as job, aiorlinf.init("driver:0", loop="thread") as driver:
        trainer = job.worker(
            Trainer, "trainer:0", labels={"zone": "far"}, num_cpus=0, resources={"right": 1}, max_restarts=1, max_task_retries=0
        ).remote(1, scale=2)
        # Given as Ray's own actor class, with an option of its own.
        player = job.worker(ray.remote(num_cpus=0)(Player), "player:0").options(label_selector={"rack": "left"}).remote()
        yield Company(ray, job, player, trainer, driver)
        ray.kill(player)
        ray.kill(trainer)


def test_each_is_a_worker_on_its_node(company: Company) -> None:
    facts = company.get(company.player.facts.remote())
    assert facts["address"] == facts["at_first"] == "player:0"
    assert facts["incarnation"] == 1
    assert facts["on_its_loop"]
    assert facts["same"]
    _, incarnation, labels = company.get(company.trainer.facts.remote())
    told = dict(part.split("=") for part in labels.split(","))
    assert (told["rack"], told["zone"]) == ("right", "far"), "the last part of the node's label, and the job's own"
    peers = company.driver.peers().wait(timeout=LIMIT_S)
    assert [peer.incarnation for peer in peers if peer.address == "trainer:0"] == [incarnation]  # 2 after the test that kills it
    racks = {str(peer.address): peer.labels["rack"] for peer in peers if not peer.address.startswith("channel.")}  # of other tests
    assert racks == {"player:0": "left", "trainer:0": "right"}
    assert facts["peers"]["driver:0"]["host"]


def test_messages_between_them_and_with_the_driver(company: Company) -> None:
    sums = company.trainer.step.remote("player:0")
    assert company.get(company.player.send.remote("trainer:0", 5)) == "sent"
    expected = 2 * sum(range(1000)) + 1
    assert company.get(company.player.recv.remote("trainer:0")) == {"answer": expected}
    assert company.get(sums) == expected
    company.driver.send({"from": "driver"}, "player:0").wait(timeout=LIMIT_S)
    assert company.get(company.player.recv.remote("driver:0")) == {"from": "driver"}


def test_a_ref_is_a_work(company: Company) -> None:
    work = aiorlinf.ray.work_of(company.player.facts.remote(), company.driver)
    chained = work.then(lambda facts: facts["address"]).then(str.upper)
    assert chained.wait(timeout=LIMIT_S) == "PLAYER:0"
    assert asyncio.run(_awaited(company.player.facts.remote(), company.driver)) == "player:0"
    failing = aiorlinf.ray.work_of(company.player.recv.remote(1), company.driver)
    with pytest.raises(Exception, match="1") as caught:
        failing.wait(timeout=LIMIT_S)
    assert isinstance(caught.value, company.ray.exceptions.RayTaskError), "Ray's own error, unchanged"
    with pytest.raises(UsageError, match="type int is no ObjectRef"):
        aiorlinf.ray.work_of(3, company.driver)
    stored = aiorlinf.ray.work_of(company.ray.put([1, 2]), company.driver)
    assert stored.wait(timeout=LIMIT_S) == [1, 2]


async def _awaited(ref: Any, driver: aiorlinf.Worker) -> str:
    """On another loop than the worker's."""
    facts = await aiorlinf.ray.work_of(ref, driver)
    return str(facts["address"])


def test_cancelling_the_work_cancels_the_call(company: Company) -> None:
    ref = company.player.sleep.remote()
    company.get(company.player.ways.remote())  # so it has begun
    work = aiorlinf.ray.work_of(ref, company.driver)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        work.wait(timeout=LIMIT_S)
    with pytest.raises((company.ray.exceptions.TaskCancelledError, company.ray.exceptions.RayTaskError)):
        company.get(ref)


def test_one_that_joins_by_itself(company: Company) -> None:
    actor = company.job.worker(ByItself, "visitor:0", join=False, num_cpus=0).remote()
    hello = actor.hello.remote("driver:0")
    assert company.driver.recv("visitor:0").wait(timeout=LIMIT_S) == "hello from visitor:0"
    assert company.get(hello) == "visitor:0"


def test_who_is_killed_is_lost_at_once_and_comes_back_as_another_life(company: Company) -> None:
    before, life, _ = company.get(company.trainer.facts.remote())
    # They know each other, whichever test comes first: who waits for one that he has never had to do with waits for its next life, too.
    sums = company.trainer.step.remote("player:0")
    company.get(company.player.send.remote("trainer:0", 5))
    assert company.get(company.player.recv.remote("trainer:0")) == {"answer": company.get(sums)}
    waiting = company.player.recv_or_error.remote("trainer:0")
    company.get(company.player.ways.remote())
    company.ray.kill(company.trainer, no_restart=False)
    error = company.get(waiting)
    assert error.startswith("PeerLost"), error
    assert company.get(company.player.new_life_of.remote("trainer:0", life)) == life + 1
    # Ray itself needs longer to see it: calls fail until it has.
    end = time.monotonic() + LIMIT_S
    after = None
    while after is None:
        try:
            after = company.get(company.trainer.facts.remote())
        except company.ray.exceptions.RayActorError:
            assert time.monotonic() < end
    assert after[0] != before
    assert after[1] == life + 1
    sums = company.trainer.step.remote("player:0")
    company.get(company.player.send.remote("trainer:0", 5))
    assert company.get(company.player.recv.remote("trainer:0")) == {"answer": company.get(sums)}


def test_who_is_no_longer_needed_leaves(company: Company) -> None:
    loops: list[tuple[Literal["auto", "thread"], str]] = [("auto", "async"), ("thread", "thread")]
    for loop, name in loops:
        actor = company.job.worker(Player, f"{name}:0", loop=loop, num_cpus=0).remote()
        company.get(actor.send.remote("driver:0", loop))
        assert company.driver.recv(f"{name}:0").wait(timeout=LIMIT_S)["value"] == loop
        waiting = company.driver.recv(f"{name}:0")
        del actor
        with pytest.raises(aiorlinf.errors.PeerLeft):
            waiting.wait(timeout=LIMIT_S)


def test_channel_workers_are_actors(company: Company) -> None:
    """One that `create_channel` starts, on the node of whoever called it, and one that was placed."""
    company.job.channel_worker("placed", resources={"right": 1})
    for name, rack in (("found", "left"), ("placed", "right")):
        taking = company.player.take_all.remote(name)
        assert company.get(company.player.put.remote(name, 5)) == "put"
        assert company.get(taking) == [0, 1, 2, 3, 4]
        holder = company.get(company.player.holder.remote(name))
        assert holder["labels"]["rack"] == rack
        assert Path(f"/proc/{holder['pid']}/cmdline").read_text().startswith("ray::ChannelActor")


def test_the_labels_of_nodes_make_the_topology(company: Company) -> None:
    end = time.monotonic() + LIMIT_S
    while {"player:0", "trainer:0"} - {
        str(peer.address) for peer in company.driver.peers().wait(timeout=LIMIT_S)
    }:  # they are only starting
        assert time.monotonic() < end
        time.sleep(0.1)
    env = {**child_env(), "AIORLINF_MANAGER": company.job.manager, "AIORLINF_TOKEN": company.job.token}
    command = [sys.executable, "-m", "aiorlinf", "topology", "--root", "player:0"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "rack left" in done.stdout
    assert "rack right" in done.stdout


def test_errors_at_the_call(company: Company) -> None:
    with pytest.raises(UsageError, match="address"):
        company.job.worker(Player, "no address")
    with pytest.raises(UsageError, match="is no class"):
        company.job.worker("Player", "player:1")
    with pytest.raises(UsageError, match="without commas"):
        company.job.worker(Player, "player:1", labels={"rack": "a,b"})
    with pytest.raises(UsageError, match="AIORLINF_TOKEN is set by the launcher"):
        company.job.worker(Player, "player:1", env={"AIORLINF_TOKEN": "x"})
    with pytest.raises(TypeError, match="bias"):
        company.job.worker(Trainer, "trainer:1").remote()
    with pytest.raises(ValueError, match="num_nonsense"):
        company.job.worker(Player, "player:1", num_nonsense=3).remote()
    with pytest.raises(UsageError, match="this process is no worker that Ray has started"):
        aiorlinf.ray.comm()
