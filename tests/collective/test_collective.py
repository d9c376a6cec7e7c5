"""Groups are made once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import aiorlinf.collective.collective as module
from aiorlinf.address import WorkerAddress
from aiorlinf.collective.collective import Collective
from aiorlinf.errors import UsageError

__all__: list[str] = []


class NoExchange:
    """Enough to make groups of."""

    local = WorkerAddress("a:0")


@pytest.fixture
def collective() -> Collective:
    exchange: Any = NoExchange()
    return Collective(exchange)


def test_the_same_members_and_name_give_the_same_group(collective: Collective) -> None:
    group = collective.create_collective_group(["a:0", "b:0"])
    assert collective.create_collective_group(["a:0", "b:0"]) is group
    assert collective.create_collective_group(iter(["b:0", "a:0"])) is group, "the order is that of the first call"
    assert group.members == ("a:0", "b:0")
    named = collective.create_collective_group(["a:0", "b:0"], group_name="x")
    assert named is not group
    assert collective.create_collective_group(["b:0", "a:0"], "x") is named
    assert collective.create_collective_group(["a:0", "b:0", "c:0"]) not in (group, named)


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ("a:0", "a list of addresses, not one text"),
        (["a:0"], "two or more members"),
        ([], "two or more members"),
        (["a:0", "a:0"], "named twice"),
        (["b:0", "c:0"], "a:0 is not among the members b:0, c:0"),
        (["a:0", "nobody"], "'nobody' is not a worker address"),
        (["a:0", "b:-1"], "not a worker address"),
        (["a:0", 7], "not a worker address"),
    ],
)
def test_what_is_no_group(collective: Collective, members: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        collective.create_collective_group(members)


@pytest.mark.parametrize("name", [5, b"x", "\ud800", ("a",)])
def test_what_is_no_name_of_a_group(collective: Collective, name: Any) -> None:
    with pytest.raises(UsageError, match="is no text"):
        collective.create_collective_group(["a:0", "b:0"], name)


def test_names_that_collide_are_found(collective: Collective, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "context_of", lambda members, name: 7)
    first = collective.create_collective_group(["a:0", "b:0"], "x")
    with pytest.raises(UsageError, match="the name 'y' collides"):
        collective.create_collective_group(["a:0", "b:0"], "y")
    assert collective.create_collective_group(["a:0", "b:0"], "x") is first


def test_any_thread_gets_the_same_group(collective: Collective) -> None:
    members = ["a:0", *[f"b:{rank}" for rank in range(50)]]
    with ThreadPoolExecutor(8) as threads:
        groups = list(threads.map(lambda _: collective.create_collective_group(members), range(64)))
    assert len({id(group) for group in groups}) == 1
