"""Links that the network has cut: another connection between the same two lives, and the stream goes on where it stopped.

Only connections between hosts (TCP) are cut by anything but the death of a process; those in one host are not looked after here.

A flow that a middlebox has forgotten makes no noise: what is sent is not answered, and the kernel tries again for a quarter of an hour. So
it is looked now and then how often it has tried in vain (`_FUTILE_TRIES`). A peer that is busy and does not read is no such case: its
kernel answers.

Whoever notices the break connects again, both sides if both do. The handshake is the ordinary one; in its hellos each side says how much of
the other's stream it has (`link.ledger`), and which of their links it means: the two may have had several. If both connect at once, the
connection of the smaller address wins, as when a link is made. The attempts end

- when it has worked;
- at once when nobody listens there any more, or another life does: that is what a death looks like;
- when the manager tells of the peer's death, which ends the link;
- when the other side has given up already, or after `cluster.network.reconnect_timeout_s`.

Then the link ends as it would have ended at the break.

It also ends when it was restored again and again for that long and nothing of ours has come through: where a way drops large packets, the
small ones of a handshake get through it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from aiorlinf.errors import AiorlinfError, PeerLost, WireError
from aiorlinf.link.dial import Refused
from aiorlinf.link.ledger import Ledger
from aiorlinf.link.link import LinkState
from aiorlinf.wire.handshake import Hello, Refusal

if TYPE_CHECKING:
    from aiorlinf.address import Identity, WorkerAddress
    from aiorlinf.link.connection import Connection
    from aiorlinf.link.link import Link
    from aiorlinf.manager.protocol import WorkerRecord
    from aiorlinf.wire.handshake import ClientHandshake
    from aiorlinf.work.home import LoopHome

__all__ = ["Dial", "Resumptions", "from_the_beginning", "resumes"]

log: logging.Logger = logging.getLogger("aiorlinf.link")

_RETRY_FIRST_SECONDS = 0.05
_RETRY_MAX_SECONDS = 1.0
_LOOK_SECONDS = 1.0
_FUTILE_TRIES = 5
"""After so many retransmissions without an answer (about six seconds; the pauses double) another connection is worth a try."""

Dial = Callable[["WorkerRecord", Hello], Awaitable[tuple["Connection", Hello, "ClientHandshake"]]]
"""Connect to a worker over TCP with this hello, as `link.dial.dial`."""


def resumes(hello: Hello) -> dict[str, Any] | None:
    """What a peer says of the link that it wants to go on with; None if it wants a new one."""
    told = hello.capabilities.get("resume")
    return told if isinstance(told, dict) else None


def from_the_beginning(hello: Hello, told: Mapping[str, Any]) -> Hello:
    """The answer to a peer that wants to go on with a link of which nothing has come here."""
    return dataclasses.replace(hello, capabilities={**hello.capabilities, "resume": {"link": told["link"], "received": 0}})


class _Upheld:
    """A link that outlives its connections."""

    __slots__ = ("began", "connection", "dialling", "error", "in_vain", "link", "number", "record", "stuck_at", "stuck_since", "task")

    def __init__(self, link: Link, connection: Connection, record: WorkerRecord | None, number: int) -> None:
        self.link = link
        self.connection = connection
        self.record = record
        self.number = number
        self.task: asyncio.Task[None] | None = None
        self.dialling = False
        self.error: BaseException | None = None
        self.began = 0.0
        self.stuck_at = -1  # position of our stream at a break, ...
        self.stuck_since = 0.0
        self.in_vain = 0  # ... and how often it has been restored since then without having come any further


class Resumptions:
    """See the module. Home thread only.

    Args:
        hello: ours, for a peer.
        dial: see `Dial`.
        links: those that have not ended; a live view.
        timeout: seconds; 0 looks after nothing.
    """

    def __init__(
        self,
        home: LoopHome,
        hello: Callable[[WorkerAddress], Hello],
        dial: Dial,
        links: Mapping[WorkerAddress, Link],
        timeout: float,
    ) -> None:
        self._home = home
        self._hello = hello
        self._dial = dial
        self._links = links
        self._timeout = timeout
        self._upheld: dict[Link, _Upheld] = {}
        self._timer: asyncio.TimerHandle | None = None

    def uphold(self, link: Link, connection: Connection, hello: Hello, record: WorkerRecord | None, number: int) -> None:
        """Look after a link, before its connection is adopted. Nothing happens if one of the two sides cannot, or need not.

        Args:
            record: where the peer listens, None if it does not say; then it has to come to us.
            number: how many links with this life of the peer there were, this one included; both sides count alike.
        """
        if not self._timeout or hello.capabilities.get("resumes") is not True or not isinstance(connection.extra_info("peername"), tuple):
            return
        upheld = _Upheld(link, connection, record, number)
        self._upheld[link] = upheld
        connection.ledger = Ledger()
        connection.on_cut = lambda error: self._cut(upheld, error)
        if self._timer is None:
            self._timer = self._home.loop.call_later(_LOOK_SECONDS, self._look)

    def forget(self, link: Link) -> None:
        """It has ended."""
        upheld = self._upheld.pop(link, None)
        if upheld is not None and upheld.task is not None:
            upheld.task.cancel()
        if not self._upheld and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        """Find the flows that nobody answers on."""
        for upheld in list(self._upheld.values()):
            connection = upheld.connection
            if connection.transport is not None and _futile_tries(connection.extra_info("socket")) >= _FUTILE_TRIES:
                connection.detach()
                self._cut(upheld, TimeoutError("no answer to what was sent"))
        self._timer = self._home.loop.call_later(_LOOK_SECONDS, self._look) if self._upheld else None

    # ---- we noticed

    def _cut(self, upheld: _Upheld, error: BaseException | None) -> None:
        link = upheld.link
        if link.state is not LinkState.UP or upheld.task is not None:
            if link.state is not LinkState.UP:
                upheld.connection.give_up(error)
            return
        upheld.error = error
        upheld.began = time.monotonic()
        if self._in_vain(upheld):
            return
        log.info("%s: the connection with %s was cut (%s)", link.local, link.identity, "end of stream" if error is None else error)
        upheld.task = self._home.spawn(self._restore(upheld), f"restore {link.remote}")

    def _in_vain(self, upheld: _Upheld) -> bool:
        """Whether to restore it does not help; then it has ended."""
        ledger, link = upheld.connection.ledger, upheld.link
        assert ledger is not None
        if not ledger.kept_bytes or ledger.confirmed != upheld.stuck_at:
            upheld.stuck_at, upheld.stuck_since, upheld.in_vain = ledger.confirmed, upheld.began, 0
            return False
        upheld.in_vain += 1
        seconds = upheld.began - upheld.stuck_since
        if seconds < self._timeout:
            return False
        text = f"its connection was restored {upheld.in_vain} times within {seconds:.1f} s, and nothing that was sent got through"
        hint = "does the way between the two hosts drop large packets? (its MTU)"
        self._give_up(upheld, PeerLost(f"{link.identity} cannot be reached: {text}", address=link.address, hint=hint))
        return True

    async def _restore(self, upheld: _Upheld) -> None:
        link, connection = upheld.link, upheld.connection
        end = upheld.began + self._timeout
        pause = _RETRY_FIRST_SECONDS
        why = "the peer did not come back"
        try:
            while connection.transport is None:
                left = end - time.monotonic()
                if left <= 0:
                    elapsed = time.monotonic() - upheld.began
                    text = f"its connection was cut, and could not be restored within {elapsed:.1f} s ({why})"
                    self._give_up(upheld, PeerLost(f"{link.identity} cannot be reached: {text}", address=link.address))
                    return
                try:
                    async with asyncio.timeout(left):
                        await self._try(upheld)
                    return
                except ConnectionRefusedError:  # its process has ended
                    self._give_up(upheld, upheld.error)
                    return
                except Refused as refused:
                    why = refused.message
                    if refused.code != "yield":
                        self._give_up(upheld, upheld.error)
                        return
                except (OSError, TimeoutError) as error:
                    why = str(error) or "no answer"
                except AiorlinfError as error:
                    self._give_up(upheld, error)
                    return
                await asyncio.sleep(min(pause * (0.5 + random.random()), max(0.0, end - time.monotonic())))
                pause = min(pause * 2, _RETRY_MAX_SECONDS)
        finally:
            if upheld.task is asyncio.current_task():
                upheld.task = None

    async def _try(self, upheld: _Upheld) -> None:
        link, record = upheld.link, upheld.record
        ledger = upheld.connection.ledger
        assert ledger is not None
        if record is None:
            raise ConnectionError("the peer has not said where it listens")
        upheld.dialling = True
        try:
            fresh, hello, handshake = await self._dial(record, self._saying(self._hello(link.remote), upheld, ledger))
        finally:
            upheld.dialling = False
        told = resumes(hello)
        if upheld.connection.transport is not None or told is None or hello.incarnation != record.identity.incarnation:
            fresh.abort()  # it came to us meanwhile; or it is somebody else
            if upheld.connection.transport is None:
                raise WireError(f"{hello.speaker} does not go on with the link")
            return
        upheld.task = None  # from here on a break is a new one
        self._go_on(upheld, fresh, told, handshake.leftover)

    def _saying(self, hello: Hello, upheld: _Upheld, ledger: Ledger) -> Hello:
        resume = {"link": upheld.number, "received": ledger.received}
        return dataclasses.replace(hello, capabilities={**hello.capabilities, "resume": resume})

    # ---- the peer noticed

    def judge(self, remote: Identity, told: dict[str, Any], hello: Hello) -> Hello | Refusal:
        """Answer a peer that wants to go on with a link. What has come over the old connection is final from here on."""
        ended = Refusal("ended", f"{hello.speaker} has given that link up")
        link = self._links.get(remote.address)
        upheld = None if link is None else self._upheld.get(link)
        if upheld is None or upheld.link.state is not LinkState.UP or upheld.link.identity != remote or told.get("link") != upheld.number:
            return ended
        if upheld.dialling and upheld.link.local < remote.address:
            return Refusal("yield", f"{hello.speaker} is connecting to {remote} at this moment")
        ledger = upheld.connection.ledger
        assert ledger is not None
        if upheld.connection.transport is not None:
            upheld.connection.detach()
            self._cut(upheld, ConnectionResetError("the peer has noticed a break"))
        return self._saying(hello, upheld, ledger) if upheld in self._upheld.values() else ended

    def proved(self, remote: WorkerAddress, told: dict[str, Any], fresh: Connection, leftover: bytes) -> None:
        """A peer that was answered is here."""
        link = self._links.get(remote)
        upheld = None if link is None else self._upheld.get(link)
        if upheld is None or upheld.connection.transport is not None:
            fresh.abort()
            return
        task, upheld.task = upheld.task, None
        if task is not None:
            task.cancel()
        self._go_on(upheld, fresh, told, leftover)

    # ---- both

    def _go_on(self, upheld: _Upheld, fresh: Connection, told: dict[str, Any], leftover: bytes) -> None:
        link = upheld.link
        received = told.get("received")
        try:
            if type(received) is not int:
                raise WireError("the peer does not say how much it has received")
            upheld.connection.resume(fresh, received, leftover)
        except ConnectionError as error:
            self._cut(upheld, error)
        except WireError as error:
            fresh.abort()
            self._give_up(upheld, error)
        else:
            link.reconnects += 1
            log.warning(
                "%s: the connection with %s was cut by the network and restored after %.2f s; nothing was lost",
                link.local,
                link.identity,
                time.monotonic() - upheld.began,
            )

    def _give_up(self, upheld: _Upheld, error: BaseException | None) -> None:
        upheld.task = None
        upheld.connection.give_up(error)


def _futile_tries(sock: socket.socket | None) -> int:
    """How often the kernel has sent the same again, or has asked whether there is room, since the other side last answered."""
    if sock is None or not hasattr(socket, "TCP_INFO"):
        return 0
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)
    except OSError:  # it is being closed
        return 0
    return max(info[2], info[3])  # tcpi_retransmits, tcpi_probes: see tcp(7) and linux/tcp.h
