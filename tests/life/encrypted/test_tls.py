"""TLS on links and to the manager, with certificates made here."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from aiorlinf import Worker, init
from aiorlinf.backends.device_pairs import register_pairs, unregister_pairs
from aiorlinf.config import JobConfig, NetworkConfig, load_config
from aiorlinf.errors import AuthenticationError, ConfigError, LinkError, PeerLeft, PeerLost, RendezvousError
from aiorlinf.rendezvous.hosts import parse_endpoint
from aiorlinf.rendezvous.tls import TLS_VARIABLES, tls_of
from aiorlinf.testing.fake import FakeAccelerator
from aiorlinf.testing.fake.pairs import FakeMaker
from aiorlinf.wire.handshake import ClientHandshake, Hello
from tests import peers
from tests.life.certificates import Authority
from tests.life.roles import echo
from tests.manager.support import TOKEN, manager


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def files(authority: Authority) -> dict[str, str]:
    return authority.files("worker")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of another authority."""
    return Authority(tmp_path_factory.mktemp("tls") / "theirs").files("stranger")


def config(files: Mapping[str, str] | None, **network: Any) -> JobConfig:
    section = {} if files is None else {"tls": dict(files)}
    return load_config({"cluster": {"network": {**section, **network}}})


def member(address: str, service: Any, files: Mapping[str, str] | None, **network: Any) -> Worker:
    return init(address, manager=service.address, token=TOKEN, config=config(files, **network))


def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers take themselves to be on different hosts."""
    numbers = itertools.count()
    monkeypatch.setattr("aiorlinf.link.enrolment.host_identity", lambda: f"host {next(numbers)}")


def socket_of(worker: Worker, peer: str) -> Any:
    from aiorlinf.address import WorkerAddress

    link = worker._table.peek(WorkerAddress(peer))
    assert link is not None
    conn: Any = link._conn
    return conn


@pytest.mark.asyncio
async def test_links_are_encrypted_and_carry_everything(files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    over_tcp(monkeypatch)
    async with manager(config=config(files)) as service, member("a:0", service, files) as a, member("b:0", service, files) as b:
        small, large = {"x": [1, 2, "three"]}, torch.arange(3_000_000)
        works = [a.send(small, "b:0"), a.send(large, "b:0"), b.send(large, "a:0"), b.send(small, "a:0")]
        assert await b.recv("a:0", timeout=20) == small
        assert torch.equal(await b.recv("a:0", timeout=20), large)
        assert torch.equal(await a.recv("b:0", timeout=20), large)
        assert await a.recv("b:0", timeout=20) == small
        await asyncio.gather(*works)
        for one, other in ((a, "b:0"), (b, "a:0")):
            assert socket_of(one, other).extra_info("ssl_object").version() == "TLSv1.3"
        (stats,) = a.stats().links
        assert stats.backend == "stream"
        assert "Gloo's sockets cannot be encrypted" in stats.reason
        works = [a.send(number, "b:0", tag=number % 3) for number in range(300)]
        for tag in range(3):
            assert [await b.recv("a:0", tag=tag, timeout=20) for _ in range(100)] == list(range(tag, 300, 3))
        await asyncio.gather(*works)


@pytest.mark.asyncio
async def test_closing_delivers_and_is_a_goodbye(files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    over_tcp(monkeypatch)
    async with manager(config=config(files)) as service, member("a:0", service, files) as a:
        async with member("b:0", service, files) as b:
            sent = [b.send(torch.full((300_000,), float(number)), "a:0") for number in range(3)]
            waiting = b.recv("a:0")
            pending = a.recv("b:0", tag=7)
            while socket_of_or_none(a, "b:0") is None:
                await asyncio.sleep(0.005)
            begin = time.monotonic()
        assert time.monotonic() - begin < 5.0
        for number, work in enumerate(sent):
            assert (await a.recv("b:0", timeout=20))[0] == number
            await work
        with pytest.raises(PeerLeft):
            await pending.async_wait(20)
        assert waiting.exception() is not None


def socket_of_or_none(worker: Worker, peer: str) -> Any:
    with contextlib.suppress(AssertionError):
        return socket_of(worker, peer)
    return None


@pytest.mark.asyncio
async def test_a_death_is_noticed_and_the_environment_is_all_that_a_child_needs(
    files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    over_tcp(monkeypatch)
    async with init("a:0", config=config(files)) as a:
        env = a.env("b:0")
        assert {name: env[name] for name in TLS_VARIABLES.values()} == {TLS_VARIABLES[key]: path for key, path in files.items()}
        with peers.process(peers.run_worker, "asyncio", None, echo, (), env=env) as process:
            await a.send("x", "b:0")
            assert await a.recv("b:0", timeout=20) == "x"
            assert socket_of(a, "b:0").extra_info("ssl_object") is not None
            pending = a.recv("b:0")
            process.kill()
            begin = time.monotonic()
            with pytest.raises(PeerLost):
                await pending.async_wait(20)
            assert time.monotonic() - begin < 2.0


@pytest.mark.asyncio
async def test_who_has_no_certificate_or_another_authoritys_is_kept_out(
    files: dict[str, str], foreign: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    async with manager(config=config(files)) as service, member("a:0", service, files) as a:
        with pytest.raises(RendezvousError, match="if it uses TLS, this worker needs certificates"):
            await member("b:0", service, None, rendezvous_timeout_s=0.5)
        assert "it does not use TLS, which this side is configured to" in caplog.text
        with pytest.raises(AuthenticationError, match="TLS with the manager failed: CERTIFICATE_VERIFY_FAILED"):
            await member("b:0", service, foreign)
        # a certificate of a stranger, who does not mind ours
        careless = {**foreign, "ca": files["ca"]}
        with pytest.raises(LinkError, match=r"its authority has signed this worker's certificate|UNKNOWN_CA"):
            await member("b:0", service, careless, rendezvous_timeout_s=2.0)
        assert [str(peer) for peer in await a.peers()] == []
        async with member("b:0", service, files) as b:
            sent = b.send(1, "a:0")
            assert await a.recv("b:0", timeout=20) == 1
            await sent


@pytest.mark.asyncio
async def test_a_worker_with_tls_does_not_speak_to_a_manager_without(files: dict[str, str]) -> None:
    async with manager() as service:
        with pytest.raises((AuthenticationError, RendezvousError)):
            await member("a:0", service, files, rendezvous_timeout_s=0.5)
        assert service._directory.living == ()


@pytest.mark.asyncio
async def test_the_token_is_needed_all_the_same(files: dict[str, str]) -> None:
    async with manager(config=config(files)) as service:
        with pytest.raises(AuthenticationError, match="AIORLINF_TOKEN"):
            await init("a:0", manager=service.address, token="another", config=config(files))


@pytest.mark.asyncio
async def test_strangers_at_an_encrypted_door(files: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    """They begin TLS and go no further, or say something else: a few are kept, and real peers get in."""
    caplog.set_level(logging.CRITICAL)
    async with manager(config=config(files, handshake_timeout_s=30.0)) as service:
        service.max_unproven = 20
        host, port = parse_endpoint(service.address)
        hello = client_hello()
        held: list[socket.socket] = []
        try:
            for said in (hello, hello[:10], b"", b"GET / HTTP/1.1\r\n\r\n", ClientHandshake(TOKEN, Hello("manager", None))._preamble.raw):
                for _ in range(40):
                    sock = socket.create_connection((host, port), 10)
                    held.append(sock)
                    sock.sendall(said)
                    await asyncio.sleep(0)
            begin = time.monotonic()
            async with member("a:0", service, files), member("b:0", service, files):
                assert time.monotonic() - begin < 5.0
            assert service.unproven <= 20
        finally:
            for sock in held:
                sock.close()
        end = time.monotonic() + 10
        while service.unproven:
            assert time.monotonic() < end
            await asyncio.sleep(0.01)


def client_hello() -> bytes:
    """The first flight of a TLS client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="x").do_handshake()
    return outgoing.read()


