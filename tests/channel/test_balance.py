"""How evenly the policies spread work, on a simulated clock."""

from __future__ import annotations

import pytest

from aiorlinf.channel.policies import LoadBalancePolicy, MemoryAware, PerformanceAware, ShortestQueue, WeightedRoundRobin, import_policy
from aiorlinf.errors import UsageError
from tests.channel.desk import Desk
from tests.channel.simulation import Simulation, arrivals, spread, spread_weights

__all__: list[str] = []

SEED = 7


@pytest.mark.parametrize("load", [0.3, 0.9, 2.0])
def test_speeds_of_1_to_4_and_weights_of_1_to_16(load: float) -> None:
    speeds, weights = spread(8, 4), spread_weights(1500, SEED)
    items = arrivals(weights, load * sum(speeds), SEED)
    aware = Simulation(PerformanceAware(), speeds)
    aware.run(items)
    assert aware.unevenness() < 0.05
    in_turn = Simulation(WeightedRoundRobin(), speeds)
    in_turn.run(items)
    assert in_turn.unevenness() > 0.5  # for comparison: the slow ones work four times as long as the fast ones


def test_all_at_once() -> None:
    speeds, weights = spread(8, 4), spread_weights(1500, SEED)
    items = [(0.0, weight) for weight in weights]
    for policy in (PerformanceAware(), ShortestQueue()):
        simulation = Simulation(policy, speeds, maxsize=32)
        simulation.run(items)
        assert simulation.unevenness() < 0.05
        assert simulation.end < 1.05 * sum(weights) / sum(speeds)


def test_a_thousand_consumers() -> None:
    speeds, weights = spread(1000, 4), spread_weights(50_000, SEED)
    simulation = Simulation(PerformanceAware(), speeds)
    simulation.run(arrivals(weights, 0.9 * sum(speeds), SEED))
    assert simulation.unevenness() < 0.05


def test_speeds_that_change() -> None:
    speeds, weights = spread(8, 4), spread_weights(3000, SEED)
    middle = sum(weights) / sum(speeds) / 2 / 0.8

    def speed_of(index: int, now: float) -> float:
        return speeds[index] if now < middle else speeds[-1 - index]

    simulation = Simulation(PerformanceAware(), speeds, speed_of=speed_of)
    simulation.run(arrivals(weights, 0.8 * sum(speeds), SEED))
    assert simulation.unevenness() < 0.05


def test_round_robin_by_share() -> None:
    desk = Desk(policy=WeightedRoundRobin())
    for name, share in (("a", 1), ("b", 2), ("c", 1)):
        desk.consumer(name, share)
    chosen = [put.consumer.name for put in [desk.put(number) for number in range(8)] if put.consumer is not None]
    assert "".join(chosen) == "bacbbacb"


def test_memory() -> None:
    desk = Desk(policy=MemoryAware())
    for name, free in (("a", 100), ("b", 250), ("c", None)):
        desk.consumer(name).free_memory = free
    puts = [desk.put(number, nbytes=100) for number in range(4)]
    assert [put.consumer and put.consumer.name for put in puts] == ["b", "b", "a", "b"]


class Made(LoadBalancePolicy):
    pass


made = Made()


def test_where_policies_come_from() -> None:
    assert isinstance(import_policy("shortest_queue"), ShortestQueue)
    assert isinstance(import_policy(f"{__name__}:Made"), Made)
    assert import_policy(f"{__name__}:made").__class__.__name__ == "Made"
    for wrong, what in [
        ("fastest", "there is no policy 'fastest'"),
        ("no.such:Thing", "cannot be imported"),
        ("os:nothing", "cannot be imported"),
        ("os:getcwd", "is not a policy"),
    ]:
        with pytest.raises(UsageError, match=what):
            import_policy(wrong)
