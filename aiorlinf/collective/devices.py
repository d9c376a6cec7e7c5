"""Collectives of tensors on accelerators: through host memory, as what is staged between two workers (`link.staging`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from aiorlinf.link.staging import Departure, Landing, Ready, callers_device

if TYPE_CHECKING:
    from aiorlinf.collective.exchange import Exchange
    from aiorlinf.wire.flat import Flat
    from aiorlinf.wire.manifest import Manifest
    from aiorlinf.work.home import LoopHome

__all__ = ["brought_home", "filled", "landed", "wanted_device"]


def wanted_device(exchange: Exchange) -> torch.device | None:
    """Where tensors from accelerators shall come to; in the caller's thread, whose current device it is unless the worker has one."""
    return exchange.device or (None if exchange.home.on_home() else callers_device())


async def brought_home(home: LoopHome, departure: Departure) -> Flat:
    """The message with all of its leaves in host memory.

    Raises BackendUnavailable: the device does not copy. Cancelling does not stop the copying, which holds the memory until it is over.
    """
    found: asyncio.Future[Flat] = home.loop.create_future()
    departure.begin(home, lambda flat, error: _settle(found, flat, error))
    return await found


async def landed(home: LoopHome, manifest: Manifest, leaves: list[torch.Tensor], wanted: torch.device | None) -> list[torch.Tensor]:
    """The leaves, with those that were on accelerators at their sender on that device. Raises, and is cancelled, as `brought_home`."""
    landing = Landing(home)
    found: asyncio.Future[list[torch.Tensor]] = home.loop.create_future()
    devices = [spec.device for spec in manifest.specs]
    if not landing.bring(leaves, devices, landing.target(wanted), lambda tensors, error: _settle(found, tensors, error)):
        return leaves
    return await found


async def filled(home: LoopHome, pairs: Sequence[tuple[torch.Tensor, torch.Tensor, Ready]]) -> None:
    """Copy sources in host memory, as flat bytes, into contiguous tensors on devices, each after what its stream was given before.

    Raises, and is cancelled, as `brought_home`; some may have been written then.
    """
    landing = Landing(home)
    works: list[asyncio.Future[None]] = []
    for target, source, ready in pairs:
        found: asyncio.Future[None] = home.loop.create_future()
        landing.fill(target, source, ready, _settler(found))
        works.append(found)
    try:
        for found in works:
            await found
    finally:
        for found in works:
            found.cancel()


def _settler(found: asyncio.Future[None]) -> Callable[[Exception | None], None]:
    return lambda error: _settle(found, None, error)


def _settle(found: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if found.done():
        return
    if error is None:
        found.set_result(value)
    else:
        found.set_exception(error)
