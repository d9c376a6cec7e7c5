"""The handshake machine, alone: two of them talk to each other, or one hears what strangers say."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiorlinf.errors import AuthenticationError, LinkError, UsageError, WireError
from aiorlinf.wire import handshake
from aiorlinf.wire.handshake import (
    MAX_HELLO_BYTES,
    ClientHandshake,
    Done,
    Fail,
    HandshakeState,
    Hello,
    Instruction,
    Refusal,
    ServerHandshake,
    Write,
)

TOKEN = b"the token"
HTTP = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
TLS = bytes.fromhex("16030100c8010000c40303") + b"\x00" * 40

CLIENT = Hello(role="link", job="j1", address="rollout:0", incarnation=2, target="trainer:0", host_id="h", capabilities={"shm": True})
SERVER = Hello(role="link", job="j1", address="trainer:0", incarnation=1, host_id="h")

Mutate = Callable[[bytes], bytes]


def talk(
    client: ClientHandshake,
    server: ServerHandshake,
    *,
    chunk: int = 1 << 20,
    to_server: Mutate | None = None,
    to_client: Mutate | None = None,
) -> tuple[Instruction | None, Instruction | None]:
    """Carry bytes to and fro until nothing moves; what each side ended with."""
    ends: list[Instruction | None] = [None, None]
    queue: list[tuple[int, Instruction]] = [(0, item) for item in client.start()] + [(1, item) for item in server.start()]
    machines: tuple[ClientHandshake, ServerHandshake] = (client, server)
    mutate = (to_server, to_client)
    while queue:
        side, item = queue.pop(0)
        if not isinstance(item, Write):
            assert ends[side] is None, "a machine ends once"
            ends[side] = item
            continue
        change = mutate[side]
        data = item.data if change is None else change(item.data)
        for start in range(0, len(data), chunk):
            queue += [(1 - side, answer) for answer in machines[1 - side].feed(data[start : start + chunk])]
    return ends[0], ends[1]


def failure(end: Instruction | None) -> Fail:
    assert isinstance(end, Fail)
    assert str(end.error)
    return end


# ----------------------------------------------------------------------------------------------------------- it works


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_both_learn_who_the_other_is(chunk: int) -> None:
    client, server = ClientHandshake(TOKEN, CLIENT), ServerHandshake(TOKEN, SERVER)
    assert talk(client, server, chunk=chunk) == (Done(SERVER), Done(CLIENT))
    assert client.state is server.state is HandshakeState.DONE
    assert client.leftover == server.leftover == b""


def test_the_other_versions_are_told() -> None:
    client = ClientHandshake(TOKEN, CLIENT, library="1.2.3")
    server = ServerHandshake(TOKEN, SERVER)
    talk(client, server)
    assert server.peer_library == "1.2.3"
    assert set(CLIENT.versions) == {"aiorlinf", "torch", "python"}


def test_what_follows_the_handshake_is_handed_on() -> None:
    client, server = ClientHandshake(TOKEN, CLIENT), ServerHandshake(TOKEN, SERVER)
    sizes = itertools.count()

    def last_with_more(data: bytes) -> bytes:
        return data + b"frames" if next(sizes) == 2 else data

    assert talk(client, server, to_client=last_with_more, to_server=None)[0] == Done(SERVER)
    assert client.leftover == b"frames"
    assert client.feed(b" more") == []
    assert client.leftover == b"frames more"


def test_accept_chooses_the_answer() -> None:
    asked = []

    def accept(peer: Hello) -> Hello:
        asked.append(peer)
        return replace(SERVER, capabilities={"window": 3})

    end, _ = talk(ClientHandshake(TOKEN, CLIENT), ServerHandshake(TOKEN, SERVER, accept))
    assert end == Done(replace(SERVER, capabilities={"window": 3}))
    assert asked == [CLIENT]


def test_a_client_of_the_manager_takes_whatever_job_it_runs() -> None:
    manager = Hello(role="manager", job="j7")
    client_end, server_end = talk(ClientHandshake(TOKEN, Hello(role="manager", job=None)), ServerHandshake(TOKEN, manager))
    assert client_end == Done(manager)
    assert isinstance(server_end, Done)


# ------------------------------------------------------------------------------------------------------------ it fails


def test_wrong_token_fails_on_both_sides_before_any_hello() -> None:
    asked: list[Hello] = []

    def accept(peer: Hello) -> Hello:
        asked.append(peer)
        return SERVER

    client, server = ClientHandshake(b"another", CLIENT), ServerHandshake(TOKEN, SERVER, accept)
    client_end, server_end = talk(client, server)
    for end in (failure(client_end), failure(server_end)):
        assert isinstance(end.error, AuthenticationError)
        assert "AIORLINF_TOKEN" in str(end.error)
        assert not end.retryable
    assert asked == []


def test_a_server_that_does_not_know_the_token_gets_no_hello() -> None:
    """It grants everybody, to hear what they say."""
    client = ClientHandshake(TOKEN, CLIENT)
    impostor = ServerHandshake(b"guess", SERVER)
    preamble = client.start()[0]
    assert isinstance(preamble, Write)
    (answer,) = impostor.feed(preamble.data)
    assert isinstance(answer, Write)
    (proof,) = client.feed(answer.data)
    assert isinstance(proof, Write)
    out = client.feed(b"\x01" + bytes(32))
    assert isinstance(failure(out[0]).error, AuthenticationError)
    assert len(out) == 1


def test_a_proof_cannot_be_replayed_or_reflected() -> None:
    client, server = ClientHandshake(TOKEN, CLIENT), ServerHandshake(TOKEN, SERVER)
    heard: list[bytes] = []

    def listen(data: bytes) -> bytes:
        heard.append(data)
        return data

    talk(client, server, to_server=listen)
    again = ServerHandshake(TOKEN, SERVER)
    out = [item for data in heard for item in again.feed(data)]
    assert isinstance(failure(out[-1]).error, AuthenticationError)

    # nor is the proof of one role good for the other, over the same two preambles
    assert client._proof(b"client", b"x", b"y") != server._proof(b"server", b"x", b"y")
    assert client._proof(b"client", b"x", b"y") == server._proof(b"client", b"x", b"y")


def test_another_protocol_version_is_named_on_both_sides_before_the_proof() -> None:
    client = ClientHandshake(TOKEN, CLIENT, protocol_version=handshake.PROTOCOL_VERSION + 1, library="9.0")
    server = ServerHandshake(b"not even the same token", SERVER, library="8.5")
    for end in map(failure, talk(client, server)):
        assert isinstance(end.error, WireError)
        for text in (f"version {handshake.PROTOCOL_VERSION}", f"version {handshake.PROTOCOL_VERSION + 1}", "aiorlinf 9.0", "aiorlinf 8.5"):
            assert text in str(end.error)


def test_wrong_job_names_both_on_both_sides() -> None:
    client_end, server_end = talk(ClientHandshake(TOKEN, replace(CLIENT, job="j2")), ServerHandshake(TOKEN, SERVER))
    for end in (failure(client_end), failure(server_end)):
        assert type(end.error) is LinkError
        assert "j1" in str(end.error)
        assert "j2" in str(end.error)
        assert end.refusal is not None
        assert end.refusal.code == "job"


@pytest.mark.parametrize(
    ("client", "server", "code", "said"),
    [
        (replace(CLIENT, job=None), SERVER, "job", "a link needs the job's id"),
        (CLIENT, Hello(role="manager", job="j1"), "role", "this is the manager, but a worker was wanted"),
        (Hello(role="manager", job=None), SERVER, "role", "this is worker trainer:0#1, but a manager was wanted"),
        (replace(CLIENT, target="trainer:1"), SERVER, "target", "this is trainer:0#1, but trainer:1 was wanted"),
    ],
)
def test_refusals(client: Hello, server: Hello, code: str, said: str) -> None:
    client_end, server_end = talk(ClientHandshake(TOKEN, client), ServerHandshake(TOKEN, server))
    for end in (failure(client_end), failure(server_end)):
        assert end.refusal == Refusal(code, said)
        assert said in str(end.error)


def test_accept_may_refuse() -> None:
    refusal = Refusal("busy", "come back later")
    client_end, server_end = talk(ClientHandshake(TOKEN, CLIENT), ServerHandshake(TOKEN, SERVER, lambda _: refusal))
    assert failure(client_end).refusal == failure(server_end).refusal == refusal
    assert failure(client_end).error.remote == "trainer:0"
    assert failure(server_end).error.remote == "rollout:0"


def test_a_server_of_another_job_is_not_accepted_by_the_client() -> None:
    lying = ServerHandshake(TOKEN, SERVER, lambda _: replace(SERVER, job="j9"))
    end, _ = talk(ClientHandshake(TOKEN, CLIENT), lying)
    assert "job j9" in str(failure(end).error)
    lying = ServerHandshake(TOKEN, SERVER, lambda _: Hello(role="manager", job="j1"))
    end, _ = talk(ClientHandshake(TOKEN, CLIENT), lying)
    assert "the manager" in str(failure(end).error)


@pytest.mark.parametrize(
    ("said", "looks"),
    [
        (HTTP, "HTTP client (b'GET / HTTP/1.1"),
        (b"POST /x HTTP/1.1\r\n", "HTTP client"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "HTTP client"),
        (b"HTTP/1.1 400 Bad Request\r\n", "HTTP server"),
        (TLS, "TLS"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "SSH"),
        (b"\x00\x00\x00\x04abcd", "begins with"),
        (b"A bit like us", "begins with"),
    ],
)
def test_strangers_are_recognised(said: bytes, looks: str) -> None:
    for machine in (ServerHandshake(TOKEN, SERVER, remote="10.1.1.1:99"), ClientHandshake(TOKEN, CLIENT, remote="10.1.1.1:99")):
        (end,) = machine.feed(said)
        error = failure(end).error
        assert isinstance(error, WireError)
        assert "does not speak aiorlinf" in str(error)
        assert looks in str(error)
        assert error.address == "10.1.1.1:99"
        assert machine.feed(HTTP) == machine.eof() == []


def test_a_connection_to_itself_is_noticed() -> None:
    client = ClientHandshake(TOKEN, CLIENT)
    (preamble,) = client.start()
    assert isinstance(preamble, Write)
    (end,) = client.feed(preamble.data)
    assert "leads back to this side" in str(failure(end).error)
    assert failure(end).retryable


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_hanging_up_says_what_was_awaited(steps: int) -> None:
    client, server = ClientHandshake(TOKEN, CLIENT), ServerHandshake(TOKEN, SERVER)
    out: Iterable[Instruction] = client.start()
    for _ in range(steps):
        for item in out:
            assert isinstance(item, Write)
            out = client.feed(b"".join(answer.data for answer in server.feed(item.data) if isinstance(answer, Write)))
    waited = ("the preamble", "the proof of the token", "the hello")[steps]
    for machine in (client, server):
        (end,) = machine.eof()
        assert waited in str(failure(end).error)
        assert failure(end).retryable
        assert machine.eof() == []


def test_no_token() -> None:
    for make in (lambda: ClientHandshake(b"", CLIENT), lambda: ServerHandshake(b"", SERVER)):
        with pytest.raises(AuthenticationError, match="AIORLINF_TOKEN"):
            make()


def test_a_hello_that_cannot_be_sent() -> None:
    with pytest.raises(UsageError, match="at most 65536 are allowed"):
        ClientHandshake(TOKEN, replace(CLIENT, capabilities={"x": "y" * MAX_HELLO_BYTES}))
    with pytest.raises(UsageError, match="JSON"):
        ClientHandshake(TOKEN, replace(CLIENT, capabilities={"x": object()}))
    with pytest.raises(UsageError, match="32 bytes"):
        ClientHandshake(TOKEN, CLIENT, nonce=b"short")


# ---------------------------------------------------------------------------------------- what a proven peer may not say


def proven_server() -> tuple[ServerHandshake, ClientHandshake]:
    """A server that waits for the hello."""
    client, server = ClientHandshake(TOKEN, CLIENT), ServerHandshake(TOKEN, SERVER)
    (preamble,) = client.start()
    assert isinstance(preamble, Write)
    (answer,) = server.feed(preamble.data)
    assert isinstance(answer, Write)
    (proof,) = client.feed(answer.data)
    assert isinstance(proof, Write)
    server.feed(proof.data)
    assert server.state is HandshakeState.HELLO
    return server, client


def hello_dict(**changes: object) -> dict[str, object]:
    made = {
        "role": "link",
        "job": "j1",
        "address": "rollout:0",
        "incarnation": 1,
        "target": None,
        "versions": {},
        "host_id": "",
        "capabilities": {},
    }
    return {**made, **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {"role": "boss"},
        {"role": ["link"]},
        {"job": 3},
        {"job": "x" * 200},
        {"address": "nonsense"},
        {"address": 5},
        {"target": "a:b"},
        {"incarnation": -1},
        {"incarnation": 2**40},
        {"incarnation": True},
        {"incarnation": "1"},
        {"versions": {"a": 1}},
        {"versions": {str(n): "" for n in range(17)}},
        {"versions": []},
        {"host_id": None},
        {"capabilities": []},
    ],
)
def test_malformed_hellos(changes: dict[str, object]) -> None:
    server, _ = proven_server()
    body = orjson.dumps(hello_dict(**changes))
    (end,) = server.feed(struct.pack("!I", len(body)) + body)
    assert isinstance(failure(end).error, WireError)
    assert "hello" in str(failure(end).error)


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("!I", MAX_HELLO_BYTES + 1),
        b"\xff\xff\xff\xff",
        struct.pack("!I", 4) + b"nope",
        struct.pack("!I", 2) + b"[]",
        struct.pack("!I", 0),
        struct.pack("!I", 6000) + b"[" * 6000,
    ],
)
def test_malformed_hello_frames(frame: bytes) -> None:
    server, _ = proven_server()
    (end,) = server.feed(frame)
    assert isinstance(failure(end).error, WireError)


def test_unknown_keys_of_a_hello_are_ignored() -> None:
    server, _ = proven_server()
    body = orjson.dumps(hello_dict(new_in_a_later_release=1))
    assert isinstance(server.feed(struct.pack("!I", len(body)) + body)[-1], Done)


def test_a_library_version_that_is_too_long_or_odd() -> None:
    server = ServerHandshake(TOKEN, SERVER)
    (end,) = server.feed(b"AIORLINF" + struct.pack("!HB", 1, 200))
    assert isinstance(failure(end).error, WireError)
    server = ServerHandshake(TOKEN, SERVER)
    server.feed(b"AIORLINF" + struct.pack("!HB", 1, 6) + b"1\x1b[31m" + bytes(32))
    assert server.peer_library == "1?[31m"


@given(st.lists(st.binary(max_size=80), max_size=6))
@settings(max_examples=60, deadline=None)
def test_any_bytes_from_a_stranger_never_get_through(pieces: list[bytes]) -> None:
    for machine in (ServerHandshake(TOKEN, SERVER), ClientHandshake(TOKEN, CLIENT)):
        for piece in (b"AIORLINF", *pieces):
            for item in machine.feed(piece):
                assert not isinstance(item, Done)
                if isinstance(item, Fail):
                    assert isinstance(item.error, (WireError, AuthenticationError))


@given(which=st.integers(0, 5), place=st.integers(0, 4000), change=st.integers(1, 255))
@settings(max_examples=120, deadline=None)
def test_one_changed_byte_gives_a_documented_error_or_a_different_hello(which: int, place: int, change: int) -> None:
    counter = itertools.count()

    def spoil(data: bytes) -> bytes:
        if next(counter) != which:
            return data
        at = place % len(data)
        return data[:at] + bytes([data[at] ^ change]) + data[at + 1 :]

    ends: tuple[Any, ...] = talk(ClientHandshake(TOKEN, CLIENT), ServerHandshake(TOKEN, SERVER), to_server=spoil, to_client=spoil)
    for end in ends:
        assert end is None or isinstance(end, (Done, Fail))
        if isinstance(end, Fail):
            assert isinstance(end.error, LinkError)
    if which < 4:  # preambles and proofs: whatever was changed there, nobody is let in
        assert not isinstance(ends[1], Done)
