"""Coroutine tests here run on asyncio's own loop and on uvloop, which each have a TLS of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import uvloop

__all__ = ["pytest_asyncio_loop_factories"]


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loops that each coroutine test is run on."""
    return {"asyncio": asyncio.SelectorEventLoop, "uvloop": uvloop.new_event_loop}
