"""The `nccl` backend (RCCL under ROCm): one standalone process group per direction of a link, from torch's public class.

A pair has a communicator, a stream of NCCL's own and one of ours. Ours waits for the tensors, NCCL's waits for ours, ours waits for
NCCL's, and behind that lies the event that the poller asks for; the program never waits. Communicators are made when they are first used,
so the constructor, which runs in a private thread under the deadline of the rendezvous, moves one byte.

Liveness is the link's business. NCCL's own guards, which would end the process when a transfer takes long, are switched off for these
groups (the settings are read when a group is made, so only then are they set); when the link ends, the group is aborted, which ends
transfers that wait for a dead peer.

NCCL asks for one order on all devices of what several communicators do at the same time. `device.turns` gives it: in each direction a
device works for one pair at a time. So one stream of ours for each direction of a device is enough, and at most two of our kernels are on
it at once, of few CTAs each, that fit beside each other and beside the program's own. The byte that makes a communicator moves on a
stream of its own, for it has no turn, and no transfer may come to wait for it.
"""

from __future__ import annotations

import datetime
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from aiorlinf.backends.unwanted import Unwanted
from aiorlinf.device.registry import runtime_of
from aiorlinf.work.threads import start_thread

if TYPE_CHECKING:
    from aiorlinf.device.runtime import Runtime

__all__ = ["NcclMaker", "NcclPair", "group_options"]

_cuda: Any = torch.cuda  # its classes have no types

_FOREVER = datetime.timedelta(days=365)
_MAX_CTAS = 8
_SENDER, _RECEIVER = 0, 1
_NONBLOCKING = "TORCH_NCCL_USE_COMM_NONBLOCKING"
_HANGS_UNBLOCKED = ((2, 26),)

_QUIET = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # no watchdog that ends the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # nor one that watches the watchdog
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
}
_environment = threading.Lock()
_unwanted = Unwanted()


@contextmanager
def _quiet() -> Iterator[None]:
    """What is made meanwhile has no guards of its own. Other threads of the program may see the settings for this moment."""
    with _environment:
        before = {name: os.environ.get(name) for name in _QUIET}
        os.environ.update(_QUIET)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def group_options(options: Any, version: tuple[int, ...], environment: Mapping[str, str]) -> Any:
    """Set what our groups need, as far as torch has it.

    Args:
        options: new ones, of torch's class.
        version: of NCCL.
        environment: of the process.
    """
    options.is_high_priority_stream = True
    options._timeout = _FOREVER
    config = getattr(options, "config", None)  # of NCCL 2.17 and newer
    if config is None:
        return options
    config.max_ctas = _MAX_CTAS
    # Set up without blocking, so that the end of a link reaches a communicator whose other side never comes: torch (2.6 and newer; ours is
    # never older) can abort one that is still being made only in this mode, and otherwise the thread that makes it is lost. It is the
    # mode of all calls on that communicator; torch waits for each to be taken, so nothing else changes. Torch does not choose it by
    # itself any more since 2.7.1, as NCCL 2.26 was found to hang in it at times (pytorch/pytorch#153960), and RCCL was never tried.
    told = _NONBLOCKING in environment  # the user has decided, and torch looks there if nothing is said here
    if hasattr(config, "blocking") and not told and torch.version.hip is None and tuple(version[:2]) not in _HANGS_UNBLOCKED:
        config.blocking = 0
    return options


class NcclMaker:
    """Meets `backends.device_pairs.PairMaker`."""

    name = "nccl"
    out = "nccl out"
    into = "nccl in"

    def problem(self) -> str | None:
        if not torch.distributed.is_available():
            return "this torch was built without torch.distributed"
        if not torch.distributed.is_nccl_available():
            return "this torch was built without NCCL"
        return None

    def describe(self) -> str:
        nccl: Any = torch.cuda.nccl
        return f"{'RCCL' if torch.version.hip else 'NCCL'} {'.'.join(map(str, nccl.version()))}"

    def make(self, store: Any, rank: int, index: int, timeout: float, watch: Any) -> NcclPair:
        return NcclPair(store, rank, index, timeout, watch)


class NcclPair:
    """One direction between two workers. Member 0 sends, member 1 receives. See `PairMaker.make`.

    Raises:
        RuntimeError: NCCL's own error, for instance if both members are on one device.
    """

    def __init__(self, store: Any, rank: int, index: int, timeout: float, watch: Any) -> None:
        from_torch: Any = torch.distributed.distributed_c10d
        runtime = runtime_of("cuda")
        assert runtime is not None
        self._runtime: Runtime = runtime
        self._rank = rank
        self._watch = watch
        self._stream: Any = runtime.side_stream(index, NcclMaker.out if rank == _SENDER else NcclMaker.into)
        self._store = store  # torch does not keep the Python object alive
        options = group_options(from_torch.ProcessGroupNCCL.Options(), torch.cuda.nccl.version(), os.environ)  # type: ignore[no-untyped-call]
        torch.cuda.set_device(index)  # of this thread only
        with _quiet():
            self._group: Any = from_torch.ProcessGroupNCCL(store, rank, 2, options)
        try:
            self._connect(index, timeout)
        except BaseException:
            self.retire()
            raise

    def _connect(self, index: int, timeout: float) -> None:
        """Make the communicator by moving one byte, and see it move."""
        probe = torch.zeros(1, dtype=torch.uint8, device=torch.device("cuda", index))
        stream: Any = _cuda.Stream(device=index)
        stream.wait_stream(_cuda.current_stream(index))
        done = threading.Event()
        trouble: list[BaseException] = []

        def move() -> None:
            try:
                torch.cuda.set_device(index)
                event = self._enqueue([probe], stream)
                event.synchronize()  # a private thread may wait for the device
            except BaseException as error:  # handed on to the thread that waits
                trouble.append(error)
            done.set()

        start_thread(threading.Thread(target=move, name="aiorlinf-nccl-connect", daemon=True))
        if not done.wait(timeout):
            raise RuntimeError(f"NCCL did not connect the two devices within {timeout:.1f} s")
        if trouble:
            raise RuntimeError(str(trouble[0]).strip().partition("\n")[0] or type(trouble[0]).__name__) from trouble[0]

    def _enqueue(self, leaves: list[torch.Tensor], stream: Any) -> Any:
        group = self._group
        if group is None:
            raise RuntimeError("the pair is closed")
        with _cuda.stream(stream):
            works = [group.send([leaf], _RECEIVER, 0) if self._rank == _SENDER else group.recv([leaf], _SENDER, 0) for leaf in leaves]
            for work in works:
                work.wait()  # our stream waits, not the program
            return self._runtime.record(stream)

    def transfer(self, leaves: list[torch.Tensor], then: Callable[[BaseException | None], None]) -> None:
        """Send or receive these one-dimensional uint8 tensors in order; `then` is called once, on the home thread, which this is."""
        try:
            event = self._enqueue(leaves, self._stream)
        except RuntimeError as error:
            then(error)
            return

        def over(error: BaseException | None) -> None:
            then(error)

        self._watch([(self._runtime, event)], over, leaves)

    def retire(self) -> None:
        """Abort what is under way and drop the group, without waiting."""
        _unwanted.take(self)
