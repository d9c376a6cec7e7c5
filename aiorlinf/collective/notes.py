"""What the members of a collective tell each other besides the payloads, as bytes. Pure.

A note is a JSON object and, behind it, a body. It names its operation by a key: the two workers that count it, and its number among the
operations that the two have in common since they know each other's present lives. Both count for themselves, so a member that comes back
as a new life is in step with everybody as soon as it takes part again.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from aiorlinf.address import WorkerAddress
from aiorlinf.errors import AiorlinfError, PeerError, PeerLeft, PeerLost, PeerRestarted, RemoteError, UsageError, WireError

__all__ = ["ALL", "ROOT", "Cause", "Key", "Note", "Step"]

_LENGTH = struct.Struct("<I")

ROOT = "root"
"""Operations with a root: counted by the root and each member."""
ALL = "all"
"""Operations without one: counted by each two members."""

_ENDS: dict[str, type[PeerError]] = {cls.__name__: cls for cls in (PeerLost, PeerLeft, PeerRestarted)}
_MAX_TEXT = 4000


class Key(NamedTuple):
    """One operation, as two workers count it.

    Attributes:
        domain: ROOT or ALL.
        first, second: the root and the member; or the two members, in the order of their texts.
        number: from 0.
    """

    domain: str
    first: str
    second: str
    number: int


class Step:
    """What a note is about."""

    HEAD = "head"  # the object of a broadcast comes, or is here
    PART = "part"  # the sender's part of a gather or an all-to-all
    DONE = "done"  # to the root: the sender has everything; from the root of a gather: everybody's part is there
    TAKEN = "taken"  # to the one who lent shared memory: it could be used
    AGAIN = "again"  # to him: it could not be used
    FAIL = "fail"  # the operation has failed


_STEPS = frozenset(value for name, value in vars(Step).items() if name.isupper())


@dataclass(frozen=True, slots=True)
class Note:
    """One note.

    Attributes:
        key: the operation, as the receiver and the first one of the key count it.
        step: see `Step`.
        lives: incarnations of workers as far as they matter: of the sender, the root, the receiver.
        facts: what belongs to the step.
        body: bytes that belong to it.
    """

    key: Key
    step: str
    lives: Mapping[str, int] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    body: bytes | memoryview = b""

    def encode(self) -> bytes:
        """As bytes."""
        lives = {str(address): life for address, life in self.lives.items()}  # orjson takes no keys of another class
        head = orjson.dumps({"key": list(self.key), "step": self.step, "lives": lives, "facts": self.facts})
        return b"".join((_LENGTH.pack(len(head)), head, self.body))

    @classmethod
    def decode(cls, data: object) -> Note:
        """Raises WireError on anything malformed."""
        if not isinstance(data, bytes) or len(data) < _LENGTH.size:
            raise WireError("a note of a collective is cut short")
        (size,) = _LENGTH.unpack_from(data)
        view = memoryview(data)[_LENGTH.size :]
        if size > len(view):
            raise WireError("a note of a collective is cut short")
        try:
            head = orjson.loads(view[:size])
            domain, first, second, number = head["key"]
            step, lives, facts = head["step"], head["lives"], head["facts"]
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise WireError(f"a malformed note of a collective: {type(error).__name__}") from None
        if domain not in (ROOT, ALL) or step not in _STEPS or type(number) is not int or number < 0:
            raise WireError("a malformed note of a collective: its key or step")
        if not isinstance(lives, dict) or not isinstance(facts, dict) or not all(type(life) is int for life in lives.values()):
            raise WireError("a malformed note of a collective: its lives or facts")
        return cls(Key(domain, WorkerAddress(first), WorkerAddress(second), number), step, lives, facts, view[size:])

    def number(self, name: str) -> int:
        """A fact that is a whole number, from 0. Raises WireError if it is not."""
        value = self.facts.get(name)
        if type(value) is not int or value < 0:
            raise WireError(f"a note of a collective says {name}={value!r:.40}")
        return value

    def text(self, name: str) -> str:
        """A fact that is a text. Raises WireError if it is not."""
        value = self.facts.get(name)
        if not isinstance(value, str):
            raise WireError(f"a note of a collective says {name}={value!r:.40}")
        return value


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a collective failed, as all members are told.

    Attributes:
        member: whose failure it is.
        kind: class of the error there, or of the end of its life.
        message: its text.
        trace: its traceback, if it was not one of the library's errors.
    """

    member: str
    kind: str
    message: str
    trace: str = ""

    @classmethod
    def of(cls, error: BaseException, member: str, trace: str = "") -> Cause:
        """The cause of an error that `member` has met."""
        if isinstance(error, (PeerLost, PeerLeft, PeerRestarted)) and error.remote is not None:
            return cls(error.remote, type(error).__name__, error.message)
        if isinstance(error, RemoteError) and error.remote is not None and error.remote_type is not None:
            return cls(error.remote, error.remote_type, error.message, error.remote_traceback or "")
        text = error.message if isinstance(error, AiorlinfError) else str(error)
        return cls(member, type(error).__name__, text, trace)

    def facts(self) -> dict[str, str]:
        """For a note."""
        return {"member": self.member, "kind": self.kind, "message": self.message[:_MAX_TEXT], "trace": self.trace[-_MAX_TEXT:]}

    @classmethod
    def from_note(cls, note: Note) -> Cause:
        """Raises WireError if it is malformed, UsageError if it names no worker."""
        return cls(WorkerAddress(note.text("member")), note.text("kind"), note.text("message"), note.text("trace"))

    def error(self, operation: str, local: str) -> AiorlinfError:
        """A fresh error for one operation."""
        end = _ENDS.get(self.kind)
        if end is not None:
            return end(self.message, operation=operation, local=local, remote=self.member)
        if self.member == local:
            return UsageError(self.message, operation=operation, local=local)
        text = f"{self.member} {_WORDS.get(self.kind, f'failed with {self.kind}')}"
        return RemoteError(
            text if self.kind in _WORDS or not self.message else f"{text}: {self.message}",
            remote_type=self.kind,
            remote_traceback=self.trace or None,
            operation=operation,
            local=local,
            remote=self.member,
        )


_WORDS = {"CancelledError": "cancelled its part"}
