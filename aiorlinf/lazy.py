"""Packages whose names are fetched when they are first used, so that importing them imports nothing of weight."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping

__all__ = ["fetcher"]


def fetcher(package: str, homes: Mapping[str, str | None]) -> Callable[[str], object]:
    """The ``__getattr__`` of a package; what it has fetched it leaves there, and is not asked for it again.

    Args:
        package: its name.
        homes: for each name the module of the package, or below it, that has it; None: the name is a module itself.
    """

    def fetch(name: str) -> object:
        try:
            home = homes[name]
        except KeyError:
            raise AttributeError(f"module {package!r} has no attribute {name!r}") from None
        if home is None:
            return importlib.import_module(f"{package}.{name}")
        value: object = getattr(importlib.import_module(f"{package}.{home}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return fetch
