"""scripts/bench: small runs of the real thing, and the arithmetic behind its tables."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.benchmarks.channel import CHANNEL
from scripts.benchmarks.contender import CONTENDERS
from scripts.benchmarks.footprint import Footprint
from scripts.benchmarks.host import HOST
from scripts.benchmarks.p2p import P2P
from scripts.benchmarks.plan import FULL, MIB, QUICK, Aim, Case, Row, Suite
from scripts.benchmarks.results import Results
from scripts.benchmarks.summary import number, quantile, summarise
from scripts.benchmarks.table import render
from tests.hypothesis_profiles import TRIES

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 150
"""A run takes 10 to 40 s, several times that where other things run beside it."""

pytestmark = pytest.mark.timeout(LIMIT_S + 10)


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the benchmark with this interpreter, as a user would."""
    environment = {**os.environ, "AIORLINF_PYTHON": sys.executable}
    return subprocess.run(
        [str(ROOT / "scripts" / "bench"), *arguments],
        capture_output=True, text=True, timeout=LIMIT_S, env=environment, check=False, start_new_session=True,
    )  # fmt: skip


def table_rows(output: str) -> dict[str, dict[str, list[str]]]:
    """Case name to label to cells."""
    tables: dict[str, dict[str, list[str]]] = {}
    name = ""
    for line in output.splitlines():
        if line.startswith("## "):
            name = line.removeprefix("## ")
            tables[name] = {}
        elif line.startswith("| ") and not line.startswith(("| who", "| ---")):
            label, *cells = (cell.strip() for cell in line.strip("|").split(" | "))
            tables[name][label] = cells
    return tables


LONG = pytest.mark.skipif(TRIES <= 1, reason="takes a dozen seconds, and most are measured by p2p, too; set AIORLINF_TRIES to more than 1")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("suite", "contenders"),
    [
        pytest.param(P2P, ("bare", "ours-stream", "ours-gloo"), id="p2p-ours"),
        pytest.param(P2P, ("raw-gloo", "pipe", "zmq"), id="p2p-peers"),
        pytest.param(HOST, ("bare", "ours-auto"), id="host-limits"),
        pytest.param(HOST, ("ours-shm", "ours-stream"), id="host-ours"),
        pytest.param(HOST, ("raw-gloo", "pipe"), id="host-blocking-peers", marks=LONG),
        pytest.param(HOST, ("zmq", "torch-queue"), id="host-other-peers", marks=LONG),
        pytest.param(CHANNEL, ("bare", "ours-channel"), id="channel"),
    ],
)
def test_a_quick_run_measures_every_row_of_the_chosen_contenders(suite: Suite, contenders: tuple[str, ...], tmp_path: Path) -> None:
    written = tmp_path / "figures.json"
    ended = bench(suite.name, "--quick", "--peers", *contenders, "--json", str(written))
    assert ended.returncode == 0, ended.stderr
    tables = table_rows(ended.stdout)
    for case in suite.cases:
        for row in case.rows:
            figure = tables[case.name][row.label][0]
            if row.contender in contenders:
                assert figure.startswith("**"), f"{case.name}: {row.label}: {figure}"
            else:
                assert figure == "skipped: not chosen"
    figures = json.loads(written.read_text())
    assert not figures["failed"]
    assert not figures["broken"]
    assert {found["contender"] for found in figures["measurements"]} == set(contenders)


def test_without_a_suite_the_suites_are_listed() -> None:
    ended = bench()
    assert ended.returncode == 2
    for suite in (P2P, HOST):
        assert suite.name in ended.stdout
        assert suite.summary.split(":")[0] in ended.stdout


def test_a_picture_is_drawn_of_what_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = tmp_path / "figures.png"
    ended = bench("host", "--quick", "--only", "small_dict_rtt", "--only", "given", "--peers", "pipe", "--plot", str(drawn))
    assert ended.returncode == 0, ended.stderr
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_a_peer_that_is_not_installed_is_skipped_with_the_reason() -> None:
    # A name that no import finds, in a process of its own: as on a machine without Ray.
    code = "import sys; sys.modules['ray'] = None; from scripts.benchmarks.contender import missing_reason; print(missing_reason('ray', 0))"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert ended.stdout.startswith("not installed: ")
    assert "ray" in ended.stdout


