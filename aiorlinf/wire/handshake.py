"""The handshake that opens every connection, to a worker and to the manager. Pure: bytes in, instructions out.

    client                               server
    preamble  ------------------------>            magic, protocol version, library version, nonce
              <------------------------  preamble
    proof     ------------------------>            HMAC-SHA256 with the job's token over role and both preambles
              <------------------------  granted + proof, or denied
    hello     ------------------------>            who I am, whom I want (JSON, bounded)
              <------------------------  hello, or a refusal with its reason

The client proves itself first, so that a stranger who reaches the port is never given anything computed from the token. Nothing is
parsed before the proof but the preamble, whose layout is the same in every protocol version: two versions can always tell each other
apart and name both. Time limits belong to the I/O around the machine.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import hmac
import importlib.metadata
import os
import platform
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from aiorlinf.address import WorkerAddress
from aiorlinf.errors import AuthenticationError, LinkError, UsageError, WireError

__all__ = [
    "BEGINNING_BYTES",
    "MAX_HELLO_BYTES",
    "PROTOCOL_VERSION",
    "ClientHandshake",
    "Done",
    "Fail",
    "HandshakeState",
    "Hello",
    "Instruction",
    "Refusal",
    "Role",
    "ServerHandshake",
    "Write",
    "encode_hello",
    "library_version",
    "library_versions",
    "wrong_beginning",
]

PROTOCOL_VERSION = 2
MAX_HELLO_BYTES = 64 * 1024
BEGINNING_BYTES = 32
"""By so many bytes it can be told who is there."""

_MAGIC = b"AIORLINF"
_NONCE_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size
_PREAMBLE_HEAD = struct.Struct("!8sHB")  # magic, protocol version, length of the library version
_LENGTH = struct.Struct("!I")
_GRANTED, _DENIED = b"\x01", b"\x00"

Role = Literal["link", "manager"]


@functools.cache
def library_version() -> str:
    """The installed version of aiorlinf, as text."""
    return _installed_version("aiorlinf")


@functools.cache
def library_versions() -> dict[str, str]:
    """What a hello tells about this process: versions of aiorlinf, torch and Python. Imports none of them."""
    return {"aiorlinf": library_version(), "torch": _installed_version("torch"), "python": platform.python_version()}


def _installed_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except (importlib.metadata.PackageNotFoundError, OSError):  # not installed, or no file descriptor left to look
        return "unknown"


@dataclass(frozen=True, slots=True)
class Hello:
    """What one side says about itself once both have proved the token.

    Attributes:
        role: "link" between two workers, or "manager".
        job: the job's id; None only from a client that joins whatever job the manager runs.
        address: the speaker, as ``group:rank``; None for the manager and for a client that is not a worker.
        incarnation: the speaker's life under that address, counted from 1; 0 when it has none yet.
        target: the address that a client wants to reach; None from a server.
        versions: versions of aiorlinf, torch and Python.
        host_id: equal for two processes that can reach each other over loopback.
        capabilities: free for the layers above; JSON values only.
    """

    role: Role
    job: str | None
    address: str | None = None
    incarnation: int = 0
    target: str | None = None
    versions: dict[str, str] = field(default_factory=lambda: dict(library_versions()))
    host_id: str = ""
    capabilities: dict[str, Any] = field(default_factory=dict)

    @property
    def speaker(self) -> str:
        """For messages: ``rollout:0#2``, or what is known instead."""
        if self.address is None:
            return "a client of the manager" if self.role == "manager" else "a client without address"
        return f"{self.address}#{self.incarnation}" if self.incarnation else self.address


@dataclass(frozen=True, slots=True)
class Refusal:
    """A server's reason against a proven client. ``code`` is for programs: "job", "role", "target", or what `accept` chose."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Write:
    """Send these bytes."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Done:
    """The handshake is complete; bytes that came after it are in ``leftover``."""

    peer: Hello


