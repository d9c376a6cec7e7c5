"""The queue: ends, batches, leases, those who go, policies that fail, shared bounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import pytest

from aiorlinf.channel.budget import ByteBudget
from aiorlinf.channel.policies import LoadBalancePolicy, PerformanceAware, ShortestQueue
from aiorlinf.channel.records import Consumer, ItemInfo, PutState, Told
from aiorlinf.errors import ChannelClosed, ChannelEmpty, ChannelError, ChannelFull, ProducerLost, UsageError
from tests.channel.desk import Desk

__all__: list[str] = []


class ByLabel(LoadBalancePolicy):
    """To the consumer whose label says the item's key; for other keys a list of wrong answers."""

    def __init__(self) -> None:
        self.answer: object = None

    def select_consumer(self, item: ItemInfo, consumers: Sequence[Consumer]) -> int:
        if self.answer is not None:
            return self.answer  # type: ignore[return-value]  # that is what is tested
        for index, consumer in enumerate(consumers):
            if consumer.labels.get("key") == item.key:
                return index
        raise LookupError(f"nobody wants {item.key!r}")


# ---- order and batches


def test_an_item_comes_back_to_its_place() -> None:
    desk = Desk()
    for number in range(5):
        desk.put(number)
    first, second = desk.get(), desk.get()
    desk.queue.returned(desk.delivery(second), 1.0)
    desk.queue.returned(desk.delivery(first), 1.0)
    assert [desk.take() for _ in range(5)] == [0, 1, 2, 3, 4]


def test_batches() -> None:
    desk = Desk()
    batch = desk.get(target=10)
    for number, weight in enumerate([4, 4, 4]):
        assert batch not in desk.got
        desk.put(number, weight=weight)
    assert desk.got[batch] == [0, 1]  # the third would make it too heavy
    heavy = desk.get(target=3)
    assert desk.got[heavy] == [2]  # alone
    exact = desk.get(target=6)
    after = desk.get()
    desk.put(3, weight=2)
    assert exact not in desk.got
    assert after not in desk.got  # in order of their coming
    desk.put(4, weight=4)
    assert desk.got[exact] == [3, 4]
    desk.put(5)
    assert desk.got[after] == [5]


def test_a_batch_that_is_given_up_lets_the_next_ones_in() -> None:
    desk = Desk()
    batch, one = desk.get(target=10), desk.get()
    desk.put(1)
    assert one not in desk.got
    desk.queue.cancel(batch, 1.0)
    desk.work()
    assert desk.got[one] == [1]


def test_a_full_channel_gives_a_batch_what_it_has() -> None:
    desk = Desk(maxsize=2)
    batch = desk.get(target=10)
    desk.put(1)
    desk.put(2)
    assert batch not in desk.got
    desk.put(3)
    assert desk.got[batch] == [1, 2]
    assert desk.committed == [1, 2, 3]


def test_a_put_that_does_not_wait_presses_as_one_that_does() -> None:
    """Whoever tries again and again with put_nowait would otherwise wait for the batch, and the batch for him."""
    for desk in (Desk(maxsize=2), Desk(max_bytes=20)):
        batch = desk.get(target=10)
        desk.put(1, nowait=True, nbytes=10)
        desk.put(2, nowait=True, nbytes=10)
        assert batch not in desk.got
        refused = desk.put(3, nowait=True, nbytes=10)
        assert isinstance(desk.errors[refused], ChannelFull)
        assert desk.got[batch] == [1, 2]
    desk = Desk(maxsize=1)
    desk.put(1)
    desk.put(2, nowait=True)
    desk.take()
    batch = desk.get(target=10)
    assert desk.put(3, nowait=True).state == PutState.OVER
    assert batch not in desk.got  # the pressure was over with that put


def test_nowait() -> None:
    desk = Desk(maxsize=1)
    get = desk.get(nowait=True)
    assert isinstance(desk.errors[get], ChannelEmpty)
    assert desk.put(1, nowait=True).state == PutState.OVER
    put = desk.put(2, nowait=True)
    assert isinstance(desk.errors[put], ChannelFull)
    assert desk.queue.full
    assert desk.take() == 1
    assert not desk.queue.full


