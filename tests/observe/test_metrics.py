"""Figures for Prometheus and OpenTelemetry: of a worker, of a job, and the dashboard that shows them."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from aiorlinf import Worker, init
from aiorlinf.cli import main
from aiorlinf.observe.job import ask_job
from aiorlinf.observe.metrics.opentelemetry import instrument
from aiorlinf.observe.metrics.reading import read_worker
from aiorlinf.observe.metrics.samples import METRICS, Sample, of_job
from tests.launch.programs import child_env
from tests.observe.test_job import tool

__all__: list[str] = []

DASHBOARD = Path(__file__).parents[2] / "config" / "grafana-dashboard.json"


def check(samples: Iterable[Sample]) -> dict[tuple[str, ...], float]:
    """Each is described, and there once; by name and labels, in the order of their description."""
    found: dict[tuple[str, ...], float] = {}
    for sample in samples:
        metric = METRICS[sample.name]
        assert set(sample.labels) == set(metric.labels), sample
        key = (sample.name, *(sample.labels[name] for name in metric.labels))
        assert key not in found, sample
        found[key] = sample.value
    return found


@pytest.mark.asyncio
async def test_the_figures_of_a_job() -> None:
    async with init("channel.c:0") as held, init("a:0") as a, init("b:0") as b, tool(a) as client:
        held.hold_channels()
        await a.send(b"x" * 100, "b:0")
        await b.recv("a:0")
        putting = await a.create_channel("c", policy="shortest_queue")
        getting = await b.connect_channel("c", consumer=True)
        await putting.put("item")
        assert await getting.get() == "item"
        waiting = b.recv("a:0")
        found = check(of_job(await ask_job(client)))
        assert found["aiorlinf_link_messages_total", "a:0", "b:0", "sent", "shm"] >= 1
        assert found["aiorlinf_link_bytes_total", "b:0", "a:0", "received", "shm"] >= 100
        assert found["aiorlinf_pending_operations", "b:0", "recv"] == 1
        assert found["aiorlinf_channel_puts_total", "c", "channel.c:0"] == 1
        assert found["aiorlinf_channel_consumer_items_total", "c", "channel.c:0", "b:0"] == 1
        assert [value for (name, *_), value in found.items() if name == "aiorlinf_worker_answers"] == [1, 1, 1]
        waiting.cancel()


def test_the_figures_of_a_worker_before_in_and_after_its_life() -> None:
    worker: Worker | None = None
    with init("a:0", loop="thread") as comm:
        worker = comm
        comm.send(1, "a:0").wait()
        found = check(read_worker(comm))
        assert found["aiorlinf_link_messages_total", "a:0", "a:0", "sent", "stream"] == 1
        comm.home.call_soon(time.sleep, 0.3)  # a scrape does not wait for the loop
        assert check(read_worker(comm))
    assert read_worker(worker) == []


@pytest.mark.asyncio
async def test_what_links_carried_that_have_ended_is_counted_on() -> None:
    async with init("a:0") as a:
        for life in (1, 2):
            async with init("b:0", manager=a.manager_address, token=a.token) as b:
                await b.send(b"x" * 100, "a:0")
                await a.recv("b:0")
            end = time.monotonic() + 20
            while a.stats().links:  # b:0 has said goodbye, which is on its way
                assert time.monotonic() < end
                await asyncio.sleep(0.01)
            found = check(read_worker(a))
            assert found["aiorlinf_ended_links_total", "a:0", "b:0"] == life
            assert found["aiorlinf_ended_link_messages_total", "a:0", "b:0", "received"] == life
            assert found["aiorlinf_ended_link_bytes_total", "a:0", "b:0", "received"] >= 100 * life


def test_prometheus_scrapes_a_worker() -> None:
    pytest.importorskip("prometheus_client")
    from aiorlinf.observe.metrics.prometheus import serve, worker_collector

    with init("a:0", loop="thread") as comm, serve(worker_collector(comm)) as port:
        comm.send(1, "a:0").wait()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    assert 'aiorlinf_link_messages_total{backend="stream",direction="sent",peer="a:0",worker="a:0"} 1.0' in text
    assert "# TYPE aiorlinf_link_messages_total counter" in text
    assert "# TYPE aiorlinf_oldest_pending_seconds gauge" in text


def test_a_job_is_scraped_over_its_manager(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("prometheus_client")
    with init("a:0", loop="thread") as comm:
        env = child_env(AIORLINF_MANAGER=comm.manager_address, AIORLINF_TOKEN=comm.token.decode())
        command = [sys.executable, "-m", "aiorlinf", "metrics", "--port", "0"]
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as serving:
            assert serving.stdout is not None
            address = serving.stdout.readline().strip()
            with urllib.request.urlopen(address, timeout=10) as answer:
                text = answer.read().decode()
            serving.send_signal(signal.SIGTERM)
            assert serving.wait(20) == 0
    assert re.search(r'aiorlinf_worker_answers\{host=".*",worker="a:0"\} 1\.0', text)
    assert main(["metrics", "--port", "70000"]) == 2
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["metrics"]) == 2
    assert "aiorlinf[observe]" in capsys.readouterr().err


class Meter:
    """As OpenTelemetry's, as far as it is used."""

    def __init__(self) -> None:
        self.made: dict[str, tuple[str, Any, str]] = {}

    def create_observable_counter(self, name: str, callbacks: Any = None, unit: str = "", description: str = "") -> None:
        self.made[name] = ("counter", callbacks[0], unit)

    def create_observable_gauge(self, name: str, callbacks: Any = None, unit: str = "", description: str = "") -> None:
        self.made[name] = ("gauge", callbacks[0], unit)


