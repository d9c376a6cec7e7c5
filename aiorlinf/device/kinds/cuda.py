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


class CudaRuntime(TorchRuntime):
    """See `device.runtime`."""

    def __init__(self) -> None:
        super().__init__("cuda")

    def problem(self) -> str | None:
        if torch.version.cuda is None and torch.version.hip is None:
            return "this torch was built without CUDA and ROCm"
        if torch.cuda._is_in_bad_fork():
            return "CUDA was used before this process was forked"
        return super().problem()

    def peer_access(self, index: int, other: int) -> bool:
        return index == other or torch.cuda.can_device_access_peer(index, other)

    def _make_stream(self, index: int) -> Stream:
        return _cuda.Stream(device=index, priority=_HIGH)

    # Torch shares allocations. With each tensor it shares it sets up a counter in shared memory, which keeps the tensor until the other
    # side has let go of it, and puts itself between the tensor and the allocator for good: `record_stream` does nothing from then on, and
    # memory would be kept for as long as the other side has it open. We keep tensors until we hear COPIED, and have memory open for longer
    # than that. So an alias is shared, which is gone at once, and its counter with it; what stays is the handle of the allocation.

    def export(self, tensor: torch.Tensor) -> Shared:
        storage = tensor.untyped_storage()
        device = tensor.device
        with torch.no_grad(), torch.cuda.device(device):
            whole = torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))
            alias: Any = _torch.from_dlpack(whole).untyped_storage()
            _, handle, _, start, counter, counter_at, _, _ = alias._share_cuda_()
            alias._release_ipc_counter(counter, counter_at, device=device)
        at = start + tensor.storage_offset() * tensor.element_size()
        return Shared(self.identity(tensor.get_device()).uuid, bytes(handle), tensor.nbytes, at, self._freed(device))

    def _freed(self, device: torch.device) -> int:
        """How often torch's allocator has given memory back to the device."""
        segments = _cuda.memory_stats_as_nested_dict(device).get("segment", {})
        return int(segments.get("all", {}).get("freed", 0))

    def open(self, shared: Shared, index: int) -> torch.Tensor:
        make: Any = torch.UntypedStorage._new_shared_cuda
        with torch.no_grad(), torch.cuda.device(index):
            storage = make(index, shared.handle, shared.nbytes, shared.at, _NO_COUNTER, 0, b"", False)
            return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index)).set_(storage, 0, (shared.nbytes,), (1,))

    def export_event(self, stream: Stream) -> tuple[Event, bytes]:
        event = _cuda.Event(interprocess=True)
        event.record(stream)
        return event, bytes(event.ipc_handle())

    def open_event(self, handle: bytes, index: int) -> Event:
        return _cuda.Event.from_ipc_handle(torch.device("cuda", index), handle)

    def collect(self) -> None:
        _cuda.ipc_collect()


def make_runtime() -> CudaRuntime:
    """For `device.registry`."""
    return CudaRuntime()