def test_bytes_of_what_is_handed_out_count_until_it_is_taken() -> None:
    desk = Desk(max_bytes=10)
    desk.put(1, nbytes=10)
    waiting = desk.put(2, nbytes=1)
    get = desk.get()
    assert waiting.state == PutState.WAITING
    desk.queue.taken(desk.delivery(get), 0.0)
    desk.work()
    assert desk.committed == [1, 2]
    assert desk.queue.nbytes == 1


def test_what_is_larger_than_the_bound_comes_alone() -> None:
    desk = Desk(max_bytes=10)
    desk.put(1, nbytes=100)
    waiting = desk.put(2, nbytes=1)
    assert desk.committed == [1]
    assert desk.take() == 1
    assert waiting.state == PutState.OVER


def test_a_put_that_goes_away_makes_room_for_those_behind_it() -> None:
    desk = Desk(max_bytes=10)
    desk.put(1, nbytes=5)
    large, small = desk.put(2, nbytes=8), desk.put(3, nbytes=5)
    assert small.state == PutState.WAITING
    desk.queue.retract(large, 0.0)
    desk.work()
    assert desk.committed == [1, 3]


def test_two_channels_share_a_bound() -> None:
    shared = ByteBudget(10)
    told: deque[Told] = deque()
    one, two = Desk(shared=shared, told=told), Desk(shared=shared, told=told)
    one.put("a", nbytes=6)
    waiting = two.put("b", nbytes=6)
    assert waiting.state == PutState.WAITING
    assert two.queue.full is False
    get = one.get()
    one.queue.taken(one.delivery(get), 0.0)
    one.work()
    assert waiting.state == PutState.OVER
    assert shared.used == 6


# ---- the end


def test_the_last_producer_ends_the_stream() -> None:
    desk = Desk()
    desk.put(1, producer="a")
    desk.put(2, producer="b")
    queue = desk.queue
    queue.leave_producer(desk.producer("a"), 1.0)
    gets = [desk.get() for _ in range(3)]
    assert [desk.got.get(get) for get in gets] == [[1], [2], None]
    assert not desk.errors
    queue.leave_producer(desk.producer("b"), 1.0)
    desk.work()
    assert isinstance(desk.errors[gets[2]], ChannelClosed)
    assert "last of its producers, b," in str(desk.errors[gets[2]])
    assert isinstance(desk.errors[desk.get()], ChannelClosed)
    with pytest.raises(ChannelClosed):
        desk.producer("c")


def test_a_stream_that_waits_for_more_producers() -> None:
    desk = Desk(producers=2)
    desk.put(1, producer="a")
    desk.queue.leave_producer(desk.producer("a"), 1.0)
    assert desk.take() == 1
    get = desk.get()
    desk.put(2, producer="b")
    assert desk.got[get] == [2]
    desk.queue.leave_producer(desk.producer("b"), 1.0)
    assert isinstance(desk.errors[desk.get()], ChannelClosed)


def test_a_lost_producer_breaks_the_stream_until_one_comes() -> None:
    desk = Desk()
    desk.put(1, producer="a")
    desk.queue.leave_producer(desk.producer("a"), 1.0, "it was killed")
    assert desk.take() == 1
    broken = desk.errors[desk.get()]
    assert isinstance(broken, ProducerLost)
    assert "a: it was killed" in str(broken)
    desk.put(2, producer="a")
    assert desk.take() == 2
    get = desk.get()
    desk.put(3, producer="b")
    assert desk.got[get] == [3]
    desk.queue.leave_producer(desk.producer("b"), 1.0)  # `a` is back and has not closed
    assert desk.get() not in desk.errors


def test_a_partial_batch_is_the_last() -> None:
    desk = Desk()
    batch = desk.get(target=10)
    desk.put(1)
    desk.queue.leave_producer(desk.producer(), 1.0)
    desk.work()
    assert desk.got[batch] == [1]


def test_the_end_waits_for_leases_of_others() -> None:
    desk = Desk()
    desk.put(1)
    desk.queue.leave_producer(desk.producer(), 1.0)
    lease = desk.get("a", lease=True)
    other, own = desk.get("b"), desk.get("a")
    assert isinstance(desk.errors[own], ChannelClosed)  # it would wait for itself
    assert other not in desk.errors
    desk.queue.leave_consumer(desk.consumers["a"], 1.0)
    desk.work()
    assert desk.got[other] == [1]
    assert desk.delivery(other).items[0].redeliveries == 1
    assert not desk.delivery(lease).open


