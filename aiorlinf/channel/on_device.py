"""Items of a local channel whose tensors are on accelerators: handed over as they are, or kept in host memory meanwhile.

Who puts such an item may still be filling it: an event says how far his stream had come, and the stream of whoever gets it waits for that.
Where the device has little memory left, the tensors go to pinned host memory, and come back to their device when somebody gets the item.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from aiorlinf.channel.landing import Wish, bring_value, tensors_of
from aiorlinf.device.registry import started_accelerator
from aiorlinf.link.staging import IN, place_of

if TYPE_CHECKING:
    from aiorlinf.device.runtime import Event, Runtime
    from aiorlinf.work.home import LoopHome

__all__ = ["OnDevice"]


class OnDevice:
    """See the module.

    Attributes:
        value: the item; its tensors may be copies in host memory.
    """

    __slots__ = ("_away", "_events", "_gone", "value")

    def __init__(self, value: Any, events: dict[torch.device, tuple[Runtime, int, Event]]) -> None:
        self.value: Any = value
        self._events = events
        self._away: dict[int, torch.device] = {}  # by id of the copy, where it belongs
        self._gone = False  # somebody has got it, or is about to

    @classmethod
    def of(cls, value: Any) -> OnDevice | None:
        """None if none of its tensors is on an accelerator. In the thread of who puts it."""
        if started_accelerator() is None:
            return None
        events: dict[torch.device, tuple[Runtime, int, Event]] = {}
        for tensor in tensors_of(value):
            if not tensor.is_cpu and tensor.device not in events:
                runtime, index = place_of(tensor.device)
                events[tensor.device] = (runtime, index, runtime.record(runtime.current_stream(index)))
        return cls(value, events) if events else None

    # ---- home thread

    def offload(self, home: LoopHome, above: float, over: Callable[[], None]) -> bool:
        """Bring it to host memory if more than this share of its device's memory is in use, and call back. False: it is not."""
        for device, (runtime, index, event) in self._events.items():
            free, total = runtime.memory(index)
            if total and 1 - free / total > above:
                runtime.wait(runtime.side_stream(index, IN), event)
                return self._leave(home, device, over)
        return False

    def _leave(self, home: LoopHome, device: torch.device, over: Callable[[], None]) -> bool:
        leaving = [tensor for tensor in tensors_of(self.value) if tensor.device == device]

        def left(value: Any, error: Exception | None) -> None:
            over()
            if self._gone or error is not None:
                return  # it is used as it is
            before = {id(tensor) for tensor in tensors_of(self.value)}
            self._away = {id(tensor): device for tensor in tensors_of(value) if id(tensor) not in before}
            self.value = value

        return bring_value(home, self.value, torch.device("cpu"), left, leaving)

    def fetch(self, home: LoopHome, wish: Wish, then: Callable[[Any, Exception | None], None]) -> bool:
        """Let somebody have it: call back when its tensors are where they belong, or where he wants them. False: `value` is it."""
        self._gone = True
        for device, (runtime, index, event) in self._events.items():
            for stream in (runtime.current_stream(index), runtime.side_stream(index, IN)):
                runtime.wait(stream, event)
            for tensor in tensors_of(self.value):
                if tensor.device == device and tensor.numel():
                    runtime.hold(tensor, runtime.current_stream(index))
        if wish.everything and wish.device is not None:
            return bring_value(home, self.value, wish.device, then)
        away = [tensor for tensor in tensors_of(self.value) if id(tensor) in self._away]
        return bool(away) and bring_value(home, self.value, self._away[id(away[0])], then, away)

    def keep(self) -> None:
        """Whoever was to get it has not taken it."""
        self._gone = False
