"""The section cluster.net_emulation: a slower network than there is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from aiorlinf.address import AddressRange
from aiorlinf.config.members import address_ranges, check_ranges
from aiorlinf.config.options import option, required

__all__ = ["BandwidthGroupConfig", "DelayPairConfig", "NetEmulationConfig"]


@dataclass(frozen=True, slots=True)
class DelayPairConfig:
    """Workers that are far from each other."""

    src: str | tuple[str, ...] = required("workers on the one side: trainer:0, rollout:0-3, rollout:*, or a list of such")
    dst: str | tuple[str, ...] = required("workers on the other side, in the same form")
    delay_ms: float = required("milliseconds that a message takes on its way, one way", minimum=0, maximum=60_000)

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield (key, complaint) for what a single key cannot tell."""
        yield from check_ranges("src", self.src)
        yield from check_ranges("dst", self.dst)


@dataclass(frozen=True, slots=True)
class BandwidthGroupConfig:
    """Workers behind one link to all others."""

    members: str | tuple[str, ...] = required("workers that share the link: rollout:0-3, rollout:*, or a list of such")
    bandwidth_mbps: float = required("what the link carries per direction; megabits (10^6 bits) per second", minimum=1e-3, maximum=1e6)

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield (key, complaint) for what a single key cannot tell."""
        yield from check_ranges("members", self.members)


@dataclass(frozen=True, slots=True)
class NetEmulationConfig:
    """A slower network than there is, for trying out what a job would do on it."""

    enabled: bool = option(True, "false, or without this section: messages travel as fast as they can")
    symmetric: bool = option(True, "false: delays hold from src to dst only, bandwidths for what members send only")
    crossdc_pairs: tuple[DelayPairConfig, ...] = option((), "workers that are far from each other, and how far")
    bandwidth_groups: tuple[BandwidthGroupConfig, ...] = option((), "workers that share a link to all others, and its bandwidth")

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield (key, complaint) for what a single key cannot tell."""
        if self.enabled and not self.crossdc_pairs and not self.bandwidth_groups:
            yield "enabled", "there is nothing to emulate; give crossdc_pairs, bandwidth_groups or both, or set enabled: false"
        ways = [
            (index, pair, address_ranges(src), address_ranges(dst))
            for index, pair in enumerate(self.crossdc_pairs)
            for src, dst in ((pair.src, pair.dst), *(((pair.dst, pair.src),) if self.symmetric else ()))
        ]
        for index, pair, src, dst in ways:
            for earlier, other, other_src, other_dst in ways:
                if earlier < index and pair.delay_ms != other.delay_ms and _overlap(src, other_src) and _overlap(dst, other_dst):
                    delays = f"{pair.delay_ms:g} and {other.delay_ms:g} ms"
                    both = "; with symmetric: true each pair counts both ways" if self.symmetric else ""
                    complaint = f"some of its workers have another delay by crossdc_pairs[{earlier}] ({delays}){both}"
                    yield f"crossdc_pairs[{index}]", complaint


def _overlap(some: tuple[AddressRange, ...], others: tuple[AddressRange, ...]) -> bool:
    return any(one.overlaps(other) for one in some for other in others)
