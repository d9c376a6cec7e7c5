"""The library's own backends pass the suite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from aiorlinf.testing.conformance import BackendConformance
from aiorlinf.testing.fake import FakeAccelerator

__all__: list[str] = []


class TestStream(BackendConformance):
    backend = "stream"


class TestSharedMemory(BackendConformance):
    backend = "shm"


class TestGloo(BackendConformance):
    backend = "gloo"


class TestDevice(BackendConformance):
    """From one accelerator to itself, through the fake one."""

    backend = "auto"
    landing = "fake:0"
    device_backend = "cuda_ipc"
    dtypes = (torch.uint8, torch.int32, torch.float32, torch.bfloat16)
    fake: FakeAccelerator

    def surroundings(self) -> AbstractContextManager[object]:
        return self._with_fake()

    @contextmanager
    def _with_fake(self) -> Iterator[None]:
        with FakeAccelerator(1, ticks=(1, 3)) as self.fake:
            yield

    def place(self, values: torch.Tensor) -> torch.Tensor:
        return self.fake.tensor(values)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_cpu else tensor.cpu()
