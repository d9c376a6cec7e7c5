"""One Ray cluster of two simulated nodes for all tests here, on loopback; this process is its driver.

The nodes differ in their labels (racks ``left`` and ``right``) and in a resource of that name.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aiorlinf.ray
from tests.launch.programs import ROOT

__all__ = ["cluster", "job", "pytest_collection_modifyitems"]

HERE = Path(__file__).parent
NODE = {"include_dashboard": False, "node_ip_address": "127.0.0.1", "object_store_memory": 128 << 20}

# What a job's environment would say to those that are not of it.
OURS = ("AIORLINF_ADDRESS", "AIORLINF_MANAGER", "AIORLINF_TOKEN", "AIORLINF_WORKERS", "AIORLINF_LABELS", "AIORLINF_RACK")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests here need Ray, which does as it likes with threads, descriptors and processes, and warns of its own affairs."""
    missing = importlib.util.find_spec("ray") is None
    for item in items:
        if HERE in item.path.parents:
            if missing:
                item.add_marker(pytest.mark.skip(reason="needs ray, of the extra 'ray': scripts/test-ray"))
            item.add_marker(pytest.mark.allow_leaks("threads", "descriptors", "children", "shm", reason="Ray's"))
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Ray's ``cluster_utils.Cluster``; the module `ray` is connected to it."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # as on those systems: loopback is not replaced by an address of the network
    os.environ["PYTHONASYNCIODEBUG"] = ""  # it has something to say about every slow moment, and here are many
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "examples"), *filter(None, [os.environ.get("PYTHONPATH")])])
    for name in OURS:
        os.environ.pop(name, None)
    ray = importlib.import_module("ray")
    made = importlib.import_module("ray.cluster_utils").Cluster(
        initialize_head=True, head_node_args={**NODE, "num_cpus": 2, "resources": {"left": 8}, "labels": {"rack": "left"}}
    )
    try:
        made.add_node(**NODE, num_cpus=2, resources={"right": 8}, labels={"example.org/rack": "right"})
        ray.init(address=made.address, log_to_driver=False, configure_logging=False)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.fixture
def job(cluster: Any) -> Iterator[aiorlinf.ray.Job]:
    """A job of this test's own."""
    with aiorlinf.ray.start() as made:
        yield made
