"""For OpenTelemetry: a hook that needs none of its packages. Give it a meter, and it makes the instruments."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from aiorlinf.observe.metrics.reading import read_worker
from aiorlinf.observe.metrics.samples import METRICS, Sample

if TYPE_CHECKING:
    from aiorlinf.worker import Worker

__all__ = ["Meter", "instrument"]

_RECENT_S = 0.2

Observation = Callable[[float, Mapping[str, str]], Any]


class Meter(Protocol):
    """What is used of ``opentelemetry.metrics.Meter``."""

    def create_observable_counter(self, name: str, callbacks: Any = ..., unit: str = ..., description: str = ...) -> Any: ...
    def create_observable_gauge(self, name: str, callbacks: Any = ..., unit: str = ..., description: str = ...) -> Any: ...


class _Recent:
    """The figures of the moment, read once for all the instruments that ask one after the other."""

    def __init__(self, read: Callable[[], Iterable[Sample]]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._samples: tuple[Sample, ...] = ()
        self._until = 0.0

    def __call__(self) -> tuple[Sample, ...]:
        with self._lock:
            if time.monotonic() >= self._until:
                self._samples = tuple(self._read())
                self._until = time.monotonic() + _RECENT_S
            return self._samples


def instrument(meter: Meter, source: Worker | Callable[[], Iterable[Sample]], observation: Observation | None = None) -> None:
    """Make an observable instrument for each figure. Its callbacks are called by OpenTelemetry, in a thread of its own.

        meter = opentelemetry.metrics.get_meter("my-rollouts")
        instrument(meter, comm)

    Args:
        meter: OpenTelemetry's, or anything with its two methods.
        source: a worker of this process, or a function that gives the figures of the moment.
        observation: makes what the callbacks return, of a value and its attributes; by default ``opentelemetry.metrics.Observation``.

    Raises:
        ImportError: there is no `observation`, and OpenTelemetry's API is not installed.
    """
    read = _Recent(source if callable(source) else lambda: read_worker(source))
    make: Observation = importlib.import_module("opentelemetry.metrics").Observation if observation is None else observation

    def callback(name: str) -> Callable[[Any], list[Any]]:
        return lambda _options: [make(sample.value, sample.labels) for sample in read() if sample.name == name]

    for name, metric in METRICS.items():
        create = meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_gauge
        plain = name.removesuffix("_total").replace("aiorlinf_", "aiorlinf.", 1)
        create(plain, callbacks=[callback(name)], unit={"seconds": "s", "bytes": "By"}.get(metric.unit, "1"), description=metric.text)
