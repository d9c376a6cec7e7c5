"""Small messages: the short ways give what the long way gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from aiorlinf.errors import NonContiguousTensor, UnsupportedObject, WireError
from aiorlinf.wire import inline
from aiorlinf.wire.inline import MANIFEST_MAX, decode_inline, encode_inline, pack_inline
from aiorlinf.wire.manifest import HEAD, encode_manifest
from aiorlinf.wire.tree import Flat, Kind, flatten
from tests.wire.carry import bits, by_inline, same

__all__: list[str] = []


class Row(dict[str, int]):
    """A dict that may hold anything besides."""


def body_of(obj: Any, **options: Any) -> bytes:
    body = encode_inline(obj, 1 << 20, **options)
    assert type(body) is bytes
    return body


def test_a_message_is_manifest_then_payload() -> None:
    obj = [torch.arange(3, dtype=torch.int16), torch.ones(1)]
    flat = flatten(obj)
    assert body_of(obj) == encode_manifest(flat) + bits(obj[0]) + bits(obj[1])
    assert pack_inline(flat) == body_of(obj)


@pytest.mark.parametrize(
    ("obj", "plain"),
    [
        ({"step": 1, "ids": [1, 2], "info": {"lives": 3, "name": "x"}}, True),
        ([{"a": 1}, (1, None)], True),
        ({"info": {"obs": torch.ones(1)}}, False),
        ({"info": {b"bytes": 1}}, False),
        ({"info": {"rest": [1]}}, False),
        ({"info": dict.fromkeys(range(65))}, False),
        ([np.ones(1)], False),
        ([b"bytes"], False),
        (Row(a=1), False),
    ],
)
def test_plain_is_only_what_cannot_hold_a_tensor(obj: Any, plain: bool) -> None:
    assert inline.is_plain(obj) is plain


@pytest.mark.parametrize("allow_pickle", [True, False])
def test_all_forms_of_one_message_are_equal(allow_pickle: bool) -> None:
    """The short ways taken for common objects give what the long way gives."""
    for obj in (
        torch.ones(3),
        torch.ones(2, 3),
        {"a": 1},
        {"a": {"b": 1}},
        [torch.ones(1)],
        torch.ones(0),
        torch.tensor(1.5),
        None,
        "x" * 60_000,
    ):
        for _ in range(3):
            assert body_of(obj, allow_pickle=allow_pickle) == pack_inline(flatten(obj, allow_pickle=allow_pickle))


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65])
def test_the_limit_counts_payload(size: int) -> None:
    for obj in (torch.zeros(size, dtype=torch.uint8), [torch.zeros(size, dtype=torch.uint8)], {"n": np.zeros(size, np.uint8)}):
        for _ in range(2):
            assert (type(encode_inline(obj, 64)) is bytes) == (size <= 64)


def test_a_message_over_the_limit_comes_back_taken_apart() -> None:
    tensor = torch.zeros(100)
    flat = encode_inline(tensor, 399)
    assert isinstance(flat, Flat)
    assert flat.leaves[0].tensor is tensor
    same(tensor, decode_inline(memoryview(pack_inline(flat))))


def test_a_small_payload_with_a_long_manifest_is_not_inline() -> None:
    flat = encode_inline({"k" * MANIFEST_MAX: torch.zeros(0)}, 1 << 20)
    assert isinstance(flat, Flat)
    with pytest.raises(UnsupportedObject, match=str(MANIFEST_MAX)):
        pack_inline(flat)


def test_what_arrives_does_not_share_memory() -> None:
    got = by_inline([torch.ones(2), torch.ones(3), np.ones(2)])
    assert len({got[0].untyped_storage().data_ptr(), got[1].untyped_storage().data_ptr(), got[2].ctypes.data}) == 3
    for part in got:
        part += 1


def test_what_arrives_is_aligned() -> None:
    obj = [torch.zeros(size, dtype=dtype) for size in (1, 3, 1000) for dtype in (torch.uint8, torch.complex128, torch.bfloat16)]
    for tensor in by_inline(obj):
        assert tensor.data_ptr() % tensor.element_size() == 0


def test_repeated_forms_with_other_values() -> None:
    for index in range(5):
        obj = {"t": torch.full((2,), float(index)), "u": torch.full((1, 2), index)}
        same(obj, by_inline(obj))
        same(obj["t"], by_inline(obj["t"]))
        parameter = Parameter(obj["t"])
        same(parameter, by_inline(parameter))


def test_more_forms_than_are_remembered() -> None:
    for index in range(1500):
        tensor = torch.zeros(index % 750, dtype=torch.uint8)
        assert by_inline(tensor).shape == tensor.shape
        assert by_inline({str(index): tensor}).keys() == {str(index)}
    assert len(inline._heads) <= 512
    assert len(inline._manifests) <= 512


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "shorter than its head"),
        (b"\x06" * 13, "shorter than its head"),
        (HEAD.pack(99, 0, 0, 0, 0), "unknown kind"),
        (HEAD.pack(0, 0, 0, 0, 0), "unknown kind"),
        (HEAD.pack(Kind.LIST, 0, 0, 0, 0) + b"x", "1 bytes of payload where 0 were announced"),
        (body_of(torch.ones(2))[:-1], "7 bytes of payload where 8 were announced"),
        (body_of(torch.ones(2)) + b"x", "9 bytes of payload where 8 were announced"),
        (body_of({"a": np.ones(1)})[:-1], "7 bytes of payload"),
        (body_of({"a": 1})[:-1], "cut short"),
        (HEAD.pack(Kind.TENSOR, 0, 0, 0, 0), "0 leaves"),
        (HEAD.pack(Kind.OBJECT, 0, 2**31, 5, 2**31), "accepted|cut short"),
    ],
)
def test_malformed(body: bytes, text: str) -> None:
    for _ in range(2):
        with pytest.raises(WireError, match=text):
            decode_inline(memoryview(body))


def test_pickle_is_refused_where_it_is_off() -> None:
    for obj in ({"a": 1}, {"a": [torch.ones(1)]}, Kind.LIST):
        with pytest.raises(UnsupportedObject, match="unpickling is switched off"):
            decode_inline(memoryview(body_of(obj)), allow_pickle=False)


def test_errors_at_the_call() -> None:
    with pytest.raises(NonContiguousTensor, match=r"obj\['a'\]"):
        encode_inline({"a": torch.ones(2, 3).t()}, 1 << 20)
    with pytest.raises(NonContiguousTensor):
        encode_inline(torch.ones(2, 3).t(), 1 << 20)
    with pytest.raises(UnsupportedObject):
        encode_inline(lambda: None, 1 << 20)
    freed = torch.ones(2)
    encode_inline(freed, 1 << 20)
    freed.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedObject, match="freed"):
        encode_inline(freed, 1 << 20)
