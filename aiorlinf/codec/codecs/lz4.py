"""LZ4 blocks: the quickest codec; for fast networks.

The calls of the lz4 package return new `bytes`. Its extension module exports the LZ4 functions themselves, though, which work between
any two addresses; called through ctypes they are 1.5 times (compressing) and 3 times (decompressing) as fast. They are no promise of
the package, so where they are not to be found, its public calls do it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, NamedTuple

from aiorlinf.codec.base import Codec, Context
from aiorlinf.codec.memory import Memory, address_of, byte_view, writable_view
from aiorlinf.config import option
from aiorlinf.errors import WireError

__all__ = ["CODEC", "MAX_INPUT", "Functions", "Lz4", "Lz4Parameters", "find_functions"]

MAX_INPUT: Final = 0x7E000000
"""LZ4_MAX_INPUT_SIZE, bytes."""

_INT_MAX = 2**31 - 1
_MAX_ACCELERATION = 65537


@dataclass(frozen=True, slots=True)
class Lz4Parameters:
    """Keys of ``codec: lz4``."""

    acceleration: int = option(1, "larger is faster and compresses less", minimum=1, maximum=_MAX_ACCELERATION)


class Functions(NamedTuple):
    """The C functions. Calling them releases the interpreter lock."""

    compress: Callable[[int, int, int, int, int], int]
    decompress: Callable[[int, int, int, int], int]
    bound: Callable[[int], int]
    version: str


def find_functions(module: ModuleType) -> Functions | str:
    """The C functions that an extension module exports, tried out; or the reason why there are none."""
    path = getattr(module, "__file__", None)
    if not path:
        return f"{module.__name__} has no file"
    try:
        library = ctypes.CDLL(path)
        compress, decompress = library.LZ4_compress_fast, library.LZ4_decompress_safe
        bound, version = library.LZ4_compressBound, library.LZ4_versionString
    except (OSError, AttributeError) as error:
        return f"{module.__name__} does not export the LZ4 functions ({error})"
    pointer, number = ctypes.c_void_p, ctypes.c_int
    compress.argtypes, compress.restype = (pointer, pointer, number, number, number), number
    decompress.argtypes, decompress.restype = (pointer, pointer, number, number), number
    bound.argtypes, bound.restype = (number,), number
    version.argtypes, version.restype = (), ctypes.c_char_p
    found = Functions(compress, decompress, bound, version().decode("ascii", "replace"))
    return found if _works(found) else f"the LZ4 functions of {module.__name__} do not do what they should"


def _works(functions: Functions) -> bool:
    text = b"the same again, " * 64
    src = ctypes.create_string_buffer(text, len(text))
    packed = ctypes.create_string_buffer(len(text))
    back = ctypes.create_string_buffer(len(text))
    size = functions.compress(ctypes.addressof(src), ctypes.addressof(packed), len(text), len(text), 1)
    if not 0 < size < len(text):
        return False
    return functions.decompress(ctypes.addressof(packed), ctypes.addressof(back), size, len(text)) == len(text) and back.raw == text


@functools.cache
def _installed() -> Functions | str:
    try:
        module = importlib.import_module("lz4.block._block")
    except ImportError as error:
        return f"the lz4 package has no extension module ({error})"
    return find_functions(module)


class Lz4(Codec[Lz4Parameters], Context):
    """See the module. Without any state, so it is its own context, and takes any number of calls at once.

    Args:
        functions: the C functions, or why there are none; None: look for them.
    """

    name = "lz4"
    number = 1
    package = "lz4"
    max_input = MAX_INPUT
    undone_at_once = 256 * 1024
    Parameters = Lz4Parameters

    def __init__(self, parameters: Lz4Parameters | None = None, *, functions: Functions | str | None = None) -> None:
        super().__init__(parameters)
        self._block: Any = importlib.import_module("lz4.block")
        found = _installed() if functions is None else functions
        self._functions = None if isinstance(found, str) else found
        self._problem = found if isinstance(found, str) else ""

    @classmethod
    def probe(cls) -> None:
        importlib.import_module("lz4.block")

    @property
    def at_once(self) -> int:
        return 128 * 1024

    def looker(self) -> Context:
        return self

    def context(self) -> Context:
        return self

    def compress_bound(self, nbytes: int) -> int:
        if not 0 <= nbytes <= MAX_INPUT:
            raise ValueError(f"{nbytes} bytes; LZ4 takes at most {MAX_INPUT}")
        return nbytes + nbytes // 255 + 16

    def compress_into(self, src: Memory, dst: Memory) -> int | None:
        source, target = byte_view(src), writable_view(dst)
        if source.nbytes > MAX_INPUT:
            raise ValueError(f"{source.nbytes} bytes; LZ4 takes at most {MAX_INPUT}")
        functions = self._functions
        if functions is None:
            return self._compress_by_package(source, target)
        size = functions.compress(
            address_of(source), address_of(target), source.nbytes, min(target.nbytes, _INT_MAX), self.parameters.acceleration
        )
        return size if size > 0 else None

    def decompress_into(self, src: Memory, dst: Memory) -> None:
        source, target = byte_view(src), writable_view(dst)
        if source.nbytes > _INT_MAX or target.nbytes > _INT_MAX:
            raise WireError(f"an LZ4 block of {source.nbytes} bytes for {target.nbytes} bytes; at most {_INT_MAX} are possible")
        functions = self._functions
        if functions is None:
            self._decompress_by_package(source, target)
            return
        size = functions.decompress(address_of(source), address_of(target), source.nbytes, target.nbytes)
        if size != target.nbytes:
            raise WireError(f"corrupt LZ4 data: {max(size, 0)} of {target.nbytes} bytes came out")

    def _compress_by_package(self, source: memoryview, target: memoryview) -> int | None:
        packed = self._block.compress(source, mode="fast", acceleration=self.parameters.acceleration, store_size=False)
        if len(packed) > target.nbytes:
            return None
        target[: len(packed)] = packed
        return len(packed)

    def _decompress_by_package(self, source: memoryview, target: memoryview) -> None:
        try:
            data = self._block.decompress(source, uncompressed_size=target.nbytes)
        except (self._block.LZ4BlockError, ValueError) as error:
            raise WireError(f"corrupt LZ4 data: {error}") from error
        if len(data) != target.nbytes:
            raise WireError(f"corrupt LZ4 data: {len(data)} of {target.nbytes} bytes came out")
        target[:] = data

    def describe(self) -> dict[str, str]:
        if self._functions is not None:
            return {"library": f"LZ4 {self._functions.version}", "calls": "the LZ4 functions, memory to memory"}
        version = importlib.import_module("lz4").library_version_string()
        return {"library": f"LZ4 {version}", "calls": "the lz4 package, with a copy each way", "reason": self._problem}


CODEC = Lz4
