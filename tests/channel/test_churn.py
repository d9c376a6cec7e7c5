"""With any policy, and whoever comes and goes: no item is lost and none is handed out twice, but for leases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiorlinf.channel.policies import POLICIES, LoadBalancePolicy
from aiorlinf.channel.records import Consumer, Delivery, ItemInfo
from tests.channel.desk import Desk
from tests.hypothesis_profiles import examples

__all__: list[str] = []

NAMES = ("a", "b", "c")
EVENTS = st.one_of(
    st.tuples(st.just("put"), st.sampled_from([None, "k"]), st.sampled_from([0.5, 1.0, 4.0])),
    st.tuples(st.just("put"), st.sampled_from([None, "k"]), st.sampled_from([0.5, 1.0, 4.0])),
    st.tuples(st.just("get"), st.sampled_from(NAMES), st.sampled_from([None, "k"]), st.sampled_from([None, 3.0]), st.booleans()),
    st.tuples(st.sampled_from(["commit", "retract", "cancel", "taken", "returned", "expire"]), st.integers(0, 7)),
    st.tuples(st.sampled_from(["leave", "join"]), st.sampled_from(NAMES)),
    st.tuples(st.just("end")),
)


class Moody(LoadBalancePolicy):
    """Fails often."""

    def __init__(self) -> None:
        self.calls = 0

    def select_consumer(self, item: ItemInfo, consumers: Sequence[Consumer]) -> int:
        self.calls += 1
        if self.calls % 3 == 0:
            raise RuntimeError("not now")
        return self.calls % (len(consumers) + 1)

    def may_move(self, item: ItemInfo, holder: Consumer, taker: Consumer, waited: float) -> bool:
        return self.calls % 2 == 0


class Run:
    def __init__(self, policy: LoadBalancePolicy | None) -> None:
        self.desk = Desk(slow=True, policy=policy, maxsize=6)
        self.number = 0
        self.taken: list[Any] = []
        self.lost: list[Any] = []  # handed out without a lease to a consumer that went
        self.waiting: list[Any] = []

    def open(self) -> list[Delivery]:
        return [delivery for delivery in self.desk.deliveries if delivery.open]

    def step(self, event: Any) -> None:
        desk, queue = self.desk, self.desk.queue
        desk.now += 1.0
        match event:
            case ("end",) if "p" in queue.roster.open and self.number > 5:
                for put in [*desk.admitted, *queue.waiting_puts()]:
                    queue.retract(put, desk.now)
                desk.admitted.clear()
                queue.leave_producer(desk.producers["p"], desk.now)
            case ("put", key, weight) if not queue.roster.closed:
                self.number += 1
                desk.put(self.number, key=key, weight=weight)
            case ("get", name, key, target, lease):
                desk.get(name, key, target=target, lease=lease, lease_seconds=100.0 if lease else None)
            case ("join", name):
                desk.consumer(name)
            case ("leave", name) if name in desk.consumers:
                consumer = desk.consumers.pop(name)
                for delivery in consumer.open:
                    if not delivery.get.lease:
                        self.lost += [item.payload for item in delivery.items]
                queue.leave_consumer(consumer, desk.now)
            case ("commit", which) if desk.admitted:
                desk.commit(desk.admitted[which % len(desk.admitted)])
            case ("retract", which) if desk.admitted:
                queue.retract(desk.admitted.pop(which % len(desk.admitted)), desk.now)
            case ("cancel", which):
                gets = [get for _, _, lane in queue.dispatch.lanes() for get in lane.line()]
                if gets:
                    queue.cancel(gets[which % len(gets)], desk.now)
            case ("taken", which) if opened := self.open():
                delivery = opened[which % len(opened)]
                self.taken += [item.payload for item in delivery.items]
                assert queue.taken(delivery, desk.now)
            case ("returned", which) if opened := self.open():
                queue.returned(opened[which % len(opened)], desk.now, redelivery=opened[which % len(opened)].get.lease)
            case ("expire", _):
                desk.now += 60.0
                queue.tick(desk.now)
        desk.work()

    def check(self) -> None:
        desk, queue = self.desk, self.desk.queue
        here = [item.payload for item in queue.items(None, all_keys=True)]
        out = [item.payload for delivery in self.open() for item in delivery.items]
        assert Counter([*here, *out, *self.taken, *self.lost]) == Counter(desk.committed)
        assert queue.length == len(here)
        assert queue.nbytes == len(here) + len(out) + len(desk.admitted)
        if queue.roster.ended and not queue.length and not queue.admitted and not queue.open_leases():
            assert not any(lane.line() for _, _, lane in queue.dispatch.lanes())  # everybody has heard of it
        for _, _, lane in queue.dispatch.lanes():
            order = [item.seq for item in lane.items]
            assert order == sorted(order)
            assert not lane.items or lane.first() is None or lane.first().target is not None  # type: ignore[union-attr]
        for consumer in queue.dispatch.consumers:
            unfinished = [item for delivery in consumer._unfinished for item in delivery.items]
            waiting = [item for of, _, lane in queue.dispatch.lanes() if of is consumer for item in lane.items]
            admitted = [put for put in desk.admitted if put.consumer is consumer]
            assert consumer.pending_items == len(unfinished) + len(waiting) + len(admitted)
            weight = sum(item.weight for item in [*unfinished, *waiting]) + sum(put.weight for put in admitted)
            assert abs(consumer.pending_weight - weight) < 1e-9
            assert consumer.asking == sum(
                len([g for g in lane.line() if g.consumer is consumer]) for _, lane in queue.dispatch.lanes_of(consumer)
            )


MAKERS: dict[str, Callable[[], LoadBalancePolicy] | None] = {**POLICIES, "moody": Moody, "none": None}


@pytest.mark.parametrize("policy", MAKERS)
@given(events=st.lists(EVENTS, min_size=15, max_size=70))
@settings(max_examples=examples(150))
def test_nothing_is_lost_and_nothing_comes_twice(policy: str, events: list[Any]) -> None:
    make = MAKERS[policy]
    run = Run(None if make is None else make())
    for event in events:
        run.step(event)
        run.check()
    # And everything can still be got.
    for put in list(run.desk.admitted):
        run.desk.commit(put)
    for consumer in list(run.desk.queue.dispatch.consumers):
        run.desk.queue.leave_consumer(consumer, run.desk.now)
    run.desk.consumers.clear()
    rest = len(run.desk.queue.items(None, all_keys=True))
    run.desk.consumer("last")
    got = [run.desk.take("last", key) for key in (None, "k") for _ in run.desk.queue.items(key)]
    assert len(got) == rest
    assert run.desk.queue.nbytes == sum(put.nbytes for put in run.desk.admitted)
