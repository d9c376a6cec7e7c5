from __future__ import annotations

from typing import Any

import pytest

from aiorlinf.errors import UsageError
from aiorlinf.launch.spec import MAX_WORKERS, check_env, format_workers, parse_env, parse_workers, worker_addresses


def test_groups_keep_their_order() -> None:
    assert parse_workers("rollout=2,trainer=1") == {"rollout": 2, "trainer": 1}
    assert list(parse_workers("b=1,a=1")) == ["b", "a"]
    assert parse_workers(" rollout = 2 , trainer=1 ") == {"rollout": 2, "trainer": 1}


def test_addresses() -> None:
    assert worker_addresses("rollout=2,trainer=1") == ["rollout:0", "rollout:1", "trainer:0"]
    assert worker_addresses({"a": 1, "b": 2}) == ["a:0", "b:0", "b:1"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty part"),
        ("rollout=2,", "empty part"),
        ("rollout", "'rollout' is not a pair"),
        ("rollout=", "is not a pair"),
        ("=2", "is not a pair"),
        ("rollout=two", "'two' is not a count"),
        ("rollout=-1", "'-1' is not a count"),
        ("rollout=1.5", "'1.5' is not a count"),
        ("rollout=\u0663", "is not a count"),
        ("rollout=0", "has count 0"),
        ("rollout=1,rollout=2", "comes twice"),
        ("2fast=1", "'2fast' is not a group name"),
        ("a b=1", "'a b' is not a group name"),
        ("rollout:0=1", "'rollout:0' is not a group name"),
        (f"rollout={MAX_WORKERS},trainer=1", "workers asked for"),
        ("rollout=9999999999", "is not a count"),
    ],
)
def test_bad_text(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_workers(text)


def test_errors_have_hints() -> None:
    with pytest.raises(UsageError, match=r"hint: write group=count pairs, such as 'rollout=2,trainer=1'"):
        parse_workers("rollout:2")


@pytest.mark.parametrize("workers", [{}, {"a": 0}, {"a": True}, {"a": "2"}, {"a": 1.0}, {3: 1}, {"a:0": 1}, 3, None, ["a:0"]])
def test_bad_mapping(workers: Any) -> None:
    with pytest.raises(UsageError):
        worker_addresses(workers)


@pytest.mark.parametrize("workers", ["a=1", "rollout=2,trainer=1", "b=1,a=3"])
def test_workers_as_text_again(workers: str) -> None:
    assert format_workers(worker_addresses(workers)) == workers


def test_env() -> None:
    assert parse_env(["A=1", "B=x=y", "C=", "A=2"]) == {"A": "2", "B": "x=y", "C": ""}
    for bad in ("A", "=1", "AIORLINF_TOKEN=x", "AIORLINF_WORKERS=a=1", "A\0=1", "A=\0"):
        with pytest.raises(UsageError):
            parse_env([bad])
    with pytest.raises(UsageError, match="are text"):
        check_env({"A": 1})
