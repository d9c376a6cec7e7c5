"""How a section declares its keys, and what a reader of sections asks of the dataclasses."""

from __future__ import annotations

import dataclasses
import functools
import pkgutil
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

__all__ = ["alternatives_of", "hints_of", "item_hint", "key_path", "nested_section", "option", "required", "variant", "variant_records"]

T = TypeVar("T")


def option(
    default: T,
    doc: str,
    *,
    choices: Sequence[object] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
) -> T:
    """A field of a configuration section.

    Args:
        default: the value when the key is absent.
        doc: one line for the user, with the unit.
        choices: the only values allowed.
        minimum, maximum: inclusive bounds of a number, or of each number in a tuple.
        above: exclusive lower bound.
    """
    metadata = {"doc": doc, "choices": choices, "min": minimum, "max": maximum, "above": above}
    return dataclasses.field(default=default, metadata=metadata)


def required(doc: str, *, minimum: float | None = None, maximum: float | None = None, above: float | None = None) -> Any:
    """As `option`, for a key that has no default. Such fields come first in their section."""
    return dataclasses.field(metadata={"doc": doc, "choices": None, "min": minimum, "max": maximum, "above": above})


def variant(key: str, source: str) -> Any:
    """The last field of a section: holds the keys that only some values of another key have. In the file they stand beside that key.

    Args:
        key: the other key; None as its value stands for no keys.
        source: ``module:function``, which gives a record class for each value of that key. It is asked when a configuration that has the
            section is loaded, so that what is built on the configuration can declare keys of its own.
    """
    return dataclasses.field(default=None, metadata={"variant": key, "source": source})


@functools.cache
def hints_of(section: type) -> dict[str, Any]:
    """The type of each field of a section, by its name."""
    return typing.get_type_hints(section)


def nested_section(hint: Any) -> type | None:
    """The section that a key of this type holds; None if it holds values."""
    for part in alternatives_of(hint):
        if isinstance(part, type) and dataclasses.is_dataclass(part):
            return part
    return None


def item_hint(hint: Any) -> Any:
    """What is in a list of any length; None if it is none."""
    args = typing.get_args(hint)
    return args[0] if typing.get_origin(hint) is tuple and args[-1] is Ellipsis else None


def alternatives_of(hint: Any) -> tuple[Any, ...]:
    """The types that a union allows; of any other type, itself alone."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def key_path(path: str, key: str) -> str:
    """The full path of a key of the section at ``path``, which is empty for the whole configuration."""
    return f"{path}.{key}" if path else key


def variant_records(field: dataclasses.Field[Any]) -> Mapping[str, type[Any]]:
    """What the source of a field made by `variant` gives: a record class for each value of the other key."""
    records: Mapping[str, type[Any]] = pkgutil.resolve_name(field.metadata["source"])()
    return records
