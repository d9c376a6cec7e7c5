"""The CUDA runtime against a torch that answers as one with devices does: what only shows there, and needs no device to be checked."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aiorlinf.device import registry
from aiorlinf.device.kinds import cuda as module
from aiorlinf.device.kinds.cuda import CudaRuntime
from aiorlinf.device.registry import started_accelerator
from aiorlinf.link.staging import Landing, callers_device, callers_streams

__all__: list[str] = []

MALLOC = b"\x02c" + bytes(range(64))
PIECES = b"\x02e" + b"descriptors 7, 8"


class Alias:
    """A storage that torch shares between processes."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    def untyped_storage(self) -> Alias:
        return self

    def _share_cuda_(self) -> tuple[Any, ...]:
        return 0, self.driver.handle, 0, 4096, b"counter", 0, b"", False

    def _release_ipc_counter(self, *_: Any, **__: Any) -> None:
        self.driver.released += 1


class Driver:
    """What stands for `torch.cuda`, with tensors on the CPU for those of its device.

    Attributes:
        asked: the driver was, so that forks are of no use any more.
        handle: of all allocations.
    """

    def __init__(self) -> None:
        self.asked = False
        self.initialised = False
        self.devices = 1
        self.broken = False
        self.handle = MALLOC
        self.released = 0
        self.current = dict.fromkeys(range(4), "the program's")  # streams, by device
        self.stats: dict[str, Any] = {}

    def is_available(self) -> bool:
        self.asked = True
        return not self.broken and self.devices > 0

    def device_count(self) -> int:
        return self.devices

    def is_initialized(self) -> bool:
        return self.initialised

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        self.asked = True
        if self.broken:
            raise RuntimeError("The NVIDIA driver on your system is too old")
        return 0

    def current_stream(self, index: int) -> str:
        return f"stream of {index}"

    def get_device_properties(self, index: int) -> Any:
        return SimpleNamespace(name="a card", uuid="GPU-1")

    def device(self, index: object) -> Any:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before = dict(self.current)
        self.current[stream.device.index] = stream.name
        yield
        self.current = before

    def Stream(self, device: int, priority: int) -> Any:
        return SimpleNamespace(device=torch.device("cuda", device), name="ours")

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return 1000, 10_000

    def memory_stats_as_nested_dict(self, index: object) -> dict[str, Any]:
        return self.stats


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """This torch has CUDA."""
    driver = Driver()
    for name in ("is_available", "device_count", "is_initialized", "_is_in_bad_fork", "current_device"):
        monkeypatch.setattr(torch.cuda, name, getattr(driver, name))
    monkeypatch.setattr(module, "_cuda", driver)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(CudaRuntime, "_torch", driver)
    monkeypatch.setattr(module._torch, "from_dlpack", lambda tensor: Alias(driver))
    registry._built_in.cache_clear()
    yield driver
    registry._built_in.cache_clear()


def test_to_look_whether_there_is_a_device_leaves_the_driver_alone(driver: Driver) -> None:
    """Or processes that are forked later could not use it: whatever is asked of us before somebody here uses the device himself."""
    assert CudaRuntime().problem() is None
    assert (started_accelerator(), callers_device(), callers_streams()) == (None, None, [])
    assert not driver.asked
    driver.initialised = True
    runtime = started_accelerator()
    assert runtime is not None
    assert callers_device() == torch.device("cuda", 0)
    assert callers_streams() == [(runtime, "stream of 0")]


def test_no_device_at_all(driver: Driver) -> None:
    driver.devices = 0
    assert CudaRuntime().problem() == "torch finds no cuda device"
    assert not driver.asked


def test_with_a_driver_that_does_not_work_tensors_land_in_cpu_memory(driver: Driver) -> None:
    driver.broken = True
    assert Landing(None).target(None) == torch.device("cpu")  # type: ignore[arg-type]
    driver.broken = False
    assert Landing(None).target(None) == torch.device("cuda", 0)  # type: ignore[arg-type]


def exported(driver: Driver, freed: int) -> Any:
    driver.stats = {"segment": {"all": {"freed": 0}}, "reserved_bytes": {"all": {"freed": freed}}}
    return CudaRuntime().export(torch.arange(10, dtype=torch.int32)[2:4])