@dataclass(frozen=True, slots=True)
class Fail:
    """Send what was written before, then close.

    ``refusal`` is set when a proven client was refused. ``retryable``: the peer only hung up, or there was none, so another try
    may succeed.
    """

    error: LinkError
    refusal: Refusal | None = None
    retryable: bool = False


Instruction = Write | Done | Fail


class HandshakeState(enum.Enum):
    """What the machine waits for. It only moves down this list."""

    PREAMBLE = "the preamble"
    PROOF = "the proof of the token"
    HELLO = "the hello"
    DONE = "nothing, it is done"
    FAILED = "nothing, it failed"


@dataclass(frozen=True, slots=True)
class _Preamble:
    raw: bytes
    protocol: int
    library: str


class _Handshake:
    """What both sides have in common."""

    def __init__(
        self,
        token: bytes,
        hello: Hello,
        *,
        nonce: bytes | None,
        protocol_version: int,
        library: str | None,
        remote: str | None,
        frame: bytes | None = None,
    ) -> None:
        if not token:
            raise AuthenticationError("there is no job token", hint="set AIORLINF_TOKEN to the job's token, or pass token=")
        self.hello = hello
        self._hello_frame = encode_hello(hello) if frame is None else frame
        self.remote = remote
        self.state: HandshakeState = HandshakeState.PREAMBLE
        self.leftover: bytes = b""  # bytes after the handshake, once done
        self.peer_library: str | None = None  # the peer's library version, once its preamble is here
        self._token = token
        nonce = os.urandom(_NONCE_BYTES) if nonce is None else nonce
        if len(nonce) != _NONCE_BYTES:
            raise UsageError(f"a nonce has {_NONCE_BYTES} bytes, not {len(nonce)}")
        text = (library_version() if library is None else library).encode("ascii", "replace")[:64]
        self._preamble = _Preamble(
            _PREAMBLE_HEAD.pack(_MAGIC, protocol_version, len(text)) + text + nonce, protocol_version, text.decode("ascii")
        )
        self._peer_preamble: _Preamble | None = None
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> list[Instruction]:
        """Take bytes from the connection; return what to do, in order. Never raises on what the peer sends."""
        if self.state is HandshakeState.DONE:
            self.leftover += data
            return []
        if self.state is HandshakeState.FAILED:
            return []
        self._buffer += data
        out: list[Instruction] = []
        try:
            while self._step(out):
                pass
        except LinkError as error:
            self._fail(out, error)
        return out

    def eof(self) -> list[Instruction]:
        """The peer closed the connection."""
        if self.state in (HandshakeState.DONE, HandshakeState.FAILED):
            return []
        out: list[Instruction] = []
        text = f"the connection was closed while waiting for {self.state.value} of the other side"
        self._fail(out, LinkError(text, hint=self._eof_hint()), retryable=True)
        return out

    def _eof_hint(self) -> str | None:
        return None

    def _step(self, out: list[Instruction]) -> bool:
        raise NotImplementedError

    def _fail(self, out: list[Instruction], error: LinkError, refusal: Refusal | None = None, *, retryable: bool = False) -> None:
        error.fill(address=self.remote)
        self.state = HandshakeState.FAILED
        self._buffer.clear()
        out.append(Fail(error, refusal, retryable))

    def _done(self, out: list[Instruction], peer: Hello) -> None:
        self.leftover = bytes(self._buffer)
        self._buffer.clear()
        self.state = HandshakeState.DONE
        out.append(Done(peer))

    def _take(self, count: int) -> bytes | None:
        if len(self._buffer) < count:
            return None
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken

    def _take_preamble(self) -> _Preamble | None:
        wrong = wrong_beginning(bytes(self._buffer[:BEGINNING_BYTES]))
        if wrong is not None:
            raise WireError(wrong)
        if len(self._buffer) < _PREAMBLE_HEAD.size:
            return None
        _, protocol, length = _PREAMBLE_HEAD.unpack_from(self._buffer)
        if length > 64:
            raise WireError(f"the preamble's library version has {length} bytes; at most 64 are allowed")
        raw = self._take(_PREAMBLE_HEAD.size + length + _NONCE_BYTES)
        if raw is None:
            return None
        text = raw[_PREAMBLE_HEAD.size : _PREAMBLE_HEAD.size + length]
        library = "".join(chr(byte) if 32 < byte < 127 else "?" for byte in text)  # it goes to logs, and is not proven yet
        preamble = self._peer_preamble = _Preamble(raw, protocol, library)
        self.peer_library = library
        return preamble

    def _check_version(self, peer: _Preamble) -> None:
        own = self._preamble
        if peer.protocol != own.protocol:
            raise WireError(
                f"the other side speaks protocol version {peer.protocol} (aiorlinf {peer.library}), "
                f"this side protocol version {own.protocol} (aiorlinf {own.library})",
                hint="install the same aiorlinf on every host of the job",
            )

    def _proof(self, role: bytes, client: bytes, server: bytes) -> bytes:
        return hmac.digest(self._token, b"aiorlinf handshake\0" + role + b"\0" + client + server, "sha256")

    def _take_json(self) -> dict[str, Any] | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > MAX_HELLO_BYTES:
            raise WireError(f"a hello of {length} bytes; at most {MAX_HELLO_BYTES} are allowed")
        frame = self._take(_LENGTH.size + length)
        if frame is None:
            return None
        try:
            data = orjson.loads(frame[_LENGTH.size :])
        except orjson.JSONDecodeError as error:
            raise WireError(f"the hello is not JSON: {error}") from None
        if not isinstance(data, dict):
            raise WireError("the hello is not a JSON object")
        return data