def observed(value: float, attributes: Mapping[str, str]) -> tuple[float, dict[str, str]]:
    return value, dict(attributes)


def test_opentelemetry_gets_instruments_and_observations() -> None:
    meter = Meter()
    with init("a:0", loop="thread") as comm:
        comm.send(1, "a:0").wait()
        instrument(meter, comm, observed)
        assert len(meter.made) == len(METRICS)
        kind, callback, unit = meter.made["aiorlinf.link_messages"]
        assert (kind, unit) == ("counter", "1")
        assert (1, {"worker": "a:0", "peer": "a:0", "direction": "sent", "backend": "stream"}) in callback(None)
        assert meter.made["aiorlinf.oldest_pending_seconds"][::2] == ("gauge", "s")


def test_opentelemetry_asks_its_source_once_for_all_instruments() -> None:
    meter, asked = Meter(), []

    def source() -> list[Sample]:
        asked.append(1)
        return [Sample("aiorlinf_worker_life", 3, {"worker": "a:0"})]

    instrument(meter, source, observed)
    assert [callback(None) for _, callback, _ in meter.made.values()].count([(3, {"worker": "a:0"})]) == 1
    assert len(asked) == 1


def test_opentelemetry_itself_takes_them_all() -> None:
    """Not a stand-in for it: its SDK reads the instruments, and has each figure as what it is."""
    metrics = pytest.importorskip("opentelemetry.sdk.metrics", reason="needs opentelemetry-sdk, of the extra 'test'")
    export = importlib.import_module("opentelemetry.sdk.metrics.export")
    reader = export.InMemoryMetricReader()
    provider = metrics.MeterProvider(metric_readers=[reader])
    every = [Sample(name, 3, {label: f"a {label}" for label in metric.labels}) for name, metric in METRICS.items()]
    try:
        with init("a:0", loop="thread") as comm:
            comm.send(1, "a:0").wait()
            instrument(provider.get_meter("all"), lambda: every)
            instrument(provider.get_meter("worker"), comm)
            (resource,) = reader.get_metrics_data().resource_metrics
    finally:
        provider.shutdown()
    read = {scope.scope.name: {metric.name: metric for metric in scope.metrics} for scope in resource.scope_metrics}
    for name, metric in METRICS.items():
        got = read["all"][name.removesuffix("_total").replace("aiorlinf_", "aiorlinf.", 1)]
        assert [(point.value, dict(point.attributes)) for point in got.data.data_points] == [
            (3, {key: f"a {key}" for key in metric.labels})
        ]
        assert isinstance(got.data, export.Sum if metric.kind == "counter" else export.Gauge)
        assert metric.kind == "gauge" or got.data.is_monotonic
    sent = {dict(point.attributes)["direction"]: point.value for point in read["worker"]["aiorlinf.link_messages"].data.data_points}
    assert sent == {"sent": 1, "received": 1}


def test_prometheus_is_given_each_figure_under_its_name() -> None:
    """The client library has ideas of its own about the names of counters."""
    client = pytest.importorskip("prometheus_client")
    from aiorlinf.observe.metrics.prometheus import Collector

    every = [Sample(name, 3, {label: f"a {label}" for label in metric.labels}) for name, metric in METRICS.items()]
    registry = client.CollectorRegistry(auto_describe=False)
    registry.register(Collector(lambda: every))
    lines = client.generate_latest(registry).decode().splitlines()
    assert {re.split(r"[ {]", line)[0] for line in lines if not line.startswith("#")} == set(METRICS)


def test_the_dashboard_shows_every_figure_and_no_other() -> None:
    board = json.loads(DASHBOARD.read_text())
    shown = {
        name for panel in board["panels"] for target in panel.get("targets", ()) for name in re.findall(r"aiorlinf_\w+", target["expr"])
    }
    assert shown == set(METRICS)
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(places)
    for variable in board["templating"]["list"]:
        for name, label in re.findall(r"label_values\((\w+), (\w+)\)", variable["query"]):
            assert label in METRICS[name].labels


def test_the_dashboard_asks_for_what_there_is() -> None:
    """Only what grows has a rate; labels that are asked for are the figure's, and what a line is called by is left in the answer."""
    board = json.loads(DASHBOARD.read_text())
    queries = [(target["expr"], target["legendFormat"]) for panel in board["panels"] for target in panel.get("targets", ())]
    assert queries
    for query, legend in queries:
        (name,) = re.findall(r"aiorlinf_\w+", query)
        metric = METRICS[name]
        grows = re.search(r"\b(?:rate|increase)\(", query) is not None
        assert grows == ("[$__rate_interval]" in query), query
        assert not grows or metric.kind == "counter", query
        kept = set(metric.labels)
        for labels in re.findall(r"\bby \(([^)]*)\)", query):
            kept &= set(labels.split(", "))
            assert set(labels.split(", ")) <= set(metric.labels), query
        if re.match(r"(?:sum|count)\(", query):
            kept = set()
        assert set(re.findall(r"(\w+)=~?\"", query)) <= set(metric.labels), query
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= kept, query
