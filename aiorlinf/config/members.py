"""Keys that name workers: ``rollout:0-3``, ``rollout:*``, or a list of such."""

from __future__ import annotations

from collections.abc import Iterator

from aiorlinf.address import AddressRange
from aiorlinf.errors import UsageError

__all__ = ["address_ranges", "check_ranges"]


def address_ranges(value: str | tuple[str, ...]) -> tuple[AddressRange, ...]:
    """What a key that names workers says. Raises UsageError if it is malformed, which a loaded configuration is not."""
    return tuple(AddressRange.parse(text) for text in ((value,) if isinstance(value, str) else value))


def check_ranges(key: str, value: str | tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield (key, complaint) for each entry that names no workers."""
    if not value:
        yield key, "no workers are named; allowed: group:rank, group:first-last, group:* or a list of such"
        return
    for index, text in enumerate((value,) if isinstance(value, str) else value):
        try:
            AddressRange.parse(text)
        except UsageError as error:
            yield key if isinstance(value, str) else f"{key}[{index}]", error.message
