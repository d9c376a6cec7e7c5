"""scripts/bench compression: small runs of the real thing, and the arithmetic behind its tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from scripts.benchmarks import shaped
from scripts.benchmarks.choice import Figures, checks, render
from scripts.benchmarks.compressed import CODECS
from scripts.benchmarks.compression import COMPRESSION, LINKS, label
from scripts.benchmarks.contender import CONTENDERS, missing_reason
from scripts.benchmarks.payloads import PAYLOADS, check_payload, make_payload, payload_bytes
from scripts.benchmarks.plan import MIB
from scripts.benchmarks.results import Results
from tests.test_bench import LIMIT_S, bench

CASES = {case.name: case for case in COMPRESSION.cases}


def results_of(times: dict[tuple[str, str], dict[str, list[float]]], wire: float = 1.0) -> Results:
    """By payload and link, the milliseconds of each codec in each round."""
    results = Results()
    for (payload, link), codecs in times.items():
        for codec, rounds in codecs.items():
            for index, time in enumerate(rounds):
                results.add(CASES[payload], link, codec, index, {"time": time, "wire": wire})
    return results


def figures_of(times: dict[tuple[str, str], dict[str, list[float]]], wire: float = 1.0) -> Figures:
    return Figures(COMPRESSION.cases, results_of(times, wire))


def test_the_suite_has_each_way_on_each_network() -> None:
    assert COMPRESSION.contenders == tuple(name for name in CONTENDERS if name in LINKS)
    for case in COMPRESSION.cases:
        assert [row.label for row in case.rows] == [label(link, codec) for link in LINKS for codec in CODECS]


def test_the_cheapest_of_the_quick_ones_is_to_be_chosen() -> None:
    figures = figures_of(
        {
            ("frames", "link-1g"): {"raw": [100.0], "lz4": [10.4], "zstd 1": [10.0], "zstd 3": [30.0], "auto": [9.0]},
            ("masks", "link-1g"): {"raw": [10.2], "lz4": [10.0]},
        }
    )
    assert (figures.choice("frames", "link-1g"), figures.fastest("frames", "link-1g")) == ("lz4", "zstd 1")
    assert figures.choice("masks", "link-1g") == "raw"
    assert figures.choice("random", "link-1g") is None
    assert figures.links() == ["link-1g"]


def test_ratios_are_taken_within_rounds() -> None:
    figures = figures_of({("frames", "link-1g"): {"raw": [100.0, 10.0, 60.0], "lz4": [50.0, 2.0, 6.0]}})
    assert figures.ratio("frames", "link-1g", "lz4") == 0.2


def test_the_aims() -> None:
    good = figures_of(
        {
            ("frames", "link-1g"): {"raw": [100.0], "lz4": [10.0], "zstd 1": [30.0], "auto": [10.5]},
            ("random", "link-1g"): {"raw": [100.0], "lz4": [101.0], "zstd 1": [99.0], "auto": [102.0]},
            ("token_ids", "link-1g"): {"raw": [100.0], "lz4": [50.0], "auto": [52.0]},
        },
        wire=0.3,
    )
    assert [(check.met, round(check.reached, 3)) for check in checks(good)] == [
        (True, 10.0),  # frames
        (True, 0.3),  # token ids on the wire
        (True, 1.02),  # random, the worst of all
        *[(True, 1.05), (True, 1.04), (True, 1.03)],  # auto: frames, token ids, random
    ]
    bad = figures_of(
        {
            ("frames", "link-1g"): {"raw": [100.0], "lz4": [30.0], "auto": [40.0]},
            ("float32", "link-100m"): {"raw": [100.0], "lz4": [110.0]},
            ("token_ids", "link-1g"): {"raw": [100.0], "lz4": [90.0]},
        },
        wire=0.5,
    )
    assert [check.met for check in checks(bad)] == [False, False, False, False]
    assert "times as fast as raw (aim: 5, with lz4): 3.33, MISSED" in str(next(checks(bad)))


def test_tables_of_what_was_measured_and_why_the_rest_was_not() -> None:
    results = results_of({("frames", "link-1g"): {"raw": [100.0, 110.0, 90.0], "lz4": [10.0, 11.0, 9.0]}}, wire=0.25)
    results.skipped["link-10g"] = "network namespaces are not permitted"
    results.broken["link-100m"] = "Traceback\nOSError: no"
    results.failed["frames", "link-1g", "auto"] = "Traceback\nConfigError: what"
    text = render(COMPRESSION.cases, results, {"machine": "toy"}, COMPRESSION.quick)
    assert "| Atari frames, uint8 | lz4, 10.0 |" in text
    assert "| Atari frames, uint8 | 100 | **10.0 (0.10)** | - | - | - | FAILED |" in text
    assert "| Atari frames, uint8 | 25.0% | 25.0% | - | - | - | - |" in text
    assert "- 10 Gbit/s: skipped, network namespaces are not permitted" in text
    assert "- 100 Mbit/s: FAILED, OSError: no" in text
    assert "- frames link-1g auto: FAILED, ConfigError: what" in text
    assert "None can be judged" in render(COMPRESSION.cases, Results(), {}, COMPRESSION.quick)


@pytest.mark.parametrize("name", PAYLOADS)
def test_payloads_are_the_same_each_time_and_checked(name: str) -> None:
    if name == "frames":
        pytest.importorskip("ale_py", reason="the examples' requirements are not installed")
    made, again = make_payload(name, MIB), make_payload(name, MIB)
    assert 0.9 * MIB <= payload_bytes(made) <= 1.1 * MIB
    check_payload(again, made)
    tensor = next(iter(again.values())).view(torch.uint8).view(-1)
    tensor[-1] ^= 1
    with pytest.raises(AssertionError, match="is not what was sent"):
        check_payload(again, made)
    with pytest.raises(AssertionError, match="another object"):
        check_payload([], made)


def test_where_links_cannot_be_shaped_the_reason_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ale_py", reason="the examples' requirements are not installed")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert missing_reason("link-1g", 0) == "there is no `unshare` command"


@pytest.mark.sampled(2)
@pytest.mark.timeout(LIMIT_S + 10)
@pytest.mark.parametrize(("link", "chosen", "plots"), [("link-1g", ["frames", "token_ids"], True), ("emulated-1g", ["frames"], False)])
def test_a_quick_run(link: str, chosen: list[str], plots: bool, tmp_path: Path) -> None:
    for package in ("ale_py", "matplotlib"):
        pytest.importorskip(package, reason="the examples' requirements are not installed")
    if link.startswith("link") and (problem := shaped.shaping_problem()) is not None:
        pytest.skip(problem)
    written, drawn = tmp_path / "figures.json", tmp_path / "figures.png"
    asked = [part for case in chosen for part in ("--only", case)]
    asked += ["--plot", str(drawn)] if plots else []
    ended = bench("compression", "--quick", *asked, "--peers", link, "--json", str(written))
    assert ended.returncode == 0, ended.stderr
    figures = json.loads(written.read_text())
    assert (figures["failed"], figures["broken"]) == ({}, {})
    assert {(found["case"], found["variant"]) for found in figures["measurements"]} == {
        (case, codec) for case in chosen for codec in CODECS
    }
    for found in figures["measurements"]:
        (metrics,) = found["rounds"]
        if found["variant"] == "raw":
            assert 0.99 <= metrics["wire"] <= 1.1, found
            # A mebibyte takes 8 ms at a gigabit per second; the first tenth of it may go in a burst.
            assert metrics["time"] >= 6.0, found
        elif found["variant"] != "auto":
            assert metrics["wire"] <= 0.4, found
    assert not plots or drawn.read_bytes().startswith(b"\x89PNG")
    assert f"## {LINKS[link]}" in ended.stdout
    assert "## Aims" in ended.stdout
