"""The manager's messages: what is malformed is a WireError, nothing else."""

from __future__ import annotations

import struct
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiorlinf.address import Identity, Incarnation, WorkerAddress
from aiorlinf.config import JobConfig, config_to_dict
from aiorlinf.errors import AuthenticationError, ConfigError, LinkError, RendezvousError, UsageError, WireError
from aiorlinf.manager.lives import End, Known
from aiorlinf.manager.protocol import (
    MAX_MESSAGE_BYTES,
    MessageReader,
    Registration,
    WorkerRecord,
    encode,
    error_from_dict,
    error_to_dict,
)
from aiorlinf.manager.requests import (
    AskJob,
    Beat,
    Book,
    Expect,
    Find,
    Forget,
    Learn,
    ListWorkers,
    Lookup,
    Pong,
    Publish,
    Register,
    Remember,
    Subscribe,
    Unregister,
    Watch,
    Withdraw,
    known_to_list,
    parse_request,
)

RECORD = WorkerRecord(
    address=WorkerAddress("rollout:0"),
    incarnation=Incarnation(3),
    host="10.0.0.5",
    port=4711,
    devices=("cpu", "cuda:0"),
    labels={"host": "node", "rack": "r1"},
    host_id="h",
    pid=77,
    unix="aiorlinf-link-0123",
)
REGISTER: dict[str, Any] = {
    "op": "register",
    "id": 1,
    "address": "rollout:0",
    "host": None,
    "port": 4711,
    "devices": ["cpu"],
    "labels": {"host": "node"},
    "host_id": "h",
    "pid": 77,
    "unix": "aiorlinf-link-0123",
}
REGISTRATION: dict[str, Any] = {
    "address": "rollout:0",
    "incarnation": 1,
    "host": "10.0.0.5",
    "config": config_to_dict(JobConfig()),
    "job": "j",
    "expected": ["rollout:0", "trainer:0"],
}


def test_records_survive_the_wire() -> None:
    (message,) = MessageReader().feed(encode(RECORD.to_dict()))
    assert WorkerRecord.from_dict(message) == RECORD
    assert RECORD.identity == Identity(WorkerAddress("rollout:0"), Incarnation(3))


def test_registrations_survive_the_wire() -> None:
    (message,) = MessageReader().feed(encode(REGISTRATION))
    assert Registration.from_dict(message) == Registration(
        identity=Identity(WorkerAddress("rollout:0"), Incarnation(1)),
        host="10.0.0.5",
        config=JobConfig(),
        job="j",
        expected=frozenset({WorkerAddress("rollout:0"), WorkerAddress("trainer:0")}),
    )
    assert Registration.from_dict({**REGISTRATION, "expected": None}).expected is None


def test_requests() -> None:
    rollout = WorkerAddress("rollout:0")
    assert parse_request(REGISTER) == Register(1, rollout, None, 4711, ("cpu",), {"host": "node"}, "h", 77, "aiorlinf-link-0123")
    assert parse_request({"op": "lookup", "id": 2, "address": "rollout:0", "timeout": 1}) == Lookup(2, rollout, 1.0)
    assert parse_request({"op": "lookup", "id": 2, "address": "rollout:0"}) == Lookup(2, rollout, None)
    assert parse_request({"op": "lookup", "id": 2, "address": "rollout:0", "timeout": 1e12}) == Lookup(2, rollout, 30 * 86400.0)
    assert parse_request({"op": "unregister", "id": 3}) == Unregister(3)
    assert parse_request({"op": "workers", "id": 4, "after": "rollout:0"}) == ListWorkers(4, rollout)
    assert parse_request({"op": "forget", "id": 5}) == Forget(5)
    assert parse_request({"op": "expect", "addresses": ["rollout:0"]}) == Expect((rollout,))
    assert parse_request({"op": "pong"}) == Pong()
    assert parse_request({"op": "book", "id": 6, "budgets": [2, 1], "bytes": 1000}) == Book(6, (2, 1), 1000)
    assert parse_request({"op": "beat"}) == Beat()
    assert parse_request({"op": "job", "id": 6}) == AskJob(6)
    assert parse_request({"op": "subscribe", "id": 7}) == Subscribe(7)
    assert parse_request({"op": "lookup", "id": 2, "address": "rollout:0", "above": 3}) == Lookup(2, rollout, None, 3)
    going_on = parse_request({**REGISTER, "life": 4, "process": "p"})
    assert isinstance(going_on, Register)
    assert (going_on.life, going_on.process) == (4, "p")
    assert parse_request({"op": "publish", "id": 8, "kind": "channel", "name": "c", "value": {"a": "b"}}) == Publish(
        8, "channel", "c", {"a": "b"}, False
    )
    assert parse_request({"op": "withdraw", "id": 9, "kind": "group", "name": "g"}) == Withdraw(9, "group", "g")
    assert parse_request({"op": "find", "id": 10, "kind": "group", "name": "g", "timeout": 1}) == Find(10, "group", "g", 1.0)
    assert parse_request({"op": "remember", "config": {}, "expected": ["rollout:0"]}) == Remember({}, (rollout,))
    assert parse_request({"op": "watch", "workers": [["rollout:0", 2]]}) == Watch((Identity(rollout, Incarnation(2)),))


