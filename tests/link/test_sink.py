"""Where the bytes of a payload go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiorlinf.errors import WireError
from aiorlinf.link.sink import DiscardSink, Sink

__all__: list[str] = []


def views(*sizes: int) -> list[memoryview]:
    """Fresh memory of these sizes."""
    return [memoryview(bytearray(size)) for size in sizes]


def fill(sink: Sink | DiscardSink, data: bytes, limit: int = 1 << 30) -> None:
    """As a connection does, with reads of at most `limit` bytes."""
    position = 0
    while position < len(data):
        view = sink.view(min(limit, len(data) - position))
        assert len(view) > 0
        view[:] = data[position : position + len(view)]
        sink.advance(len(view))
        position += len(view)


def test_bytes_go_into_one_view_after_the_other() -> None:
    parts = views(3, 0, 5, 0)
    sink = Sink(parts)
    assert (sink.done, sink.total) == (0, 8)
    fill(sink, b"abcdefgh")
    assert [bytes(part) for part in parts] == [b"abc", b"", b"defgh", b""]
    assert (sink.done, sink.total) == (8, 8)


def test_more_than_announced_is_refused() -> None:
    sink = Sink(views(2))
    fill(sink, b"ab")
    with pytest.raises(WireError, match="more payload than the 2 bytes announced"):
        sink.view(1)


def test_a_payload_without_bytes_takes_none() -> None:
    sink = Sink(views(0, 0))
    assert sink.total == 0
    with pytest.raises(WireError):
        sink.view(1)


def test_a_view_is_never_longer_than_asked_for() -> None:
    sink = Sink(views(10))
    assert len(sink.view(4)) == 4


sizes = st.lists(st.integers(0, 20), max_size=8)


@given(sizes, st.integers(1, 30), st.data())
def test_a_redirected_payload_is_whole_in_its_new_place(lengths: list[int], limit: int, data: st.DataObject) -> None:
    payload = bytes(index % 251 for index in range(sum(lengths)))
    first, second = views(*lengths), views(*lengths)
    sink = Sink(first)
    before = data.draw(st.integers(0, len(payload)))
    fill(sink, payload[:before], limit)
    sink.redirect(second)
    frozen = [bytes(view) for view in first]
    fill(sink, payload[before:], limit)
    assert b"".join(second) == payload
    assert [bytes(view) for view in first] == frozen, "the old place is not written to any more"
    assert sink.done == sink.total == len(payload)


def test_a_discarded_payload_goes_nowhere_however_long() -> None:
    sink = DiscardSink()
    fill(sink, bytes(200_000))
    assert sink.done == 200_000
