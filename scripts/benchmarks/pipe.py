"""``multiprocessing``'s connection over a Unix socket: the object that ``multiprocessing.Pipe()`` returns."""

from __future__ import annotations

import pickle
import time
from collections import deque
from multiprocessing.connection import Client, Connection, Listener
from typing import ClassVar, Final

import torch

from scripts.benchmarks.contender import SMALL_DICT, BlockingContender, Effort, Metrics, Place, unknown
from scripts.benchmarks.footprint import KEPT, Footprint
from scripts.benchmarks.tensors import (
    byte_view,
    check_bulk,
    check_kept,
    check_nested,
    check_stream,
    copied_bytes,
    made_from,
    make_bulk,
    make_nested,
    make_stream,
)

__all__ = ["Pipe"]

WARM_UP: Final = 20
DONE: Final = b"!"


class Pipe(BlockingContender):
    """Objects by ``send``/``recv``; tensors as raw bytes, because torch's own reducers are far slower."""

    needs: ClassVar[tuple[str, ...]] = ("torch",)

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.path = str(place.directory / f"pipe{place.generation}.sock")
        self.listener: Listener | None = None
        self.connection: Connection | None = None

    async def offer(self) -> dict[str, str]:
        if not self.leads:
            self.listener = Listener(self.path, "AF_UNIX")
        return {}

    def open_blocking(self, offer: dict[str, str]) -> None:
        if self.listener is None:
            self.connection = Client(self.path, "AF_UNIX")
        else:
            self.connection = self.listener.accept()

    def close_blocking(self) -> None:
        for end in (self.connection, self.listener):
            if end is not None:
                end.close()

    def measure_blocking(self, case: str, variant: str, effort: Effort) -> Metrics:
        assert self.connection is not None
        if case == "small_dict_rtt":
            return self._objects(self.connection, effort.round_trips)
        if case == "small_tensor_rtt":
            return self._small_tensor(self.connection, effort.round_trips)
        if case == "nested":
            return self._nested(self.connection, effort)
        if case == "steady":
            return self._steady(self.connection, effort)
        if case == "tensor":
            return self._tensor(self.connection, fresh=variant == "fresh", effort=effort)
        if case == "stream_256B":
            return self._stream(self.connection, effort.stream_messages)
        raise unknown(case, variant)

    def _objects(self, connection: Connection, count: int) -> Metrics:
        took, back = [], None
        for _ in range(count + WARM_UP):
            start = time.perf_counter()
            if self.leads:
                connection.send(SMALL_DICT)
                back = connection.recv()
                took.append(time.perf_counter() - start)
            else:
                connection.send(connection.recv())
        if not self.leads:
            return {}
        if back != SMALL_DICT:
            raise AssertionError("another object came back")
        took = sorted(took[WARM_UP:])
        return {"time": took[len(took) // 2] * 1e6}

    def _small_tensor(self, connection: Connection, count: int) -> Metrics:
        took, back = [], make_stream()[1]
        for _ in range(count + WARM_UP):
            start = time.perf_counter()
            if self.leads:
                connection.send_bytes(copied_bytes(back))
                back = made_from(connection.recv_bytes())
                took.append(time.perf_counter() - start)
            else:
                connection.send_bytes(copied_bytes(made_from(connection.recv_bytes())))
        if not self.leads:
            return {}
        check_stream(back, 1)
        took = sorted(took[WARM_UP:])
        return {"time": took[len(took) // 2] * 1e6}

    def _nested(self, connection: Connection, effort: Effort) -> Metrics:
        nested = make_nested(effort.tensor_bytes) if self.leads else {}
        took = []
        for _ in range(effort.transfers + 1):
            start = time.perf_counter()
            if self.leads:
                connection.send_bytes(pickle.dumps(nested, 5))
                connection.recv_bytes()
                took.append(time.perf_counter() - start)
            else:
                nested = pickle.loads(connection.recv_bytes())
                connection.send_bytes(DONE)
        if not self.leads:
            check_nested(nested, effort.tensor_bytes)
            return {}
        took = sorted(took[1:])
        return {"rate": effort.tensor_bytes / took[len(took) // 2] / 1e9}

    def _steady(self, connection: Connection, effort: Effort) -> Metrics:
        footprint = Footprint(effort.steady_messages)
        kept: deque[torch.Tensor] = deque(maxlen=KEPT)
        bulk = make_bulk(effort.steady_bytes)
        start = time.perf_counter()
        for index in range(effort.steady_messages):
            if self.leads:
                bulk[0] = index
                connection.send_bytes(byte_view(bulk))
            else:
                kept.append(torch.empty(effort.steady_bytes // 4, dtype=torch.float32))
                connection.recv_bytes_into(byte_view(kept[-1]))
            footprint.passed_one()
        found = footprint.metrics()
        if self.leads:
            connection.recv_bytes()
            return {**found, "rate": effort.steady_messages * effort.steady_bytes / (time.perf_counter() - start) / 1e9}
        check_kept(kept, effort.steady_messages)
        connection.send_bytes(DONE)
        return found

    def _tensor(self, connection: Connection, *, fresh: bool, effort: Effort) -> Metrics:
        bulk = make_bulk(effort.tensor_bytes)
        took = []
        if not self.leads:
            bulk.zero_()
        for _ in range(effort.transfers + 1):
            start = time.perf_counter()
            if self.leads:
                connection.send_bytes(byte_view(bulk))
                connection.recv_bytes()
                took.append(time.perf_counter() - start)
                continue
            if fresh:
                del bulk
                bulk = torch.frombuffer(bytearray(connection.recv_bytes()), dtype=torch.float32)
            else:
                connection.recv_bytes_into(byte_view(bulk))
            connection.send_bytes(DONE)
        if not self.leads:
            check_bulk(bulk, effort.tensor_bytes)
            return {}
        took = sorted(took[1:])
        return {"rate": effort.tensor_bytes / took[len(took) // 2] / 1e9}

    def _stream(self, connection: Connection, count: int) -> Metrics:
        if self.leads:
            tensors = make_stream()
            start = time.perf_counter()
            for index in range(count):
                connection.send_bytes(copied_bytes(tensors[index % len(tensors)]))
            connection.recv_bytes()
            return {"rate": count / (time.perf_counter() - start)}
        got = None
        for _ in range(count):
            got = made_from(connection.recv_bytes())
        assert got is not None
        check_stream(got, count - 1)
        connection.send_bytes(DONE)
        return {}
