"""From plain values to records: reads nothing but the dataclasses, so a new section or key is one more field."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING
from typing import Any, TypeVar, cast

from aiorlinf.config.complaints import check_rules, describe, expected, remedy, unknown_key
from aiorlinf.config.options import alternatives_of, hints_of, key_path, variant_records
from aiorlinf.errors import ConfigError

__all__ = ["read_section"]

T = TypeVar("T")


def read_section(section: type[T], data: object, path: str) -> T:
    """The checked record of a section.

    Args:
        section: its dataclass.
        data: a mapping of its keys; None stands for an empty one.
        path: the section's full path, for errors.

    Raises:
        ConfigError: a key is unknown or missing, or a value is not allowed.
    """
    if data is None:
        data = {}  # `network:` with every key commented out
    if not isinstance(data, Mapping):
        raise ConfigError(path, f"a section with keys is expected, not {describe(data)}")
    fields = {field.name: field for field in dataclasses.fields(cast(Any, section))}
    variant_field = next((field for field in fields.values() if "variant" in field.metadata), None)
    if variant_field is not None:
        del fields[variant_field.name]
    hints = hints_of(cast(Any, section))
    values: dict[str, Any] = {}
    others: dict[str, object] = {}
    for key, value in data.items():
        if isinstance(key, str) and key in fields:
            if value is None and fields[key].default_factory is not MISSING:
                continue  # a section with every key commented out is as good as none
            values[key] = _value(hints[key], value, key_path(path, key), fields[key].metadata)
        elif variant_field is not None:
            others[str(key)] = value
        else:
            deeper = [key_path(path, inner) for inner in _deeper(section, str(key))]
            raise ConfigError(key_path(path, str(key)), unknown_key(str(key), list(fields), deeper))
    if variant_field is not None:
        values[variant_field.name] = _variant_section(variant_field, values, others, path, list(fields))
    for name, field in fields.items():
        if name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(key_path(path, name), "this key is required")
    record = section(**values)
    check = getattr(record, "check", None)
    if check is not None:
        for key, complaint in check():
            raise ConfigError(key_path(path, key), complaint)
    return record


def _deeper(section: type[Any], key: str) -> Iterator[str]:
    """Where the key stands in the sections of this one, and in theirs."""
    for name, hint in hints_of(cast(Any, section)).items():
        for kind in alternatives_of(hint):
            if isinstance(kind, type) and dataclasses.is_dataclass(kind):
                if any(inner.name == key for inner in dataclasses.fields(kind)):
                    yield f"{name}.{key}"
                for path in _deeper(kind, key):
                    yield f"{name}.{path}"


def _variant_section(
    field: dataclasses.Field[Any], values: Mapping[str, Any], others: Mapping[str, object], path: str, plain: list[str]
) -> object:
    """The record of the keys that stand in the section because of what another key says; None if that says nothing."""
    by = field.metadata["variant"]
    chosen = values.get(by)
    if chosen is None and not others:
        return None
    records = variant_records(field)
    if chosen is not None:
        check_rules(chosen, key_path(path, by), {"choices": list(records)})
    own = [] if chosen is None else [inner.name for inner in dataclasses.fields(records[chosen])]
    for key in others:
        if key in own:
            continue
        allowed = ", ".join(plain + own)
        has_it = [f"{by}: {name}" for name, record in records.items() if any(inner.name == key for inner in dataclasses.fields(record))]
        if not has_it:
            raise ConfigError(key_path(path, key), unknown_key(key, plain + own))
        meant = " or ".join(own or has_it)
        complaint = f"only {' and '.join(has_it)} has this key, and {by} is {chosen or 'not set'}"
        raise ConfigError(key_path(path, key), f"{complaint}; do you mean {meant}? (allowed here: {allowed})")
    return None if chosen is None else read_section(records[chosen], others, path)


def _value(hint: Any, value: object, path: str, rules: Mapping[str, Any]) -> object:
    alternatives = alternatives_of(hint)
    if value is None and type(None) in alternatives:
        return None
    for kind in alternatives:
        if kind is type(None):
            continue
        result = _of_kind(kind, value, path, rules)
        if result is not None:
            checked = result[0]
            check_rules(checked, path, rules)
            return checked
    raise ConfigError(path, f"{expected(alternatives, rules)} is expected, not {describe(value)}{remedy(alternatives, value)}")


def _of_kind(kind: Any, value: object, path: str, rules: Mapping[str, Any]) -> tuple[Any] | None:
    """The value converted to the kind, in a tuple of one; None if it is of another kind."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return (read_section(kind, value, path),)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            return None
        if args[-1] is Ellipsis:
            args = (args[0],) * len(value)
        if len(args) != len(value):
            return None
        return (tuple(_value(arg, item, f"{path}[{index}]", rules) for index, (arg, item) in enumerate(zip(args, value, strict=True))),)
    if origin is dict:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            return None
        return ({key: _value(args[1], item, key_path(path, key), rules) for key, item in value.items()},)
    if kind is float:
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return None
        try:
            number = float(value)
        except OverflowError:  # a whole number beyond what a float holds
            return None
        return (number,) if math.isfinite(number) else None
    # bool is a subclass of int, but `fallback: 1` and `chunk_bytes: yes` are mistakes
    return (value,) if type(value) is kind else None
