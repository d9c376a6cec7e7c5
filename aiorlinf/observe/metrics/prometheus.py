"""For Prometheus, with its own client library (extra ``observe``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from aiorlinf.observe.metrics.reading import read_worker
from aiorlinf.observe.metrics.samples import METRICS, Sample

if TYPE_CHECKING:
    from aiorlinf.worker import Worker

__all__ = ["Collector", "serve", "worker_collector"]


class Collector:
    """What a registry of prometheus_client asks: ``REGISTRY.register(worker_collector(comm))``.

    Args:
        read: gives the figures of the moment, in whatever thread serves the scrape.
    """

    def __init__(self, read: Callable[[], Iterable[Sample]]) -> None:
        self._read = read

    def describe(self) -> Iterator[Any]:
        """All that there may be; asked when it is registered, and then nothing is read yet."""
        yield from self._families().values()

    def collect(self) -> Iterator[Any]:
        """The figures of the moment."""
        families = self._families()
        for sample in self._read():
            families[sample.name].add_metric([sample.labels[name] for name in METRICS[sample.name].labels], sample.value)
        yield from (family for family in families.values() if family.samples)

    def _families(self) -> dict[str, Any]:
        kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
        return {name: kinds[metric.kind](name, metric.text, labels=metric.labels) for name, metric in METRICS.items()}


def worker_collector(comm: Worker) -> Collector:
    """Of one worker of this process. Its loop need not have a turn for a scrape."""
    return Collector(lambda: read_worker(comm))


@contextmanager
def serve(collector: Collector, port: int = 0, host: str = "127.0.0.1") -> Iterator[int]:
    """Answer scrapes at ``http://host:port/metrics``, in a thread, until the block is left; the port.

    Args:
        port: 0: a free one.
        host: who asks needs no token, so it is loopback unless you say otherwise.

    Raises:
        OSError: the port cannot be had.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    server, thread = start_http_server(port, host, registry)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
