"""A TCP proxy that does to connections what networks do: it delays, limits, cuts and corrupts them, and forgets that they were there.

It stands before any TCP server; `aiorlinf.testing.cluster` puts one between two workers::

    proxy = cluster.between("rollout:0", "trainer:0", Plan(delay_s=0.02))
    ...
    proxy.cut()  # both ends get a reset, and restore their link

What happens to a connection is said by a `Plan` beforehand, for each in the order in which they are made, or by calls, for those that are
there. A plan counts bytes, so that the same thing happens at the same place each time.
"""

from __future__ import annotations

import asyncio
import ctypes
import socket
import struct
import threading
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Self

from aiorlinf.rendezvous.hosts import bind_listener

__all__ = ["Plan", "Proxy"]

_READ_BYTES = 1 << 16
_HELD_BYTES = 1 << 26
_RESET = struct.pack("ii", 1, 0)
_SO_ATTACH_FILTER = 26
_DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # a filter of one instruction: take 0 bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of one connection.

    Attributes:
        delay_s: seconds that bytes take on their way, each way.
        bytes_per_s: how many get through in a second, each way; None: as many as come.
        refuse: it is reset as soon as it is made.
        cut_after: it is reset when so many bytes have gone through, both ways together.
        forget_after: when so many bytes have gone through, both ways together, all later ones vanish, and neither side is told anything,
            as by a router that has forgotten the connection, or a host that has lost its power.
        corrupt_at: of the bytes at these places, counted from 0 in each direction, one bit is flipped.
    """

    delay_s: float = 0.0
    bytes_per_s: float | None = None
    refuse: bool = False
    cut_after: int | None = None
    forget_after: int | None = None
    corrupt_at: tuple[int, ...] = ()


class Proxy:
    """See the module. Lives on the running loop; only `door` may be called from other threads.

    Args:
        plans: for the first connection, the second, ...; the last one is for all that follow. Without any they are left alone.

    Attributes:
        accepted: how many connections were made so far.
        carried: bytes that have gone through, both ways together.

    Use it as ``async with Proxy(...) as proxy``, or `close` it. Cancelling what waits in `close` leaves it closing.
    """

    def __init__(self, *plans: Plan) -> None:
        self.accepted: int = 0
        self.carried = 0
        self._plans = deque(plans or (Plan(),))
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._doors: dict[tuple[str, int], socket.socket] = {}
        self._flows: set[_Flow] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def door(self, host: str, port: int) -> tuple[str, int]:
        """Where to connect to in order to reach this server through the proxy: a port of loopback that the kernel chooses. Any thread.

        Raises:
            RendezvousError: there is no port left, or the proxy is closed.
        """
        with self._lock:
            listener = self._doors.get((host, port))
            if listener is None:
                listener = self._doors[host, port] = bind_listener("127.0.0.1")
                self._loop.call_soon_threadsafe(self._serve, listener, host, port)
        name = listener.getsockname()
        return name[0], name[1]

    # ---- what can be done to those that are there

    @property
    def connections(self) -> int:
        """How many there are at the moment."""
        return len(self._flows)

    def set(self, plan: Plan) -> None:
        """From now on all connections are delayed and limited like this; for those to come all of the plan holds."""
        self._plans = deque((plan,))
        for flow in self._flows:
            flow.plan = plan

    def cut(self) -> int:
        """Reset all connections; how many there were. Bytes on their way are gone."""
        flows = list(self._flows)
        for flow in flows:
            flow.cut()
        return len(flows)

    def forget(self) -> int:
        """All connections turn into black holes: bytes vanish, and nobody is told. How many there were. New ones work."""
        for flow in self._flows:
            flow.forget()
        return len(self._flows)

    def hold(self) -> None:
        """Let nothing through until `go_on`, and lose nothing."""
        for flow in self._flows:
            flow.open.clear()

    def go_on(self) -> None:
        """What was held goes on."""
        for flow in self._flows:
            flow.open.set()

    def corrupt(self) -> int:
        """Flip one bit of the next byte of every connection, each way; how many connections there were."""
        for flow in self._flows:
            for direction in flow.directions:
                direction.flip_next = True
        return len(self._flows)

    async def close(self) -> None:
        """Reset all connections and close the doors. May be called again."""
        self._closed = True
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listener in self._doors.values():
            listener.close()

    # ---- inside

    def _serve(self, listener: socket.socket, host: str, port: int) -> None:
        if self._closed:
            listener.close()
        else:
            self._spawn(self._accept(listener, host, port))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine, name="proxy")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket, host: str, port: int) -> None:
        while True:
            sock, _ = await self._loop.sock_accept(listener)
            plan = self._plans[0] if len(self._plans) == 1 else self._plans.popleft()
            self.accepted += 1
            self._spawn(self._carry(sock, host, port, plan))

    async def _carry(self, near: socket.socket, host: str, port: int, plan: Plan) -> None:
        far: socket.socket | None = None
        flow: _Flow | None = None
        try:
            near.setblocking(False)
            if plan.refuse:
                return
            far = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
            far.setblocking(False)
            await self._loop.sock_connect(far, (host, port))
            for sock in (near, far):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            flow = _Flow(self, plan, near, far)
            self._flows.add(flow)
            await flow.run()
        except OSError:  # one side is gone: the other is told so below
            pass
        finally:
            if flow is not None:
                self._flows.discard(flow)
            for end in (near, far):
                if end is not None:
                    if flow is None or flow.broken:
                        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    end.close()


class _Flow:
    """One connection.

    Attributes:
        forgotten: what comes vanishes.
        open: cleared while it is held.
        broken: its ends are reset, not closed.
    """

    def __init__(self, proxy: Proxy, plan: Plan, near: socket.socket, far: socket.socket) -> None:
        self.plan = plan
        self.passed = 0
        self.forgotten = False
        self.broken = False
        self.open = asyncio.Event()
        self.open.set()
        self.proxy = proxy
        self.directions = (_Direction(self, near, far), _Direction(self, far, near))
        self._cut = asyncio.Event()

    async def run(self) -> None:
        """Carry until both sides have ended, or it is cut."""
        cut: asyncio.Future[Any] = asyncio.ensure_future(self._cut.wait())
        going: set[asyncio.Future[Any]] = {
            asyncio.ensure_future(part) for direction in self.directions for part in (direction.read(), direction.write())
        }
        everything: set[asyncio.Future[Any]] = {cut, *going}
        try:
            while going and not cut.done():
                done, _ = await asyncio.wait({cut, *going}, return_when=asyncio.FIRST_COMPLETED)
                going -= done
                for task in done:
                    task.result()
        except BaseException as error:  # of whatever kind: what is left of it is reset
            self.broken = True
            if not isinstance(error, OSError):
                raise
        finally:
            for task in everything:
                task.cancel()
            await asyncio.gather(*everything, return_exceptions=True)

    def cut(self) -> None:
        """End it now."""
        self.broken = True
        self._cut.set()

    def forget(self) -> None:
        """From now on nothing is heard here of what comes, nor said."""
        self.forgotten = True
        for direction in self.directions:
            _turn_deaf(direction.source)

    def count(self, size: int) -> None:
        """So many bytes have gone through."""
        self.passed += size
        self.proxy.carried += size

    @property
    def left(self) -> int | None:
        """Bytes until its plan makes an end of it; None: it does not."""
        ends = [end for end in (self.plan.cut_after, self.plan.forget_after) if end is not None]
        return max(0, min(ends) - self.passed) if ends else None

    def at_end(self) -> None:
        """Its plan makes an end of it now."""
        cut, forget = self.plan.cut_after, self.plan.forget_after
        if cut is not None and (forget is None or cut <= forget):
            self.cut()
        else:
            self.forget()


class _Direction:
    """Bytes from one side to the other."""

    def __init__(self, flow: _Flow, source: socket.socket, target: socket.socket) -> None:
        self.flip_next = False
        self._flow = flow
        self.source = source
        self._target = target
        self._loop = asyncio.get_running_loop()
        self._held: deque[tuple[float, bytes]] = deque()
        self._bytes = 0
        self._changed = asyncio.Event()
        self._place = 0
        self._free_at = 0.0

    async def read(self) -> None:
        """Take what comes, with the time when it may go on."""
        while True:
            data = await self._loop.sock_recv(self.source, _READ_BYTES)
            self._held.append((self._loop.time() + self._flow.plan.delay_s, data))
            self._bytes += len(data)
            self._changed.set()
            if not data:
                return
            while self._bytes > _HELD_BYTES:
                self._changed.clear()
                await self._changed.wait()

    async def write(self) -> None:
        """Send on what is due."""
        flow = self._flow
        while True:
            while not self._held:
                self._changed.clear()
                await self._changed.wait()
            due, data = self._held.popleft()
            self._bytes -= len(data)
            self._changed.set()
            due = max(due, self._free_at)
            if flow.plan.bytes_per_s is not None:
                self._free_at = max(due, self._loop.time()) + len(data) / flow.plan.bytes_per_s
            await asyncio.sleep(max(0.0, due - self._loop.time()))
            await flow.open.wait()
            if flow.forgotten:
                if not data:
                    await asyncio.Event().wait()  # the other side never hears of it
                continue
            if not data:
                self._target.shutdown(socket.SHUT_WR)
                return
            await self._send(data)

    async def _send(self, data: bytes) -> None:
        flow = self._flow
        left = flow.left
        ends = left is not None and left <= len(data)
        data = self._flipped(data if left is None else data[:left])
        if data:
            flow.count(len(data))
            await self._loop.sock_sendall(self._target, data)
        if ends:
            flow.at_end()

    def _flipped(self, data: bytes) -> bytes:
        begin, self._place = self._place, self._place + len(data)
        places = [place - begin for place in self._flow.plan.corrupt_at if begin <= place < self._place]
        if self.flip_next and data:
            self.flip_next = False
            places.append(0)
        if not places:
            return data
        changed = bytearray(data)
        for place in places:
            changed[place] ^= 1 << (place % 8)
        return bytes(changed)


def _turn_deaf(sock: socket.socket) -> None:
    """Let the kernel throw away every packet that comes. Unacknowledged, its sender tries again and again, as into a dead line."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(_DROP_ALL)))
    except OSError:  # not Linux: what comes is acknowledged, and vanishes all the same
        pass