class ClientHandshake(_Handshake):
    """The side that connected. Send what `start` returns, then `feed` every byte received until `Done` or `Fail`.

    Args:
        token: the job's secret.
        hello: what to say about ourselves; ``target`` is whom we want.
        remote: the network address connected to, for error messages.
    """

    def __init__(
        self,
        token: bytes,
        hello: Hello,
        *,
        remote: str | None = None,
        nonce: bytes | None = None,
        protocol_version: int = PROTOCOL_VERSION,
        library: str | None = None,
    ) -> None:
        super().__init__(token, hello, nonce=nonce, protocol_version=protocol_version, library=library, remote=remote)

    def start(self) -> list[Instruction]:
        """The first bytes to send."""
        return [Write(self._preamble.raw)]

    def _step(self, out: list[Instruction]) -> bool:
        if self.state is HandshakeState.PREAMBLE:
            peer = self._take_preamble()
            if peer is None:
                return False
            if peer.raw == self._preamble.raw:
                # the kernel connects a socket to itself when it happens to pick the wanted port, which nobody listens on, as its own
                error = LinkError("the connection leads back to this side, nobody else listens there")
                self._fail(out, error, retryable=True)
                return False
            self._check_version(peer)
            out.append(Write(self._proof(b"client", self._preamble.raw, peer.raw)))
            self.state: HandshakeState = HandshakeState.PROOF
            return True
        if self.state is HandshakeState.PROOF:
            return self._take_verdict(out)
        if self.state is HandshakeState.HELLO:
            data = self._take_json()
            if data is None:
                return False
            self._take_answer(data, out)
        return False

    def _take_verdict(self, out: list[Instruction]) -> bool:
        verdict = bytes(self._buffer[:1])
        if verdict == _DENIED:
            raise AuthenticationError("the other side denied our proof of the job token", hint=_TOKEN_HINT)
        if verdict not in (b"", _GRANTED):
            raise WireError(f"an unknown verdict {verdict!r} on the proof")
        taken = self._take(1 + _PROOF_BYTES)
        if taken is None:
            return False
        assert self._peer_preamble is not None
        if not hmac.compare_digest(taken[1:], self._proof(b"server", self._preamble.raw, self._peer_preamble.raw)):
            raise AuthenticationError("the other side did not prove that it knows the job token", hint=_TOKEN_HINT)
        out.append(Write(self._hello_frame))
        self.state = HandshakeState.HELLO
        return True

    def _take_answer(self, data: dict[str, Any], out: list[Instruction]) -> None:
        if "refused" in data:
            refusal = Refusal(_text(data, "refused", 64), _text(data, "message", 4096))
            self._fail(out, LinkError(f"refused by the other side: {refusal.message}", remote=self.hello.target), refusal)
            return
        peer = _hello_from_dict(data)
        if peer.role != self.hello.role:
            raise LinkError(f"the other side is {_role_text(peer)}, but {_role_name(self.hello.role)} was wanted")
        if peer.job is None or (self.hello.job is not None and peer.job != self.hello.job):
            raise LinkError(f"the other side belongs to job {peer.job}, this side to job {self.hello.job}")
        self._done(out, peer)

    def _eof_hint(self) -> str | None:
        return "the port may belong to another service" if self.state is HandshakeState.PREAMBLE else None


