"""As in the cases: every coroutine test runs on both loops, and complaints in the logs fail it."""

from __future__ import annotations

from tests.cases.conftest import Pair, complaints, pytest_asyncio_loop_factories, stream_pair

__all__ = ["Pair", "complaints", "pytest_asyncio_loop_factories", "stream_pair"]