def test_what_is_known_of_lives_survives_the_wire() -> None:
    identity = Identity(WorkerAddress("rollout:0"), Incarnation(2))
    lives = (Known(identity, None), Known(identity, End("left", "it closed")), Known(identity, End("lost", "x" * 1000)))
    learnt = parse_request({"op": "learn", "lives": [known_to_list(known) for known in lives]})
    assert learnt == Learn((*lives[:2], Known(identity, End("lost", "x" * 300))))


@pytest.mark.parametrize(
    "message",
    [
        {"op": "learn", "lives": None},
        {"op": "learn", "lives": [["rollout:0", 1]] * 1001},
        {"op": "learn", "lives": ["rollout:0"]},
        {"op": "learn", "lives": [["rollout:0", 0]]},
        {"op": "learn", "lives": [["rollout:0", 1, "lost"]]},
        {"op": "learn", "lives": [["rollout:0", 1, "slept", ""]]},
        {"op": "learn", "lives": [["rollout:0", 1, "lost", "x" * 301]]},
        {"op": "watch", "workers": [["rollout:0"]]},
        {"op": "watch", "workers": [[1, 1]]},
        {"op": "watch", "workers": {}},
        {"op": "remember", "config": []},
        {"op": "remember", "config": {}, "expected": [7]},
        {"op": "publish", "id": 1, "kind": "file", "name": "x", "value": {}},
        {"op": "publish", "id": 1, "kind": "group", "name": "", "value": {}},
        {"op": "publish", "id": 1, "kind": "group", "name": "x", "value": {"a": 1}},
        {"op": "find", "id": 1, "kind": ["group"], "name": "x"},
        {"op": "lookup", "id": 2, "address": "rollout:0", "above": -1},
    ],
)
def test_malformed_news_and_names(message: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        parse_request(message)


@pytest.mark.parametrize(
    "changes",
    [
        {"op": "eval"},
        {"op": None},
        {"op": ["register"]},
        {"id": 0},
        {"id": 1.0},
        {"id": True},
        {"id": 2**60},
        {"address": "rollout"},
        {"address": 5},
        {"host": ""},
        {"host": "a b"},
        {"host": "x" * 300},
        {"host": 7},
        {"port": 0},
        {"port": 65536},
        {"port": "80"},
        {"devices": "cpu"},
        {"devices": [1]},
        {"devices": ["cpu"] * 65},
        {"labels": {"host": 1}},
        {"labels": {"x" * 200: ""}},
        {"labels": {"x": "y" * 2000}},
        {"labels": {str(number): "" for number in range(65)}},
        {"labels": []},
        {"host_id": None},
        {"pid": -1},
        {"pid": 2**40},
    ],
)
def test_malformed_requests(changes: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        parse_request({**REGISTER, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"id": 0},
        *({"budgets": wrong} for wrong in ([], 1, [-1], [1.0], [True], [0] * 300)),
        *({"bytes": wrong} for wrong in (0, -1, 1.5, None, 2**60)),
    ],
)
def test_malformed_bookings(changes: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        parse_request({"op": "book", "id": 6, "budgets": [2, 1], "bytes": 1000, **changes})


@pytest.mark.parametrize("timeout", [-1, "1", True, 1e300, [], float("nan"), float("inf")])
def test_malformed_timeouts(timeout: object) -> None:
    with pytest.raises(WireError, match="timeout"):
        parse_request({"op": "lookup", "id": 1, "address": "a:0", "timeout": timeout})


@pytest.mark.parametrize(
    "changes", [{"config": []}, {"config": None}, {"expected": 3}, {"expected": ["x"]}, {"incarnation": 0}, {"job": 1}]
)
def test_malformed_registrations(changes: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        Registration.from_dict({**REGISTRATION, **changes})


def test_a_configuration_of_a_later_version() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.warp"):
        Registration.from_dict({**REGISTRATION, "config": {"cluster": {"warp": 9}}})


@pytest.mark.parametrize(
    "error",
    [
        RendezvousError("nobody came", local="a:0", remote="b:0", elapsed=1.5, hint="wait"),
        UsageError("not so"),
        LinkError("broken", address="h:1"),
    ],
)
def test_errors_survive_the_wire(error: LinkError | UsageError) -> None:
    (message,) = MessageReader().feed(encode(error_to_dict(error)))
    back = error_from_dict(message)
    assert type(back) is type(error)
    assert str(back) == str(error)


def test_an_error_without_a_kind_of_its_own_arrives_as_its_base() -> None:
    assert type(error_from_dict(error_to_dict(AuthenticationError("no")))) is LinkError


@pytest.mark.parametrize(
    "data", [None, [], {}, {"kind": "exec", "message": ""}, {"kind": [], "message": ""}, {"kind": "link"}, {"kind": "link", "message": 1}]
)
def test_malformed_errors(data: object) -> None:
    with pytest.raises(WireError):
        error_from_dict(data)


# -------------------------------------------------------------------------------------------------------------- framing


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_messages_are_cut_out_of_the_stream(chunk: int) -> None:
    stream = b"".join(encode({"n": number, "text": "x" * number}) for number in range(5))
    reader = MessageReader()
    messages = [message for start in range(0, len(stream), chunk) for message in reader.feed(stream[start : start + chunk])]
    assert [message["n"] for message in messages] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("!I", MAX_MESSAGE_BYTES + 1),
        b"\xff\xff\xff\xff",
        struct.pack("!I", 3) + b"xyz",
        struct.pack("!I", 2) + b"[]",
        struct.pack("!I", 0),
        struct.pack("!I", 4) + b"null",
        struct.pack("!I", 5000) + b"[" * 5000,
    ],
)
def test_what_is_no_message(data: bytes) -> None:
    with pytest.raises(WireError):
        MessageReader().feed(data)


def test_what_cannot_be_encoded() -> None:
    with pytest.raises(UsageError, match="JSON"):
        encode({"x": object()})
    with pytest.raises(UsageError, match="at most 1048576"):
        encode({"x": "y" * MAX_MESSAGE_BYTES})


_scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["rollout:0", "cpu", "link"])
_values = st.recursive(_scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3))
_ops = st.sampled_from(
    [
        "register",
        "lookup",
        "unregister",
        "workers",
        "forget",
        "expect",
        "pong",
        "learn",
        "watch",
        "remember",
        "find",
        "publish",
        "book",
        "x",
    ]
)


