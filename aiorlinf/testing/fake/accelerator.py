"""The fake accelerator itself: meets `device.runtime.Runtime`, and is what a test holds."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from aiorlinf.device.registry import register, unregister
from aiorlinf.device.runtime import Identity, Shared
from aiorlinf.testing.fake import kernels
from aiorlinf.testing.fake.between import Flag, SharedMemory, open_memory
from aiorlinf.testing.fake.ledger import Block, Ledger
from aiorlinf.testing.fake.memory import Memory, cpu_alias, device_tensor
from aiorlinf.testing.fake.streams import Clock, FakeEvent, FakeStream, Operation, merge, shuffled

__all__ = ["FakeAccelerator", "Fault"]

_TICKS_MAX = 1_000_000
_TICK_S = 0.0005
_TOTAL_BYTES = 1 << 34


class Fault(NamedTuple):
    """Something that would have been wrong on a real device: what, and where in the code."""

    text: str
    where: str

    def __str__(self) -> str:
        return f"{self.text}\n{self.where}"


class FakeAccelerator:
    """Use it as ``with FakeAccelerator(...) as fake``: meanwhile it is the accelerator of this process. At the end it raises AssertionError
    if memory was read before it was written, freed too early, or used on a stream that had not waited.

    Args:
        devices: how many.
        seed: decides how long operations take and which stream goes first.
        ticks: shortest and longest time of an operation.
        self_moving: time passes by one tick whenever somebody asks for an event; otherwise only by `step`.
        between: processes that each have one share the devices: they open each other's memory and events. Time passes by itself, as nobody
            in one process asks for what another waits for. What is freed is written over, when nobody has a right to it any more.

    Attributes:
        faults: what was wrong so far.
        limbo: workers end in the middle: it is no fault if memory is gone when the other side comes to open it or copies from it, for what
            was copied is thrown away, nor if it is closed in the thread of a loop.
        islands: no device can read another one's memory.
        mappings: how many allocations are open for other processes.
        kind: torch's device type.
    """

    kind = "fake"
    opens_own = True

    def __init__(
        self, devices: int = 1, *, seed: int = 0, ticks: tuple[int, int] = (1, 3), self_moving: bool = True, between: bool = False
    ) -> None:
        self.faults: list[Fault] = []
        self.self_moving = self_moving
        self.limbo = False
        self.islands = False
        self.copies: int = 0
        self._devices = devices
        self._ticks = ticks
        self._chance = random.Random(seed)
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        self._host: Clock = {}
        self._ledger = Ledger(self._object)
        self._streams: list[FakeStream] = []
        self._sides: dict[tuple[int, str], FakeStream] = {}
        self._defaults = [self.new_stream(index, "default stream") for index in range(devices)]
        self._current = threading.local()
        self._failures: dict[str, deque[Exception]] = {}
        self._exports: dict[bytes, Block] = {}
        self._epoch = 0
        self._mapped: dict[int, int] = {}  # by address of a block
        self.mappings: int = 0
        self._events: weakref.WeakValueDictionary[int, FakeEvent] = weakref.WeakValueDictionary()  # whoever exports one keeps it
        self._between = between
        self._elsewhere = self.new_stream(0, "memory of another process") if between else self._defaults[0]  # owns what is open here
        self._over = threading.Event()
        self._time: threading.Thread | None = None
        self._used = [0] * devices

    def __enter__(self) -> FakeAccelerator:
        kernels.install(self)
        register(self)
        if self._between:
            self._time = threading.Thread(target=self._pass_time, name="time of the fake accelerator", daemon=True)
            self._time.start()
        return self

    def _pass_time(self) -> None:
        while not self._over.wait(_TICK_S):
            self.step()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        unregister(self)
        self.drain()
        self._over.set()
        if self._time is not None:
            self._time.join()
        kernels.install(None)
        if error is None:
            assert not self.faults, "\n".join(map(str, self.faults))

    # ---- what a test does

    def tensor(self, values: torch.Tensor, index: int = 0) -> torch.Tensor:
        """A copy of these values on a device; there at once, without any stream."""
        return self._tensor(values, index, self._defaults[index])

    def _tensor(self, values: torch.Tensor, index: int, owner: FakeStream) -> torch.Tensor:
        with self._lock:
            stored = self._allocate(values.numel() * values.element_size(), index, owner)
        flat = values.detach().contiguous().reshape(-1).view(torch.uint8)
        cpu_alias(stored).copy_(flat)
        typed = stored.view(values.dtype) if stored.numel() else torch.empty(0, dtype=values.dtype, device=stored.device)
        return typed.view(values.shape)

    def late(self, values: torch.Tensor, index: int = 0, stream: FakeStream | None = None, ticks: int | None = None) -> torch.Tensor:
        """As `tensor`, but the values are written by an operation of this stream, the current one if none is named, whose memory it is."""
        stream = stream or self.current_stream(index)
        target = self._tensor(torch.full_like(values, 0), index, stream)
        self.write(target, values, stream, ticks)
        return target

    def write(self, target: torch.Tensor, values: torch.Tensor, stream: FakeStream | None = None, ticks: int | None = None) -> None:
        """An operation of this stream that gives a tensor other values."""
        stream = stream or self.current_stream(target.get_device())
        alias, source = cpu_alias(target), values.clone()
        self.launch("a write", stream, lambda: alias.copy_(source), writes=[target], ticks=ticks)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the tensor holds once everything is over that its current stream was given: a copy on the CPU."""
        stream = self.current_stream(tensor.get_device())
        found: list[torch.Tensor] = []
        alias = cpu_alias(tensor)
        self.launch("a read", stream, lambda: found.append(alias.clone()), reads=[tensor])
        self.synchronise(stream)
        return found[0]

    def new_stream(self, index: int = 0, name: str = "stream of the test") -> FakeStream:
        """A stream of its own."""
        with self._lock:
            stream = FakeStream(next(self._numbers), index, f"{name} of fake:{index}")
            self._streams.append(stream)
            return stream

    def set_stream(self, stream: FakeStream) -> None:
        """It is the calling thread's current one from now on."""
        self._local()[stream.index] = stream

    def set_device(self, index: int) -> None:
        """It is the calling thread's current one from now on."""
        self._current.device = index

    def step(self, ticks: int = 1) -> bool:
        """Let time pass. False if nothing can go on."""
        moved = False
        with self._lock:
            for _ in range(ticks):
                moved = False
                for stream in shuffled(self._streams, self._chance):
                    moved |= stream.tick()
        return moved

    def drain(self) -> None:
        """Let time pass until everything is over. Knows nothing of it: that is `synchronise`."""
        for _ in range(_TICKS_MAX):
            if not self.step() and not self._patience():
                break
        left = [stream for stream in self._streams if stream.queue]
        if left:
            self._object(f"these streams wait for each other for ever: {left}")

    def synchronise(self, stream: FakeStream) -> None:
        """Let time pass until this stream is through; from now on the program knows."""
        event = self.record(stream)
        for _ in range(_TICKS_MAX):
            if event.happened:
                break
            if not self.step():
                self._patience()
        merge(self._host, event.clock)

    def _patience(self) -> bool:
        """Give another process time, if one of its events is waited for here."""
        with self._lock:
            waits = any(stream.waits_for_another for stream in self._streams)
        if waits:
            time.sleep(_TICK_S)
        return waits

    def fail_next(self, call: str, error: Exception | None = None, times: int = 1) -> None:
        """The next calls of this method of the runtime fail."""
        for _ in range(times):
            self._failures.setdefault(call, deque()).append(error or RuntimeError(f"{call} fails because the test says so"))

    @property
    def blocks(self) -> int:
        """How many allocations there are, those of pinned memory too."""
        return len(self._ledger)

    def _local(self) -> dict[int, FakeStream]:
        streams: dict[int, FakeStream] | None = getattr(self._current, "streams", None)
        if streams is None:
            streams = self._current.streams = {}
        return streams

    def _object(self, text: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if "/testing/fake/" not in frame.filename]
        self.faults.append(Fault(text, "".join(traceback.format_list(frames[-6:]))))

    def _maybe_fail(self, call: str) -> None:
        failures = self._failures.get(call)
        if failures:
            raise failures.popleft()

    # ---- operations

    def launch(
        self,
        what: str,
        stream: FakeStream,
        run: Callable[[], object],
        *,
        reads: list[torch.Tensor] | None = None,
        writes: list[torch.Tensor] | None = None,
        ticks: int | None = None,
    ) -> None:
        """Give a stream something to do that uses these tensors."""
        with self._lock:
            merge(stream.clock, self._host)
            operation = Operation(what, run, self._chance.randint(*self._ticks) if ticks is None else ticks)
            count = stream.add(operation)
            for tensors, does_write in ((reads or [], False), (writes or [], True)):
                for tensor in tensors:
                    if tensor.numel():
                        block = self._ledger.use(stream, count, tensor.data_ptr(), _extent(tensor), writes=does_write, what=what)
                        operation.keeps.append(None if block is None else block.memory)

    def _allocate(self, nbytes: int, index: int, owner: FakeStream) -> torch.Tensor:
        memory = SharedMemory(nbytes) if self._between else Memory(nbytes)
        block = Block(memory, owner)
        self._ledger.add(block)
        self._used[index] += nbytes
        return device_tensor(memory, index, lambda: self._freed(block, index))

    def _freed(self, block: Block, index: int) -> None:
        with self._lock:
            self._used[index] -= block.memory.nbytes
            for handle, exported in list(self._exports.items()):
                if exported is block:
                    del self._exports[handle]
            left = self.limbo and self._mapped.get(block.memory.address)
            self._ledger.free(block, None if left else self._host)
            if isinstance(block.memory, SharedMemory) and block.owner is not None:
                block.memory.close()
                self._reuse(block, block.owner)

    def _reuse(self, block: Block, owner: FakeStream) -> None:
        """The allocator gives the memory to somebody else, once the streams that are known to use it are through with that."""
        for stream in block.holds:
            event = FakeEvent(next(self._numbers), {})
            stream.add(Operation("an event", event.happen, 0))
            owner.add(Operation("a wait", None, 0, event))
        operation = Operation("a use of others", block.memory.spoil, 0)
        operation.keeps.append(block.memory)
        owner.add(operation)

    # ---- the runtime

    def problem(self) -> str | None:
        return None

    def started(self) -> bool:
        return True

    def count(self) -> int:
        return self._devices

    def identity(self, index: int) -> Identity:
        return Identity("fake", f"FAKE-{index}", index, "fake accelerator")

    def current_device(self) -> int:
        return int(getattr(self._current, "device", 0))

    def memory(self, index: int) -> tuple[int, int]:
        return _TOTAL_BYTES - self._used[index], _TOTAL_BYTES

    def peer_access(self, index: int, other: int) -> bool:
        return index == other or not self.islands

    def current_stream(self, index: int) -> FakeStream:
        return self._local().get(index, self._defaults[index])

    def side_stream(self, index: int, purpose: str) -> FakeStream:
        with self._lock:
            stream = self._sides.get((index, purpose))
            if stream is None:
                stream = self._sides[index, purpose] = self.new_stream(index, f"side stream {purpose}")
            return stream

    def record(self, stream: FakeStream) -> FakeEvent:
        return self._record(stream, None)

    def _record(self, stream: FakeStream, flag: Flag | None) -> FakeEvent:
        self._maybe_fail("record")
        with self._lock:
            merge(stream.clock, self._host)
            event = FakeEvent(next(self._numbers), {}, flag, stream=stream.number)
            stream.add(Operation("an event", event.happen, 0))
            event.clock = dict(stream.clock)
            return event

    def place(self, event: FakeEvent) -> tuple[int, int] | None:
        return None if event.stream is None else (event.stream, event.number)

    def query(self, event: FakeEvent) -> bool:
        self._maybe_fail("query")
        with self._lock:
            if self.self_moving:
                self.step()
            if event.happened:
                merge(self._host, event.clock)
            return event.happened

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        with self._lock:
            merge(stream.clock, event.clock)
            stream.add(Operation("a wait", None, 0, event))

    def pinned(self, nbytes: int) -> torch.Tensor:
        self._maybe_fail("pinned")
        block = Block(Memory(nbytes), None)
        with self._lock:
            self._ledger.add(block)
        return block.memory.bytes(lambda: self._pinned_gone(block))

    def _pinned_gone(self, block: Block) -> None:
        """Nobody refers to this host memory any more; torch keeps such memory until the copies that it knows of are over."""
        with self._lock:
            self._ledger.free(block, self._host)

    def empty(self, nbytes: int, index: int, stream: FakeStream) -> torch.Tensor:
        self._maybe_fail("empty")
        with self._lock:
            return self._allocate(nbytes, index, stream)

    def copy(self, out: torch.Tensor, source: torch.Tensor, stream: FakeStream) -> None:
        self._maybe_fail("copy")
        self.copies += 1
        raw = out.dtype is torch.uint8 and source.dtype is torch.uint8
        if out.shape != source.shape or out.dim() != 1 or not (raw or not (out.is_cpu or source.is_cpu)):
            self._object(f"a copy from {list(source.shape)} {source.dtype} to {list(out.shape)} {out.dtype}")
        for tensor in (out, source):
            if tensor.numel() and tensor.is_cpu and self._ledger.find(tensor.data_ptr(), tensor.numel()) is None:
                self._object("a copy from or to host memory that is not pinned")
                return
        if stream.index not in [tensor.get_device() for tensor in (out, source) if not tensor.is_cpu]:
            self._object(f"a copy between other devices on {stream.name}")
        to = out if out.is_cpu else cpu_alias(out)
        of = source if source.is_cpu else cpu_alias(source)
        self.launch("a copy", stream, lambda: to.copy_(of), reads=[source], writes=[out])

    def hold(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        with self._lock:
            block = self._ledger.find(tensor.data_ptr(), 1)
            if block is not None:
                block.holds.add(stream)

    def look(self, host: torch.Tensor, *, writes: bool = False) -> None:
        """The program uses pinned memory itself: it must know that the device is through with it."""
        with self._lock:
            self._ledger.host(self._host, host.data_ptr(), host.numel() * host.element_size(), writes=writes, what="the program looks")

    # ---- between processes, which are all this one

    def empty_cache(self) -> None:
        """Memory is given back to the device, as far as it is free."""
        self._epoch += 1

    def export(self, tensor: torch.Tensor) -> Shared:
        self._maybe_fail("export")
        with self._lock:
            block = self._ledger.find(tensor.data_ptr(), tensor.nbytes)
            if block is None:
                raise RuntimeError("memory that the device does not know")
            handle = next((handle for handle, exported in self._exports.items() if exported is block), None)
            if handle is None:
                memory = block.memory
                own = f"{memory.handle}:{memory.nbytes}" if isinstance(memory, SharedMemory) else str(next(self._numbers))
                handle = f"{os.getpid()}/{own}".encode()
                self._exports[handle] = block
            uuid, at = self.identity(tensor.get_device()).uuid, tensor.data_ptr() - block.memory.address
            return Shared(uuid, handle, tensor.nbytes, at, self._epoch)

    def open(self, shared: Shared, index: int) -> torch.Tensor:
        self._maybe_fail("open")
        if _in_loop():
            self._object("memory of another process is opened in the thread of a loop, which takes long")
        process, _, where = shared.handle.decode().partition("/")
        if process.isdigit() and int(process) != os.getpid():
            self._check_between()
            return self._open_from_another(where, shared, index)
        with self._lock:
            block = self._exports.get(shared.handle)
            if block is None:
                if not self.limbo:
                    self._object("memory is opened that was freed meanwhile")
                raise RuntimeError("there is no such memory")
            self.mappings += 1
            address = block.memory.address
            self._mapped[address] = self._mapped.get(address, 0) + 1
            return device_tensor(block.memory, index, lambda: self._closed(address))[shared.at : shared.at + shared.nbytes]

    def _check_between(self) -> None:
        if not self._between:
            raise RuntimeError("what another process has cannot be opened here")

    def _open_from_another(self, where: str, shared: Shared, index: int) -> torch.Tensor:
        at, _, nbytes = where.rpartition(":")
        try:
            memory = open_memory(at, int(nbytes))
        except RuntimeError:
            if not self.limbo:
                self._object("memory of another process is opened that was freed meanwhile")
            raise
        block = Block(memory, self._elsewhere)
        with self._lock:
            self._ledger.add(block)
            self.mappings += 1
            self._mapped[memory.address] = 1

        def closed() -> None:
            with self._lock:
                self._ledger.free(block, self._host)
            self._closed(memory.address)

        return device_tensor(memory, index, closed)[shared.at : shared.at + shared.nbytes]

    def _closed(self, address: int) -> None:
        with self._lock:
            self.mappings -= 1
            self._mapped[address] -= 1
        if _in_loop() and not self.limbo:
            self._object("memory of another process is closed in the thread of a loop, which waits for the device")

    def let_go(self, memories: list[torch.Tensor]) -> None:
        memories.clear()

    def export_event(self, stream: FakeStream) -> tuple[FakeEvent, bytes]:
        flag = Flag() if self._between else None
        event = self._record(stream, flag)
        self._events[event.number] = event
        where = flag.memory.handle if flag is not None and isinstance(flag.memory, SharedMemory) else ""
        return event, f"{os.getpid()}/{event.number}/{where}".encode()

    def open_event(self, handle: bytes, index: int) -> FakeEvent:
        process, number, where = handle.decode().split("/")
        if int(process) != os.getpid():
            self._check_between()
            try:
                return FakeEvent(next(self._numbers), {}, Flag(open_memory(where, 1)), foreign=True)
            except RuntimeError:
                event = None
        else:
            event = self._events.get(int(number))
        if event is None:
            if not self.limbo:
                self._object("an event of another process is opened that was let go of meanwhile")
            raise RuntimeError("there is no such event")
        return event

    def collect(self) -> None:
        """Nothing is kept."""


def _in_loop() -> bool:
    """The calling thread runs a loop."""
    return asyncio._get_running_loop() is not None


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
