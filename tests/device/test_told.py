"""What two sides tell each other about accelerators, and what a hostile one may tell."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiorlinf.backends.cuda_ipc import decode_handles, encode_handles
from aiorlinf.device.runtime import Shared
from aiorlinf.errors import WireError
from aiorlinf.link.device_facts import DeviceFacts

__all__: list[str] = []

FACTS = DeviceFacts("process 1", "cuda", ("GPU-1", "GPU-2"), "GPU-2", False, None, ("GPU-2",))
LEAVES = [Shared("GPU-1", b"\0handle\xff", 7, 512, 3), Shared("GPU-2", b"", 1 << 40)]
EVENTS = {"GPU-1": b"\1\2", "GPU-2": b""}


def test_facts_arrive_as_they_were() -> None:
    for facts in (FACTS, DeviceFacts("p"), dataclasses.replace(FACTS, target="", pairs="no")):
        assert DeviceFacts.decode(facts.encode()) == facts


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[1,2,3]",
        b'["p","cuda",["GPU-1"],"GPU-2",false,null,[]]',
        b'["p","cuda",[7],"",false,null,[]]',
        b'["p","cuda","GPU-1","",false,null,[]]',
        b'["p","cuda",[],"",0,null,[]]',
        b'["p",null,[],"",false,null,[]]',
        b'["p","cuda",[],"",false,null,[7]]',
        b'["p","cuda",[],"",false,null,null]',
        b'["p","cuda",[],"",false,null]',
    ],
)
def test_other_facts_are_refused(body: bytes) -> None:
    with pytest.raises(WireError):
        DeviceFacts.decode(body)


def test_handles_arrive_as_they_were() -> None:
    assert decode_handles(memoryview(encode_handles(EVENTS, LEAVES)), [7, 1 << 40]) == (EVENTS, LEAVES)


@pytest.mark.parametrize("sizes", [[], [7], [7, 7], [1 << 40, 7]])
def test_handles_must_fit_the_leaves(sizes: list[int]) -> None:
    with pytest.raises(WireError):
        decode_handles(memoryview(encode_handles(EVENTS, LEAVES)), sizes)
    with pytest.raises(WireError):
        decode_handles(memoryview(encode_handles({"GPU-1": b""}, LEAVES)), [7, 1 << 40])


@given(st.binary(max_size=64) | st.text(alphabet='[]{}",0123nul', max_size=64).map(str.encode))
def test_no_bytes_do_harm(body: bytes) -> None:
    for decode in (DeviceFacts.decode, lambda body: decode_handles(memoryview(body), [1])):
        try:
            decode(body)
        except WireError:
            pass