class ServerHandshake(_Handshake):
    """The side that was connected to. `feed` every byte received until `Done` or `Fail`.

    Args:
        token: the job's secret.
        hello: what to say about ourselves; a client's job, role and target are checked against it.
        accept: asked about a proven client whose job, role and target are right: a `Hello` to answer with, or a `Refusal`.
            Without it the answer is ``hello``.
        remote: the client's network address, for error messages.
        frame: what `encode_hello` makes of ``hello``, for those who are connected to often.
    """

    def __init__(
        self,
        token: bytes,
        hello: Hello,
        accept: Callable[[Hello], Hello | Refusal] | None = None,
        *,
        remote: str | None = None,
        frame: bytes | None = None,
        nonce: bytes | None = None,
        protocol_version: int = PROTOCOL_VERSION,
        library: str | None = None,
    ) -> None:
        super().__init__(token, hello, nonce=nonce, protocol_version=protocol_version, library=library, remote=remote, frame=frame)
        self._accept = accept

    def start(self) -> list[Instruction]:
        """Nothing: the client speaks first."""
        return []

    def _step(self, out: list[Instruction]) -> bool:
        if self.state is HandshakeState.PREAMBLE:
            peer = self._take_preamble()
            if peer is None:
                return False
            out.append(Write(self._preamble.raw))  # before the check: the client learns both versions too
            self._check_version(peer)
            self.state: HandshakeState = HandshakeState.PROOF
            return True
        if self.state is HandshakeState.PROOF:
            proof = self._take(_PROOF_BYTES)
            if proof is None:
                return False
            assert self._peer_preamble is not None
            client, server = self._peer_preamble.raw, self._preamble.raw
            if not hmac.compare_digest(proof, self._proof(b"client", client, server)):
                out.append(Write(_DENIED))
                raise AuthenticationError("the other side did not prove that it knows the job token", hint=_TOKEN_HINT)
            out.append(Write(_GRANTED + self._proof(b"server", client, server)))
            self.state = HandshakeState.HELLO
            return True
        if self.state is HandshakeState.HELLO:
            data = self._take_json()
            if data is None:
                return False
            self._answer(_hello_from_dict(data), out)
        return False

    def _answer(self, peer: Hello, out: list[Instruction]) -> None:
        answer = self._judge(peer)
        if isinstance(answer, Refusal):
            out.append(Write(_json_frame({"refused": answer.code, "message": answer.message})))
            self._fail(out, LinkError(f"refused {peer.speaker}: {answer.message}", remote=peer.address), answer)
            return
        out.append(Write(self._hello_frame if answer is self.hello else _json_frame(_hello_to_dict(answer))))
        self._done(out, peer)

    def _judge(self, peer: Hello) -> Hello | Refusal:
        own = self.hello
        if peer.role != own.role:
            return Refusal("role", f"this is {_role_text(own)}, but {_role_name(peer.role)} was wanted")
        if peer.job is None and own.role == "link":
            return Refusal("job", "a link needs the job's id")
        if peer.job is not None and peer.job != own.job:
            return Refusal("job", f"{_role_text(own)} here belongs to job {own.job}, and {peer.speaker} comes from job {peer.job}")
        if peer.target is not None and peer.target != own.address:
            return Refusal("target", f"this is {own.speaker}, but {peer.target} was wanted")
        return own if self._accept is None else self._accept(peer)


