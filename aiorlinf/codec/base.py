"""What a codec is.

A codec is lossless and works on one run of bytes at a time, from memory of the caller's straight into memory of the caller's. It does
not frame, cut or checksum: `codec.header` does. A new one is one file in `codec/codecs`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

from aiorlinf.codec.memory import Memory

__all__ = ["Codec", "Context"]

P = TypeVar("P")


class Context(ABC):
    """A codec's working state. One call at a time, in any thread; the calls release the interpreter lock while they work."""

    __slots__ = ()

    @abstractmethod
    def compress_into(self, src: Memory, dst: Memory) -> int | None:
        """Compress all of `src` into the start of `dst`; the number of bytes written, or None: they do not fit.

        `dst` decides what counts as worth it: if it is smaller than `src`, whatever is returned is a gain. Nothing outside it is written.

        Raises:
            ValueError: `src` is larger than `Codec.max_input`.
            MemoryError: no memory for the working state.
        """

    @abstractmethod
    def decompress_into(self, src: Memory, dst: Memory) -> None:
        """Decompress `src`, which must yield exactly as many bytes as `dst` has. Nothing outside `dst` is written.

        Raises:
            WireError: corrupt, or of another size; what is in `dst` then is undefined.
            MemoryError: no memory for the working state.
        """


class Codec(ABC, Generic[P]):
    """A codec with its parameters set. Making one imports its library.

    Args:
        parameters: a record of class `Parameters`; None: the defaults.

    Attributes:
        name: in the configuration.
        number: on the wire, from 1 to 255; never reused.
        package: the distribution that it needs.
        max_input: bytes of the largest tensor that it takes.
        undone_at_once: as `at_once`, for decompressing: bytes that come out.
        Parameters: frozen dataclass of its keys in the configuration, each made with `config.option`.
    """

    name: ClassVar[str]
    number: ClassVar[int]
    package: ClassVar[str]
    max_input: ClassVar[int]
    undone_at_once: ClassVar[int] = 0
    Parameters: ClassVar[type[Any]]

    def __init__(self, parameters: P | None = None) -> None:
        self.probe()
        self.parameters: P = self.Parameters() if parameters is None else parameters

    @classmethod
    @abstractmethod
    def probe(cls) -> None:
        """Import the library.

        Raises:
            ImportError: it is missing, or broken.
        """

    @classmethod
    def choices(cls) -> Sequence[tuple[str, P]]:
        """What ``codec: auto`` may choose from: names for people, and parameters. The cheapest first."""
        return [(cls.name, cls.Parameters())]

    @property
    def max_inflight(self) -> int | None:
        """How many contexts a worker may have, for both directions together; None: contexts cost nothing."""
        return None

    @property
    def at_once(self) -> int:
        """So many bytes it compresses in less time than it takes to hand them to a thread and back: the loop may do that itself."""
        return 0

    def looker(self) -> Context | None:
        """A context of this codec that looks at some ten kilobytes on the loop, without waiting for another and however hard the codec
        works otherwise; the same each time. None: it has none that is quick."""
        return None

    @abstractmethod
    def context(self) -> Context:
        """A new context. One that costs nothing may be the same each time, and then takes any number of calls at once."""

    @abstractmethod
    def compress_bound(self, nbytes: int) -> int:
        """Bytes that are enough for `nbytes` compressed, whatever they are."""

    @abstractmethod
    def describe(self) -> dict[str, str]:
        """For people: the library, its version, and how it is reached."""
