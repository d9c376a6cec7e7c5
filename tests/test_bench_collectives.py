"""``scripts/bench collectives`` runs, and prints a figure for each measurement. Of these only what crosses a link is tested."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.benchmarks.collectives import main
from scripts.benchmarks.racks import racks_problem

__all__: list[str] = []

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 150

pytestmark = pytest.mark.timeout(LIMIT_S + 10)


def bench(part: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.benchmarks", "collectives", "--quick", "--only", part],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_on_one_host() -> None:
    printed = bench("host")
    assert re.search(r"one transfer of 1 MiB on this host +[0-9.]+ ms", printed)
    assert re.findall(r"broadcast to (\d) +[0-9.]+ ms, [0-9.]+ times as long", printed) == ["1", "2", "4"]
    row = r"^(gather|all_to_all) of tensors of (1 KiB|1 MiB)(?: +[0-9.]+ ms){3} +[0-9.]+, new [0-9.]+$"
    exchanges = re.findall(row, printed, re.MULTILINE)
    assert exchanges == [("gather", "1 KiB"), ("all_to_all", "1 KiB"), ("gather", "1 MiB"), ("all_to_all", "1 MiB")]


def test_the_link_between_two_racks_carries_a_broadcast_once() -> None:
    problem = racks_problem()
    if problem is not None:
        pytest.skip(problem)
    printed = bench("racks")
    crossed = re.findall(r"^(one transfer|broadcast to 7).* ([0-9.]+) times its bytes on the link", printed, re.MULTILINE)
    assert [what for what, _ in crossed] == ["one transfer", "broadcast to 7"], printed
    assert all(1.0 <= float(times) < 1.2 for _, times in crossed), printed
    assert "WRONG" not in printed


def test_without_namespaces_the_part_with_two_racks_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "")
    assert main(["--quick", "--only", "racks"]) == 0
    assert "skipped: there is no `unshare` command" in capsys.readouterr().out


def test_the_others_of_a_member_that_is_killed_raise_and_go_on() -> None:
    printed = bench("deaths")
    rows = re.findall(r"^(\w+) of .* +[0-9.]+ ms +[0-9.]+ ms, worst of 1", printed, re.MULTILINE)
    assert rows == ["broadcast"] * 5 + ["gather"] * 2 + ["all_to_all"], printed
