"""The queue does what the model says, whatever happens in whatever order."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from aiorlinf.channel.records import Get, Put, PutState
from aiorlinf.errors import ChannelEmpty, ChannelFull
from tests.channel.desk import Desk
from tests.channel.model import MGet, MItem, Model
from tests.hypothesis_profiles import examples

__all__: list[str] = []

KEYS = st.sampled_from([None, "a"])
WEIGHTS = st.sampled_from([0.0, 1.0, 2.0, 5.0])
EVENTS = st.one_of(
    st.tuples(st.just("put"), KEYS, WEIGHTS, st.integers(0, 6), st.booleans()),
    st.tuples(st.just("put"), KEYS, WEIGHTS, st.integers(0, 6), st.booleans()),
    st.tuples(st.just("get"), KEYS, st.sampled_from([None, None, 1.0, 3.0, 6.0]), st.booleans(), st.booleans()),
    st.tuples(st.sampled_from(["commit", "retract", "cancel", "taken", "returned", "late"]), st.integers(0, 5)),
)


class Pair:
    """The queue and the model, side by side."""

    def __init__(self, maxsize: int, max_bytes: int | None) -> None:
        self.desk = Desk(slow=True, maxsize=maxsize, max_bytes=max_bytes)
        self.model = Model(maxsize, max_bytes)
        self.numbers = itertools.count(1)
        self.puts: dict[int, Put] = {}
        self.gets: dict[int, Get] = {}

    def put(self, key: Any, weight: float, nbytes: int, nowait: bool) -> None:
        number = next(self.numbers)
        refused = nowait and (bool(self.model.puts) or not self.model.room(nbytes))
        put = self.puts[number] = self.desk.put(number, key=key, weight=weight, nbytes=nbytes, nowait=nowait)
        assert isinstance(self.desk.errors.get(put), ChannelFull) == refused
        if refused:
            self.model.pressing = True
            self.model.settle()
            self.model.pressing = False
        else:
            self.model.puts.append(MItem(0, key, weight, nbytes, number))

    def get(self, key: Any, target: float | None, nowait: bool, lease: bool) -> None:
        number = next(self.numbers)
        get = self.gets[number] = self.desk.get(key=key, target=target, nowait=nowait, lease=lease)
        wanted = MGet(number, key, target, lease)
        self.model.gets.append(wanted)
        self.model.settle()
        if nowait and wanted in self.model.gets:
            self.model.gets.remove(wanted)
            assert isinstance(self.desk.errors[get], ChannelEmpty)
        else:
            assert get not in self.desk.errors

    def other(self, event: str, which: int) -> None:
        model, queue, now = self.model, self.desk.queue, self.desk.now
        if event in ("commit", "retract"):
            pending = [*model.uncommitted, *(model.puts if event == "retract" else [])]
            if pending:
                item = pending[which % len(pending)]
                put = self.puts[item.number]
                if event == "commit":
                    model.uncommitted.remove(item)
                    model.items.append(item)
                    self.desk.commit(put)
                else:
                    (model.uncommitted if item in model.uncommitted else model.puts).remove(item)
                    if put in self.desk.admitted:
                        self.desk.admitted.remove(put)
                    queue.retract(put, now)
        elif event == "cancel" and model.gets:
            get = model.gets.pop(which % len(model.gets))
            queue.cancel(self.gets[get.number], now)
        elif event in ("taken", "returned") and model.held:
            number = list(model.held)[which % len(model.held)]
            items = model.held.pop(number)
            delivery = self.desk.delivery(self.gets[number])
            if event == "taken":
                model.gone[number] = items
                assert queue.taken(delivery, now)
                assert not queue.taken(delivery, now)
            else:
                model.items += items
                queue.returned(delivery, now, redelivery=delivery.get.lease)
        elif event == "late" and model.gone:  # somebody was cancelled after all
            number = list(model.gone)[which % len(model.gone)]
            model.items += model.gone.pop(number)
            queue.returned(self.desk.delivery(self.gets[number]), now)

    def compare(self) -> None:
        self.desk.work()
        self.model.settle()
        desk, model, queue = self.desk, self.model, self.desk.queue
        assert [put.payload for put in queue.waiting_puts()] == [item.number for item in model.puts]
        assert [put.payload for put in desk.admitted] == [item.number for item in model.uncommitted]
        assert [put.seq for put in desk.admitted] == [item.seq for item in model.uncommitted]
        for key in (None, "a"):
            there = sorted((item for item in model.items if item.key == key), key=lambda item: item.seq)
            assert [item.payload for item in queue.items(key)] == [item.number for item in there]
            lane = queue.dispatch.lane(None, key)
            assert lane.line() == [self.gets[get.number] for get in model.gets if get.key == key]
            assert abs(lane.weight - sum(item.weight for item in there)) < 1e-9
            assert lane.nbytes == sum(item.nbytes for item in there)
        assert {number: desk.got[get] for number, get in self.gets.items() if get in desk.got} == model.outcome
        held = sum(item.nbytes for items in model.held.values() for item in items)
        assert queue.nbytes == held + sum(item.nbytes for item in [*model.items, *model.uncommitted])
        assert queue.length == len(model.items)
        assert queue.admitted == len(model.uncommitted) == sum(put.state == PutState.ADMITTED for put in self.puts.values())
        assert queue.open_leases() == sum(self.gets[number].lease for number in model.held)
        assert desk.consumer().asking == len(model.gets)


@given(st.sampled_from([0, 1, 3]), st.sampled_from([None, 6, 12]), st.lists(EVENTS, max_size=60))
@settings(max_examples=examples(300))
def test_like_the_model(maxsize: int, max_bytes: int | None, events: list[Any]) -> None:
    pair = Pair(maxsize, max_bytes)
    pair.desk.consumer()
    for event in events:
        pair.desk.now += 1.0
        if event[0] == "put":
            pair.put(*event[1:])
        elif event[0] == "get":
            pair.get(*event[1:])
        else:
            pair.other(*event)
        pair.compare()
