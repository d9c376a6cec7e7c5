"""``torch.multiprocessing.Queue``: tensors go as descriptors of shared memory.

Such a queue can only be inherited, so the leading half starts the process at the other end itself, and the answering half idles.
"""

from __future__ import annotations

import os
import time
from collections import deque
from typing import Any, ClassVar, Final

from scripts.benchmarks.contender import SMALL_DICT, BlockingContender, Effort, Metrics, Place, unknown
from scripts.benchmarks.parent import die_with_parent

__all__ = ["TorchQueue"]

WARM_UP: Final = 20
LIMIT_S: Final = 50.0


class TorchQueue(BlockingContender):
    """A queue each way. The first ``put`` of a tensor moves it into shared memory; from then on both processes share it."""

    needs: ClassVar[tuple[str, ...]] = ("torch.multiprocessing",)
    one_sided: ClassVar[bool] = True

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.there: Any = None
        self.back: Any = None
        self.process: Any = None

    def open_blocking(self, offer: dict[str, str]) -> None:
        if not self.leads:
            return
        from torch import multiprocessing

        context: Any = multiprocessing.get_context("spawn")
        self.there, self.back = context.Queue(), context.Queue()
        self.process = context.Process(target=answer, args=(self.there, self.back, os.getpid()), daemon=True)
        self.process.start()
        self.back.get(timeout=LIMIT_S)  # it is up: starting Python is nobody's first message

    def close_blocking(self) -> None:
        if self.process is not None:
            self.there.put(("end",))
            self.process.join(LIMIT_S)
            for queue in (self.there, self.back):
                queue.close()
                queue.join_thread()

    def measure_blocking(self, case: str, variant: str, effort: Effort) -> Metrics:
        if not self.leads:
            return {}
        if case in ("small_dict_rtt", "small_tensor_rtt"):
            return self._round_trips(case, max(20, effort.round_trips // 5))
        if case in ("tensor", "nested"):
            return self._transfers(case, effort, again=variant == "again")
        if case == "steady":
            return self._steady(effort)
        raise unknown(case, variant)

    def _take(self) -> Any:
        found = self.back.get(timeout=LIMIT_S)
        if isinstance(found, BaseException):
            raise found
        return found

    def _round_trips(self, case: str, count: int) -> Metrics:
        from scripts.benchmarks.tensors import check_small_dict, check_stream, make_stream

        self.there.put(("echo", count + WARM_UP))
        took: list[float] = []
        sample: Any = SMALL_DICT if case == "small_dict_rtt" else make_stream()[1]
        back: Any = None
        for _ in range(count + WARM_UP):
            # A tensor that has been put already would only be named, so that each round trip gets one of its own.
            fresh = sample if isinstance(sample, dict) else sample.clone()
            start = time.perf_counter()
            self.there.put(fresh)
            back = self._take()
            took.append(time.perf_counter() - start)
        if case == "small_dict_rtt":
            check_small_dict(back)
        else:
            check_stream(back, 1)
        took = sorted(took[WARM_UP:])
        return {"time": took[len(took) // 2] * 1e6}

    def _transfers(self, case: str, effort: Effort, *, again: bool) -> Metrics:
        from scripts.benchmarks.tensors import make_bulk, make_nested

        count = effort.transfers + 1
        self.there.put(("take", case, effort.tensor_bytes, count))
        took = []
        made: Any = None
        for _ in range(count):
            if made is None or not again:
                made = (make_bulk if case == "tensor" else make_nested)(effort.tensor_bytes)
            start = time.perf_counter()
            self.there.put(made)
            self._take()
            took.append(time.perf_counter() - start)
        self._take()  # whether the last one is what was sent
        took = sorted(took[1:])
        return {"rate": effort.tensor_bytes / took[len(took) // 2] / 1e9}

    def _steady(self, effort: Effort) -> Metrics:
        from scripts.benchmarks.footprint import Footprint
        from scripts.benchmarks.tensors import make_bulk

        self.there.put(("keep", effort.steady_messages))
        footprint, bulk = Footprint(effort.steady_messages), make_bulk(effort.steady_bytes)
        start = time.perf_counter()
        for index in range(effort.steady_messages):
            bulk[0] = index
            self.there.put(bulk.clone())
            self._take()
            footprint.passed_one()
        rate = effort.steady_messages * effort.steady_bytes / (time.perf_counter() - start) / 1e9
        theirs = self._take()
        return {**{name: max(value, theirs[name]) for name, value in footprint.metrics().items()}, "rate": rate}


def answer(there: Any, back: Any, parent: int) -> None:
    """The process at the other end: does what the first item of each job says."""
    die_with_parent(parent)
    back.put("up")
    while True:
        job = there.get()
        if job[0] == "end":
            return
        try:
            back.put(do(there, back, *job))
        except Exception as error:  # whatever it is, the leading half raises it
            back.put(RuntimeError(repr(error)))


def do(there: Any, back: Any, what: str, *details: Any) -> Any:
    """One job's messages; the last answer is what this returns."""
    from scripts.benchmarks.footprint import KEPT, Footprint
    from scripts.benchmarks.tensors import check_bulk, check_kept, check_nested

    if what == "echo":
        for _ in range(details[0] - 1):
            back.put(there.get())
        return there.get()
    if what == "take":
        case, nbytes, count = details
        got: Any = None
        for _ in range(count):
            got = there.get()
            back.put(None)
        (check_bulk if case == "tensor" else check_nested)(got, nbytes)
        return None
    (count,) = details
    footprint = Footprint(count)
    kept: deque[Any] = deque(maxlen=KEPT)
    for _ in range(count):
        kept.append(there.get())
        footprint.passed_one()
        back.put(None)
    check_kept(kept, count)
    return footprint.metrics()
