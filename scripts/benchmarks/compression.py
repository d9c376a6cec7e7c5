"""The suite ``compression``: which codec for which data on which network. Data only; `choice` and `choice_plot` show what it found."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from scripts.benchmarks.compressed import CODECS, WAYS
from scripts.benchmarks.payloads import FRAME_BYTES, PAYLOADS
from scripts.benchmarks.plan import FULL, MIB, QUICK, Case, Suite, time_row

__all__ = ["COMPRESSION", "FIXED", "LINKS", "label"]

LINKS: Final[dict[str, str]] = {
    "link-100m": "100 Mbit/s",
    "link-1g": "1 Gbit/s",
    "link-10g": "10 Gbit/s",
    "emulated-1g": "1 Gbit/s, emulated",
    "emulated-far": "100 Mbit/s and 20 ms, emulated",
}
"""Contender to the network that it is on. Those that are not emulated are veth pairs shaped by the kernel (`shaped`)."""

FIXED: Final = tuple(codec for codec in WAYS if codec != "auto")
"""What a user can choose, the cheapest first."""


def label(link: str, codec: str) -> str:
    """Of the row of a case."""
    return f"{LINKS[link]}: {codec}"


def _case(name: str) -> Case:
    rows = tuple(time_row(label(link, codec), link, codec) for link in LINKS for codec in CODECS)
    return Case(name, name, PAYLOADS[name][0], "ms", "lower", rows)


COMPRESSION: Final = Suite(
    "compression",
    "two processes on networks of several bandwidths: raw, lz4, zstd and auto, with what rollouts and trainers send",
    tuple(_case(name) for name in PAYLOADS),
    full=replace(FULL, tensor_bytes=128 * FRAME_BYTES, transfers=3),
    quick=replace(QUICK, tensor_bytes=MIB, transfers=1),
    rounds=3,
)
