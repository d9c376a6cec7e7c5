"""Matching, without a link."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from aiorlinf.link.incoming import Incoming, Receive
from aiorlinf.link.mailbox import Mailbox

__all__: list[str] = []


class Taker:
    """An inbox that takes messages while it has room."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.offered: list[Incoming] = []

    def offer(self, mailbox: Mailbox, message: Incoming) -> bool:
        self.offered.append(message)
        self.room -= 1
        return self.room >= 0

    def again(self, receive: Receive) -> None:
        raise AssertionError("nothing is withdrawn here")

    def make_way(self) -> bool:
        raise AssertionError("there is no other here")


def new_mailbox(**wildcards: Taker) -> Mailbox:
    """With wildcards by their key, as in `k7`."""
    return Mailbox(None, {int(name[1:]): taker for name, taker in wildcards.items()}, itertools.count())


def arrival(mailbox: Mailbox, key: int = 7) -> Incoming:
    """The next message of a stream."""
    return Incoming(key, mailbox.next_order(), 0, is_tensor=False, want_reply=False)


def test_messages_wait_in_order_for_receives() -> None:
    mailbox = new_mailbox()
    first, second = arrival(mailbox), arrival(mailbox)
    for message in (first, second):
        assert mailbox.waiting(7) is None
        mailbox.keep(message)
    assert len(mailbox) == 2
    assert list(mailbox.queued(7)) == [first, second]
    assert mailbox.first(7) is first
    assert mailbox.first(7) is second
    assert mailbox.first(7) is None
    assert not first.queued


def test_receives_wait_in_order_for_messages() -> None:
    mailbox = new_mailbox()
    one, two = Receive(7), Receive(7)
    mailbox.post(7, one)
    mailbox.post(7, two)
    assert mailbox.posted_keys() == [7]
    assert mailbox.waiting(7) is one
    assert mailbox.waiting(7) is two
    assert mailbox.waiting(7) is None
    assert mailbox.posted_keys() == []


def test_streams_do_not_see_each_other() -> None:
    mailbox = new_mailbox()
    mailbox.keep(arrival(mailbox, 7))
    mailbox.post(8, Receive(8))
    assert mailbox.first(8) is None
    assert mailbox.waiting(7) is None
    assert mailbox.waiting(8) is not None
    assert mailbox.first(7) is not None


def test_a_withdrawn_receive_gets_nothing() -> None:
    mailbox = new_mailbox()
    one, two, three = Receive(7), Receive(7), Receive(7)
    for receive in (one, two, three):
        mailbox.post(7, receive)
    mailbox.withdraw(7, two)
    assert mailbox.waiting(7) is one
    assert mailbox.waiting(7) is three
    mailbox.withdraw(7, three)  # it is not in the queue any more


def test_a_message_that_was_given_back_has_its_old_place() -> None:
    mailbox = new_mailbox()
    messages = [arrival(mailbox) for _ in range(4)]
    mailbox.keep(messages[0])
    mailbox.keep(messages[3])
    mailbox.keep(messages[1])
    mailbox.keep(messages[2])
    assert list(mailbox.queued(7)) == messages


def test_a_receive_posted_at_the_head_is_the_first() -> None:
    mailbox = new_mailbox()
    one, two = Receive(7), Receive(7)
    mailbox.post(7, one)
    mailbox.post(7, two, at_head=True)
    assert mailbox.waiting(7) is two


def test_an_inbox_is_offered_what_no_receive_takes() -> None:
    taker = Taker(1)
    mailbox = new_mailbox(k7=taker)
    first, second, other = arrival(mailbox), arrival(mailbox), arrival(mailbox, 8)
    for message in (first, second, other):
        mailbox.keep(message)
    assert taker.offered == [first, second]
    assert list(mailbox.queued(7)) == [second]
    assert list(mailbox.all_queued()) == [second, other]


def test_a_removed_message_is_gone_and_removing_it_again_does_nothing() -> None:
    mailbox = new_mailbox()
    first, second = arrival(mailbox), arrival(mailbox)
    mailbox.keep(first)
    mailbox.keep(second)
    mailbox.remove(first)
    mailbox.remove(first)
    assert list(mailbox.queued(7)) == [second]


def test_draining_gives_every_receive_that_waits() -> None:
    mailbox = new_mailbox()
    one, two, gone = Receive(7), Receive(8), Receive(7)
    mailbox.post(7, one)
    mailbox.post(7, gone)
    mailbox.post(8, two)
    mailbox.withdraw(7, gone)
    mailbox.keep(arrival(mailbox, 9))
    assert mailbox.drain_posted() == [one, two]
    assert mailbox.posted_keys() == []
    assert len(mailbox) == 1


def test_someone_who_polls_for_ever_leaves_nothing_behind() -> None:
    mailbox = new_mailbox()
    standing = Receive(7)
    mailbox.post(7, standing)
    for number in range(5000):
        receive = Receive(number + 100)
        mailbox.post(receive.key, receive)
        mailbox.withdraw(receive.key, receive)
        again = Receive(7)
        mailbox.post(7, again)
        mailbox.withdraw(7, again)
        mailbox.keep(arrival(mailbox, number + 100_000))
        assert mailbox.first(number + 100_000) is not None
    assert len(mailbox.streams) < 200
    assert len(mailbox.streams[7].posted) == 1


@given(st.lists(st.sampled_from(["message", "receive", "cancel first", "cancel last", "remove first", "remove last"]), max_size=50))
def test_matching_is_that_of_two_queues(steps: list[str]) -> None:
    mailbox = new_mailbox()
    receives: list[Receive] = []
    messages: list[Incoming] = []
    for step in steps:
        if step == "message":
            message = arrival(mailbox)
            expected = receives.pop(0) if receives else None
            assert mailbox.waiting(7) is expected
            if expected is None:
                mailbox.keep(message)
                messages.append(message)
        elif step == "receive":
            receive = Receive(7)
            first = messages.pop(0) if messages else None
            assert mailbox.first(7) is first
            if first is None:
                mailbox.post(7, receive)
                receives.append(receive)
        elif step.startswith("cancel") and receives:
            mailbox.withdraw(7, receives.pop(0 if step.endswith("first") else -1))
        elif step.startswith("remove") and messages:
            mailbox.remove(messages.pop(0 if step.endswith("first") else -1))
        assert list(mailbox.queued(7)) == messages
        assert mailbox.posted_keys() == ([7] if receives else [])
