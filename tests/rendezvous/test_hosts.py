"""Host identity, interfaces and listening sockets, on the real host."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from aiorlinf.errors import ConfigError, RendezvousError, UsageError
from aiorlinf.rendezvous.hosts import (
    LISTEN_BACKLOG,
    Interface,
    bind_listener,
    choose_interface,
    format_endpoint,
    host_identity,
    host_labels,
    interface_host,
    is_ip,
    is_loopback,
    is_wildcard,
    list_interfaces,
    local_failure,
    open_listener,
    outward_host,
    parse_endpoint,
)

# ------------------------------------------------------------------------------------------------------------- the host


def test_identity_is_the_same_in_another_process_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIORLINF_HOST_ID", raising=False)
    program = "from aiorlinf.rendezvous.hosts import host_identity; print(host_identity())"
    seen = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": "."}
    )
    assert seen.stdout.strip() == host_identity()


def test_identity_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIORLINF_HOST_ID", "pretended")
    assert host_identity() == "pretended"
    monkeypatch.setenv("AIORLINF_HOST_ID", "x" * 1000)
    assert len(host_identity()) == 256


def test_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIORLINF_RACK", raising=False)
    assert host_labels() == {"host": socket.gethostname()}
    monkeypatch.setenv("AIORLINF_RACK", "r7")
    assert host_labels({"zone": "z", "host": "mine"}) == {"host": "mine", "rack": "r7", "zone": "z"}


# ------------------------------------------------------------------------------------------------------------ endpoints


@pytest.mark.parametrize(
    ("text", "host", "port"), [("10.0.0.5:4711", "10.0.0.5", 4711), ("node-1.x:1", "node-1.x", 1), ("[::1]:65535", "::1", 65535)]
)
def test_endpoints(text: str, host: str, port: int) -> None:
    assert parse_endpoint(text) == (host, port)
    assert format_endpoint(host, port) == text


@pytest.mark.parametrize(
    "text", ["", ":1", "host", "host:", "host:0", "host:65536", "host:-1", "host:1x", "::1:5", "host:99999999999", "host:\u0661"]
)
def test_endpoints_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="is not a network address"):
        parse_endpoint(text)


def test_kinds_of_hosts() -> None:
    assert [host for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost", "::ffff:127.0.0.1") if not is_loopback(host)] == []
    assert [host for host in ("10.0.0.1", "fd00::2", "node", "0.0.0.0", "") if is_loopback(host)] == []
    assert [host for host in ("0.0.0.0", "::", "") if not is_wildcard(host)] == []
    assert [host for host in ("127.0.0.1", "node") if is_wildcard(host)] == []
    assert is_ip("fe80::1%eth0")
    assert not is_ip("node")
    assert is_ip(outward_host())


# ----------------------------------------------------------------------------------------------------------- interfaces

KNOWN = (
    Interface("lo", ("127.0.0.1",)),
    Interface("docker0", ("172.17.0.1",)),
    Interface("ib0", ()),
    Interface("eth0", ("10.0.0.5", "fd00::5")),
)


@pytest.mark.parametrize(
    ("setting", "chosen"),
    [
        ("eth0", "eth0"),
        ("ib0,eth0", "eth0"),
        ("^docker0", "eth0"),
        ("^docker0,eth0", "lo"),
        ("^lo", "docker0"),
        ("^ docker0 , lo ", "eth0"),
    ],
)
def test_choosing_an_interface(setting: str, chosen: str) -> None:
    assert choose_interface(setting, KNOWN).name == chosen


@pytest.mark.parametrize("setting", ["eth1", "^eth1", "eth0,eth1", "", "^", "eth*"])
def test_an_unknown_interface_lists_the_real_ones(setting: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_interface(setting, KNOWN)
    assert caught.value.path == "cluster.network.interface"
    assert "this host has: lo (127.0.0.1), docker0 (172.17.0.1), ib0 (no address), eth0 (10.0.0.5, fd00::5)" in caught.value.message


@pytest.mark.parametrize(("setting", "said"), [("ib0", "has no address"), ("^lo,docker0,eth0", "leaves no interface")])
def test_an_interface_without_an_address(setting: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        choose_interface(setting, KNOWN)


def test_the_interfaces_of_this_host() -> None:
    loopback = next(interface for interface in list_interfaces() if interface.loopback)
    assert "127.0.0.1" in loopback.addresses
    assert interface_host(loopback.name) == "127.0.0.1"
    with pytest.raises(ConfigError, match=f"'no-such-0' is not an interface of this host; this host has: .*{loopback.name}"):
        interface_host("no-such-0")


# ------------------------------------------------------------------------------------------------------------ listening


@pytest.fixture
def sockets() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_listener_takes_a_port_of_the_kernel(sockets: ExitStack) -> None:
    listener = sockets.enter_context(bind_listener("127.0.0.1"))
    host, port = listener.getsockname()
    assert host == "127.0.0.1"
    assert port > 0
    assert not listener.getblocking()
    assert not listener.get_inheritable()
    assert LISTEN_BACKLOG >= 1024
    sockets.enter_context(socket.create_connection((host, port), timeout=5))


def free_pair(sockets: ExitStack) -> int:
    """A port that is free and has a free successor, found by taking and giving back."""
    for _ in range(100):
        with bind_listener("127.0.0.1") as first:
            port = int(first.getsockname()[1])
            try:
                bind_listener("127.0.0.1", (port + 1, port + 1)).close()
            except RendezvousError:
                continue
            return port
    pytest.skip("no two neighbouring ports are free")


def test_a_port_range_is_gone_through_and_named_when_it_is_used_up(sockets: ExitStack) -> None:
    first = free_pair(sockets)
    listeners = [sockets.enter_context(bind_listener("127.0.0.1", (first, first + 1))) for _ in range(2)]
    assert [listener.getsockname()[1] for listener in listeners] == [first, first + 1]
    with pytest.raises(RendezvousError) as caught:
        bind_listener("127.0.0.1", (first, first + 1))
    assert f"cannot listen on 127.0.0.1, ports {first} to {first + 1}: the last one tried says the port is taken" in str(caught.value)
    assert "cluster.network.port_range" in str(caught.value)


def test_a_taken_port(sockets: ExitStack) -> None:
    port = sockets.enter_context(bind_listener("127.0.0.1")).getsockname()[1]
    with pytest.raises(RendezvousError, match=f"cannot listen on 127.0.0.1:{port}: the port is taken"):
        bind_listener("127.0.0.1", (port, port))


def test_a_port_is_free_again_at_once() -> None:
    """A closed connection's TIME_WAIT must not keep a restarted manager from its port."""
    listener = bind_listener("127.0.0.1")
    where = listener.getsockname()
    listener.setblocking(True)
    client = socket.create_connection(where, timeout=5)
    served, _ = listener.accept()
    served.close()
    client.close()
    listener.close()
    bind_listener("127.0.0.1", (where[1], where[1])).close()


