"""Two ends that count, and a line between them that breaks anywhere: what arrives is what was written, once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiorlinf.errors import WireError
from aiorlinf.link.ledger import Ledger

__all__: list[str] = []

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.binary(min_size=1, max_size=40), st.booleans()),
        st.tuples(st.just("carry"), st.integers(0, 60)),
        st.tuples(st.just("tell")),
        st.tuples(st.just("break")),
    ),
    max_size=60,
)


@given(STEPS)
def test_whatever_breaks_the_stream_is_whole(steps: list[tuple[object, ...]]) -> None:
    here, there = Ledger(), Ledger()
    written, line, arrived = b"", b"", b""
    told = 0
    for step in steps:
        if step[0] == "write":
            data, lent = step[1], step[2]
            assert isinstance(data, bytes)
            here.keep(memoryview(data) if lent else data, lent=bool(lent))
            written += data
            line += data
        elif step[0] == "carry":
            assert isinstance(step[1], int)
            part, line = line[: step[1]], line[step[1] :]
            there.arrived(len(part))
            arrived += part
        elif step[0] == "tell":
            told = there.tell()
            here.acknowledged(told)
            assert here.kept_bytes <= here.written - told + 40
        else:
            line = b"".join(bytes(piece) for piece in here.missing(there.received))
        assert here.written == len(written)
        assert there.received == len(arrived)
        assert arrived + line == written
    line = b"".join(bytes(piece) for piece in here.missing(there.received))
    assert arrived + line == written
    here.acknowledged(here.written)
    assert here.settled
    assert here.kept_bytes == 0


def test_memory_of_others_is_referred_to_until_the_peer_has_it() -> None:
    ledger = Ledger()
    ledger.keep(b"header")
    assert ledger.settled
    ledger.keep(memoryview(bytearray(100)), lent=True)
    ledger.keep(b"trailer")
    for count in (0, 6, 105):
        ledger.acknowledged(count)
        assert not ledger.settled
    ledger.acknowledged(106)
    assert ledger.settled
    assert ledger.kept_bytes == 7


@pytest.mark.parametrize("count", [-1, 11, 1 << 63])
def test_a_peer_that_cannot_count_is_not_believed(count: int) -> None:
    ledger = Ledger()
    ledger.keep(b"0123456789")
    with pytest.raises(WireError):
        ledger.acknowledged(count)
    with pytest.raises(WireError):
        ledger.missing(count)
    ledger.acknowledged(10)
    with pytest.raises(WireError, match="has had 10"):
        ledger.missing(9)


def test_the_peer_is_told_now_and_then() -> None:
    ledger = Ledger()
    assert not ledger.arrived(65_535)
    assert ledger.arrived(1)
    assert ledger.tell() == 65_536
    assert not ledger.arrived(65_535)
