"""The plugin in a test suite of a user's own."""

from __future__ import annotations

import textwrap
from pathlib import Path

from tests.inner_pytest import run_pytest

__all__: list[str] = []

SUITE = """
import asyncio
import pytest

pytestmark = pytest.mark.asyncio


@pytest.mark.cluster("rollout=2,trainer=1", config={"cluster": {"network": {"heartbeat_timeout_s": 3.0}}})
async def test_with_workers(local_cluster):
    sent = local_cluster["rollout:1"].send("hello", "trainer:0")
    assert await local_cluster["trainer:0"].recv("rollout:1") == "hello"
    await sent
    assert local_cluster["trainer:0"].config.cluster.network.heartbeat_timeout_s == 3.0


async def test_without(local_cluster):
    assert len(local_cluster) == 0
    await local_cluster.join("w:0")


async def answer(comm):
    await comm.send(int(comm.incarnation), "here:0")


@pytest.mark.cluster("here=1")
async def test_processes(spawned_cluster):
    await spawned_cluster.start("there:0", answer)
    assert await spawned_cluster["here:0"].recv("there:0", timeout=20) == 1
"""

POLICY = """
from aiorlinf import LoadBalancePolicy
from aiorlinf.testing.conformance import PolicyConformance


class First(LoadBalancePolicy):
    def select_consumer(self, item, consumers):
        return 0 if len(consumers) < 100 else 100


class TestFirst(PolicyConformance):
    serves_all = False

    def make(self):
        return First()
"""


def test_a_suite_of_a_users_own(tmp_path: Path) -> None:
    run = run_pytest(tmp_path, SUITE, "-p", "aiorlinf.testing.pytest_plugin")
    assert run.outcomes == {"test_with_workers": "passed", "test_without": "passed", "test_processes": "passed"}, run.output


def test_settings_that_there_are_not(tmp_path: Path) -> None:
    suite = """
    import pytest

    @pytest.mark.cluster(actor=1)
    @pytest.mark.asyncio
    async def test_local(local_cluster): ...

    @pytest.mark.cluster("actor=1", closd=True)
    @pytest.mark.asyncio
    async def test_spawned(spawned_cluster): ...
    """
    run = run_pytest(tmp_path, textwrap.dedent(suite), "-p", "aiorlinf.testing.pytest_plugin")
    assert set(run.outcomes.values()) == {"error"}, run.output
    assert "UsageError: the marker `cluster` has no setting actor (there are: config, " in run.output
    assert "no setting closd" in run.output


def test_a_policy_of_a_users_own(tmp_path: Path) -> None:
    run = run_pytest(tmp_path, POLICY, "-p", "aiorlinf.testing.pytest_plugin")
    assert run.outcomes.pop("test_it_chooses_one_of_those_that_are_there[100]") == "failure", run.output
    assert "100 of 100 consumers" in run.texts["test_it_chooses_one_of_those_that_are_there[100]"]
    assert set(run.outcomes.values()) <= {"passed"}, run.output
    assert len(run.outcomes) >= 9
