"""Random runs of one that passes messages on, held against the model; see `tests.link.relay` for what must hold."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import aiorlinf.link.packing
import aiorlinf.link.ways
from aiorlinf.testing import procfs
from tests.hypothesis_profiles import examples
from tests.link import planned_memory
from tests.link.relay import SMALL, Relay

__all__: list[str] = []


@pytest.fixture(autouse=True, scope="module")
def _small_limits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aiorlinf.link.ways, "PACK_INLINE_BYTES", 5000)
        patch.setattr(aiorlinf.link.packing, "_SHARED_BYTES", 2 * 5000)
        patch.setattr(logging.getLogger("aiorlinf.link"), "disabled", True)
        yield


producer = st.sampled_from("bbbc")
consumer = st.sampled_from("cccb")
name = st.sampled_from("bc")
index = st.integers(0, 9)
size = st.sampled_from([SMALL, SMALL, 30, 300, 1000, 1000, 4000])
steps = st.one_of(
    st.tuples(st.just("send"), producer, size),
    st.tuples(st.just("send"), producer, size),
    st.tuples(st.just("ask"), producer),
    st.tuples(st.just("ask"), producer),
    st.just(("collect",)),
    st.just(("collect",)),
    st.tuples(st.just("hand_on"), index, consumer, st.sampled_from([False, False, False, True])),
    st.tuples(st.just("hand_on"), index, consumer, st.just(False)),
    st.tuples(st.just("receive"), consumer),
    st.just(("take",)),
    st.tuples(st.just("write"), index, index),
    st.tuples(st.just("let_go"), index),
    st.tuples(st.just("cancel_send"), index),
    st.tuples(st.just("cancel_ask"), index),
    st.tuples(st.just("cancel_handing_on"), index),
    st.tuples(st.just("throw_away"), index),
    st.tuples(st.just("read"), name, st.booleans(), st.sampled_from([1, 30, 500, 1 << 20])),
    st.tuples(st.just("read"), name, st.booleans(), st.sampled_from([1, 30, 500, 1 << 20])),
    st.tuples(st.just("flow"), st.integers(1, 6)),
    st.tuples(st.just("flow"), st.integers(1, 6)),
    st.tuples(st.just("step_memory"), index, st.sampled_from(planned_memory.STEPS)),
    st.tuples(st.just("step_memory"), index, st.just("pass")),
    st.tuples(st.just("step_memory"), index, st.just("pass")),
    st.tuples(st.just("trim"), index),
    st.just(("turn",)),
    st.just(("thread",)),
    st.just(("tick",)),
)
kill = st.tuples(st.just("kill"), name)


def play(run: list[tuple[Any, ...]], *, keep: bool) -> None:
    before = len(procfs.open_descriptors())
    relay = Relay(keep=keep)
    try:
        for what, *arguments in run:
            getattr(relay, what)(*arguments)
            relay.check()
        relay.finish()
    finally:
        relay.free()
    del relay
    end = time.monotonic() + 5
    while len(procfs.open_descriptors()) > before:  # private threads let go of the mappings
        assert time.monotonic() < end, procfs.open_descriptors()
        time.sleep(0.001)


large = st.sampled_from([1000, 1000, 4000])
dense = st.one_of(  # a few large messages, one way, so that the memory of each meets much
    st.tuples(st.just("send"), st.just("b"), large),
    st.tuples(st.just("ask"), st.just("b")),
    st.just(("collect",)),
    st.tuples(st.just("hand_on"), index, st.just("c"), st.just(False)),
    st.tuples(st.just("trip"), index, consumer, st.booleans()),
    st.tuples(st.just("receive"), st.just("c")),
    st.just(("take",)),
    st.tuples(st.just("write"), index, index),
    st.tuples(st.just("let_go"), index),
    st.tuples(st.just("cancel_handing_on"), index),
    st.tuples(st.just("flow"), st.integers(1, 6)),
    st.tuples(st.just("flow"), st.integers(3, 6)),
    st.tuples(st.just("flow"), st.integers(3, 6)),
)
through: st.SearchStrategy[list[tuple[Any, ...]]] = st.just(
    [("send", "b", 1000), ("ask", "b"), ("flow", 6), ("collect",), ("hand_on", 0, "c", False), ("receive", "c"), ("flow", 6), ("take",)]
)


def runs(least: int, most: int) -> st.SearchStrategy[list[tuple[Any, ...]]]:
    """So many steps."""
    return st.lists(steps, min_size=least, max_size=most) | st.lists(dense, min_size=least, max_size=most)


@settings(max_examples=examples(150), suppress_health_check=list(HealthCheck))
@given(runs(20, 70), st.sampled_from([True, True, True, False]))
def test_nothing_is_lost_torn_or_kept(run: list[tuple[Any, ...]], keep: bool) -> None:
    play(run, keep=keep)


@settings(max_examples=examples(150), suppress_health_check=list(HealthCheck))
@given(runs(10, 40), through, kill, runs(10, 40))
def test_the_same_when_one_is_killed(
    run: list[tuple[Any, ...]], through: list[tuple[Any, ...]], end: tuple[Any, ...], later: list[tuple[Any, ...]]
) -> None:
    play([*run, *through, end, *later], keep=True)