def test_a_wrong_case_is_named_with_those_there_are() -> None:
    ended = bench("p2p", "--only", "nonsense")
    assert ended.returncode == 2
    assert "small_dict_rtt" in ended.stderr


def test_a_process_that_dies_fails_its_row_and_the_others_go_on(tmp_path: Path) -> None:
    # A module that shadows zmq and ends the process: what a crash in a peer's C code looks like from outside.
    (tmp_path / "zmq.py").write_text("import os\nos._exit(17)\n")
    environment = {**os.environ, "AIORLINF_PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(
        [str(ROOT / "scripts" / "bench"), "p2p", "--quick", "--only", "small_dict_rtt", "--peers", "zmq", "pipe"],
        capture_output=True, text=True, timeout=LIMIT_S, env=environment, check=False,
    )  # fmt: skip
    rows = table_rows(ended.stdout)["small_dict_rtt"]
    assert ended.returncode == 1
    assert "status 17" in ended.stderr
    assert rows["pyzmq asyncio"][0].startswith("FAILED")
    assert rows["multiprocessing.Pipe"][0].startswith("**")


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def descendants_of(pid: int) -> list[int]:
    children = children_of(pid)
    return children + [further for child in children for further in descendants_of(child)]


def alive(pid: int) -> bool:
    """Not ended, or ended and only waiting to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT_S / 2
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("contender", "processes", "how"),
    [
        pytest.param("pipe", 2, signal.SIGINT, id="ctrl-c"),
        pytest.param("pipe", 2, signal.SIGTERM, id="terminated"),
        pytest.param("pipe", 2, signal.SIGKILL, id="killed"),
        # One of the two starts a third, and multiprocessing's resource tracker.
        pytest.param("torch-queue", 4, signal.SIGKILL, id="killed-with-grandchildren"),
    ],
)
def test_no_process_outlives_the_benchmark(contender: str, processes: int, how: signal.Signals) -> None:
    # Enough rounds that it is surely still at it when the signal comes.
    command = [str(ROOT / "scripts" / "bench"), "host", "--only", "small_dict_rtt", "--peers", contender, "--rounds", "100000"]
    with tempfile.TemporaryDirectory() as temporary:
        environment = {**os.environ, "AIORLINF_PYTHON": sys.executable, "TMPDIR": temporary}
        quiet = subprocess.DEVNULL
        running = subprocess.Popen(command, stdout=quiet, stderr=quiet, env=environment, start_new_session=True)
        try:
            wait_until(lambda: len(descendants_of(running.pid)) == processes, "the processes of the contender never came")
            children = descendants_of(running.pid)
            time.sleep(1)  # any moment will do; by now they measure or nearly so
            running.send_signal(how)
            running.wait(LIMIT_S / 2)
            wait_until(lambda: not any(map(alive, children)), "a process was left behind")
            if how != signal.SIGKILL:
                assert list(Path(temporary).iterdir()) == []
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)
                running.wait()


def test_every_row_names_a_contender_and_compares_with_rows_of_its_case() -> None:
    for case in (*P2P.cases, *HOST.cases):
        labels = [row.label for row in case.rows]
        assert len(set(labels)) == len(labels)
        for row in case.rows:
            assert row.contender in CONTENDERS
            assert set(row.baselines) <= set(labels)


def test_a_case_may_ask_for_larger_tensors() -> None:
    large = next(case for case in HOST.cases if case.name == "tensor_256MiB")
    assert large.effort(FULL).tensor_bytes == 256 * MIB
    assert large.effort(FULL).steady_bytes == FULL.steady_bytes


def test_a_footprint_counts_what_grows_after_the_warm_up() -> None:
    gc.collect()  # what other tests left would be given back in the middle
    footprint = Footprint(8)
    kept = []
    for index in range(8):
        kept.append(bytearray(b"x" * (128 << 20)) if index in (0, 4) else bytearray())
        footprint.passed_one()
    found = footprint.metrics()
    # The memory of the first may come back for the second only after the warm-up has been counted; and what others give back meanwhile
    # is not counted, but is less than that.
    assert 80 <= found["growth"] <= 300
    assert found["faults"] > 100


def test_ratios_are_taken_within_rounds_and_aims_judged_by_their_median() -> None:
    base = Row("base", "bare", "", "time")
    ours = Row("ours", "ours-stream", "", "time", aims=(Aim("≤", 2.0, "base"), Aim("<", 5.0)))
    case = Case("toy", "in_flight", "A toy", "µs", "lower", (base, ours))
    results = Results()
    for index, (limit, own) in enumerate([(1.0, 1.5), (10.0, 30.0), (2.0, 3.8)]):
        results.add(case, "bare", "", index, {"time": limit})
        results.add(case, "ours-stream", "", index, {"time": own})
    row = table_rows(render([case], results, {"machine": "toy"}, FULL))["toy"]["ours"]
    assert row == ["**3.80** (1.50-30.0)", "**1.90** (1.50-3.00) of base", "≤ 2.00 of base: met; < 5.00: met"]


def test_a_row_without_figures_says_why_and_a_missing_baseline_gives_no_verdict() -> None:
    base = Row("base", "bare", "", "time")
    ours = Row("ours", "ours-stream", "", "time", aims=(Aim("≤", 2.0, "base"),))
    case = Case("toy", "in_flight", "A toy", "µs", "lower", (base, ours))
    results = Results()
    results.skipped["bare"] = "not installed: No module named 'bare'"
    results.add(case, "ours-stream", "", 0, {"time": 1.0})
    rows = table_rows(render([case], results, {}, QUICK))["toy"]
    assert rows["base"][0] == "skipped: not installed: No module named 'bare'"
    assert rows["ours"] == ["**1.00**", "-", "≤ 2.00 of base: not measured"]


def test_a_missed_aim_is_said_loudly() -> None:
    case = Case("toy", "in_flight", "A toy", "GB/s", "higher", (Row("ours", "ours-gloo", "", "rate", aims=(Aim("≥", 0.9),)),))
    results = Results()
    results.add(case, "ours-gloo", "", 0, {"rate": 0.5})
    assert table_rows(render([case], results, {}, QUICK))["toy"]["ours"][2] == "≥ 0.90: MISSED"


def test_summary_numbers() -> None:
    assert summarise([3.0, 1.0, 2.0])[:3] == (2.0, 1.0, 3.0)
    assert [number(value) for value in (0, 0.0123, 0.5, 5.678, 12.34, 123.4, 98765.4)] == [
        "0", "0.012", "0.50", "5.68", "12.3", "123", "98,765",
    ]  # fmt: skip
    assert quantile(list(range(1000)), 0.99) == 990
    assert quantile([7.0], 0.99) == 7.0


def test_membership_measures_jobs_of_several_sizes() -> None:
    done = bench("membership", "--workers", "20", "40")
    assert done.returncode == 0, done.stderr
    rows = [line.split("|") for line in done.stdout.splitlines() if line.startswith(("| 20 ", "| 40 "))]
    assert [len(row) for row in rows] == [8, 8]
    assert all(float(cell.split()[0].replace(",", "")) > 0 for row in rows for cell in row[2:6])
    assert "Cost with 40 workers to that with 20: join " in done.stdout


def test_pending_events_are_measured() -> None:
    done = bench("events", "--pending", "500", "--turns", "50")
    assert done.returncode == 0, done.stderr
    assert "| a turn of the loop, in time of its thread |" in done.stdout
    assert "0 more" in done.stdout


def test_deaths_are_timed() -> None:
    done = bench("deaths", "--kills", "3", "--freezes", "1", "--heartbeat", "1.5")
    assert done.returncode == 0, done.stderr
    rows = [line.split("|") for line in done.stdout.splitlines() if line.startswith("| SIG")]
    assert [(row[1].split(",")[0].strip(), int(row[2])) for row in rows] == [("SIGKILL", 3), ("SIGSTOP", 1)]
    assert all(float(row[3].replace(",", "")) > 0 for row in rows)


def test_what_a_trace_costs_is_measured() -> None:
    done = bench("trace", "--messages", "40", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    rows = [line.split("|") for line in done.stdout.splitlines() if line.startswith(("| one way ", "| round trips "))]
    assert [len(row) for row in rows] == [8, 8]
    assert all(float(cell.replace(",", "")) > 0 for row in rows for cell in row[2:6])
    assert "Not recorded, a message has 3 tests of an attribute: " in done.stdout