@pytest.mark.parametrize(
    ("host", "said"), [("192.0.2.77", "no such address"), ("no-such-host.invalid", "cannot listen on 'no-such-host.invalid'")]
)
def test_an_address_of_another_host(host: str, said: str) -> None:
    with pytest.raises(RendezvousError, match=said) as caught:
        bind_listener(host)
    assert "cluster.network.bind_host" in str(caught.value)


@pytest.mark.asyncio
async def test_names_are_looked_up_off_the_loop(sockets: ExitStack) -> None:
    assert is_loopback(sockets.enter_context(await open_listener("localhost")).getsockname()[0])
    port = sockets.enter_context(await open_listener("127.0.0.1")).getsockname()[1]
    with pytest.raises(RendezvousError, match="the port is taken"):
        await open_listener("127.0.0.1", (port, port))
    with pytest.raises(RendezvousError, match=r"cannot listen on 'no-such-host\.invalid'"):
        await open_listener("no-such-host.invalid")


def test_failures_of_this_host_are_told_from_those_of_peers() -> None:
    assert "file descriptors" in str(local_failure(OSError(errno.EMFILE, "x")))
    assert "local port" in str(local_failure(OSError(errno.EADDRNOTAVAIL, "x")))
    assert local_failure(OSError(errno.ECONNREFUSED, "x")) is None
    assert local_failure(OSError("x")) is None
