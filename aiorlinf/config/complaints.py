"""Is a single value allowed, and the words in which a user is told that something is not."""

from __future__ import annotations

import difflib
import math
import typing
from collections.abc import Mapping
from typing import Any

from aiorlinf.errors import ConfigError

__all__ = ["check_rules", "describe", "expected", "remedy", "unknown_key"]


def unknown_key(key: str, allowed: list[str], deeper: list[str] | None = None) -> str:
    """What to say of a key that the section does not have; `deeper` are paths of keys of its name that lie further down."""
    near = deeper or difflib.get_close_matches(key, allowed, n=1, cutoff=0.6)
    meant = f"; do you mean {near[0]}?" if near else ""
    return f"unknown key{meant} (allowed here: {', '.join(allowed)})"


def check_rules(value: object, path: str, rules: Mapping[str, Any]) -> None:
    """Raise ConfigError for a value that the field's ``choices`` or bounds do not allow."""
    choices = rules.get("choices")
    if choices is not None and not isinstance(value, tuple) and value not in choices:  # of a tuple, the items were checked
        near = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
        meant = f"; do you mean {near[0]}?" if near else ""
        raise ConfigError(path, f"{value!r} is not allowed{meant} (allowed: {', '.join(str(choice) for choice in choices)})")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        low, high, above = rules.get("min"), rules.get("max"), rules.get("above")
        if (low is not None and value < low) or (high is not None and value > high) or (above is not None and value <= above):
            raise ConfigError(path, f"{describe(value)} is out of range; allowed: {_range(rules)}")


def _range(rules: Mapping[str, Any]) -> str:
    low, high, above = rules.get("min"), rules.get("max"), rules.get("above")
    parts = []
    if low is not None:
        parts.append(f"at least {low}")
    if above is not None:
        parts.append(f"above {above}")
    if high is not None:
        parts.append(f"at most {high}")
    return " and ".join(parts)


_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}


def expected(alternatives: tuple[Any, ...], rules: Mapping[str, Any]) -> str:
    """What a key of these types may hold."""
    names = []
    for kind in alternatives:
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if origin is tuple and args[-1] is not Ellipsis:
            names.append(f"a list of {len(args)} ({', '.join(_NAMES.get(arg, 'entries') for arg in args)})")
        elif origin is tuple:
            names.append("a list")
        elif origin is dict:
            names.append("a mapping")
        else:
            names.append(_NAMES.get(kind, "a section"))
    text = " or ".join(names)
    choices = rules.get("choices")
    return f"{text} ({', '.join(str(choice) for choice in choices)})" if choices else text


def describe(value: object) -> str:
    """The value as a user may have written it, cut short."""
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "a section with keys"
    try:
        text = repr(value)
    except ValueError:  # Python writes no whole numbers of thousands of digits
        return "a number of thousands of digits"
    if len(text) > 60:
        text = text[:57] + "..."
    return f"the text {text}" if isinstance(value, str) else text


def remedy(alternatives: tuple[Any, ...], value: object) -> str:
    """YAML 1.1 takes `1e-3` for text; say so, because the line looks right."""
    if float in alternatives and isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return ""
        if math.isfinite(number):
            return f" (write {number!r}, without quotes and with a decimal point)"
    return ""