MORE: dict[str, Any] = {
    "timeout": None,
    "after": None,
    "addresses": [],
    "above": 1,
    "life": 1,
    "lives": [["rollout:0", 1, "lost", "x"]],
    "workers": [["rollout:0", 1]],
    "config": {},
    "expected": [],
    "kind": "channel",
    "name": "x",
    "value": {},
    "budgets": [1],
    "bytes": 1,
}


@given(op=_ops, changes=st.dictionaries(st.sampled_from([*REGISTER, *MORE]), _values))
@settings(max_examples=60, deadline=None)
def test_any_request_is_understood_or_a_wire_error(op: str, changes: dict[str, Any]) -> None:
    try:
        parse_request({**REGISTER, **MORE, "op": op, **changes})
    except WireError:
        pass


@given(st.dictionaries(st.sampled_from([*RECORD.to_dict(), *REGISTRATION]), _values))
@settings(max_examples=60, deadline=None)
def test_any_answer_is_understood_or_a_documented_error(changes: dict[str, Any]) -> None:
    try:
        WorkerRecord.from_dict({**RECORD.to_dict(), **changes})
    except WireError:
        pass
    try:
        Registration.from_dict({**REGISTRATION, **changes})
    except (WireError, ConfigError):
        pass
    try:
        error_from_dict(changes)
    except WireError:
        pass


@given(place=st.integers(0, 1000), change=st.integers(1, 255), chunk=st.integers(1, 300))
@settings(max_examples=120, deadline=None)
def test_one_changed_byte_gives_a_message_or_a_wire_error(place: int, change: int, chunk: int) -> None:
    data = bytearray(encode(REGISTER) + encode({"op": "pong"}))
    data[place % len(data)] ^= change
    reader = MessageReader()
    try:
        for start in range(0, len(data), chunk):
            for message in reader.feed(data[start : start + chunk]):
                parse_request(message)
    except WireError:
        pass


def test_json_of_the_wire_is_plain() -> None:
    assert orjson.loads(encode({"address": WorkerAddress("a:0")})[4:]) == {"address": "a:0"}
