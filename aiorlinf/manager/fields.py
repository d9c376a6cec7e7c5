"""Checks of single values in what came over the wire. Pure. Each raises WireError on anything malformed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from aiorlinf.address import Identity, Incarnation, WorkerAddress
from aiorlinf.errors import UsageError, WireError

__all__ = [
    "MAX_INCARNATION",
    "MAX_WAIT_S",
    "MAX_WORKERS",
    "address",
    "addresses",
    "host",
    "identity",
    "integer",
    "number",
    "numbers",
    "table",
    "text",
    "texts",
    "timeout",
]

MAX_WAIT_S = 30 * 86400.0
MAX_WORKERS = 65536
MAX_INCARNATION = 2**31

_HOST = re.compile(r"[A-Za-z0-9_.:%\-]{1,255}", re.ASCII)


def integer(data: Mapping[str, Any], key: str, low: int, high: int) -> int:
    """A whole number within the bounds."""
    value = data.get(key)
    if type(value) is not int or not low <= value <= high:
        raise WireError(f"{key} is not a whole number from {low} to {high}")
    return value


def number(data: Mapping[str, Any], key: str) -> float:
    """A number, not negative."""
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1e12:
        raise WireError(f"{key} is not a number in range")
    return float(value)


def numbers(data: Mapping[str, Any], key: str, count: int) -> tuple[int, ...]:
    """A list of one or more small whole numbers, at most so many."""
    value = data.get(key)
    if not isinstance(value, list) or not 1 <= len(value) <= count or not all(type(item) is int and 0 <= item < 2**31 for item in value):
        raise WireError(f"{key} is not a list of 1 to {count} whole numbers")
    return tuple(value)


def timeout(data: Mapping[str, Any]) -> float | None:
    """Seconds, or None for no limit."""
    return None if data.get("timeout") is None else min(number(data, "timeout"), MAX_WAIT_S)


def text(data: Mapping[str, Any], key: str, limit: int) -> str:
    """A text of at most so many characters."""
    value = data.get(key)
    if not isinstance(value, str) or len(value) > limit:
        raise WireError(f"{key} is not a text of at most {limit} characters")
    return value


def host(data: Mapping[str, Any], key: str) -> str:
    """A host name or an IP address."""
    value = text(data, key, 255)
    if _HOST.fullmatch(value) is None:
        raise WireError(f"{key} is not a host name or an IP address")
    return value


def texts(data: Mapping[str, Any], key: str, count: int, limit: int) -> tuple[str, ...]:
    """A list of texts."""
    value = data.get(key)
    if not isinstance(value, list) or len(value) > count or not all(isinstance(item, str) and len(item) <= limit for item in value):
        raise WireError(f"{key} is not a list of at most {count} texts")
    return tuple(value)


def table(data: Mapping[str, Any], key: str) -> dict[str, str]:
    """A small table of texts."""
    value = data.get(key)
    if not isinstance(value, dict) or len(value) > 64:
        raise WireError(f"{key} is not a table of at most 64 texts")
    for name, item in value.items():
        if not isinstance(name, str) or len(name) > 128 or not isinstance(item, str) or len(item) > 1024:
            raise WireError(f"{key} is not a table of at most 64 texts")
    return value


def address(data: Mapping[str, Any], key: str) -> WorkerAddress:
    """A worker's address."""
    return _address(data.get(key), key)


def addresses(data: Mapping[str, Any], key: str) -> tuple[WorkerAddress, ...]:
    """A list of workers' addresses."""
    value = data.get(key)
    if not isinstance(value, list) or len(value) > MAX_WORKERS:
        raise WireError(f"{key} is not a list of at most {MAX_WORKERS} worker addresses")
    return tuple(_address(item, key) for item in value)


def identity(worker: object, life: object, key: str) -> Identity:
    """An address and a life's number."""
    if type(life) is not int or not 1 <= life <= MAX_INCARNATION:
        raise WireError(f"{key} has a life that is not a whole number from 1 to {MAX_INCARNATION}")
    return Identity(_address(worker, key), Incarnation(life))


def _address(value: object, key: str) -> WorkerAddress:
    if not isinstance(value, str):
        raise WireError(f"{key} is not a worker address")
    try:
        return WorkerAddress(value)
    except UsageError:
        raise WireError(f"{key} is not a worker address") from None
