"""`aiorlinf bench`: two workers that it starts, two that somebody else has started, and wrong use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from aiorlinf import init
from aiorlinf.cli import main
from tests.launch.programs import child_env, cli

__all__: list[str] = []


@pytest.mark.timeout(120)
def test_two_workers_of_this_machine(tmp_path: Path) -> None:
    done = cli("bench", "--seconds", "0.05", "--sizes", "1KiB,1MiB", "--backend", "stream", "--json", cwd=tmp_path, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert (told["between"], told["backend"]) == (["bench:0", "bench:1"], "stream")
    assert 0 < told["round_trip_us_median"] <= told["round_trip_us_p99"]
    assert told["messages_per_s"] > 0
    assert [each["size_bytes"] for each in told["tensors"]] == [1 << 10, 1 << 20]
    assert all(each["gb_per_s"] == pytest.approx(each["size_bytes"] / each["seconds"] / 1e9) for each in told["tensors"])


@pytest.mark.timeout(120)
def test_two_that_were_started_otherwise(tmp_path: Path) -> None:
    with init("keeper:0", loop="thread") as comm:
        command = [sys.executable, "-m", "aiorlinf", "bench", "--seconds", "0.02", "--sizes", "100"]
        both = [
            subprocess.Popen(
                command, env=child_env(**comm.env(address)), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for address in ("bench:0", "bench:1")
        ]
        (first, problems), (second, others) = (each.communicate(timeout=100) for each in both)
    assert (problems, others, second) == ("", "", "")
    lines = first.splitlines()
    assert lines[0].startswith("bench:0 and bench:1: over ")
    assert [line.partition("  ")[0] for line in lines[1:]] == ["round trip of a small dict", "small dicts one way", "tensor of 100 bytes"]


@pytest.mark.parametrize("wrong", [["--seconds", "0"], ["--sizes", "much"], ["--sizes", "1KiB,"], ["--config", "nowhere.yaml"]])
def test_wrong_use(wrong: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIORLINF_ADDRESS", raising=False)
    assert main(["bench", *wrong]) == 2
    assert capsys.readouterr().err.count("\n") == 1
