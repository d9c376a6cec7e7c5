"""Errors on their way between a channel worker and a worker. Pure."""

from __future__ import annotations

import traceback
from typing import Any

import orjson

from aiorlinf.errors import (
    AiorlinfError,
    ChannelClosed,
    ChannelEmpty,
    ChannelError,
    ChannelFull,
    ClosedError,
    ProducerLost,
    RemoteError,
    RendezvousError,
    UsageError,
    WireError,
)

__all__ = ["decode_error", "encode_error"]

_PASSED = (ChannelClosed, ChannelEmpty, ChannelError, ChannelFull, ClosedError, ProducerLost, RendezvousError, UsageError)
_CLASSES: dict[str, type[AiorlinfError]] = {cls.__name__: cls for cls in _PASSED}
_FIELDS = ("operation", "local", "remote", "hint")
_MAX_TEXT = 16384


def encode_error(error: BaseException) -> bytes:
    """An error as bytes. What is not one of the channel's own arrives as a `RemoteError`."""
    fact: dict[str, Any] = {"kind": type(error).__name__ if type(error) in _PASSED else ""}
    if isinstance(error, AiorlinfError) and fact["kind"]:
        fact["message"] = error.message[:_MAX_TEXT]
        fact |= {name: str(value)[:_MAX_TEXT] for name in _FIELDS if (value := getattr(error, name)) is not None}
    else:
        fact["type"] = type(error).__name__
        fact["message"] = _text(error)[:_MAX_TEXT]
        fact["trace"] = "".join(traceback.format_exception(error))[-_MAX_TEXT:]
    # Not what UTF-8 cannot say: a message of a user's error may hold anything.
    return orjson.dumps({name: value.encode("utf-8", "replace").decode() for name, value in fact.items()})


def decode_error(data: bytes) -> AiorlinfError:
    """The reverse of `encode_error`. Raises WireError."""
    try:
        fact: dict[str, str] = orjson.loads(data)
        cls = _CLASSES.get(fact["kind"])
        if cls is None:
            text = f"it failed in the channel worker: {fact['type']}: {fact['message']}"
            return RemoteError(text, remote_type=fact["type"], remote_traceback=fact.get("trace"))
        error = cls(fact["message"])
        error.fill(**{name: fact[name] for name in _FIELDS if name in fact})
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        raise WireError("an error of a channel worker without a readable reason") from None
    return error


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a user's error whose __str__ fails
        return "?"
