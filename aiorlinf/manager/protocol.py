"""What a worker and the manager say to each other once the handshake is done. Pure.

Every message is a u32 length and a JSON object. A worker sends requests, ``{"op": ..., "id": n, ...}``; the manager answers each with
``{"id": n, "ok": {...}}`` or ``{"id": n, "error": {...}}``, and tells news, ``{"event": ...}``, in between:

* ``joined``: a worker, with its address and incarnation;
* ``gone``: the same, with reason (``left`` or ``lost``), detail, and whether it had fallen silent with its connection still open;
* ``dead``: the manager has declared the listener itself lost, and hangs up;
* ``inspect``: somebody wants to know what this worker is doing, which is answered by the request ``tell`` with the same number;
* ``ping``: the manager must know whether the connection is alive, which is answered by the request ``pong``;
* ``beat``: the answer to the request of that name.

The requests are in `manager.requests`; those without a number have no answer.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from aiorlinf.address import Identity, Incarnation, WorkerAddress
from aiorlinf.config import JobConfig, load_config
from aiorlinf.errors import DeclaredDead, LinkError, RendezvousError, UsageError, WireError
from aiorlinf.manager import fields

__all__ = [
    "BEATS_IN_LIMIT",
    "MAX_MESSAGE_BYTES",
    "ManagerError",
    "MessageReader",
    "Registration",
    "WorkerRecord",
    "encode",
    "error_from_dict",
    "error_to_dict",
]

BEATS_IN_LIMIT = 5
"""How many heartbeats a worker sends in the time after which its silence is taken for its death."""

MAX_MESSAGE_BYTES = 1024 * 1024

_LENGTH = struct.Struct("!I")


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
        process: equal for workers of one process, as `process_identity` names it; empty if it did not say.
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
    process: str = ""

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
            "process": self.process,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> WorkerRecord:
        """From JSON values. Raises WireError on anything malformed."""
        return cls(
            address=fields.address(data, "address"),
            incarnation=Incarnation(fields.integer(data, "incarnation", 1, fields.MAX_INCARNATION)),
            host=fields.host(data, "host"),
            port=fields.integer(data, "port", 1, 65535),
            devices=fields.texts(data, "devices", 64, 128),
            labels=fields.table(data, "labels"),
            host_id=fields.text(data, "host_id", 256),
            pid=fields.integer(data, "pid", 0, 2**31),
            unix=fields.text(data, "unix", 128),
            process="" if data.get("process") is None else fields.text(data, "process", 64),
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
        began: those of them that it began with: what came later, such as channel workers, is not among them.
    """

    identity: Identity
    host: str
    config: JobConfig
    job: str
    expected: frozenset[WorkerAddress] | None
    began: frozenset[WorkerAddress] | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Registration:
        """From JSON values. Raises WireError on anything malformed, ConfigError on a configuration this version does not know."""
        config = data.get("config")
        if not isinstance(config, dict):
            raise WireError("registration: the configuration is not a table")
        expected = None if data.get("expected") is None else fields.addresses(data, "expected")
        return cls(
            identity=Identity(fields.address(data, "address"), Incarnation(fields.integer(data, "incarnation", 1, fields.MAX_INCARNATION))),
            host=fields.host(data, "host"),
            config=load_config(config),
            job=fields.text(data, "job", 128),
            expected=None if expected is None else frozenset(expected),
            began=None if data.get("began") is None else frozenset(fields.addresses(data, "began")),
        )


# --------------------------------------------------------------------------------------------------------------- errors

ManagerError = LinkError | UsageError | DeclaredDead
"""What the manager may answer with."""

_KINDS: dict[str, type[ManagerError]] = {"rendezvous": RendezvousError, "link": LinkError, "usage": UsageError, "dead": DeclaredDead}


def error_to_dict(error: ManagerError) -> dict[str, Any]:
    """An error that the manager answers with, as JSON values."""
    kind = next(name for name, cls in _KINDS.items() if isinstance(error, cls))
    told = {name: getattr(error, name) for name in ("local", "remote", "address", "elapsed", "hint")}
    return {"kind": kind, "message": error.message, **{name: value for name, value in told.items() if value is not None}}


def error_from_dict(data: object) -> ManagerError:
    """The error that the manager answered with. Raises WireError on anything malformed."""
    if not isinstance(data, dict) or not isinstance(data.get("kind"), str) or data["kind"] not in _KINDS:
        raise WireError("an error of unknown kind from the manager")
    told: dict[str, Any] = {name: fields.text(data, name, 4096) for name in ("local", "remote", "address", "hint") if name in data}
    if "elapsed" in data:
        told["elapsed"] = fields.number(data, "elapsed")
    return _KINDS[data["kind"]](fields.text(data, "message", MAX_MESSAGE_BYTES), **told)


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
