"""The channel worker's end of its conversation with one worker; the other is `channel.client`.

What is said about puts is in `channel.intake`, about gets in `channel.handout`.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from aiorlinf.channel.entries import HEAD, LIFE, REPLIES, Bits, Entry, Op, decode_end, decode_key, entries, entry
from aiorlinf.channel.faults import encode_error
from aiorlinf.channel.handle import Handle
from aiorlinf.channel.handout import Handout
from aiorlinf.channel.host_port import Hosted, HostPort
from aiorlinf.channel.intake import Intake
from aiorlinf.channel.posting import post
from aiorlinf.channel.records import Delivery, Put, Rejected
from aiorlinf.channel.settings import ChannelSettings
from aiorlinf.channel.stats import take_stats
from aiorlinf.channel.watching import watch
from aiorlinf.errors import AiorlinfError, ChannelClosed, ChannelError, PeerLeft, WireError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from aiorlinf.address import WorkerAddress
    from aiorlinf.channel.affinity import Affinity
    from aiorlinf.channel.records import Key
    from aiorlinf.collective.exchange import Exchange
    from aiorlinf.link.link import Link
    from aiorlinf.work.base import AsyncWork
    from aiorlinf.work.home import LoopHome

__all__ = ["Holder", "Session"]

log: logging.Logger = logging.getLogger("aiorlinf.channel")

_FLUSH_BYTES = 48 * 1024
_PUT, _GET, _COMMIT, _TAKEN = Op.PUT, Op.GET, Op.COMMIT, Op.TAKEN  # they are compared for every entry


class Holder(Protocol):
    """What a session needs of the channel worker (`channel.host`)."""

    exchange: Exchange
    home: LoopHome

    async def channel(self, settings: ChannelSettings, *, create: bool) -> Hosted: ...
    def not_told(self, session: Session) -> list[Delivery]: ...
    def session_ended(self, session: Session) -> None: ...
    def work_off(self) -> None: ...


class Session:
    """See the module. Home thread only.

    Attributes:
        peer: the worker; `number` of the conversation.
        ports: its handles.
        ended: nothing more is said.
        link: to the worker.
    """

    def __init__(self, host: Holder, peer: WorkerAddress, number: int) -> None:
        self.peer = peer
        self.number = number
        self.ports: dict[int, HostPort] = {}
        self._opening: set[int] = set()
        self.ended: bool = False
        self.exchange: Exchange = host.exchange
        self.link: Link | None = host.exchange.table.peek(peer)
        self.clock: Callable[[], float] = time.monotonic
        self.work_off: Callable[[], None] = host.work_off
        self.intake: Intake = Intake(self)
        self.handout: Handout = Handout(self)
        self._host = host
        self._life: AsyncWork[Any] | None = None
        self._loop = host.home.loop
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._scheduled = False

    def watch_life(self) -> None:
        """End with the link."""
        self._life = self.exchange.recv_parcel(self.peer, LIFE, 0)
        watch(self._life, self._life_over)

    def _life_over(self, work: AsyncWork[Any]) -> None:
        if work.cancelled():
            self.end(None, link_lives=False)
            return
        error = work.exception()
        if error is None:
            told = decode_end(work.result().small, self.number)
            if told is None:  # the last word of an earlier conversation
                self.watch_life()
            else:
                self.end(told)
        elif isinstance(error, PeerLeft):
            self.end(None, link_lives=False)
        else:
            self.end(error.message if isinstance(error, AiorlinfError) else str(error), link_lives=False)

    # ---- sending

    def write(self, data: bytes) -> None:
        """An entry; those of one turn of the loop leave together."""
        self._out.append(data)
        self._out_bytes += len(data)
        if self._out_bytes > _FLUSH_BYTES:
            self.flush()
        elif not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send what is there."""
        self._scheduled = False
        if self.ended:
            return
        out = self._out
        admits = self.intake.admits
        if admits:
            for port, number in admits.items():
                out.append(entry(Op.ADMIT, port, number))
            admits.clear()
        if out:
            body = HEAD.pack(self.number, 0) + b"".join(out)
            out.clear()
            self._out_bytes = 0
            post(self.exchange, self.peer, REPLIES, body)

    def fail(self, port: int, number: int, error: BaseException) -> None:
        """This call has failed."""
        self.write(entry(Op.ERROR, port, number, payload=encode_error(error)))

    def _answer(self, each: Entry, value: Any) -> None:
        self.write(entry(Op.ANSWER, each.port, each.number, payload=orjson.dumps(value)))

    # ---- what the worker says

    def obey(self, body: bytes) -> None:
        """A message of the worker.

        Raises:
            WireError: malformed.
        """
        ports = self.ports
        intake, handout = self.intake, self.handout
        now = self.clock()
        for each in entries(body):
            op, bits, port_number, slot, number, value, extra, key, payload = each
            if op == _TAKEN:
                handout.taken(number, extra, now)
                continue
            port = ports.get(port_number)
            if op == _PUT and port is not None:
                intake.put(port, bits, number, value, extra, key, payload, now)
            elif op == _GET and port is not None:
                handout.get(port, bits, number, slot, value, extra, key, now)
            elif op == _COMMIT and port is not None:
                intake.commit(port, number, now)
            elif not self._obey_rare(Entry(*each), port, now):
                raise WireError(f"entry {op} of a worker for port {port_number}")

    def _obey_rare(self, each: Entry, port: HostPort | None, now: float) -> bool:
        """False: nobody knows what that means."""
        op, number = each.op, each.number
        if op == Op.RETURN:
            self.handout.come_back(number, each.payload, now)
        elif op == Op.DONE:
            self.handout.done(number, now)
        elif op == Op.BACK:
            self.handout.back(number, now)
        elif op == Op.AGAIN:
            self.handout.again(number, each.extra)
        elif op == Op.OPEN:
            self._open(each)
        elif op == Op.CLOSE and each.bits & Bits.NOWAIT:
            self._give_up(each.port, port, now)
        elif port is None:
            return False
        elif op == Op.RETRACT:
            self.intake.retract(port, number, now)
        elif op == Op.CANCEL:
            self.work_off()  # if it has been served, the item goes back to its place before the next get looks for one
            self.handout.cancel(port, number, now)
        elif op == Op.ASK:
            self._ask(each, port)
        elif op == Op.REPORT:
            port.handle.report(None if each.bits & Bits.NOWAIT else each.extra)
        elif op == Op.CLOSE:
            self._close(each, port, now)
        else:
            return False
        return True

    def _open(self, each: Entry) -> None:
        try:
            told = orjson.loads(each.payload)
            settings = ChannelSettings.from_dict(told["settings"])
        except (orjson.JSONDecodeError, KeyError, TypeError):
            raise WireError("a handle is opened without saying for what") from None
        opening = self._host.channel(settings, create=bool(told.get("create")))
        self._opening.add(each.port)
        task = self._host.home.hold(opening, f"open {settings.name}")
        task.add_done_callback(lambda task: self._opened(each, told, task))

    def _opened(self, each: Entry, told: dict[str, Any], task: asyncio.Task[Hosted]) -> None:
        given_up = each.port not in self._opening
        self._opening.discard(each.port)
        if task.cancelled() or self.ended:
            return
        if given_up:
            task.exception()  # that is nobody's concern any more
            return
        try:
            hosted = task.result()
            names = (str(told["consumer"]), str(told["producer"]))
            handle = Handle(hosted.queue, *names, float(told["share"]), {str(k): str(v) for k, v in told["labels"].items()})
            if "producer" in told["joins"]:
                handle.producing()
            if "consumer" in told["joins"]:
                handle.consuming(self.clock())
        except Exception as error:  # whatever a policy's own code raises goes to the one who asked for it
            self.fail(each.port, each.number, error)
            return
        self.ports[each.port] = HostPort(self, each.port, hosted, handle)
        self._answer(each, {})
        self.work_off()

    def _give_up(self, number: int, port: HostPort | None, now: float) -> None:
        """Who wanted this handle did not wait for it."""
        self._opening.discard(number)
        if port is not None:
            del self.ports[number]
            port.handle.give_up(now)

    def _ask(self, each: Entry, port: HostPort) -> None:
        hosted = port.hosted
        queue = hosted.queue
        key = decode_key(each.key)
        if each.payload == b"length":
            self._answer(each, queue.length if each.bits & Bits.ALL_KEYS else len(queue.items(key)))
        elif each.payload == b"full":
            self._answer(each, queue.full)
        elif each.payload == b"stats":
            self._answer(each, take_stats(queue, self.clock(), str(self.exchange.local), hosted.settings.policy).to_dict())
        elif each.payload == b"produce":
            try:
                port.handle.producing()
            except ChannelClosed as error:
                self.fail(each.port, each.number, error)
            else:
                self._answer(each, None)
        elif each.payload.startswith((b"nodes", b"place ")):
            self._answer(each, _place(hosted.affinity, each.payload, key))
        elif each.payload == b"peek":
            items = queue.items(key)
            if items:
                self.handout.look(each.number, items)
            else:
                self._answer(each, None)
        else:
            raise WireError(f"unknown question {each.payload[:40]!r}")

    def _close(self, each: Entry, port: HostPort, now: float) -> None:
        if each.bits & Bits.FORGET:
            over = not port.puts and not port.gets
            if over:
                port.handle.gone(now, None)
                del self.ports[each.port]
            self._answer(each, over)
            return
        if each.bits & Bits.SHUTDOWN:
            port.hosted.queue.shutdown(port.handle.producer_name, now, immediate=bool(each.bits & Bits.IMMEDIATE))
        else:
            port.handle.close(now)
        self._answer(each, None)

    # ---- what the queue says

    def admitted(self, port: HostPort, put: Put) -> None:
        """This put has room."""
        self.intake.admitted(port, put)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.flush)

    def rejected(self, port: HostPort, told: Rejected) -> None:
        """This call has failed."""
        number = told.request.number
        port.puts.pop(number, None)
        port.gets.pop(number, None)
        self.fail(port.number, number, told.error)

    # ---- the end

    def break_off(self, why: str) -> None:
        """What the worker says cannot be followed any more, whoever's fault that is. It is told, so that none of its calls waits for us."""
        if self.ended:
            return
        error = ChannelError(f"{self.exchange.local} has ended the conversation: {why}", remote=self.exchange.local)
        post(self.exchange, self.peer, REPLIES, HEAD.pack(self.number, 0) + entry(Op.END, 0, 0, payload=encode_error(error)))
        self.end(why)

    def end(self, cause: str | None, *, link_lives: bool = True) -> None:
        """The worker is gone: lost for this cause, or (None) it has closed. Or (`link_lives`) it is only the conversation that ends."""
        if self.ended:
            return
        self.ended = True
        if self._life is not None:
            self._life.cancel()  # the next conversation has its own
        now = self.clock()
        self._out.clear()
        for port in self.ports.values():
            for get in port.gets.values():  # first, so that nothing more comes to them
                port.hosted.queue.cancel(get, now)
        self.handout.end(now, link_lives=link_lives)
        for delivery in self._host.not_told(self):
            if delivery.open and not delivery.get.lease:
                delivery.get.owner.hosted.queue.returned(delivery, now)
        for port in self.ports.values():
            if cause is not None and not self.intake.complete(port):
                port.handle.cut_short(cause)
            self.intake.settle(port, now)
        for port in self.ports.values():
            port.handle.gone(now, cause)
        self._host.session_ended(self)


def _place(affinity: Affinity | None, question: bytes, key: Key) -> Any:
    """The answer to "place", a node's name: the replica of the key; to "nodes", perhaps with a new one and its replica: all there are."""
    if affinity is None:
        raise WireError("a channel without replicas is asked for them")
    what, _, told = question.partition(b" ")
    try:
        if what == b"place":
            return affinity.nodes[affinity.place(key, told.decode())]
        if told:
            node, name = orjson.loads(told)
            affinity.join(str(node), str(name))
    except (ValueError, TypeError, KeyError):
        raise WireError(f"a malformed question about replicas: {question[:80]!r}") from None
    return affinity.nodes
