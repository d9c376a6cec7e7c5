"""scripts/torture: short forms of the real thing, and what it makes of what it sees."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from scripts.tortures.__main__ import main
from scripts.tortures.channel import Bounds, ExactlyOnce, Leases
from scripts.tortures.exchanges import differs, random_object
from scripts.tortures.proc import Footprint
from scripts.tortures.report import render_rounds, render_steady, steady_complaints
from scripts.tortures.rounds import Outcome
from scripts.tortures.steady import Side, side

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 170


def torture(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it with this interpreter, as a user would."""
    return subprocess.run(
        [str(ROOT / "scripts" / "torture"), *arguments],
        capture_output=True, text=True, timeout=LIMIT_S, env={**os.environ, "AIORLINF_PYTHON": sys.executable}, check=False,
    )  # fmt: skip


def rows(output: str) -> dict[str, list[str]]:
    """First cell to the others."""
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in output.splitlines() if line.startswith("| ")]
    return {first: rest for first, *rest in cells}


@pytest.mark.timeout(LIMIT_S + 10)
def test_sudden_death_leaves_nothing() -> None:
    ended = torture("shm", "--rounds", "6", "--seed", "7")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = rows(ended.stdout)
    assert found["rounds"] == ["6 (seed 7)"]
    assert found["killed"] == ["a:0 6 times"]
    assert found["rounds that one survivor lived through"] == ["up to 6"]
    assert found["left over or wrong"] == ["nothing"]


@pytest.mark.timeout(LIMIT_S + 10)
def test_a_steady_stream_touches_no_fresh_memory() -> None:
    ended = torture("steady", "--messages", "150", "--settle", "30")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.endswith("\nFlat.\n")
    assert set(rows(ended.stdout)) >= {"sender", "receiver"}


@pytest.mark.timeout(LIMIT_S + 10)
def test_a_channel_loses_nothing_and_gives_nothing_twice() -> None:
    ended = torture("channel", "--items", "100", "--kills", "2", "--mib", "96", "--seed", "3")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = rows(ended.stdout)
    assert found["wrong"] == ["nothing"]
    assert found["exactly once, get"][0].startswith("100 items, ")
    assert found["at least once, lease"][0].startswith("100 items, 2 consumers killed, ")
    for backend in ("auto", "stream"):
        assert "96 MiB through a bound of 64 MiB" in found[f"bounded memory, {backend}"][0]


@pytest.mark.timeout(LIMIT_S + 10)
def test_all_to_all_is_as_the_model_says() -> None:
    ended = torture("all_to_all", "--cases", "24", "--seed", "5")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = rows(ended.stdout)
    assert found["cases"] == ["24 (seed 5)"]
    assert found["wrong"] == ["nothing"]
    assert sum(int(part.split()[-1].replace(",", "")) for part in found["objects compared"][0].split(", ")) == 24 * 64


@pytest.mark.parametrize("seed", range(20))
def test_what_differs_from_the_model_is_seen(seed: int) -> None:
    made = [random_object(random.Random(f"{seed} {count}")) for count in range(50)]
    again = [random_object(random.Random(f"{seed} {count}")) for count in range(50)]
    assert differs(again, made) is None
    for index in range(49):
        assert (differs(made[index], made[index + 1]) is None) == (differs(made[index + 1], made[index]) is None)
    assert differs([1, {"a": torch.ones(2)}], [1, {"a": torch.zeros(2)}]) == "it[1]['a']"
    assert differs([1, 2], [1]) == "the length of it"
    assert differs({"a": 1}, {"b": 1}) == "the keys of it"
    assert differs(torch.ones(2), torch.ones(2).double()) == "it"
    assert differs((), []) == "it: tuple instead of list"


def test_what_a_channel_does_wrong_is_seen() -> None:
    twice = ExactlyOnce(4, False, [[0, 2, 1], [2]], [1, 2], 0, 1.0)
    assert twice.wrong() == ["1 items are missing [3], 1 came more than once [2]", "consumer 0 saw 1 items after newer ones"]
    assert Leases(3, {0: 1, 2: 2}, 1, 1, 1.0).wrong() == ["1 items were lost: [1]"]
    assert Bounds("auto", 10 << 20, 1 << 20, 5 << 20, 20 << 20, 1).wrong() == ["the channel worker grew by 15.0 MiB; 11.0 MiB are allowed"]


@pytest.mark.parametrize("arguments", [[], ["shm", "--rounds", "0"], ["steady", "--mib", "x"], ["other"]])
def test_wrong_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: scripts/torture" in capsys.readouterr().err


def test_what_went_wrong_is_shown() -> None:
    outcome = Outcome(
        rounds=3,
        killed=Counter({"b:0": 1, "a:0": 2}),
        counts=Counter({"sent": 1234, "received": 5}),
        wrong=["round 1: b:0#1 (pid 5) has 2 memory files open"],
        settle_s=[0.010, 0.500, 0.020],
    )
    text = render_rounds(outcome, 9)
    found = rows(text)
    assert found["killed"] == ["a:0 2 times, b:0 1 times"]
    assert found["messages that survivors sent, received"] == ["1,234, 5"]
    assert found["until the survivor had everything back"] == ["20 ms, at worst 500 ms"]
    assert found["until the next life had exchanged messages"] == ["-"]
    assert found["left over or wrong"] == ["1"]
    assert text.endswith("\n\nround 1: b:0#1 (pid 5) has 2 memory files open\n")


def test_growth_faults_and_descriptors_are_each_a_complaint() -> None:
    mib = 1 << 20
    good = Side("sender", 100 * mib, 100 * mib, 101 * mib, 0.5, 0)
    assert steady_complaints([good]) == []
    bad = Side("receiver", 100 * mib, 100 * mib, 200 * mib, 4096.0, 3)
    assert steady_complaints([good, bad]) == [
        "the receiver's memory varies by 100.0 MiB",
        "the receiver has 4096.0 page faults per message",
        "the receiver has 3 more descriptors",
    ]
    text = render_steady([good, bad], 1000, 16 * mib, 8, 50)
    assert "1,000 messages of 16 MiB after 50 others; the receiver keeps the last 8." in text
    assert rows(text)["sender"] == ["100.0 MiB", "100.0 to 101.0 MiB", "0.50", "0"]
    assert "Flat." not in text


def test_faults_are_counted_from_when_the_stream_had_settled() -> None:
    looks = [Footprint(10, 0, 0, 100, 50, 5, 1000), Footprint(10, 0, 0, 90, 50, 5, 1200), Footprint(12, 0, 0, 100, 60, 5, 1300)]
    assert side("sender", looks, 100) == Side("sender", 150, 140, 160, 3.0, 2)
