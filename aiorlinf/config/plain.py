"""Records shown again: as plain values, and key by key with what each means."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from aiorlinf.config.complaints import describe
from aiorlinf.config.job import JobConfig
from aiorlinf.config.options import hints_of, item_hint, key_path, nested_section, variant_records

__all__ = ["config_to_dict", "option_docs"]


def config_to_dict(config: object) -> dict[str, Any]:
    """The record as plain dicts, lists and scalars; JSON and YAML can hold it, and `load_config` gives the record back."""
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise TypeError(f"a configuration record is expected, not {describe(config)}")
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if "variant" not in field.metadata:
            values[field.name] = _plain(value)
        elif value is not None:
            values.update(config_to_dict(value))
    return values


def option_docs(section: type = JobConfig, path: str = "") -> Iterator[tuple[str, str, object]]:
    """Yield (full path, doc, default) of every key, in order."""
    for field in dataclasses.fields(section):
        if "variant" in field.metadata:
            for name, record in variant_records(field).items():
                for inner, doc, default in option_docs(record, path):
                    yield inner, f"only with {field.metadata['variant']}: {name}; {doc}", default
            continue
        inner = key_path(path, field.name)
        nested = nested_section(hints_of(section)[field.name])
        if nested is not None:
            yield from option_docs(nested, inner)
            continue
        yield inner, field.metadata["doc"], field.default
        item = nested_section(item_hint(hints_of(section)[field.name]))
        if item is not None:
            yield from option_docs(item, f"{inner}[]")


def _plain(value: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return config_to_dict(value)
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value