def test_shutdown() -> None:
    desk = Desk(maxsize=1)
    desk.put(1)
    waiting = desk.put(2)
    desk.queue.shutdown("boss", 1.0)
    desk.work()
    assert "shut down by boss" in str(desk.errors[waiting])
    assert desk.take() == 1
    assert isinstance(desk.errors[desk.get()], ChannelClosed)

    desk = Desk()
    desk.put(1, nbytes=5)
    desk.queue.shutdown("boss", 1.0, immediate=True)
    assert isinstance(desk.errors[desk.get()], ChannelClosed)
    assert (desk.queue.nbytes, desk.queue.length) == (0, 0)


def test_the_end_waits_for_what_was_admitted() -> None:
    desk = Desk(slow=True)
    put = desk.put(1)
    get = desk.get()
    desk.queue.shutdown("boss", 1.0)
    desk.work()
    assert get not in desk.errors
    desk.commit(put)
    assert desk.got[get] == [1]
    put = desk.put(2)
    assert isinstance(desk.errors[put], ChannelClosed)


def test_what_was_admitted_before_a_shutdown_that_leaves_nothing_is_not_kept() -> None:
    desk = Desk(slow=True, policy=ShortestQueue())
    consumer = desk.consumer("a")
    put = desk.put(1, nbytes=10)
    desk.queue.shutdown("p", 0.0, immediate=True)
    get = desk.get("a")
    assert get not in desk.errors, "it may still be withdrawn"
    desk.queue.commit(put, 1, 0.0)
    desk.work()
    assert isinstance(desk.errors[get], ChannelClosed)
    assert (desk.queue.length, desk.queue.nbytes, consumer.pending_items) == (0, 0, 0)
    assert desk.queue.over


# ---- leases


def test_leases_end_in_time() -> None:
    desk = Desk()
    desk.put(1)
    desk.put(2)
    lease = desk.get("a", lease=True, lease_seconds=5.0)
    assert desk.queue.next_deadline() == 5.0
    assert desk.queue.tick(4.9) == []
    assert desk.queue.tick(5.0) == [desk.delivery(lease)]
    assert not desk.queue.taken(desk.delivery(lease), 6.0)  # too late
    assert desk.queue.next_deadline() is None
    assert [desk.take("b"), desk.take("b")] == [1, 2]
    assert desk.queue.redeliveries == 1


def test_leases_that_end_early_are_not_remembered_until_their_time() -> None:
    desk = Desk()
    for number in range(1000):
        desk.put(number)
        delivery = desk.delivery(desk.get("a", lease=True, lease_seconds=1e6 - number))
        assert desk.queue.taken(delivery, desk.now)
    desk.put("last")
    lease = desk.get("a", lease=True, lease_seconds=5.0)
    assert len(desk.queue._leases._deadlines) < 100
    assert desk.queue.next_deadline() == 5.0
    assert desk.queue.tick(5.0) == [desk.delivery(lease)]


def test_a_lost_consumer_keeps_what_it_got_and_gives_back_what_it_leased() -> None:
    desk = Desk()
    for number in range(3):
        desk.put(number, nbytes=2)
    desk.get("a")
    desk.get("a", lease=True)
    desk.queue.leave_consumer(desk.consumers["a"], 1.0)
    assert [desk.take("b"), desk.take("b")] == [1, 2]
    assert desk.queue.nbytes == 0


# ---- policies


@pytest.mark.parametrize("answer", [-1, 2, "0", 1.0, True])
def test_nonsense_of_a_policy_fails_that_put_only(answer: object) -> None:
    policy = ByLabel()
    desk = Desk(policy=policy)
    desk.consumer("a", key="x")
    desk.consumer("b", key="y")
    policy.answer = answer
    wrong = desk.put(1, key="x")
    assert isinstance(desk.errors[wrong], ChannelError)
    assert "ByLabel" in str(desk.errors[wrong])
    policy.answer = None
    assert isinstance(desk.errors[desk.put(2, key="z")], LookupError)
    desk.put(3, key="y")
    assert desk.take("b", key="y") == 3
    assert desk.queue.nbytes == 0


