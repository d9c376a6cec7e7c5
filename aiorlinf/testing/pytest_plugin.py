"""A pytest plugin: jobs as fixtures, and suites that a codec, policy, channel or backend of your own has to pass.

Switch it on in the ``conftest.py`` at the root of your tests (it needs pytest-asyncio)::

    pytest_plugins = ["aiorlinf.testing.pytest_plugin"]

===================  ========================================================================================
fixture              what it is
===================  ========================================================================================
``local_cluster``    a job whose workers live on the loop of the test; see `aiorlinf.testing.cluster`
``spawned_cluster``  a job whose workers are processes; see `aiorlinf.testing.spawned`
===================  ========================================================================================

A marker says what they begin with, as the arguments of the functions of these names (none of which is needed)::

    @pytest.mark.cluster("rollout=2,trainer=1", config={"cluster": {"network": {"heartbeat_timeout_s": 2}}})
    @pytest.mark.asyncio
    async def test_mine(local_cluster):
        await local_cluster["rollout:0"].send(1, "trainer:0")

The suites are in `aiorlinf.testing.conformance`; with this plugin their assertions say what was there. `aiorlinf.testing.pytest_leaks` is a
plugin of its own.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

if "aiorlinf.testing.conformance" not in sys.modules:
    pytest.register_assert_rewrite("aiorlinf.testing.conformance")

from aiorlinf.errors import UsageError
from aiorlinf.testing.cluster import LocalCluster  # after the line above
from aiorlinf.testing.cluster import local_cluster as make_local_cluster
from aiorlinf.testing.spawned import SpawnedCluster
from aiorlinf.testing.spawned import spawned_cluster as make_spawned_cluster

__all__ = ["fixture_local_cluster", "fixture_spawned_cluster", "pytest_configure"]


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line("markers", "cluster(workers, **settings): what the fixtures local_cluster and spawned_cluster begin with")


def _asked(request: pytest.FixtureRequest, make: Callable[..., object], workers: str) -> dict[str, Any]:
    marker = request.node.get_closest_marker("cluster")
    if marker is None:
        return {}
    if len(marker.args) > 1:
        pytest.fail("the marker `cluster` takes the workers, and settings by name", pytrace=False)
    asked = {**({workers: marker.args[0]} if marker.args else {}), **marker.kwargs}
    known = inspect.signature(make).parameters
    if wrong := [name for name in asked if name not in known]:
        raise UsageError(
            f"the marker `cluster` has no setting {', '.join(wrong)} (there are: {', '.join(name for name in known if name != workers)})",
            hint='the workers are its first argument, as text or as a mapping: @pytest.mark.cluster("rollout=2,trainer=1")',
        )
    return asked


@pytest_asyncio.fixture(name="local_cluster")
async def fixture_local_cluster(request: pytest.FixtureRequest) -> AsyncIterator[LocalCluster]:
    """A job whose workers live on the loop of the test."""
    async with make_local_cluster(**_asked(request, make_local_cluster, "workers")) as cluster:
        yield cluster


@pytest_asyncio.fixture(name="spawned_cluster")
async def fixture_spawned_cluster(request: pytest.FixtureRequest) -> AsyncIterator[SpawnedCluster]:
    """A job whose workers are processes; those that the marker names live on the loop of the test."""
    async with make_spawned_cluster(**_asked(request, make_spawned_cluster, "here")) as cluster:
        yield cluster
