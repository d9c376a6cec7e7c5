"""CUDA, and ROCm, which torch offers under the same names."""

from __future__ import annotations

from typing import Any

import torch

from aiorlinf.device.runtime import Event, Shared, Stream
from aiorlinf.device.torch_runtime import TorchRuntime

__all__ = ["CudaRuntime", "make_runtime"]

_torch: Any = torch  # some of it has no types
_cuda: Any = torch.cuda

_HIGH = -1
"""Priority of our streams: a copy is short, and somebody waits for it."""

_NO_COUNTER = b"/aiorlinf-no-counter"
"""Torch counts down in this file when memory of another process is let go of. There is none, which it takes for that process's death."""

_PIECEWISE = b"e"
"""Second byte of torch's handles of memory that is mapped piece by piece (``expandable_segments:True``)."""

_BETWEEN, _CLOSING = "between", "closing"
"""Purposes of streams of ours."""

_CAPTURING = "capturing"
"""Part of what CUDA says to a thread that asks for anything while another one captures a graph in the mode "global"."""


class CudaRuntime(TorchRuntime):
    """See `device.runtime`."""

    def __init__(self) -> None:
        super().__init__("cuda")

    def problem(self) -> str | None:
        if torch.version.cuda is None and torch.version.hip is None:
            return "this torch was built without CUDA and ROCm"
        if torch.cuda._is_in_bad_fork():
            return "CUDA was used before this process was forked"
        # Not `is_available`, which initialises the driver: then no process that is forked later can use CUDA (`_is_in_bad_fork` there). To
        # count asks the management library, which leaves the driver alone, unless that library is not there.
        return None if _cuda.is_initialized() or _cuda.device_count() > 0 else "torch finds no cuda device"

    def memory(self, index: int) -> tuple[int, int]:
        free, total = super().memory(index)
        stats = _cuda.memory_stats_as_nested_dict(index)
        # What torch's allocator has had from the device and gives to nobody at the moment is free for tensors of this process.
        kept = _current(stats, "reserved_bytes") - _current(stats, "allocated_bytes")
        return min(total, free + max(0, kept)), total

    def query(self, event: Event) -> bool:
        try:
            return super().query(event)
        except RuntimeError as error:
            if _CAPTURING in str(error):
                return False  # nothing is wrong with the event: it can be asked for when the other thread is done
            raise

    def peer_access(self, index: int, other: int) -> bool:
        return index == other or torch.cuda.can_device_access_peer(index, other)

    def _make_stream(self, index: int) -> Stream:
        return _cuda.Stream(device=index, priority=_HIGH)

    def copy(self, out: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        if out.is_cpu or source.is_cpu or out.device == source.device:
            super().copy(out, source, stream)
            return
        # Torch copies between two devices on the source's current stream, behind and before the other one's. Of both, the one that is not
        # given has to be ours, too, or the copy waits for what the program has given its own, and the program for the copy.
        other = source if stream.device == out.device else out
        with _cuda.stream(self.side_stream(other.get_device(), _BETWEEN)):
            super().copy(out, source, stream)

    # Torch shares allocations. With each tensor it shares it sets up a counter in shared memory, which keeps the tensor until the other
    # side has let go of it, and puts itself between the tensor and the allocator for good: `record_stream` does nothing from then on, and
    # memory would be kept for as long as the other side has it open. We keep tensors until we hear COPIED, and have memory open for longer
    # than that. So an alias is shared, which is gone at once, and its counter with it; what stays is the handle of the allocation.

    def export(self, tensor: torch.Tensor) -> Shared:
        storage = tensor.untyped_storage()
        device = tensor.device
        with torch.no_grad(), _cuda.device(device):
            whole = torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))
            alias: Any = _torch.from_dlpack(whole).untyped_storage()
            _, handle, _, start, counter, counter_at, _, _ = alias._share_cuda_()
            alias._release_ipc_counter(counter, counter_at, device=device)
        at = start + tensor.storage_offset() * tensor.element_size()
        epoch = self._freed(device)
        handle = bytes(handle)
        if handle[1:2] == _PIECEWISE:
            # It names descriptors of this process, and their numbers are used again for other memory once this was given back. The other
            # side's torch finds by the handle what it has open already, and reads no further than it needs, so this makes it another one.
            handle += epoch.to_bytes(8, "little")
        return Shared(self.identity(tensor.get_device()).uuid, handle, tensor.nbytes, at, epoch)

    def _freed(self, device: torch.device) -> int:
        """Grows whenever torch's allocator gives memory back to the device: so many bytes so far. Segments are not counted by it where
        memory is mapped piece by piece."""
        return int(_cuda.memory_stats_as_nested_dict(device).get("reserved_bytes", {}).get("all", {}).get("freed", 0))

    def open(self, shared: Shared, index: int) -> torch.Tensor:
        make: Any = torch.UntypedStorage._new_shared_cuda
        with torch.no_grad(), _cuda.device(index):
            storage = make(index, shared.handle, shared.nbytes, shared.at, _NO_COUNTER, 0, b"", False)
            return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index)).set_(storage, 0, (shared.nbytes,), (1,))

    def let_go(self, memories: list[torch.Tensor]) -> None:
        # Torch waits then for the stream that is current in this thread, and lets no other thread run Python meanwhile. In a new thread
        # that would be the default stream, with all that the program has given it. Nothing is ever given this one.
        while memories:
            memory = memories.pop()
            with _cuda.stream(self.side_stream(memory.get_device(), _CLOSING)):
                del memory

    def export_event(self, stream: Stream) -> tuple[Event, bytes]:
        event = _cuda.Event(interprocess=True)
        event.record(stream)
        return event, bytes(event.ipc_handle())

    def open_event(self, handle: bytes, index: int) -> Event:
        return _cuda.Event.from_ipc_handle(torch.device("cuda", index), handle)

    def collect(self) -> None:
        _cuda.ipc_collect()


def _current(stats: Any, what: str) -> int:
    return int(stats.get(what, {}).get("all", {}).get("current", 0))


def make_runtime() -> CudaRuntime:
    """For `device.registry`."""
    return CudaRuntime()
