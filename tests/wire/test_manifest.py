"""What a receiver accepts as a description of a message."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch

from aiorlinf.errors import UnsupportedObject, WireError
from aiorlinf.wire.containers import pack_keys, pack_numbers
from aiorlinf.wire.flat import INDEXED, SPLICED, Kind
from aiorlinf.wire.leaves import RAW, STREAM, LeafSpec
from aiorlinf.wire.manifest import HEAD, Limits, decode_manifest, describe_manifest, encode_manifest, read_manifest
from aiorlinf.wire.tree import flatten

__all__: list[str] = []

F4 = LeafSpec(16, "float32", (4,))
BUFFER = LeafSpec(16, "", (), RAW)
PIECE = LeafSpec(16, "", (), RAW | STREAM)


def manifest(kind: int, flags: int, specs: list[LeafSpec], skeleton: bytes = b"") -> bytes:
    table = b"".join(spec.entry for spec in specs)
    return HEAD.pack(kind, flags, len(specs), len(skeleton), len(table)) + skeleton + table


def test_a_manifest_says_all_before_the_payload() -> None:
    flat = flatten({"a": torch.zeros(2, 3), "b": torch.zeros(0, dtype=torch.bool)})
    got = decode_manifest(encode_manifest(flat))
    assert got.kind is Kind.DICT
    assert got.keys == ("a", "b")
    assert got.numbers is None
    assert got.specs == (LeafSpec(24, "float32", (2, 3)), LeafSpec(0, "bool", (0,)))
    assert got.payload_bytes == flat.payload_bytes == 24


def test_the_size_of_a_manifest_within_more_bytes() -> None:
    data = encode_manifest(flatten([torch.zeros(4)]))
    got, size = read_manifest(memoryview(data + b"payload"))
    assert size == len(data)
    assert got.specs == (F4,)


def test_two_thousand_leaves() -> None:
    tensors = {f"layer {index}": torch.zeros(index % 7) for index in range(2000)}
    got = decode_manifest(encode_manifest(flatten(tensors)))
    assert got.keys == tuple(tensors)
    assert [spec.shape for spec in got.specs] == [tuple(tensor.shape) for tensor in tensors.values()]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "shorter than its head"),
        (b"\x01" * 13, "shorter than its head"),
        (manifest(0, 0, []), "unknown kind"),
        (manifest(99, 0, []), "unknown kind"),
        (manifest(Kind.LIST, SPLICED, [F4]), "unknown kind"),
        (manifest(Kind.TENSOR, INDEXED, [F4], pack_numbers([0])), "unknown kind"),
        (manifest(Kind.TENSOR, 0, []), "a tensor of 1 tensors with 0 leaves"),
        (manifest(Kind.TENSOR, 0, [F4, F4]), "with 2 leaves"),
        (manifest(Kind.TENSOR, 0, [F4], b"x"), "1 bytes too many"),
        (manifest(Kind.TENSOR, 0, [BUFFER]), "raw buffer"),
        (manifest(Kind.LIST, 0, [F4, BUFFER]), "raw buffer"),
        (manifest(Kind.LIST, INDEXED, [F4, F4], pack_numbers([0, 2])), "not sent"),
        (manifest(Kind.LIST, INDEXED, [F4, F4], pack_numbers([0, 0])), "no element"),
        (manifest(Kind.DICT, 0, [F4], pack_keys([])), "0 keys for 1 tensors"),
        (manifest(Kind.DICT, 0, [F4], pack_keys(["a"]) + b"x"), "too many"),
        (manifest(Kind.OBJECT, 0, [PIECE], b"x"), "1 pieces of a stream for 0 gaps"),
        (manifest(Kind.OBJECT, SPLICED, [F4], pack_numbers([1, 0])), "0 pieces of a stream for 1 gaps"),
        (manifest(Kind.PLAIN, SPLICED, [F4, PIECE]), "in two places"),
        (manifest(Kind.PLAIN, SPLICED, [PIECE], b"N"), "in two places"),
        (manifest(Kind.PLAIN, 0, [PIECE]), "in two places"),
        (manifest(Kind.LIST, 0, [F4])[:-1], "cut short after"),
        (manifest(Kind.LIST, 0, [F4]) + b"x", "1 bytes behind the manifest"),
        (HEAD.pack(Kind.LIST, 0, 2**32 - 1, 0, len(F4.entry)) + F4.entry, "4294967295 leaves in a table"),
        (HEAD.pack(Kind.LIST, 0, 1, 0, 2 * len(F4.entry)) + F4.entry * 2, "behind the last leaf"),
        (HEAD.pack(Kind.LIST, 0, 2, 0, len(F4.entry)) + F4.entry, "cut short"),
        (HEAD.pack(Kind.LIST, 0, 0, 2**32 - 1, 2**32 - 1), "at most 16777216 are accepted"),
    ],
)
def test_malformed_manifests(data: bytes, text: str) -> None:
    with pytest.raises(WireError, match=text):
        decode_manifest(data)


def test_limits_of_the_receiver() -> None:
    data = encode_manifest(flatten(torch.zeros(4)))
    with pytest.raises(WireError, match="at most 20 are accepted"):
        decode_manifest(data, limits=Limits(max_manifest_bytes=20))
    with pytest.raises(WireError, match="a payload of 16 bytes; at most 15"):
        decode_manifest(data, limits=Limits(max_message_bytes=15))
    decode_manifest(data, limits=Limits(max_manifest_bytes=len(data), max_message_bytes=16))


def test_limits_of_the_sender_name_the_key_to_raise() -> None:
    flat = flatten([torch.zeros(4)] * 1 + [torch.zeros(5)])
    with pytest.raises(UnsupportedObject, match=r"raise cluster\.collective\.max_manifest_bytes"):
        encode_manifest(flat, limits=Limits(max_manifest_bytes=20))
    with pytest.raises(UnsupportedObject, match=r"takes 36 bytes; at most 35 .*raise cluster\.collective\.max_message_bytes"):
        encode_manifest(flat, limits=Limits(max_message_bytes=35))


@pytest.mark.parametrize(
    ("obj", "text"),
    [
        (torch.zeros(4), "tensor float32[4]"),
        ({"a": torch.zeros(4), "b": torch.zeros(4)}, "dict of 2 leaves, 32 bytes"),
        ((torch.zeros(4),), "tuple of 1 leaf, 16 bytes"),
        ({"a": 1, "b": np.zeros(4)}, "object of 1 leaf, 32 bytes"),
    ],
)
def test_manifests_in_words(obj: Any, text: str) -> None:
    flat = flatten(obj)
    assert describe_manifest(flat) == describe_manifest(decode_manifest(encode_manifest(flat))) == text
    plain = flatten(obj, allow_pickle=False)
    assert describe_manifest(plain) == text


def test_what_the_codec_has_to_read() -> None:
    got = decode_manifest(encode_manifest(flatten([b"x" * 100_000, torch.zeros(1000)])))
    assert 100_000 < got.codec_bytes < 100_200
    assert decode_manifest(encode_manifest(flatten(torch.zeros(1000)))).codec_bytes == 0


def test_head_layout_is_fixed() -> None:
    assert HEAD.size == struct.calcsize("<BBIII") == 14
