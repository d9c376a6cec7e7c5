"""A flattened object: what stays of it, and what travels raw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from aiorlinf.wire.leaves import Device, Leaf

__all__ = ["INDEXED", "SPLICED", "Flat", "Kind"]

INDEXED = 1
"""Flag of the tensor containers: elements name their leaf by number, because one tensor occurs more than once."""
SPLICED = 2
"""Flag of the kinds with a codec: long pieces of the skeleton travel as leaves."""

_CPU = Device.CPU


class Kind(IntEnum):
    """How the skeleton of a message is to be read. The numbers are part of the protocol."""

    TENSOR = 1
    LIST = 2  # of tensors
    TUPLE = 3  # of tensors
    DICT = 4  # of tensors, by text
    DATACLASS = 5  # pickled; holds tensors
    OBJECT = 6  # pickled
    PLAIN = 7  # without pickle: see wire/plain.py


@dataclass(slots=True)
class Flat:
    """An object taken apart. It keeps all memory alive that its parts show.

    Attributes:
        kind: how the skeleton is to be read.
        skeleton: what is not a leaf, in pieces.
        leaves: in the order in which their payload travels.
        flags: INDEXED, SPLICED.
    """

    kind: Kind
    skeleton: Sequence[bytes | bytearray]
    leaves: list[Leaf]
    flags: int = field(default=0)

    @property
    def payload_bytes(self) -> int:
        """Sum of the leaves' sizes."""
        total = 0
        for leaf in self.leaves:  # no generator: it is asked of each message, and most have one leaf
            total += leaf.spec.nbytes
        return total

    @property
    def on_devices(self) -> bool:
        """Some of its leaves are on accelerators."""
        found = False
        for leaf in self.leaves:  # as above
            if leaf.spec.device is not _CPU:
                found = True
        return found

    def hold(self) -> None:
        """Its leaves show the memory that they show now, whatever becomes of the tensor objects. Not before tensors are given away."""
        for leaf in self.leaves:
            leaf.hold()

    def versions(self) -> tuple[int, ...]:
        """The version counters of the tensors now. A different answer later means that somebody wrote to one in between.

        Arrays and bytes have no counter, nor have tensors made in inference mode: writes to them go unnoticed.
        """
        found = []
        for leaf in self.leaves:  # as above
            tensor = leaf.tensor
            if tensor is not None and not tensor.is_inference():
                found.append(tensor._version)
        return tuple(found)