_TOKEN_HINT = "every worker of a job needs the same token: set AIORLINF_TOKEN"


def _role_name(role: str) -> str:
    return "a manager" if role == "manager" else "a worker"


def _role_text(hello: Hello) -> str:
    return "the manager" if hello.role == "manager" else f"worker {hello.speaker}"


def wrong_beginning(start: bytes) -> str | None:
    """Why a connection that begins with these bytes, at most `BEGINNING_BYTES`, is not one of ours; None if it may be."""
    if start[: len(_MAGIC)] == _MAGIC[: len(start)]:
        return None
    return f"the other side does not speak aiorlinf: {_looks_like(start)}"


def encode_hello(hello: Hello) -> bytes:
    """As it goes over the wire. Raises UsageError if it is too large, or holds what JSON does not."""
    return _json_frame(_hello_to_dict(hello))


def _json_frame(data: dict[str, Any]) -> bytes:
    try:
        body = orjson.dumps(data)
    except orjson.JSONEncodeError as error:
        raise UsageError(f"a hello holds a value that JSON does not: {error}") from None
    if len(body) > MAX_HELLO_BYTES:
        raise UsageError(f"a hello of {len(body)} bytes; at most {MAX_HELLO_BYTES} are allowed")
    return _LENGTH.pack(len(body)) + body


def _hello_to_dict(hello: Hello) -> dict[str, Any]:
    return {
        "role": hello.role,
        "job": hello.job,
        "address": hello.address,
        "incarnation": hello.incarnation,
        "target": hello.target,
        "versions": hello.versions,
        "host_id": hello.host_id,
        "capabilities": hello.capabilities,
    }


def _hello_from_dict(data: dict[str, Any]) -> Hello:
    """Check every field; keys we do not know are ignored, so that a hello can grow within one protocol version."""
    role = data.get("role")
    if role != "link" and role != "manager":
        raise WireError(f"hello: the role {role!r:.40} is not known")
    incarnation = data.get("incarnation")
    if type(incarnation) is not int or not 0 <= incarnation < 2**31:
        raise WireError("hello: the incarnation is not a number in range")
    versions = data.get("versions")
    if not isinstance(versions, dict) or len(versions) > 16 or not all(type(v) is str and len(v) <= 128 for v in versions.values()):
        raise WireError("hello: the versions are not a small table of texts")
    capabilities = data.get("capabilities")
    if not isinstance(capabilities, dict):
        raise WireError("hello: the capabilities are not a table")
    return Hello(
        role=role,
        job=None if data.get("job") is None else _text(data, "job", 128),
        address=_address(data, "address"),
        incarnation=incarnation,
        target=_address(data, "target"),
        versions=versions,
        host_id=_text(data, "host_id", 256),
        capabilities=capabilities,
    )


def _text(data: dict[str, Any], key: str, limit: int) -> str:
    value = data.get(key)
    if not isinstance(value, str) or len(value) > limit:
        raise WireError(f"hello: {key} is not a text of at most {limit} characters")
    return value


def _address(data: dict[str, Any], key: str) -> str | None:
    value = data.get(key)
    if value is None:
        return None
    try:
        return WorkerAddress(value)
    except UsageError:
        raise WireError(f"hello: {key} is not a worker address") from None


_METHODS = (b"GET ", b"HEAD ", b"POST ", b"PUT ", b"DELETE ", b"OPTIONS ", b"CONNECT ", b"PATCH ", b"TRACE ", b"PRI ")


def _looks_like(start: bytes) -> str:
    if start.startswith(_METHODS):
        return f"it looks like an HTTP client ({start!r})"
    if start.startswith(b"HTTP/"):
        return f"it looks like an HTTP server ({start!r})"
    if start[:2] == b"\x16\x03":
        return "it looks like TLS"
    if start.startswith(b"SSH-"):
        return f"it looks like SSH ({start!r})"
    return f"it begins with {start!r}"
