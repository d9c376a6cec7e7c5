"""What a worker and the manager say to each other once the handshake is done. Pure.

Every message is a u32 length and a JSON object. A worker sends requests, ``{"op": ..., "id": n, ...}``; the manager answers each with
``{"id": n, "ok": {...}}`` or ``{"id": n, "error": {...}}``, and tells news, ``{"event": ...}``, in between. ``forget``, ``expect`` and
``pong`` have no answer. The manager asks ``{"event": "ping"}`` when it must know whether a connection is still alive.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from aiorlinf.address import Identity, Incarnation, WorkerAddress
from aiorlinf.config import JobConfig, load_config
from aiorlinf.errors import LinkError, RendezvousError, UsageError, WireError

__all__ = [
    "MAX_MESSAGE_BYTES",
    "Book",
    "Expect",
    "Forget",
    "ListWorkers",
    "Lookup",
    "MessageReader",
    "Pong",
    "Register",
    "Registration",
    "Request",
    "Unregister",
    "WorkerRecord",
    "encode",
    "error_from_dict",
    "error_to_dict",
    "parse_request",
]

MAX_MESSAGE_BYTES = 1024 * 1024
MAX_WAIT_S = 30 * 86400.0

_LENGTH = struct.Struct("!I")
_MAX_ID = 2**53 - 1
_MAX_WORKERS = 65536
_HOST = re.compile(r"[A-Za-z0-9_.:%\-]{1,255}", re.ASCII)


# -------------------------------------------------------------------------------------------------------------- records


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """What the manager tells about one living worker.

    Attributes:
        address, incarnation: which life of which worker.
        host, port: where it listens for links.
        devices: its devices, as torch names them.
        labels: such as host and rack.
        host_id: equal for workers that reach each other over loopback.
        unix: name of its listening socket in the abstract namespace of that host; empty if it has none.
        pid: its process id, on its own host.
    """

    address: WorkerAddress
    incarnation: Incarnation
    host: str
    port: int
    devices: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    host_id: str = ""
    pid: int = 0
    unix: str = ""

    @property
    def identity(self) -> Identity:
        """The life this record belongs to."""
        return Identity(self.address, self.incarnation)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "address": str(self.address),
            "incarnation": self.incarnation,
            "host": self.host,
            "port": self.port,
            "devices": list(self.devices),
            "labels": dict(self.labels),
            "host_id": self.host_id,
            "pid": self.pid,
            "unix": self.unix,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> WorkerRecord:
        """From JSON values. Raises WireError on anything malformed."""
        return cls(
            address=_address(data, "address"),
            incarnation=Incarnation(_integer(data, "incarnation", 1, 2**31)),
            host=_host(data, "host"),
            port=_integer(data, "port", 1, 65535),
            devices=_texts(data, "devices", 64, 128),
            labels=_table(data, "labels"),
            host_id=_text(data, "host_id", 256),
            pid=_integer(data, "pid", 0, 2**31),
            unix=_text(data, "unix", 128),
        )


@dataclass(frozen=True, slots=True)
class Registration:
    """What a worker gets for registering.

    Attributes:
        identity: its address and the number of this life.
        host: the address that peers will be told.
        config: the job's configuration.
        job: the job's id.
        expected: all workers of the job, if the job has a closed set; else None.
    """

    identity: Identity
    host: str
    config: JobConfig
    job: str
    expected: frozenset[WorkerAddress] | None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Registration:
        """From JSON values. Raises WireError on anything malformed, ConfigError on a configuration this version does not know."""
        config = data.get("config")
        if not isinstance(config, dict):
            raise WireError("registration: the configuration is not a table")
        expected = None if data.get("expected") is None else _addresses(data, "expected")
        return cls(
            identity=Identity(_address(data, "address"), Incarnation(_integer(data, "incarnation", 1, 2**31))),
            host=_host(data, "host"),
            config=load_config(config),
            job=_text(data, "job", 128),
            expected=None if expected is None else frozenset(expected),
        )


# ------------------------------------------------------------------------------------------------------------- requests


@dataclass(frozen=True, slots=True)
class Register:
    """I am this worker and listen here. ``host`` None: tell peers the address my connection comes from."""

    id: int
    address: WorkerAddress
    host: str | None
    port: int
    devices: tuple[str, ...]
    labels: Mapping[str, str]
    host_id: str
    pid: int
    unix: str = ""


@dataclass(frozen=True, slots=True)
class Unregister:
    """I leave in an orderly way."""

    id: int


@dataclass(frozen=True, slots=True)
class Lookup:
    """Where is this worker? Wait for it up to ``timeout`` seconds (None: as long as the connection lives)."""

    id: int
    address: WorkerAddress
    timeout: float | None


@dataclass(frozen=True, slots=True)
class ListWorkers:
    """Who is registered? One page of them, those whose addresses come after ``after``."""

    id: int
    after: WorkerAddress | None


@dataclass(frozen=True, slots=True)
class Book:
    """I am about to send ``nbytes`` through these budgets of the emulated network, in this order (`manager.emulation`)."""

    id: int
    budgets: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Forget:
    """The answer to request ``id`` is not wanted any more."""

    id: int


@dataclass(frozen=True, slots=True)
class Expect:
    """These workers will join, too."""

    addresses: tuple[WorkerAddress, ...]


@dataclass(frozen=True, slots=True)
class Pong:
    """I am alive."""


Request = Register | Unregister | Lookup | ListWorkers | Book | Forget | Expect | Pong


def parse_request(message: Mapping[str, Any]) -> Request:
    """Check a worker's message. Raises WireError on anything malformed."""
    op = message.get("op")
    if op == "register":
        return Register(
            id=_integer(message, "id", 1, _MAX_ID),
            address=_address(message, "address"),
            host=None if message.get("host") is None else _host(message, "host"),
            port=_integer(message, "port", 1, 65535),
            devices=_texts(message, "devices", 64, 128),
            labels=_table(message, "labels"),
            host_id=_text(message, "host_id", 256),
            pid=_integer(message, "pid", 0, 2**31),
            unix=_text(message, "unix", 128),
        )
    if op == "lookup":
        return Lookup(_integer(message, "id", 1, _MAX_ID), _address(message, "address"), _timeout(message))
    if op == "unregister":
        return Unregister(_integer(message, "id", 1, _MAX_ID))
    if op == "workers":
        return ListWorkers(_integer(message, "id", 1, _MAX_ID), None if message.get("after") is None else _address(message, "after"))
    if op == "book":
        return Book(_integer(message, "id", 1, _MAX_ID), _numbers(message, "budgets", 256), _integer(message, "bytes", 1, 2**48))
    if op == "forget":
        return Forget(_integer(message, "id", 1, _MAX_ID))
    if op == "expect":
        return Expect(_addresses(message, "addresses"))
    if op == "pong":
        return Pong()
    raise WireError(f"the request {op!r:.40} is not known")


