"""Intel's accelerators: nothing but what torch has for all of them."""

from __future__ import annotations

from aiorlinf.device.torch_runtime import TorchRuntime

__all__ = ["make_runtime"]


def make_runtime() -> TorchRuntime:
    """For `device.registry`."""
    return TorchRuntime("xpu")
