"""What we ask Ray itself for. It is imported here only, and when it is first needed: it is an extra, and heavy."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from aiorlinf.errors import UsageError

__all__ = ["driver", "node_host", "node_labels", "ray_itself"]


def ray_itself() -> Any:
    """The module.

    Raises:
        UsageError: it is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise UsageError(f"Ray cannot be imported: {error}", hint="pip install 'aiorlinf[ray]'") from error


def driver() -> Any:
    """The module, in a process that is connected to a cluster.

    Raises:
        UsageError: it is not installed; this process is not connected, or only as a client of a program elsewhere.
    """
    ray = ray_itself()
    if not ray.is_initialized():
        raise UsageError("this process is not connected to a Ray cluster", hint="call ray.init() first, or ray.init(address='auto')")
    if importlib.import_module("ray.util.client").ray.is_connected():
        hint = "run the program on a node of the cluster, or start `aiorlinf manager` there and name it: manager='host:port'"
        raise UsageError("over Ray Client this process is not part of the cluster, so workers could not reach a manager in it", hint=hint)
    return ray


def node_host() -> str:
    """The address by which the nodes of the cluster reach this one."""
    host: str = importlib.import_module("ray.util").get_node_ip_address()
    return host


def node_labels() -> dict[str, str]:
    """The labels of this process's node, by the last part of their names: ``ray.io/availability-zone`` is ``availability-zone``."""
    found: Mapping[str, Any] = ray_itself().get_runtime_context().get_node_labels() or {}
    return {name.rpartition("/")[2]: str(value) for name, value in found.items() if value}
