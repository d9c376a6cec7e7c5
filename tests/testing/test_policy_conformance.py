"""The library's own policies pass the suite that is there for those of its users; and the suite sees what a policy does wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from aiorlinf import LoadBalancePolicy
from aiorlinf.channel.policies import POLICIES, MemoryAware, PerformanceAware, ShortestQueue, WeightedRoundRobin
from aiorlinf.channel.records import Consumer, ItemInfo
from aiorlinf.testing.conformance import PolicyConformance

__all__: list[str] = []


class TestWeightedRoundRobin(PolicyConformance):
    def make(self) -> LoadBalancePolicy:
        return WeightedRoundRobin()


class TestShortestQueue(PolicyConformance):
    def make(self) -> LoadBalancePolicy:
        return ShortestQueue()


class TestPerformanceAware(PolicyConformance):
    def make(self) -> LoadBalancePolicy:
        return PerformanceAware()


class TestMemoryAware(PolicyConformance):
    def make(self) -> LoadBalancePolicy:
        return MemoryAware()


def test_these_are_all() -> None:
    suites = [suite for suite in PolicyConformance.__subclasses__() if suite.__module__ == __name__]
    assert {type(suite().make()) for suite in suites} == {type(make()) for make in POLICIES.values()}


# ---- what is wrong is seen


class Bad(LoadBalancePolicy):
    """Alone fine; each of the others does one thing wrong."""

    def select_consumer(self, item: ItemInfo, consumers: Sequence[Consumer]) -> int:
        return 0


class OneTooFar(Bad):
    def select_consumer(self, item: ItemInfo, consumers: Sequence[Consumer]) -> int:
        return len(consumers)


class Meddler(Bad):
    def select_consumer(self, item: ItemInfo, consumers: Sequence[Consumer]) -> int:
        consumers[0].labels["chosen"] = "yes"
        return 0


class Undecided(Bad):
    def may_move(self, item: ItemInfo, holder: Consumer, taker: Consumer, waited: float) -> Any:
        return None


class Keeper(Bad):
    def __init__(self) -> None:
        self.known: dict[str, float] = {}

    def select_consumer(self, item: ItemInfo, consumers: Sequence[Consumer]) -> int:
        for consumer in consumers:
            self.known[consumer.name] = consumer.share
        return 0


class Unpicklable(Bad):
    def __init__(self) -> None:
        self.key = lambda consumer: consumer.pending_weight


@pytest.mark.parametrize(
    ("make", "test", "what"),
    [
        (OneTooFar, "test_it_takes_consumers_that_nothing_is_known_of", "3 of 3 consumers"),
        (Meddler, "test_it_takes_consumers_that_nothing_is_known_of", "a policy only looks"),
        (Undecided, "test_whether_an_item_may_move_is_yes_or_no", "None"),
        (Keeper, "test_it_forgets_consumers_that_are_gone", "its state has grown"),
    ],
)
def test_what_a_policy_does_wrong_is_seen(make: Callable[[], LoadBalancePolicy], test: str, what: str) -> None:
    with pytest.raises(AssertionError, match=what):
        getattr(PolicyConformance(), test)(make())


def test_one_that_cannot_be_pickled_is_seen() -> None:
    with pytest.raises((AttributeError, TypeError)):
        PolicyConformance().test_it_can_be_given_to_a_channel_worker(Unpicklable())


def test_one_that_gives_all_to_one_is_seen() -> None:
    with pytest.raises(AssertionError, match="they got"):
        asyncio.run(PolicyConformance().test_of_those_that_are_alike_each_gets_something(Bad()))


def test_a_suite_that_does_not_say_what_it_tests_says_so() -> None:
    with pytest.raises(NotImplementedError, match=r"PolicyConformance\.make\(\) says which policy is tested"):
        PolicyConformance().make()
