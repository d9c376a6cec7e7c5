"""What stands out in a job, said in words. `test_planted` has real jobs; here is what takes a while to come about, and what is not said."""

from __future__ import annotations

from typing import Any

from aiorlinf.observe.job import JobState, WorkerState
from aiorlinf.observe.top.remarks import remarks
from tests.observe.test_top import channel, link, record, report, wait

__all__: list[str] = []


def job(*workers: WorkerState) -> JobState:
    return JobState.of("m", "j", workers)


def worker(address: str, *pending: Any, links: Any = (), **more: Any) -> WorkerState:
    return WorkerState(record(address), report(0.0, list(links), list(pending), **more))


def of_channel(*pending: Any, **changes: Any) -> list[str]:
    """What is said of a channel with these changes, and these calls of `a:0`."""
    held = {**channel(), "length": 1, "waiting_puts": 0, "keys": [], "consumers": [], **changes}
    return remarks(job(worker("a:0", *pending), worker("channel.traj:0", channels=[held])), None)


def call(name: str, age: float) -> dict[str, Any]:
    return {**wait("x", age), "operation": name, "peer": None, "waits_for": [], "channel": "traj", "subject": "of channel 'traj'"}


def consumer(name: str, taken: int, rate: float, waiting: int = 0, queued: int = 0) -> dict[str, Any]:
    return {"name": name, "taken": taken, "items_per_second": rate, "waiting_gets": waiting, "queued": queued, "pending": queued}


def test_nothing_is_said_of_a_job_that_works() -> None:
    # A receive and a send that have just begun, messages that have just come, and a channel from which all get alike.
    sent = {**wait("b:0", 0.5), "operation": "send"}
    some = worker("a:0", sent, wait("b:0", 30.0), links=[link("b:0", 1, 1, 1)])
    other = worker("b:0", links=[link("a:0", 1, 9, 1, unread_tags=[0])])
    assert remarks(job(some, other), job(some, worker("b:0", links=[link("a:0", 1, 5, 1, unread_tags=[0])]))) == []
    assert of_channel(consumers=[consumer("x", 100, 9.0), consumer("y", 99, 8.0)]) == []


def test_who_does_not_answer_and_who_is_blocked() -> None:
    frozen = WorkerState(record("c:0"), None, "does not answer within 2 s")
    blocked = worker("b:0", loop_blocked=True, busy_at=["sim.py:3 in step"])
    said = remarks(job(worker("a:0", wait("c:0", 9.0)), blocked, frozen), None)
    assert said == [
        "c:0 does not answer within 2 s: its process 4711 on node is frozen or cut off; 1 operation of others waits for it",
        "the event loop of b:0 is blocked at sim.py:3 in step: nothing else that runs on it goes on",
    ]


def test_who_is_waited_for_and_not_there() -> None:
    assert remarks(job(worker("a:0", wait("b:0", 9.0))), None) == [
        "a:0 has waited 9 s for b:0, which has not joined the job, or has left it"
    ]


def test_messages_that_lie_there_between_two_looks() -> None:
    sender, busy = worker("a:0"), worker("b:0", wait("c:0", 5.0), links=[link("a:0", 1, 5, 1, unread_tags=[1, 2])])
    there = worker("c:0", links=[link("b:0", 1, 1, 1)])
    assert remarks(job(sender, busy, there), None) == [], "a first look cannot tell"
    (said,) = remarks(job(sender, busy, there), job(sender, busy, there))
    assert said == (
        "b:0 does not receive what a:0 sends with tags 1, 2: 2 messages of it lie there unread. "
        "It waits for something else: recv from c:0 tag 1, begun at train.py:7"
    )


def test_a_receive_in_another_group() -> None:
    sender = worker("a:0", {**wait("b:0", 5.0), "operation": "send_tensor"})
    receiver = worker("b:0", wait("a:0", 6.0), links=[link("a:0", 0, 0, 0)])
    (said,) = remarks(job(sender, receiver), None)
    assert said.endswith("1 send waits for that, the oldest for 5 s. It waits for the same tag in another group, begun at train.py:7")


def test_a_full_channel_an_empty_one_and_a_key_that_nobody_wants() -> None:
    (full,) = of_channel(length=4, waiting_puts=3, gets_per_second=0.0)
    assert full == "channel 'traj' is full (4 of 4): 3 puts wait, and nobody takes anything from it"
    (empty,) = of_channel(call("get", 5.0), length=0, puts_per_second=0.0, consumers=[consumer("x", 0, 0.0, 1)])
    assert empty == "channel 'traj' is empty: 1 get waits, and its producers (p) put nothing"
    assert of_channel(call("get", 0.5), length=0, puts_per_second=0.0, consumers=[consumer("x", 0, 0.0, 1)]) == []
    keys = [{"key": "b", "length": 2, "bytes": 9, "oldest_age_seconds": 30.0, "waiting_gets": 0}]
    assert of_channel(keys=keys, takes={"x": ["a"]}) == ["channel 'traj': 2 items of key 'b' lie there, which no consumer has asked for"]


def test_an_uneven_channel_whose_consumers_are_all_at_work() -> None:
    (said,) = of_channel(consumers=[consumer("x", 90, 9.0), consumer("y", 10, 1.0)], takes={"x": None, "y": None})
    assert said == (
        "channel 'traj' is uneven: x (b:0) gets 9.0 items/s, y 1.0, of 2 consumers; "
        "nobody waits: the others are slower; its policy is shortest_queue"
    )
    assert of_channel(consumers=[consumer("x", 5, 1.0), consumer("y", 1, 0.0)]) == [], "too few to say"


def test_an_uneven_channel_whose_items_wait_for_the_slow_one() -> None:
    """Each has as many items, and so the quick one waits most of the time, with a channel full of items that it cannot have."""
    consumers = [consumer("x", 90, 9.0, 1), consumer("y", 10, 1.0, queued=4)]
    (said,) = of_channel(consumers=consumers, takes={"x": None, "y": None}, length=4, policy="weighted_round_robin")
    assert said == (
        "channel 'traj' is uneven: x (b:0) gets 9.0 items/s, y 1.0, of 2 consumers; "
        "4 of the 4 items that lie there are meant for y already; its policy is weighted_round_robin"
    )
