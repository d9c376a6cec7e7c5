"""Random runs of two links, held against the model; see `tests.link.model` for what must hold."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import aiorlinf.link.connection
import aiorlinf.link.delivery
import aiorlinf.link.packing
import aiorlinf.link.ways
from tests.hypothesis_profiles import examples
from tests.link import planned_coding, planned_lane, planned_memory
from tests.link.model import Model
from tests.link.shapes import HEAVY, OBJECTS, TENSORS, Shape

__all__: list[str] = []


@pytest.fixture(autouse=True, scope="module")
def _small_limits() -> Iterator[None]:
    """Limits at which the short messages of the model take all paths; and a quick garbage collection."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aiorlinf.link.delivery, "_HEAVY_SKELETON_BYTES", HEAVY)
        patch.setattr(aiorlinf.link.delivery, "_COPY_INLINE_BYTES", 1500)
        patch.setattr(aiorlinf.link.ways, "PACK_INLINE_BYTES", 1500)
        patch.setattr(aiorlinf.link.packing, "_SHARED_BYTES", 2 * 1500)
        patch.setattr(aiorlinf.link.connection, "_BULK_READ_BYTES", 60)
        patch.setattr(aiorlinf.link.connection, "_SMALL_PIECE_BYTES", 50)
        planned_coding.small_chunks(patch)
        patch.setattr(logging.getLogger("aiorlinf"), "disabled", True)
        patch.setattr(logging.getLogger("aiorlinf.link"), "disabled", True)
        yield


side = st.integers(0, 1)
sender = st.sampled_from([0, 0, 0, 1])  # most of it on one stream, so that much happens there
receiver = st.sampled_from([1, 1, 1, 0])
tag = st.sampled_from([0, 0, 0, 0, 1])
index = st.integers(0, 12)
size = st.sampled_from([1, 3, 16, 17, 40, 100, 300, 1000, 1 << 20])
kind = st.sampled_from(["right", "right", "right", "right", "right", "object", "inbox", *[shape.tensor for shape in TENSORS[:2]]])

calls = st.one_of(
    st.just(("nothing",)),  # what a step shrinks to: runs have a least length, because hypothesis prefers short lists by far
    st.tuples(st.just("send"), sender, tag, st.sampled_from(OBJECTS)),
    st.tuples(st.just("send"), sender, tag, st.sampled_from(TENSORS)),
    st.tuples(st.just("recv"), receiver, tag, kind, st.booleans()),
    st.tuples(st.just("recv"), receiver, tag, kind, st.booleans()),
    st.tuples(st.just("cancel_send"), index),
    st.tuples(st.just("cancel_recv"), index),
    st.tuples(st.just("cancel_recv"), index),
    st.tuples(st.just("take"), index),
    st.tuples(st.just("write"), index, index),
)
world = st.one_of(
    st.tuples(st.just("read"), receiver, size),
    st.tuples(st.just("read"), sender, size),
    st.tuples(st.just("flow"), st.integers(1, 4)),
    st.tuples(st.just("flow"), st.integers(1, 4)),
    st.tuples(st.just("step_lane"), sender, st.sampled_from(planned_lane.STEPS)),
    st.tuples(st.just("step_memory"), sender, st.sampled_from(planned_memory.STEPS)),
    st.tuples(st.just("turn")),
    st.tuples(st.just("tick")),
    st.tuples(st.just("thread")),
    st.tuples(st.just("up"), side),
)
end = st.one_of(
    st.tuples(st.just("lose"), side, st.booleans()),
    st.tuples(st.just("goodbye"), side),
    st.tuples(st.just("goodbye"), side),
)
Step = tuple[Any, ...]


def much_of(*shapes: Shape, back: bool = False) -> st.SearchStrategy[list[Step]]:
    """Runs about these shapes only, on one stream or both ways: so many rare meetings are needed for the rest that few happen."""
    one_way = [
        st.tuples(st.just("send"), st.just(0), st.just(0), st.sampled_from(shapes)),
        st.tuples(st.just("recv"), st.just(1), st.just(0), st.sampled_from(["right", "right", "right", "object", "inbox"]), st.booleans()),
        st.tuples(st.just("read"), st.just(1), size),
        st.tuples(st.just("read"), st.just(0), size),
    ]
    other_way = [
        st.tuples(st.just("send"), st.just(1), st.just(0), st.sampled_from(shapes)),
        st.tuples(st.just("recv"), st.just(0), st.just(0), st.just("right"), st.booleans()),
    ]
    both = [
        st.just(("nothing",)),
        st.tuples(st.just("cancel_send"), index),
        st.tuples(st.just("cancel_recv"), index),
        st.tuples(st.just("write"), index, index),
        st.tuples(st.just("flow"), st.integers(1, 3)),
        st.just(("turn",)),
        st.just(("thread",)),
        st.tuples(st.just("step_lane"), st.just(0), st.sampled_from(planned_lane.STEPS)),
        st.tuples(st.just("step_lane"), st.just(0), st.sampled_from(planned_lane.STEPS)),
        st.tuples(st.just("step_memory"), st.just(0), st.sampled_from(planned_memory.STEPS)),
    ]
    return st.lists(st.one_of(*both, *one_way, *one_way, *(other_way if back else [])), min_size=25, max_size=60)


