"""CUDA, and ROCm, which torch offers under the same names."""

from __future__ import annotations

from typing import Any

import orjson
import torch

from aiorlinf.device.runtime import Event, Shared, Stream
from aiorlinf.device.torch_runtime import TorchRuntime

__all__ = ["CudaRuntime", "make_runtime"]

_cuda: Any = torch.cuda  # its classes have no types

_HIGH = -1
"""Priority of our streams: a copy is short, and somebody waits for it."""


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

    # Torch shares allocations, not tensors: the handle of an allocation is made once and cached by both sides, and a tensor is a place in
    # it. A counter in shared memory keeps the allocation until the other side has let go of it, even if the tensor is gone here.

    def export(self, tensor: torch.Tensor) -> Shared:
        storage: Any = tensor.untyped_storage()
        with torch.cuda.device(tensor.device):
            _, handle, size, start, counter, counter_at, event, waits = storage._share_cuda_()
        at = tensor.storage_offset() * tensor.element_size()
        place = [handle.hex(), size, start, counter.hex(), counter_at, event.hex(), bool(waits), at]
        return Shared(self.identity(tensor.get_device()).uuid, orjson.dumps(place), tensor.nbytes)

    def open(self, shared: Shared, index: int) -> torch.Tensor:
        try:
            handle, size, start, counter, counter_at, event, waits, at = orjson.loads(shared.handle)
            handles = [bytes.fromhex(each) for each in (handle, counter, event)]
        except (ValueError, TypeError) as error:
            raise RuntimeError(f"not the handle of an allocation: {error}") from error
        make: Any = torch.UntypedStorage._new_shared_cuda
        with torch.cuda.device(index):
            # The current stream is made to wait for what the sender's current stream had done when it shared the memory.
            storage = make(index, handles[0], size, start, handles[1], counter_at, handles[2], waits)
            whole = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index))
            return whole.set_(storage, at, (shared.nbytes,), (1,))

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