def test_memory_that_was_given_back_is_not_taken_for_what_comes_after_it(driver: Driver) -> None:
    """Handles of memory that is mapped piece by piece come again; the other side finds by them what it has open."""
    one = exported(driver, 0)
    assert (one.handle, one.at, one.nbytes, one.epoch, driver.released) == (MALLOC, 4096 + 8, 8, 0, 1)
    assert exported(driver, 7).handle == MALLOC  # those of whole allocations do not
    driver.handle = PIECES
    first, same, later = exported(driver, 7), exported(driver, 7), exported(driver, 8)
    assert first == same
    assert first.handle != later.handle
    assert first.handle.startswith(PIECES)  # torch reads so far
    assert (first.epoch, later.epoch) == (7, 8)


def test_memory_that_torch_keeps_for_later_is_free(driver: Driver) -> None:
    assert CudaRuntime().memory(0) == (1000, 10_000)  # nothing is in use yet
    driver.stats = {"reserved_bytes": {"all": {"current": 8000}}, "allocated_bytes": {"all": {"current": 3000}}}
    assert CudaRuntime().memory(0) == (6000, 10_000)


def test_closing_waits_for_no_stream_of_the_program(driver: Driver) -> None:
    """Torch waits for the stream that is current then, and nothing else runs in the process meanwhile."""
    runtime = CudaRuntime()
    waited_for = []

    class Memory:
        def get_device(self) -> int:
            return 3

        def __del__(self) -> None:
            waited_for.append(driver.current[3])

    memories: Any = [Memory(), Memory()]
    runtime.let_go(memories)
    assert memories == []
    assert waited_for == ["ours"] * 2
    assert driver.current[3] == "the program's"


@pytest.mark.parametrize(("out", "source"), [(2, 1), (1, 2), (1, 1), (1, None), (None, 1)])
def test_a_copy_uses_no_stream_of_the_program(driver: Driver, out: int | None, source: int | None) -> None:
    """Torch takes those that are current on both devices."""
    runtime = CudaRuntime()
    used: list[str] = []

    class Tensor:
        def __init__(self, index: int | None) -> None:
            self.is_cpu = index is None
            self.device = torch.device("cpu") if index is None else torch.device("cuda", index)

        def get_device(self) -> int:
            return self.device.index

        def copy_(self, source: Any, non_blocking: bool) -> None:
            assert non_blocking
            used.extend(driver.current[each.device.index] for each in (self, source) if not each.is_cpu)

    target: Any = Tensor(out)
    origin: Any = Tensor(source)
    runtime.copy(target, origin, runtime.side_stream(1, "test"))
    assert set(used) == {"ours"}


def test_an_event_while_another_thread_captures_a_graph(driver: Driver) -> None:
    """Nothing can be asked then; the operation must not fail for that."""

    def query() -> bool:
        if said:
            raise RuntimeError(said)
        return True

    event = SimpleNamespace(query=query)
    said = "CUDA error: operation not permitted when stream is capturing"
    assert not CudaRuntime().query(event)
    said = ""
    assert CudaRuntime().query(event)
    said = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(RuntimeError, match="illegal"):
        CudaRuntime().query(event)


def test_the_places_of_events_grow_along_their_streams(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    """Also when several threads record on one stream; a class of events that takes no attributes has no places."""
    order: list[object] = []

    class Event:
        def record(self, stream: object) -> None:
            order.append(self)
            time.sleep(0)  # another thread has its turn

    class Closed(Event):
        def __setattr__(self, name: str, value: object) -> None:
            raise AttributeError(name)

    runtime = CudaRuntime()
    monkeypatch.setattr(driver, "Event", Event, raising=False)
    threads = [threading.Thread(target=lambda: [runtime.record("a stream") for _ in range(100)]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    places = [runtime.place(event) for event in order]
    assert places == [("a stream", number) for number in range(300)]
    monkeypatch.setattr(driver, "Event", Closed, raising=False)
    assert runtime.place(runtime.record("a stream")) is None
