"""What everything of a kind has to keep to, as classes of tests: derive from one, say what is tested, and let pytest run it.

::

    from aiorlinf.testing.conformance import PolicyConformance

    class TestMyPolicy(PolicyConformance):
        def make(self):
            return MyPolicy()

There is one for a `Codec`, a `LoadBalancePolicy`, a channel and a backend; each says in its docstring what can be told about the thing
under test. They need pytest, and those of channels, policies and backends pytest-asyncio. aiorlinf's own pass the same suites.
"""

from __future__ import annotations

from aiorlinf.testing.conformance.backend import BackendConformance
from aiorlinf.testing.conformance.channel import ChannelConformance, Place
from aiorlinf.testing.conformance.codec import CodecConformance
from aiorlinf.testing.conformance.policy import PolicyConformance

__all__ = ["BackendConformance", "ChannelConformance", "CodecConformance", "Place", "PolicyConformance"]