# --------------------------------------------------------------------------------------------------------------- errors

_KINDS: dict[str, type[LinkError | UsageError]] = {"rendezvous": RendezvousError, "link": LinkError, "usage": UsageError}


def error_to_dict(error: LinkError | UsageError) -> dict[str, Any]:
    """An error that the manager answers with, as JSON values."""
    kind = next(name for name, cls in _KINDS.items() if isinstance(error, cls))
    fields = {name: getattr(error, name) for name in ("local", "remote", "address", "elapsed", "hint")}
    return {"kind": kind, "message": error.message, **{name: value for name, value in fields.items() if value is not None}}


def error_from_dict(data: object) -> LinkError | UsageError:
    """The error that the manager answered with. Raises WireError on anything malformed."""
    if not isinstance(data, dict) or not isinstance(data.get("kind"), str) or data["kind"] not in _KINDS:
        raise WireError("an error of unknown kind from the manager")
    fields: dict[str, Any] = {name: _text(data, name, 4096) for name in ("local", "remote", "address", "hint") if name in data}
    if "elapsed" in data:
        fields["elapsed"] = _number(data, "elapsed")
    return _KINDS[data["kind"]](_text(data, "message", MAX_MESSAGE_BYTES), **fields)


# -------------------------------------------------------------------------------------------------------------- framing