LARGE = [shape for shape in OBJECTS if shape.name in ("one", "big", "leaves", "mixed", "heavy")]
runs = st.one_of(
    st.lists(calls | world, min_size=20, max_size=60),
    much_of(*LARGE),
    much_of(*LARGE, back=True),
    much_of(*TENSORS[:3], back=True),
    much_of(*TENSORS[:3], *LARGE),
    much_of(*OBJECTS[:2], *LARGE[:2], *TENSORS[:2]),
)


def play(model: Model, steps: list[Step]) -> None:
    """Let this happen, one after the other."""
    for name, *args in steps:
        if name in ("cancel_send", "write"):
            unfinished = [sending for sending in model.sendings if not sending.work.done()] or model.sendings
            if unfinished:
                getattr(model, name)(unfinished[args[0] % len(unfinished)], *args[1:])
        elif name in ("cancel_recv", "take"):
            open_ones = [receive for receive in model.receivings if not receive.taken and not receive.work.cancelled()]
            pending = [receive for receive in open_ones if not receive.work.done()]
            choice = pending if pending and name == "cancel_recv" and args[0] % 3 else open_ones
            if choice:
                getattr(model, name)(choice[args[0] % len(choice)])
        elif name != "nothing":
            getattr(model, name)(*args)
        model.check()


def let_go(model: Model) -> list[weakref.ref[torch.Tensor]]:
    """Forget what was sent, but keep the works of the sends: nothing of the library may hold on to it."""
    gone = [weakref.ref(tensor) for sending in model.sendings for tensor in sending.tensors]
    for sending in model.sendings:
        sending.tensors.clear()
        sending.obj = None
    return gone


def play_to_the_end(model: Model, steps: list[Step]) -> None:
    """And look whether everything is received, nothing pends, and nothing is kept."""
    play(model, steps)
    model.finish()
    received = [weakref.ref(receive.out) for receive in model.receivings if receive.out is not None]
    sent = let_go(model)
    if any(ref() is not None for ref in sent):
        gc.collect()
    assert [ref() for ref in sent if ref() is not None] == []
    model.forget_received()
    if any(ref() is not None for ref in received):
        gc.collect()
    assert [ref() for ref in received if ref() is not None] == []


@settings(max_examples=examples(120), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    steps=runs,
    start_up=st.sampled_from([True, True, True, False]),
    ending=st.none() | st.tuples(end, st.lists(calls | world, max_size=15)),
    capacity=st.sampled_from([30, 100, 700, 1 << 30]),
    chunk_bytes=st.sampled_from([40, 100, 256, 1000]),
    ways=st.sampled_from([("none", "none"), ("lane", "none"), ("lane", "lane"), ("memory", "none"), ("memory", "memory")]),
    required=st.booleans(),
)
def test_any_run_of_two_links(
    steps: list[Step],
    start_up: bool,
    ending: tuple[Step, list[Step]] | None,
    capacity: int,
    chunk_bytes: int,
    ways: tuple[str, str],
    required: bool,
) -> None:
    run(Model(capacity=capacity, chunk_bytes=chunk_bytes, ways=ways, required=required), steps, start_up, ending)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    steps=st.one_of(much_of(*LARGE[:3]), much_of(*LARGE[:3], back=True), much_of(*LARGE, *TENSORS[:3])),
    start_up=st.sampled_from([True, True, True, False]),
    ending=st.none() | st.tuples(end, st.lists(calls | world, max_size=15)),
    capacity=st.sampled_from([30, 100, 700, 1 << 30]),
    chunk_bytes=st.sampled_from([40, 100, 256, 1000]),
    codec=st.sampled_from(planned_coding.CODECS),
)
def test_any_run_of_two_links_that_compress(
    steps: list[Step], start_up: bool, ending: tuple[Step, list[Step]] | None, capacity: int, chunk_bytes: int, codec: str
) -> None:
    run(Model(capacity=capacity, chunk_bytes=chunk_bytes, ways=(codec, codec), required=False), steps, start_up, ending)


def run(model: Model, steps: list[Step], start_up: bool, ending: tuple[Step, list[Step]] | None) -> None:
    """Play it, perhaps with an end of the link and what comes after that."""
    both_up: list[Step] = [("up", 0), ("up", 1)]
    try:
        play_to_the_end(model, [*(both_up if start_up else []), *steps, *([] if ending is None else [*both_up, ending[0], *ending[1]])])
    finally:
        model.free()


def _named(name: str) -> Shape:
    return next(shape for shape in (*OBJECTS, *TENSORS) if shape.name == name)


NOTE, ONE, BIG, TENSOR, BIG_TENSOR = map(_named, ("note", "one", "big", "tensor", "big tensor"))

