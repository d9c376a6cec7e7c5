"""The codecs. Each module here is one: it defines ``CODEC``, a subclass of `codec.base.Codec`, and nothing else has to know of it."""

from __future__ import annotations

__all__: list[str] = []
