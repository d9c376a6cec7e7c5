"""What every channel does, within a process and between workers."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any

from aiorlinf.testing.conformance import ChannelConformance
from tests.channel.places import Place, place

__all__: list[str] = []


class TestLocal(ChannelConformance):
    copies = False

    def place(self, **settings: Any) -> AbstractAsyncContextManager[Place]:
        return place("local", **settings)


class TestHosted(ChannelConformance):
    def place(self, **settings: Any) -> AbstractAsyncContextManager[Place]:
        return place("hosted", **settings)
