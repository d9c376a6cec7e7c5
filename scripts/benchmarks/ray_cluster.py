"""The Ray cluster that a benchmark runs in: that of RAY_ADDRESS, if it is set, else one of its own on this machine."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

__all__ = ["connected"]

STORE_BYTES: Final = 2 << 30


@contextmanager
def connected() -> Iterator[Any]:
    """The module `ray`, connected. Raises ImportError where it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray: Any = importlib.import_module("ray")
    with tempfile.TemporaryDirectory(prefix="aio-") as folder:
        if os.environ.get("RAY_ADDRESS"):
            ray.init(log_to_driver=False, configure_logging=False)
        else:
            ray.init(
                address="local", num_cpus=4, object_store_memory=STORE_BYTES, include_dashboard=False, log_to_driver=False,
                configure_logging=False, _temp_dir=folder, _node_ip_address="127.0.0.1",
            )  # fmt: skip
        try:
            yield ray
        finally:
            ray.shutdown()
