"""What is known of lives, in whatever order and however often it was told."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aiorlinf.address import Identity, Incarnation, WorkerAddress
from aiorlinf.manager.lives import End, Known, Lives

A = WorkerAddress("a:0")


def life(number: int, address: str = "a:0") -> Identity:
    return Identity(WorkerAddress(address), Incarnation(number))


def test_the_newest_life_counts() -> None:
    lives = Lives()
    assert (lives.newest(A), lives.end(A), lives.next(A)) == (0, None, life(1))
    assert lives.learn(life(2))
    assert not lives.learn(life(1), End("lost", "late news"))
    assert lives.next(A) == life(3)
    assert lives.end_of(life(2)) is None
    assert lives.end_of(life(1)) == End("lost", "#2 lives under its address, or has lived")
    assert lives.end_of(life(3)) is None
    assert list(lives) == [Known(life(2), None)]


def test_a_life_that_is_over_stays_over() -> None:
    lives = Lives()
    assert lives.learn(life(1), End("lost", "why"))
    assert not lives.learn(life(1))
    assert lives.end_of(life(1)) == lives.end(A) == End("lost", "why")
    assert lives.learn(life(2))
    assert lives.end(A) is None


def test_ends_that_read_the_same_are_kept_once() -> None:
    lives = Lives()
    for number in range(3):
        assert lives.learn(life(1, f"w:{number}"), End("left", f"it closed {lives.next(A)}"))
    assert len({id(lives.end(WorkerAddress(f"w:{number}"))) for number in range(3)}) == 1


ENDS = st.none() | st.builds(End, st.sampled_from(["left", "lost"]), st.sampled_from(["x", "y"]))
KNOWN = st.builds(Known, st.builds(life, st.integers(1, 4), st.sampled_from(["a:0", "b:0"])), ENDS)


@given(st.lists(KNOWN, max_size=12), st.randoms())
def test_the_order_does_not_matter_nor_that_it_is_told_twice(told: list[Known], random: object) -> None:
    one, other = Lives(), Lives()
    for known in told:
        before = one.newest(known.identity.address)
        one.learn(*known)
        assert one.newest(known.identity.address) >= max(before, known.identity.incarnation)
    again = told + told[: len(told) // 2]
    random.shuffle(again)  # type: ignore[attr-defined]
    for known in again:
        other.learn(*known)
    assert dict(one) == dict(other)
    assert not any(one.learn(*known) for known in other)
