"""Finds the runtime of a type of device. A new type is one more file in `kinds`, or a call of `register`."""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
from typing import TYPE_CHECKING

import torch

from aiorlinf.device import kinds as _kinds
from aiorlinf.errors import UsageError

if TYPE_CHECKING:
    from aiorlinf.device.runtime import Runtime

__all__ = ["accelerator", "parse_device", "register", "runtime_of", "started_accelerator", "unregister", "usable_runtime"]

_runtimes: dict[str, Runtime] = {}
_added: list[str] = []  # by `register`: those come first


def runtime_of(kind: str) -> Runtime | None:
    """The runtime of a device type, None if there is none. Whether it can be used in this process is another question."""
    runtime = _runtimes.get(kind)
    if runtime is None and kind in _known():
        module = importlib.import_module(f"{_kinds.__name__}.{kind}")
        runtime = _runtimes[kind] = module.make_runtime()
    return runtime


def usable_runtime(kind: str) -> Runtime | None:
    """As `runtime_of`, if it can be used in this process."""
    runtime = runtime_of(kind)
    return None if runtime is None or runtime.problem() is not None else runtime


def accelerator() -> Runtime | None:
    """The runtime of this process's accelerator, None if it has none. A process has devices of one type at most, as torch has it."""
    for kind in _added:
        runtime = usable_runtime(kind)
        if runtime is not None:
            return runtime
    return _built_in(os.getpid())


@functools.lru_cache(maxsize=1)
def _built_in(_pid: int) -> Runtime | None:
    """Asked for every message that has a tensor of an accelerator; the answer changes with a fork at most."""
    found = (usable_runtime(kind) for kind in _known() if kind != "cpu")
    return next((runtime for runtime in found if runtime is not None), None)


def started_accelerator() -> Runtime | None:
    """As `accelerator`, but None also if nobody in this process uses it yet. No driver is asked for that, so any call may."""
    for kind in dict.fromkeys((*_added, *_known())):
        runtime = None if kind == "cpu" else runtime_of(kind)
        if runtime is not None and runtime.started() and runtime.problem() is None:
            return runtime
    return None


@functools.cache
def _known() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(_kinds.__path__))


def register(runtime: Runtime) -> None:
    """Use this runtime for its type of device from now on."""
    _runtimes[runtime.kind] = runtime
    if runtime.kind not in _added:
        _added.append(runtime.kind)


def unregister(runtime: Runtime) -> None:
    """Take back `register`."""
    if _runtimes.get(runtime.kind) is runtime:
        del _runtimes[runtime.kind]
        _added.remove(runtime.kind)


def parse_device(device: str | int | torch.device) -> torch.device:
    """The device that a user names, with its index; the accelerator's current one if only the type is named.

    Raises:
        UsageError: no such device in this process.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"device={device!r} is no device: {error}") from None
    if found.type == "cpu":
        return torch.device("cpu")
    runtime = runtime_of(found.type)
    if runtime is None:
        raise UsageError(f"device={str(found)!r} cannot be used here: no runtime for devices of type {found.type!r}")
    problem = runtime.problem()
    if problem is not None:
        raise UsageError(f"device={str(found)!r} cannot be used here: {problem}")
    index: int | None = found.index  # torch's stubs do not say that it may be missing
    if index is None:
        return torch.device(found.type, runtime.current_device())
    if index >= runtime.count():
        raise UsageError(f"device={str(found)!r}: this process sees {runtime.count()} devices of type {found.type!r}")
    return found
