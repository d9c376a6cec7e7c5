"""Strangers at the doors of the manager and of workers: they harm nobody, and a real peer gets in meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aiorlinf import Worker, init
from aiorlinf.errors import WireError
from aiorlinf.link.dial import dial
from aiorlinf.manager.service import ManagerService
from aiorlinf.rendezvous.hosts import parse_endpoint
from aiorlinf.wire.handshake import PROTOCOL_VERSION, ClientHandshake, Hello
from tests import peers
from tests.manager.support import TOKEN, config_with
from tests.peers import Pipe
from tests.system import resident_bytes, soon

HTTP = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
TLS_HELLO = bytes.fromhex("16030100c8010000c40303") + b"\x00" * 240
LONG = struct.pack("!I", 2**32 - 1)
MAGIC = b"AIORLINF"
PREAMBLE = MAGIC + struct.pack("!HB", 1, 5) + b"0.1.0" + b"n" * 32


class _Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (Path(self._path),)


# ---- the crowd, in a process of its own


def crowd(pipe: Pipe, host: str, port: int, count: int, first: bytes, drip: bytes) -> None:
    """Open many connections and keep them open; say `first` on each, and a byte of `drip` on each every second."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held: list[socket.socket] = []
    try:
        for number in range(count):
            sock = socket.socket()
            sock.settimeout(5.0)
            with contextlib.suppress(OSError):
                sock.connect((host, port))
                if first:
                    sock.sendall(first)
            sock.setblocking(False)
            held.append(sock)
            if number == count // 4:
                pipe.say("begun")
        pipe.say("all there")
        for turn in range(1000):
            begin = time.monotonic()
            for sock in held:
                with contextlib.suppress(OSError):
                    sock.send(drip[turn % len(drip) : turn % len(drip) + 1])
            time.sleep(max(0.0, 1.0 - (time.monotonic() - begin)))
    finally:
        for sock in held:
            sock.close()


@contextlib.contextmanager
def running_manager(**network: float) -> Iterator[tuple[str, int]]:
    """In a process of its own; its address and process id."""
    with peers.process(run_manager, network, env={"PYTHONASYNCIODEBUG": ""}) as process:  # its speed is what is looked at
        yield process.wait_hear(), process.pid


def run_manager(pipe: Pipe, network: dict[str, float]) -> None:
    async def main() -> None:
        service = ManagerService(config=config_with(**network), token=TOKEN)
        await service.start()
        pipe.say(service.address)
        await asyncio.sleep(120)

    asyncio.run(main())


async def join_and_talk(manager: str, turn: int) -> float:
    """Two workers join, and one sends to the other; the seconds that the slower join took."""

    async def join(address: str) -> tuple[Worker, float]:
        begin = time.monotonic()
        worker = await init(address, manager=manager, token=TOKEN)
        return worker, time.monotonic() - begin

    (a, slow), (b, slower) = await asyncio.gather(join("a:0"), join("b:0"))
    async with a, b:
        sent = a.send(turn, "b:0")
        assert await b.recv("a:0", timeout=10) == turn
        await sent
    return max(slow, slower)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("first", "drip"),
    [(b"", b"\x00"), (b"A", b"IORLINF" + bytes(200)), (PREAMBLE, b"x")],
    ids=["silent", "one byte per second", "a preamble without a proof"],
)
async def test_ten_thousand_half_open_connections_at_the_manager(first: bytes, drip: bytes) -> None:
    with running_manager(handshake_timeout_s=30.0) as (address, pid):
        before = resident_bytes(pid)
        host, port = parse_endpoint(address)
        with peers.process(crowd, host, port, 10_000, first, drip) as strangers:
            assert await strangers.hear() == "begun"
            took = [await join_and_talk(address, 0)]  # while they come
            assert await strangers.hear() == "all there"
            took += [await join_and_talk(address, turn) for turn in (1, 2, 3)]
        assert sorted(took)[1] < 1.0, took  # one of them may have met a busy machine
        assert max(took) < 5.0, took
        assert resident_bytes(pid) - before < 128 << 20


@pytest.mark.asyncio
@pytest.mark.parametrize(("first", "drip"), [(b"", b"\x00"), (PREAMBLE, b"x")], ids=["silent", "a preamble without a proof"])
async def test_many_half_open_connections_at_a_worker(first: bytes, drip: bytes) -> None:
    asyncio.get_running_loop().set_debug(False)  # its speed is what is looked at
    with running_manager(handshake_timeout_s=30.0) as (address, _):
        async with init("a:0", manager=address, token=TOKEN, backend="stream") as a:
            assert a._self is not None
            assert a._self.record is not None
            with peers.process(crowd, "127.0.0.1", a._self.record["port"], 3000, first, drip) as strangers:
                assert await strangers.hear() == "begun"
                for turn in range(3):
                    begin = time.monotonic()
                    async with init("b:0", manager=address, token=TOKEN, backend="stream") as b:
                        sent = b.send(turn, "a:0")
                        assert await a.recv("b:0", timeout=20) == turn
                        await sent
                        assert time.monotonic() - begin < 2.0
                assert await strangers.hear() == "all there"