# ---- the files


def test_the_environment_goes_before_the_configuration(files: dict[str, str], foreign: dict[str, str]) -> None:
    environ = {TLS_VARIABLES[name]: path for name, path in files.items()}
    network = config(foreign).cluster.network
    for given, expected in ((tls_of(network, environ), files), (tls_of(network, {}), foreign), (tls_of(None, environ), files)):
        assert given is not None
        assert dict(given.files) == expected
        assert given.env() == {TLS_VARIABLES[name]: path for name, path in expected.items()}
    assert tls_of(None, {}) is None
    assert tls_of(NetworkConfig(), {}) is None


def test_what_cannot_be_used_is_an_error_with_the_key(files: dict[str, str], foreign: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="AIORLINF_TLS_KEY, AIORLINF_TLS_CA is missing"):
        tls_of(None, {"AIORLINF_TLS_CERT": files["cert"]})
    with pytest.raises(ConfigError, match=r"cluster\.network\.tls\.key: this key is required when cert is given"):
        config({"cert": "x"})
    nothing = tmp_path / "nothing.pem"
    for changes, key in (({"ca": str(nothing)}, "ca"), ({"cert": str(nothing)}, "cert"), ({"key": foreign["key"]}, "cert")):
        with pytest.raises(ConfigError, match=rf"cluster\.network\.tls\.{key}: .* cannot be used"):
            tls_of(config({**files, **changes}).cluster.network, {})


@pytest.mark.asyncio
async def test_tensors_of_accelerators_go_over_encrypted_connections_too(files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    over_tcp(monkeypatch)
    values = torch.arange(50_000, dtype=torch.int32)
    with FakeAccelerator(2, seed=0, ticks=(1, 9)) as fake:
        register_pairs("fake", FakeMaker(fake))
        try:
            async with manager(config=config(files)) as service, member("a:0", service, files) as a, member("b:0", service, files) as b:
                sent = a.send(fake.late(values), "b:0")
                assert torch.equal((await b.recv("a:0", timeout=20)).cpu(), values)
                await sent
                (stats,) = a.stats().links
                assert stats.device_backend == "staging"
                assert "NCCL's sockets cannot be encrypted" in stats.device_reason
        finally:
            unregister_pairs("fake")
