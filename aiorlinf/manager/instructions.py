"""What the pure `Directory` tells the service to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NewType

from aiorlinf.manager.protocol import ManagerError
from aiorlinf.manager.requests import Register

__all__ = ["Cut", "Instruction", "Probe", "Refuse", "Reply", "SessionId", "Tell", "Wait"]

SessionId = NewType("SessionId", int)


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer a request."""

    session: SessionId
    request: int
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer a request with an error."""

    session: SessionId
    request: int
    error: ManagerError


@dataclass(frozen=True, slots=True)
class Tell:
    """Send news."""

    session: SessionId
    event: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Wait:
    """The request waits: call `Directory.expire` if it still does after ``timeout`` seconds (None: never), on top of those before."""

    session: SessionId
    request: int
    timeout: float | None
    before: float = 0.0


@dataclass(frozen=True, slots=True)
class Probe:
    """The address is taken by ``holder``: find out if that one is alive, then register again with what was found."""

    session: SessionId
    request: Register
    holder: SessionId


@dataclass(frozen=True, slots=True)
class Cut:
    """Close the connection once all it was told has left."""

    session: SessionId
    detail: str


Instruction = Reply | Refuse | Tell | Wait | Probe | Cut
