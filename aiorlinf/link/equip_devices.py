"""What a link has for tensors on accelerators, set up when it comes up. Nothing is asked of an accelerator before the first such tensor."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from aiorlinf.backends.device_pairs import DevicePair, pair_maker
from aiorlinf.device.registry import accelerator
from aiorlinf.link.device_events import watch_events
from aiorlinf.link.device_facts import DeviceFacts
from aiorlinf.link.device_in import DeviceIn
from aiorlinf.link.device_out import DeviceOut, DevicePlan
from aiorlinf.rendezvous.hosts import process_identity
from aiorlinf.rendezvous.pairs import Pairs
from aiorlinf.wire.frames import Flag, FrameType, Via

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiorlinf.link.link import Link
    from aiorlinf.work.home import LoopHome

__all__ = ["equip_devices"]

log: logging.Logger = logging.getLogger("aiorlinf.link")


def equip_devices(home: LoopHome, link: Link, send: Callable[[bytes], None], plan: DevicePlan, connect_timeout: float) -> None:
    """Both halves, and the pairs that they may come to use.

    Args:
        send: queues a frame on the link.
        connect_timeout: seconds for a pair to be made.
    """
    landing = link.receiver.delivery.landing

    def facts() -> DeviceFacts:
        try:
            target = landing.target(None)
            found = DeviceFacts.here(target)
        except RuntimeError as error:  # a driver that does not work; the tensors that others send come to CPU memory
            log.warning("%s: the accelerator cannot be used: %s", link.local, error)
            return DeviceFacts(process_identity())
        into.pair_index = target.index or 0
        return found

    def tell(flags: int) -> None:
        link.receiver.reply(FrameType.DEVICE, 0, facts().encode(), flags)

    def make(store: Any, rank: int, timeout: float) -> DevicePair:
        runtime = accelerator()
        maker = None if runtime is None else pair_maker(runtime.kind)
        if maker is None:
            raise RuntimeError("there is nothing to make a pair of accelerators with")
        index = into.pair_index if rank else out.pair_index
        return maker.make(store, rank, index or 0, timeout, functools.partial(watch_events, home))

    pairs = Pairs(home, send, make, threshold=0, timeout=connect_timeout, local=link.local, remote=link.remote, name="nccl", via=Via.NCCL)
    into = DeviceIn(link.receiver, landing, pairs)
    out = DeviceOut(link.sender, plan, lambda: tell(Flag.ASK), facts, pairs)
    link.device_pairs = pairs
    link.receiver.devices = into
    link.sender.devices = out
    link.tell_devices = functools.partial(tell, 0)
