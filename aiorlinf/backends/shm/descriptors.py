"""Passing memory files between two processes of one user: descriptors over a Unix socket.

Each worker has one listening socket for it, in the abstract namespace: it has no file, and it is gone with its process. Who connects says
which link it belongs to and shows the key that the link's handshake told it; the kernel says which user it is. One message per segment.
"""

from __future__ import annotations

import array
import errno
import os
import secrets
import socket
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

import orjson

from aiorlinf.address import WorkerAddress

if TYPE_CHECKING:
    import asyncio

__all__ = ["DescriptorListener", "DescriptorReader", "DescriptorWriter", "abstract_listener", "abstract_name"]

_HEAD = struct.Struct("<QQ")
_MAX_GREETING = 1024
_MAX_UNGREETED = 256
_RETRY_SECONDS = 0.1


def abstract_name(purpose: str) -> str:
    """A fresh name in the abstract namespace, without its leading zero byte."""
    return f"aiorlinf-{purpose}-{secrets.token_hex(16)}"


def abstract_listener(name: str, kind: int) -> socket.socket:
    """A non-blocking listening Unix socket. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, kind)
    try:
        listener.setblocking(False)
        listener.bind(f"\0{name}")
        listener.listen(1024)
    except BaseException:
        listener.close()
        raise
    return listener


class DescriptorListener:
    """Accepts peers that will pass descriptors.

    Args:
        key: what a peer must show.
        attach: called with (address, incarnation, reader) of a peer that did; returns whether the reader was taken.
        shut: called with the reason each time that peers wait and cannot be let in.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        key: str,
        attach: Callable[[str, int, DescriptorReader], bool],
        shut: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.name: str = abstract_name("fd")
        self._loop = loop
        self._key = key
        self._attach = attach
        self._shut = shut
        self._listener = abstract_listener(self.name, socket.SOCK_SEQPACKET)
        self._ungreeted: dict[socket.socket, None] = {}
        self._retry: asyncio.TimerHandle | None = None
        loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno != errno.ECONNABORTED:
                    self._pause(error)
                    return
                continue
            peer.setblocking(False)
            if not _same_user(peer):
                peer.close()
                continue
            if len(self._ungreeted) >= _MAX_UNGREETED:
                oldest = next(iter(self._ungreeted))
                self._forget(oldest)
                oldest.close()
            self._ungreeted[peer] = None
            self._loop.add_reader(peer.fileno(), self._greet, peer)
            self._greet(peer)  # a peer says who it is right away

    def _pause(self, error: OSError) -> None:
        """No descriptors left, say. The peers go on waiting, so the socket stays readable: look again after a while."""
        self._loop.remove_reader(self._listener.fileno())
        self._retry = self._loop.call_later(_RETRY_SECONDS, self._resume)
        self._shut(f"no connection can be accepted: {error}")

    def _resume(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _greet(self, peer: socket.socket) -> None:
        try:
            data = peer.recv(_MAX_GREETING)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        self._forget(peer)
        greeting = self._read_greeting(data)
        if greeting is None or not self._attach(*greeting, DescriptorReader(self._loop, peer)):
            peer.close()

    def _forget(self, peer: socket.socket) -> None:
        self._loop.remove_reader(peer.fileno())
        del self._ungreeted[peer]

    def _read_greeting(self, data: bytes) -> tuple[str, int] | None:
        """Address and incarnation of a peer that shows the key."""
        try:
            greeting = orjson.loads(data)
            if secrets.compare_digest(str(greeting["key"]).encode(), self._key.encode()):
                return str(WorkerAddress(greeting["address"])), int(greeting["incarnation"])
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
            pass
        return None

    def close(self) -> None:
        """Accept nobody any more."""
        if self._retry is not None:
            self._retry.cancel()
        else:
            self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        for peer in list(self._ungreeted):
            self._forget(peer)
            peer.close()


def _same_user(peer: socket.socket) -> bool:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid == os.getuid())


class DescriptorReader:
    """The receiving end: (segment number, size, descriptor) for each segment that the peer passes."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        self._loop = loop
        self._sock: socket.socket | None = sock
        self._take: Callable[[int, int, int | None], None] | None = None
        self._ended: Callable[[], None] | None = None

    def start(self, take: Callable[[int, int, int | None], None], ended: Callable[[], None]) -> None:
        """Begin. `take` owns the descriptor that it is given; None: it was lost, because the limit of open files is reached.

        `ended` is called once when the peer has closed.
        """
        assert self._sock is not None
        self._take, self._ended = take, ended
        self._loop.add_reader(self._sock.fileno(), self._readable)

    def _readable(self) -> None:
        while self._sock is not None:
            try:
                data, control, _, _ = self._sock.recvmsg(_HEAD.size, socket.CMSG_SPACE(array.array("i").itemsize), socket.MSG_CMSG_CLOEXEC)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data, control = b"", []
            fds = _descriptors(control)
            if len(data) != _HEAD.size or len(fds) > 1:
                for fd in fds:
                    os.close(fd)
                ended = self._ended
                self.close()
                if ended is not None:
                    ended()
                return
            assert self._take is not None
            number, size = _HEAD.unpack(data)
            self._take(number, size, fds[0] if fds else None)

    def close(self) -> None:
        """Stop. May be called again."""
        sock, self._sock = self._sock, None
        if sock is not None:
            if self._take is not None:
                self._loop.remove_reader(sock.fileno())
            sock.close()
        self._take = self._ended = None


def _descriptors(control: list[tuple[int, int, bytes]]) -> array.array[int]:
    fds = array.array("i")
    for level, kind, payload in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return fds


class DescriptorWriter:
    """The sending end. Connecting to and writing to a local socket with room does not block, so there is nothing to await.

    Raises:
        OSError: nobody listens, or not enough room.
    """

    def __init__(self, name: str, key: str, address: str, incarnation: int) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._sock.setblocking(False)
            self._sock.connect(f"\0{name}")
            self._sock.send(orjson.dumps({"key": key, "address": address, "incarnation": incarnation}))
        except BaseException:
            self._sock.close()
            raise

    def send(self, number: int, size: int, fd: int) -> None:
        """Pass a segment. Raises OSError."""
        self._sock.sendmsg([_HEAD.pack(number, size)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])

    def close(self) -> None:
        """Stop."""
        self._sock.close()