def encode(message: Mapping[str, Any]) -> bytes:
    """One message as bytes.

    Raises:
        UsageError: it holds something JSON does not, or is larger than `MAX_MESSAGE_BYTES`.
    """
    try:
        body = orjson.dumps(message)
    except orjson.JSONEncodeError as error:
        raise UsageError(f"a message to or from the manager holds a value that JSON does not: {error}") from None
    if len(body) > MAX_MESSAGE_BYTES:
        raise UsageError(f"a message of {len(body)} bytes to or from the manager; at most {MAX_MESSAGE_BYTES} are allowed")
    return _LENGTH.pack(len(body)) + body


class MessageReader:
    """Cuts the stream into messages. Holds at most one unfinished message."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> list[dict[str, Any]]:
        """Take bytes, return the messages they complete. Raises WireError, after which the stream cannot be used any more."""
        self._buffer += data
        messages: list[dict[str, Any]] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > MAX_MESSAGE_BYTES:
                raise WireError(f"a message of {length} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            try:
                message = orjson.loads(memoryview(self._buffer)[start + _LENGTH.size : end])
            except orjson.JSONDecodeError as error:
                raise WireError(f"a message that is not JSON: {error}") from None
            if not isinstance(message, dict):
                raise WireError("a message that is not a JSON object")
            messages.append(message)
            start = end
        del self._buffer[:start]
        return messages


# --------------------------------------------------------------------------------------------------------------- fields


def _integer(data: Mapping[str, Any], key: str, low: int, high: int) -> int:
    value = data.get(key)
    if type(value) is not int or not low <= value <= high:
        raise WireError(f"{key} is not a whole number from {low} to {high}")
    return value


def _number(data: Mapping[str, Any], key: str) -> float:
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1e12:
        raise WireError(f"{key} is not a number in range")
    return float(value)


def _timeout(data: Mapping[str, Any]) -> float | None:
    return None if data.get("timeout") is None else min(_number(data, "timeout"), MAX_WAIT_S)


def _text(data: Mapping[str, Any], key: str, limit: int) -> str:
    value = data.get(key)
    if not isinstance(value, str) or len(value) > limit:
        raise WireError(f"{key} is not a text of at most {limit} characters")
    return value


def _host(data: Mapping[str, Any], key: str) -> str:
    value = _text(data, key, 255)
    if _HOST.fullmatch(value) is None:
        raise WireError(f"{key} is not a host name or an IP address")
    return value


def _texts(data: Mapping[str, Any], key: str, count: int, limit: int) -> tuple[str, ...]:
    value = data.get(key)
    if not isinstance(value, list) or len(value) > count or not all(isinstance(item, str) and len(item) <= limit for item in value):
        raise WireError(f"{key} is not a list of at most {count} texts")
    return tuple(value)


def _numbers(data: Mapping[str, Any], key: str, count: int) -> tuple[int, ...]:
    value = data.get(key)
    if not isinstance(value, list) or not 1 <= len(value) <= count or not all(type(item) is int and 0 <= item < 2**31 for item in value):
        raise WireError(f"{key} is not a list of 1 to {count} whole numbers")
    return tuple(value)


def _table(data: Mapping[str, Any], key: str) -> dict[str, str]:
    value = data.get(key)
    if not isinstance(value, dict) or len(value) > 64:
        raise WireError(f"{key} is not a table of at most 64 texts")
    for name, item in value.items():
        if not isinstance(name, str) or len(name) > 128 or not isinstance(item, str) or len(item) > 1024:
            raise WireError(f"{key} is not a table of at most 64 texts")
    return value


def _address(data: Mapping[str, Any], key: str) -> WorkerAddress:
    return _worker_address(data.get(key), key)


def _addresses(data: Mapping[str, Any], key: str) -> tuple[WorkerAddress, ...]:
    value = data.get(key)
    if not isinstance(value, list) or len(value) > _MAX_WORKERS:
        raise WireError(f"{key} is not a list of at most {_MAX_WORKERS} worker addresses")
    return tuple(_worker_address(item, key) for item in value)


def _worker_address(value: object, key: str) -> WorkerAddress:
    if not isinstance(value, str):
        raise WireError(f"{key} is not a worker address")
    try:
        return WorkerAddress(value)
    except UsageError:
        raise WireError(f"{key} is not a worker address") from None
