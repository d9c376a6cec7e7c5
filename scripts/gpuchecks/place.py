"""Where the checks run: on CUDA (or ROCm), or on the fake accelerator, which shows that the checks themselves work."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from aiorlinf.testing.fake import FakeAccelerator

__all__ = ["KINDS", "CudaPlace", "FakePlace", "Place", "place"]

KINDS = ("cuda", "fake")

_BUSY_CYCLES = 50_000_000
"""Some tens of milliseconds."""


class Place(Protocol):
    """Accelerators of one kind.

    Attributes:
        kind: torch's device type.
        scale: sizes are divided by this.
    """

    kind: str
    scale: int

    def count(self) -> int:
        """How many there are."""

    def describe(self) -> str:
        """For people."""

    def late(self, values: torch.Tensor, index: int = 0) -> torch.Tensor:
        """These values on a device, written by a stream that is busy for a while before it comes to that."""

    def write(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Give a tensor on a device other values, late."""

    def empty_cache(self) -> None:
        """Give memory that is not in use back to the device."""

    def on_a_stream(self, index: int = 0) -> contextlib.AbstractContextManager[Any]:
        """Another stream is current meanwhile."""

    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the current stream sees, in CPU memory."""

    def tidy(self) -> None:
        """Between two checks: nothing of the one is left for the other."""


class CudaPlace:
    """The real ones."""

    kind = "cuda"
    scale = 1

    def count(self) -> int:
        return torch.cuda.device_count()

    def describe(self) -> str:
        names = [torch.cuda.get_device_name(index) for index in range(self.count())]
        built = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        nccl = ""
        if torch.distributed.is_nccl_available():
            nccl = ", NCCL " + ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        return f"{len(names)} x {names[0]}, torch {torch.__version__}, {built}{nccl}"

    def late(self, values: torch.Tensor, index: int = 0) -> torch.Tensor:
        with torch.cuda.device(index):
            target = torch.zeros_like(values, device=f"cuda:{index}")
            source = values.to(f"cuda:{index}")
            cuda: Any = torch.cuda
            cuda._sleep(_BUSY_CYCLES)
            return target.copy_(source)

    def write(self, target: torch.Tensor, values: torch.Tensor) -> None:
        source = values.to(target.device)
        cuda: Any = torch.cuda
        cuda._sleep(_BUSY_CYCLES)
        target.copy_(source)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def on_a_stream(self, index: int = 0) -> contextlib.AbstractContextManager[Any]:
        cuda: Any = torch.cuda
        stream = cuda.Stream(device=index)
        stream.wait_stream(cuda.current_stream(index))
        context: contextlib.AbstractContextManager[Any] = cuda.stream(stream)
        return context

    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu()

    def tidy(self) -> None:
        gc.collect()
        cuda: Any = torch.cuda
        cuda.synchronize()
        cuda.empty_cache()
        cuda.ipc_collect()


class FakePlace:
    """The fake one, with two devices and small sizes."""

    kind = "fake"
    scale = 256

    def __init__(self, fake: FakeAccelerator) -> None:
        self.fake = fake

    def count(self) -> int:
        return self.fake.count()

    def describe(self) -> str:
        return "2 x fake accelerator (this shows that the checks work, and nothing else)"

    def late(self, values: torch.Tensor, index: int = 0) -> torch.Tensor:
        return self.fake.late(values, index, ticks=30)

    def write(self, target: torch.Tensor, values: torch.Tensor) -> None:
        self.fake.write(target, values, ticks=30)

    def empty_cache(self) -> None:
        self.fake.empty_cache()

    @contextlib.contextmanager
    def on_a_stream(self, index: int = 0) -> Iterator[None]:
        before = self.fake.current_stream(index)
        self.fake.set_stream(self.fake.new_stream(index))
        yield
        self.fake.set_stream(before)

    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_cpu else self.fake.read(tensor)

    def tidy(self) -> None:
        gc.collect()
        self.fake.drain()


@contextlib.contextmanager
def place(kind: str) -> Iterator[Place]:
    """The accelerators of this process."""
    if kind == "cuda":
        yield CudaPlace()
        return
    with FakeAccelerator(2, between=True) as fake:
        yield FakePlace(fake)
