"""Finding runtimes, and what users name as devices."""

from __future__ import annotations

import pytest
import torch

from aiorlinf.device.kinds.cuda import CudaRuntime
from aiorlinf.device.registry import accelerator, parse_device, runtime_of, usable_runtime
from aiorlinf.errors import UsageError
from aiorlinf.testing.fake import FakeAccelerator

__all__: list[str] = []

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")


def test_a_type_is_a_file() -> None:
    for kind in ("cpu", "cuda", "xpu"):
        runtime = runtime_of(kind)
        assert runtime is not None
        assert runtime.kind == kind
        assert runtime_of(kind) is runtime
    assert runtime_of("abacus") is None
    assert not runtime_of("cuda").started()  # type: ignore[union-attr]


@without_cuda
def test_what_is_not_there_says_why() -> None:
    cuda = CudaRuntime()
    assert cuda.problem() is not None
    assert usable_runtime("cuda") is None
    with pytest.raises(UsageError, match=r"device='cuda:0' cannot be used here: .*CUDA"):
        parse_device("cuda:0")


def test_the_cpu_is_done_when_it_returns() -> None:
    cpu = runtime_of("cpu")
    assert cpu is not None
    assert cpu.problem() is None
    stream = cpu.side_stream(0, "test")
    out = cpu.empty(3, 0, stream)
    cpu.copy(out, torch.tensor([1, 2, 3], dtype=torch.uint8), stream)
    event = cpu.record(stream)
    cpu.wait(cpu.current_stream(0), event)
    assert cpu.query(event)
    assert out.tolist() == [1, 2, 3]
    free, total = cpu.memory(0)
    assert 0 < free <= total
    assert cpu.peer_access(0, cpu.current_device())
    assert cpu.identity(0).kind == "cpu"


@without_cuda
def test_one_accelerator_at_most() -> None:
    assert accelerator() is None
    with FakeAccelerator(2) as fake:
        assert accelerator() is fake
        assert parse_device("fake") == torch.device("fake", 0)
        assert parse_device(torch.device("fake", 1)) == torch.device("fake", 1)
        fake.set_device(1)
        assert parse_device("fake") == torch.device("fake", 1)
        with pytest.raises(UsageError, match="2 devices"):
            parse_device("fake:2")
    assert accelerator() is None
    assert parse_device("cpu:0") == torch.device("cpu")
    with pytest.raises(UsageError, match="no device"):
        parse_device("abacus")
