"""Imported by fork servers: in the processes that they fork, too, asyncio's debug mode records short stacks (see `short_stacks`)."""

from __future__ import annotations

from tests.short_stacks import shorten

__all__: list[str] = []

shorten()
