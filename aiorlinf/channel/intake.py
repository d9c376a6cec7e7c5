"""The puts of one worker, as the channel worker sees them: announced, admitted, brought, final."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from aiorlinf.channel.entries import PUTS, Bits, Op, decode_key, entry
from aiorlinf.channel.records import Put, PutState
from aiorlinf.channel.watching import watch
from aiorlinf.errors import ChannelClosed, WireError
from aiorlinf.link.lending import refuse, take_parcel

if TYPE_CHECKING:
    from aiorlinf.channel.host_port import HostPort, Talk
    from aiorlinf.link.parcel import Parcel
    from aiorlinf.work.base import AsyncWork

__all__ = ["Intake"]

_SLOTS = 64
"""So many large payloads may be on their way from a worker at once; more wait."""

_ADMITTED = PutState.ADMITTED
_LARGE, _NOWAIT, _PLACED = Bits.LARGE, Bits.NOWAIT, Bits.PLACED


class Intake:
    """See the module. Home thread only.

    Attributes:
        admits: by port, the last put that has room and that the worker does not know of.
    """

    def __init__(self, session: Talk) -> None:
        self.admits: dict[int, int] = {}
        self._session = session
        self._slots = deque(range(1, _SLOTS + 1))
        self._expected: deque[Put] = deque()  # large ones with room, that wait for a slot
        self._transfers: dict[Put, AsyncWork[Any]] = {}
        self._early: set[Put] = set()  # of those, the ones that are final already

    # ---- what the worker says

    def put(self, port: HostPort, bits: int, number: int, weight: float, nbytes: int, key: bytes, payload: bytes, now: float) -> None:
        """It wants to put this."""
        producer = port.handle.producer
        if producer is None or producer.state != "open":
            try:
                producer = port.handle.producing()
            except ChannelClosed as error:
                if bits & _PLACED:
                    refuse(self._session.link, payload)
                self._session.fail(port.number, number, error)
                return
        brought: bytes | Parcel | None = payload
        if bits & _LARGE:
            brought = self._placed(port, number, payload) if bits & _PLACED else None
        put = Put(producer, decode_key(key) if key else None, weight, nbytes, bool(bits & _NOWAIT), brought, port, number)
        port.puts[number] = put
        port.hosted.queue.put(put, now)

    def _placed(self, port: HostPort, number: int, told: bytes) -> Parcel | None:
        session = self._session
        parcel = take_parcel(session.link, told)
        if parcel is None:
            refuse(session.link, told)
            session.write(entry(Op.AGAIN, port.number, number))
        return parcel

    def retract(self, port: HostPort, number: int, now: float) -> None:
        """It does not want that any more."""
        put = port.puts.pop(number, None)
        if put is not None:
            self._drop(port, put, now)

    def _drop(self, port: HostPort, put: Put, now: float) -> None:
        transfer = self._transfers.get(put)
        if transfer is not None:
            transfer.cancel()
        put.payload = None
        port.hosted.queue.retract(put, now)

    def commit(self, port: HostPort, upto: int, now: float) -> None:
        """All admitted puts of this port up to that one are final."""
        admitted, puts = port.admitted, port.puts
        queue = port.hosted.queue
        while admitted and admitted[0].number <= upto:
            put = admitted.popleft()
            if put.state != _ADMITTED:
                continue
            puts.pop(put.number, None)
            payload = put.payload
            if payload is not None:
                queue.commit(put, payload, now)
            elif put in self._transfers:
                self._early.add(put)
            else:
                queue.retract(put, now)
                raise WireError(f"put {put.number} is committed without a payload")

    # ---- what the queue says

    def admitted(self, port: HostPort, put: Put) -> None:
        """This put has room."""
        port.admitted.append(put)
        self.admits[port.number] = put.number
        if put.payload is None:
            self._expected.append(put)
            self._deal_slots()

    def _deal_slots(self) -> None:
        session = self._session
        while self._expected and self._slots:
            put = self._expected.popleft()
            if put.state != _ADMITTED:
                continue
            put.slot = slot = self._slots.popleft()
            self._transfers[put] = work = session.exchange.recv_parcel(session.peer, PUTS, slot)
            watch(work, partial(self._received, put))
            session.write(entry(Op.GO, put.owner.number, put.number, slot=slot))

    def _received(self, put: Put, work: AsyncWork[Any]) -> None:
        session = self._session
        self._transfers.pop(put, None)
        self._slots.append(put.slot)
        early = put in self._early
        self._early.discard(put)
        if not work.cancelled() and work.exception() is None and put.state == _ADMITTED:
            if early:
                put.owner.hosted.queue.commit(put, work.result(), session.clock())
                session.work_off()
            else:
                put.payload = work.result()
        elif early:
            put.owner.hosted.queue.retract(put, session.clock())
        if not session.ended:
            self._deal_slots()

    def complete(self, port: HostPort) -> bool:
        """Everything that it has put is here and has room."""
        return all(put.state == _ADMITTED and put.payload is not None for put in port.puts.values())

    def settle(self, port: HostPort, now: float) -> None:
        """The worker says nothing more about its puts: those whose items are here stay, the others are withdrawn."""
        queue = port.hosted.queue
        for put in list(port.puts.values()):
            if put.state == _ADMITTED and put.payload is not None:
                queue.commit(put, put.payload, now)
            else:
                self._drop(port, put, now)
        port.puts.clear()
        port.admitted.clear()