RUNS: dict[str, tuple[list[Step], bool]] = {
    "a small message whose send was cancelled before the answer is not received": (
        [("up", 0), ("up", 1), ("send", 0, 0, NOTE), ("cancel_send", 0)],
        False,
    ),
    "a message cancelled before the link is up is let go": ([("send", 0, 0, ONE), ("cancel_send", 0)], False),
    "what is to be answered after a goodbye is not written to the closed socket": (
        [("send", 0, 0, ONE), ("send", 1, 0, ONE), ("up", 0), ("up", 1), ("goodbye", 0), ("flow", 3)],
        False,
    ),
    "a payload that a goodbye cuts short is not taken for sent": (
        [
            *[("up", 0), ("up", 1), ("recv", 1, 0, "right", True), ("send", 0, 0, NOTE), ("flow", 3)],
            *[("send", 0, 0, ONE), ("turn",), ("goodbye", 0), ("flow", 9)],
        ],
        False,
    ),
    "a message cancelled while its lane is made gives its share of the window back": (
        [("up", 0), ("up", 1), ("send", 0, 0, ONE), ("cancel_send", 0), ("send", 0, 0, ONE)],
        True,
    ),
    "what waits for a lane that is never made is let go at the end of the link": (
        [("up", 0), ("up", 1), ("send", 0, 0, ONE), ("send", 0, 0, ONE), ("goodbye", 1)],
        True,
    ),
    "a tensor that was accepted against a lock-out and then refused gives its room back": (
        [("up", 0), ("up", 1), ("send", 0, 0, TENSOR), ("flow", 2), ("send", 1, 0, TENSOR), ("recv", 1, 0, "object", False)],
        False,
    ),
    "when a receive is cancelled, the later ones get the earlier messages": (
        [
            *[("up", 0), ("up", 1), ("send", 0, 0, BIG), ("send", 0, 0, BIG), ("turn",)],
            *[("recv", 1, 0, "right", False), ("recv", 1, 0, "right", False), ("flow", 4), ("cancel_recv", 0)],
        ],
        False,
    ),
    "when a send is cancelled, the earlier receives get the later messages": (
        [
            *[("up", 0), ("up", 1), ("send", 0, 0, BIG), ("send", 0, 0, BIG), ("send", 0, 0, NOTE), ("turn",)],
            *[("recv", 1, 0, "right", False), ("recv", 1, 0, "right", False), ("flow", 4), ("cancel_send", 0), ("flow", 2)],
        ],
        False,
    ),
    "a tensor whose receive is cancelled in the middle is whole at the next one": (
        [
            *[("up", 0), ("up", 1), ("send", 0, 0, BIG_TENSOR), ("flow", 1), ("recv", 1, 0, "right", False), ("flow", 2)],
            *[("read", 1, 70), ("turn",), ("read", 1, 50), ("cancel_recv", 0), ("flow", 1)],
        ],
        False,
    ),
    "news of a lane that the peer had lost before comes too late to matter": (
        [
            *[("up", 0), ("up", 1), ("recv", 1, 0, "right", False), ("send", 0, 0, ONE), ("turn",), ("step_lane", 0, "ready")],
            *[("step_lane", 0, "break receiver"), ("flow", 3), ("step_lane", 0, "tell sender"), ("flow", 3)],
        ],
        True,
    ),
    "a receiver that hears late of a lost lane does not ask again for what is coming over the stream": (
        [
            *[("up", 0), ("up", 1), ("recv", 1, 0, "right", False), ("send", 0, 0, ONE), ("turn",), ("step_lane", 0, "ready"), ("flow", 2)],
            *[("step_lane", 0, "break sender"), ("step_lane", 0, "tell sender"), ("turn",), ("read", 1, 200)],
            *[("step_lane", 0, "break receiver"), ("step_lane", 0, "tell receiver"), ("flow", 2)],
        ],
        True,
    ),
    "an inbox does not hold on to what was withdrawn": (
        [
            *[("up", 0), ("up", 1), ("recv", 1, 0, "inbox", False), ("cancel_recv", 0), ("send", 0, 0, ONE), ("thread",), ("flow", 1)],
            *[("step_memory", 0, "pass"), ("turn",), ("cancel_send", 0)],
        ],
        False,
    ),
    "an inbox does not hold on to what others received": (
        [
            *[("up", 0), ("up", 1), ("send", 0, 0, ONE), ("send", 0, 0, TENSOR), ("turn",), ("write", 1, 0), ("flow", 2)],
            *[("recv", 1, 0, "inbox", False), ("recv", 1, 0, "right", True), ("turn",), ("flow", 3)],
        ],
        False,
    ),
    "receives whose messages were withdrawn wait in their old order": (
        [
            *[("up", 0), ("up", 1), ("send", 0, 0, BIG), ("send", 0, 0, BIG), ("turn",)],
            *[("recv", 1, 0, "right", False), ("recv", 1, 0, "right", False), ("flow", 4)],
            *[("cancel_send", 0), ("cancel_send", 1), ("flow", 2), ("send", 0, 0, NOTE), ("flow", 2)],
        ],
        False,
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_runs_that_once_went_wrong(name: str) -> None:
    steps, lanes = RUNS[name]
    way = "lane" if lanes else "memory" if "inbox" in name else "none"
    model = Model(capacity=100, chunk_bytes=256, ways=(way, way), required=lanes)
    try:
        play_to_the_end(model, steps)
    finally:
        model.free()
