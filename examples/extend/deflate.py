"""Deflate: for those who have nothing but Python."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from aiorlinf.codec.base import Codec, Context
from aiorlinf.codec.memory import Memory, byte_view, writable_view
from aiorlinf.config import option
from aiorlinf.errors import WireError

__all__ = ["CODEC", "Deflate", "DeflateParameters"]


@dataclass(frozen=True, slots=True)
class DeflateParameters:
    """Keys of ``codec: deflate``."""

    level: int = option(1, "higher compresses more, and takes longer", minimum=1, maximum=9)


class Deflate(Codec[DeflateParameters], Context):
    """See the module. Without any state, so it is its own context."""

    name = "deflate"
    number = 200
    package = "python"
    max_input = 2**31 - 1
    Parameters = DeflateParameters

    @classmethod
    def probe(cls) -> None:
        pass

    def context(self) -> Context:
        return self

    def compress_bound(self, nbytes: int) -> int:
        if not 0 <= nbytes <= self.max_input:
            raise ValueError(f"{nbytes} bytes; at most {self.max_input}")
        return nbytes + nbytes // 1000 + 64

    def describe(self) -> dict[str, str]:
        return {"library": f"zlib {zlib.ZLIB_RUNTIME_VERSION}", "calls": "Python's own, with a copy each way"}

    def compress_into(self, src: Memory, dst: Memory) -> int | None:
        source, target = byte_view(src), writable_view(dst)
        if source.nbytes > self.max_input:
            raise ValueError(f"{source.nbytes} bytes; at most {self.max_input}")
        packed = zlib.compress(source, self.parameters.level)
        if len(packed) > target.nbytes:
            return None
        target[: len(packed)] = packed
        return len(packed)

    def decompress_into(self, src: Memory, dst: Memory) -> None:
        target = writable_view(dst)
        stream = zlib.decompressobj()
        try:
            data = stream.decompress(byte_view(src), target.nbytes + 1)  # no more, whatever it claims to be
        except zlib.error as error:
            raise WireError(f"not a deflate stream: {error}") from error
        if len(data) != target.nbytes or not stream.eof or stream.unused_data:
            raise WireError(f"a deflate stream of another size than {target.nbytes} bytes")
        target[:] = data


CODEC = Deflate