def speak(host: str, port: int, said: bytes) -> bytes:
    """Say it, and read to the end of the connection."""
    with socket.create_connection((host, port), 10) as sock:
        heard = b""
        with contextlib.suppress(ConnectionError):
            sock.sendall(said)
            while data := sock.recv(65536):
                heard += data
        return heard


@pytest.mark.parametrize("door", ["manager", "worker"])
def test_what_strangers_say_is_not_obeyed_and_not_answered(door: str, tmp_path: Path) -> None:
    victim = tmp_path / "made by a pickle"
    bomb = pickle.dumps(_Bomb(str(victim)))
    pickle.loads(bomb)
    assert victim.exists(), "it works where it is unpickled"
    victim.unlink()
    config = config_with(handshake_timeout_s=1.0)
    with init("a:0", config=config) as a, init("b:0") as b:
        assert a._self is not None
        assert a._self.record is not None
        host, port = parse_endpoint(a.manager_address) if door == "manager" else ("127.0.0.1", a._self.record["port"])
        before = resident_bytes()
        for said in (
            HTTP,
            TLS_HELLO,
            bomb,
            struct.pack("!I", len(bomb)) + bomb,
            LONG * 1000,
            b"\x80\x05" * 100_000,
            MAGIC + b"\xff" * 5000,
        ):
            assert speak(host, port, said) == b"", "a stranger is told nothing"
        # the preamble is answered by ours, which holds nothing of the token; a wrong proof by one byte that denies it
        for more in (LONG, bomb, b"\x00" * 32, b"\x00" * 32 + LONG + bomb):
            heard = speak(host, port, PREAMBLE + more)
            assert heard.startswith(MAGIC)
            assert len(heard) <= 200
            assert TOKEN not in heard
        assert resident_bytes() - before < 64 << 20
        assert not victim.exists()
        sent = a.send("still here", "b:0")
        assert b.recv("a:0").wait(20) == "still here"
        sent.wait(20)


@pytest.mark.asyncio
async def test_a_peer_of_another_version_learns_both_at_every_door_and_so_does_who_is_inside(caplog: pytest.LogCaptureFixture) -> None:
    async with init("a:0") as a, init("b:0") as b:
        assert a._self is not None
        assert a._self.record is not None
        for where, hello in (
            (parse_endpoint(a.manager_address), Hello(role="manager", job=None)),
            (("127.0.0.1", int(a._self.record["port"])), Hello(role="link", job=a.job, address="c:0", incarnation=1, target="a:0")),
        ):
            caplog.clear()
            machine = ClientHandshake(a.token, hello, protocol_version=PROTOCOL_VERSION + 1)
            with pytest.raises(WireError) as caught:
                await dial(asyncio.get_running_loop(), *where, machine, 10)
            await soon(lambda: bool(caplog.text))
            for said in (str(caught.value), caplog.text):
                assert f"protocol version {PROTOCOL_VERSION} (" in said
                assert f"protocol version {PROTOCOL_VERSION + 1} (" in said
        sent = a.send("still here", "b:0")
        assert await b.recv("a:0", timeout=20) == "still here"
        await sent


def test_a_proof_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `hmac.compare_digest`, on both sides, and by nothing else."""
    import hmac

    from aiorlinf.wire import handshake

    seen: list[int] = []

    def compare(one: bytes, other: bytes) -> bool:
        seen.append(len(one))
        return hmac.compare_digest(one, other)

    class Fake:
        digest = staticmethod(hmac.digest)
        compare_digest = staticmethod(compare)

    monkeypatch.setattr(handshake, "hmac", Fake)
    with init("a:0") as a:
        assert a.incarnation == 1
    assert seen == [32, 32], "the server looked at the client's, the client at the server's"


def test_a_stranger_who_is_slow_is_cut_after_the_time_limit_whatever_he_says() -> None:
    config = config_with(handshake_timeout_s=0.5)
    with init("a:0", config=config) as a:
        assert a._self is not None
        assert a._self.record is not None
        for host, port in (parse_endpoint(a.manager_address), ("127.0.0.1", int(a._self.record["port"]))):
            with socket.create_connection((host, port), 10) as sock:
                begin = time.monotonic()
                ended = threading.Event()

                def drip(sock: socket.socket = sock, ended: threading.Event = ended) -> None:
                    for byte in PREAMBLE:
                        if ended.wait(0.02):
                            return
                        with contextlib.suppress(OSError):
                            sock.send(bytes([byte]))

                thread = threading.Thread(target=drip)
                thread.start()
                with contextlib.suppress(ConnectionError):
                    while sock.recv(65536):
                        pass
                took = time.monotonic() - begin
                ended.set()
                thread.join()
                assert 0.3 < took < 3.0
