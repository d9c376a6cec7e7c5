"""torch.distributed as a user would call it: Gloo ``send``/``recv`` of tensors, and lists of objects."""

from __future__ import annotations

import os
import time
from collections import deque
from datetime import timedelta
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist

from scripts.benchmarks.contender import SMALL_DICT, BlockingContender, Effort, Metrics, unknown
from scripts.benchmarks.footprint import KEPT, Footprint
from scripts.benchmarks.tensors import (
    both_rates,
    check_bulk,
    check_kept,
    check_nested,
    check_stream,
    make_bulk,
    make_nested,
    make_stream,
)

__all__ = ["RawGloo"]

WARM_UP: Final = 10
TIMEOUT: Final = timedelta(seconds=60)


class RawGloo(BlockingContender):
    """The default process group over the loopback interface."""

    needs: ClassVar[tuple[str, ...]] = ("torch.distributed",)

    def open_blocking(self, offer: dict[str, str]) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = self.place.directory / f"gloo{self.place.generation}"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=self.place.role, world_size=2, timeout=TIMEOUT)

    def close_blocking(self) -> None:
        dist.destroy_process_group()

    def measure_blocking(self, case: str, variant: str, effort: Effort) -> Metrics:
        if case == "small_dict_rtt":
            return self._object_lists(max(20, effort.round_trips // 5))
        if case == "tensor":
            return self._tensor(fresh=variant == "fresh", effort=effort)
        if case == "stream_256B":
            return self._stream(int(effort.stream_messages * effort.slow_share))
        if case == "small_tensor_rtt":
            return self._small_tensor(effort.round_trips)
        if case == "nested":
            return self._nested(effort)
        if case == "both_directions":
            return self._both_ways(effort)
        if case == "steady":
            return self._steady(effort)
        if case == "first_message":
            return self._first()
        raise unknown(case, variant)

    def _signal(self) -> None:
        """One tensor byte from the half that answers to the half that leads."""
        mark = torch.zeros(1, dtype=torch.uint8)
        if self.leads:
            dist.recv(mark, 1)
        else:
            dist.send(mark, 0)

    def _object_lists(self, count: int) -> Metrics:
        took, back = [], [None]
        for _ in range(count + WARM_UP):
            start = time.perf_counter()
            back = [None]
            if self.leads:
                dist.send_object_list([SMALL_DICT], 1)
                dist.recv_object_list(back, 1)
                took.append(time.perf_counter() - start)
            else:
                dist.recv_object_list(back, 0)
                dist.send_object_list(back, 0)
        if back != [SMALL_DICT]:
            raise AssertionError("another object came back")
        took = sorted(took[WARM_UP:])
        return {"time": took[len(took) // 2] * 1e6} if self.leads else {}

    def _tensor(self, *, fresh: bool, effort: Effort) -> Metrics:
        bulk = make_bulk(effort.tensor_bytes)
        took = []
        if not self.leads:
            bulk.zero_()
        for _ in range(effort.transfers + 1):
            start = time.perf_counter()
            if self.leads:
                dist.send(bulk, 1)
            else:
                if fresh:
                    del bulk
                    bulk = torch.empty(effort.tensor_bytes // 4, dtype=torch.float32)
                dist.recv(bulk, 0)
            self._signal()
            took.append(time.perf_counter() - start)
        if not self.leads:
            check_bulk(bulk, effort.tensor_bytes)
            return {}
        took = sorted(took[1:])
        return {"rate": effort.tensor_bytes / took[len(took) // 2] / 1e9}

    def _small_tensor(self, count: int) -> Metrics:
        took, sample = [], make_stream()[1]
        back = torch.zeros_like(sample)
        for _ in range(count + WARM_UP):
            start = time.perf_counter()
            if self.leads:
                dist.send(sample, 1)
                dist.recv(back, 1)
                took.append(time.perf_counter() - start)
            else:
                dist.recv(back, 0)
                dist.send(back, 0)
        check_stream(back, 1)
        took = sorted(took[WARM_UP:])
        return {"time": took[len(took) // 2] * 1e6} if self.leads else {}

    def _nested(self, effort: Effort) -> Metrics:
        """``send_object_list`` pickles the object, tensors and all."""
        nested = make_nested(effort.tensor_bytes) if self.leads else {}
        took = []
        for _ in range(effort.transfers + 1):
            start = time.perf_counter()
            if self.leads:
                dist.send_object_list([nested], 1)
            else:
                got: list[Any] = [None]
                dist.recv_object_list(got, 0)
                nested = got[0]
            self._signal()
            took.append(time.perf_counter() - start)
        if not self.leads:
            check_nested(nested, effort.tensor_bytes)
            return {}
        took = sorted(took[1:])
        return {"rate": effort.tensor_bytes / took[len(took) // 2] / 1e9}

    def _both_ways(self, effort: Effort) -> Metrics:
        bulk, peer = make_bulk(effort.both_ways_bytes), 1 - self.place.role
        arrived = torch.zeros_like(bulk)
        self._signal()
        start = time.perf_counter()
        for _ in range(effort.both_ways_messages):
            works = [dist.isend(bulk, peer), dist.irecv(arrived, peer)]
            for work in works:
                assert work is not None
                work.wait()
        took = time.perf_counter() - start
        check_bulk(arrived, effort.both_ways_bytes)
        return {"rate": both_rates(effort, took)} if self.leads else {}

    def _steady(self, effort: Effort) -> Metrics:
        footprint = Footprint(effort.steady_messages)
        kept: deque[torch.Tensor] = deque(maxlen=KEPT)
        bulk = make_bulk(effort.steady_bytes)
        start = time.perf_counter()
        for index in range(effort.steady_messages):
            if self.leads:
                bulk[0] = index
                dist.send(bulk, 1)
            else:
                kept.append(torch.empty(effort.steady_bytes // 4, dtype=torch.float32))
                dist.recv(kept[-1], 0)
            footprint.passed_one()
        found = footprint.metrics()
        self._signal()
        if self.leads:
            return {**found, "rate": effort.steady_messages * effort.steady_bytes / (time.perf_counter() - start) / 1e9}
        check_kept(kept, effort.steady_messages)
        return found

    def _stream(self, count: int) -> Metrics:
        tensors = make_stream()
        got = tensors[0]
        start = time.perf_counter()
        for index in range(count):
            if self.leads:
                dist.send(tensors[index % len(tensors)], 1)
            else:
                got = torch.empty(tensors[0].shape, dtype=torch.float32)
                dist.recv(got, 0)
        self._signal()
        if not self.leads:
            check_stream(got, count - 1)
            return {}
        return {"rate": count / (time.perf_counter() - start)}

    def _first(self) -> Metrics:
        start = time.perf_counter()
        group = dist.new_group([0, 1], timeout=TIMEOUT)
        mark = torch.zeros(1)
        if self.leads:
            dist.send(mark, 1, group=group)
            dist.recv(mark, 1, group=group)
        else:
            dist.recv(mark, 0, group=group)
            dist.send(mark, 0, group=group)
        took = time.perf_counter() - start
        dist.destroy_process_group(group)
        return {"time": took * 1e3} if self.leads else {}
