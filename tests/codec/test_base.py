"""What every codec keeps to. A new codec needs a class here."""

from __future__ import annotations

from typing import Any

from aiorlinf.codec.base import Codec
from aiorlinf.codec.registry import codecs_by_name
from aiorlinf.testing.conformance import CodecConformance
from tests.codec.material import CODECS, make_codec

__all__: list[str] = []


class TestLz4(CodecConformance):
    def make(self) -> Codec[Any]:
        return make_codec("lz4")


class TestLz4ByThePackage(CodecConformance):
    copies = True

    def make(self) -> Codec[Any]:
        return make_codec("lz4 by the package")


class TestZstd(CodecConformance):
    def make(self) -> Codec[Any]:
        return make_codec("zstd")


def test_these_are_all() -> None:
    assert {make_codec(name).name for name in CODECS} == set(codecs_by_name())
    made = [suite().make() for suite in CodecConformance.__subclasses__() if suite.__module__ == __name__]
    assert {codec.name for codec in made} == set(codecs_by_name())