def test_items_wait_for_the_first_consumer_and_a_dead_ones_go_to_the_others(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk(policy=ByLabel())
    desk.put(1, key="x")
    desk.put(2, key="x")
    desk.consumer("a", key="x")
    get = desk.get("a", key="x")
    assert desk.got[get] == [1]
    desk.consumer("b", key="y")
    desk.queue.leave_consumer(desk.consumers["a"], 1.0)  # the policy wants nobody else
    assert "shortest queue" in caplog.text
    assert desk.take("b", key="x") == 2


def test_a_consumer_that_comes_later_gets_its_share() -> None:
    desk = Desk(policy=ShortestQueue())
    desk.consumer("a")
    for number in range(6):
        desk.put(number)
    desk.consumer("b")
    assert desk.consumers["a"].pending_items == desk.consumers["b"].pending_items == 3
    assert [desk.take("a") for _ in range(3)] == [0, 2, 4]
    assert [desk.take("b") for _ in range(3)] == [1, 3, 5]


def test_who_has_run_out_gets_what_waits_elsewhere() -> None:
    desk = Desk(policy=PerformanceAware())
    desk.consumer("a")
    desk.consumer("b")
    for number in range(6):
        desk.put(number)
    assert desk.take("a") == 0
    for number in (1, 3, 5, 2):  # the last was for a
        desk.now += 1
        assert desk.take("b") == number
    assert desk.take("a") == 4


def test_a_consumers_name_is_its_own() -> None:
    desk = Desk()
    desk.consumer("a")
    with pytest.raises(UsageError, match="a consumer 'a' already"):
        desk.queue.join_consumer(Consumer("a"), 0.0)


def test_who_runs_out_at_the_end_hears_of_it() -> None:
    desk = Desk(policy=PerformanceAware())
    for name in ("a", "b", "c"):
        desk.consumer(name)
    for number in range(3):
        desk.put(number)
    desk.queue.leave_producer(desk.producer(), 1.0)
    assert desk.take("c") == 2
    assert desk.take("b") == 1
    desk.now = 1.0
    waiting, other = desk.get("c"), desk.get("b")
    assert not desk.errors  # there is still one, for a
    desk.now = 100.0
    desk.queue.tick(desk.now)  # by now it should have been asked for
    desk.work()
    assert [desk.got.get(get) for get in (waiting, other)].count([0]) == 1
    assert [isinstance(desk.errors.get(get), ChannelClosed) for get in (waiting, other)].count(True) == 1


class ToTheFirst(LoadBalancePolicy):
    """Lets items move only when told to."""

    moves = False

    def select_consumer(self, item: ItemInfo, consumers: Sequence[Consumer]) -> int:
        return 0

    def may_move(self, item: ItemInfo, holder: Consumer, taker: Consumer, waited: float) -> bool:
        return self.moves


def test_all_hear_of_the_end_when_the_last_item_moves_to_somebody_before_the_one_who_asks() -> None:
    policy = ToTheFirst()
    desk = Desk(policy=policy)
    for name in ("a", "b", "c"):
        desk.consumer(name)
    desk.put(0)
    desk.queue.leave_producer(desk.producer(), 1.0)
    first, other = desk.get("c"), desk.get("b")
    assert not desk.errors  # there is still one, for a
    policy.moves = True
    second = desk.get("c")
    assert desk.got == {first: [0]}
    assert [type(desk.errors.get(get)) for get in (other, second)] == [ChannelClosed] * 2


@pytest.mark.parametrize("policy", [PerformanceAware, ShortestQueue])
def test_one_of_very_many_consumers_leaves_when_the_last_one_has_just_been_given_something(policy: type[LoadBalancePolicy]) -> None:
    desk = Desk(policy=policy())
    names = [f"c{number}" for number in range(60)]
    for name in names:
        desk.consumer(name)
    for number in range(60):
        desk.put(number)  # one for each, so the last row has changed since the policy looked
    desk.queue.leave_consumer(desk.consumers.pop("c0"), desk.now)
    for number in range(60, 120):
        desk.put(number)
    assert not desk.errors
    assert desk.queue.length == 120
