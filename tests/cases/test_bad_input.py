"""Bad input: each a clear error in the right place, and everything else goes on."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import textwrap
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aiorlinf import Worker, init, load_config
from aiorlinf.errors import (
    AiorlinfError,
    AuthenticationError,
    ClosedError,
    ConfigError,
    DeadlineExceeded,
    NonContiguousTensor,
    RendezvousError,
    UnsupportedObject,
    UsageError,
)
from aiorlinf.link import connecting
from aiorlinf.manager import dial
from aiorlinf.manager.service import ManagerService
from aiorlinf.testing import procfs
from tests.cases.conftest import Pair, carried_by


async def goes_on(a: Worker, b: Worker) -> None:
    """The two can still exchange what they like."""
    for group, other in ((a, b), (b, a)):
        sending = group.send({"x": torch.ones(100_000)}, str(other.address), tag=77)
        assert (await other.recv(str(group.address), tag=77, timeout=20))["x"].sum() == 100_000
        await sending
        tensor_sending = group.send_tensor(torch.ones(5), str(other.address), tag=78)
        assert (await other.recv_tensor(torch.zeros(5), str(group.address), tag=78, timeout=20)).sum() == 5
        await tensor_sending


def listening_ports() -> set[int]:
    """The TCP ports on which this process listens."""
    ours = set(procfs.open_descriptors().values())
    with open("/proc/self/net/tcp", encoding="ascii") as file:
        rows = [line.split() for line in file][1:]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in ours}


# ---- objects, tensors, tags, addresses


@pytest.mark.asyncio
async def test_bad_objects_and_tensors_fail_at_their_call(pair: Pair) -> None:
    strided = torch.ones(4, 4)[:, 1]
    array: Any = np.ones(3)
    cases: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: pair.ab.send([strided]), NonContiguousTensor, r"obj\[0\] is not contiguous .*\.contiguous\(\)"),
        (lambda: pair.ab.send_tensor(strided), NonContiguousTensor, "tensor is not contiguous"),
        (lambda: pair.ab.recv_tensor(strided), NonContiguousTensor, "out is not contiguous"),
        (lambda: pair.ab.send({"f": lambda: 1}), UnsupportedObject, r"obj\['f'\]"),
        (lambda: pair.ab.send([1, (x for x in "ab")]), UnsupportedObject, r"obj\[1\]"),
        (lambda: pair.ab.send_tensor(array), UnsupportedObject, "ndarray"),
        (lambda: pair.ab.send_tensor([1.0]), UnsupportedObject, "list"),  # type: ignore[call-overload]
        (lambda: pair.ab.recv_tensor(array), UnsupportedObject, "ndarray"),
        (lambda: pair.ab.recv_tensor(torch.empty(3, device="meta")), UnsupportedObject, "meta"),
        (lambda: pair.ab.recv_tensor(torch.ones(2, dtype=torch.complex64).conj()), UnsupportedObject, "conjugate"),
    ]
    for call, error_type, text in cases:
        with pytest.raises(error_type, match=text):
            call()
    await goes_on(pair.a, pair.b)


@pytest.mark.asyncio
async def test_bad_tags_and_addresses_fail_at_their_call(stream_pair: Pair) -> None:
    a = stream_pair.a
    for tag in (-1, 1 << 32, 1.0, "1", True, None):
        calls: list[Callable[[], Any]] = [
            lambda tag=tag: stream_pair.ab.send(1, tag=tag),  # type: ignore[misc]
            lambda tag=tag: stream_pair.ab.recv(tag=tag),  # type: ignore[misc]
            lambda tag=tag: a.inbox(tag),  # type: ignore[misc]
        ]
        for call in calls:
            with pytest.raises(UsageError, match="tag"):
                call()
    for address in ("b", "b:", "b:-1", ":0", "b:0:1", "b:x", "b 1:0", "", "b:01"):
        for use in (a.recv, lambda address: a.send(1, address), a.env, init):
            if use is init and address == "":
                continue
            with pytest.raises(UsageError, match="address"):
                use(address)
    for members in (["a:0"], ["b:0", "c:0"], ["a:0", "a:0"], ["a:0", "b"], "a:0", []):
        with pytest.raises(UsageError):
            a.collective.create_collective_group(members)
    destinations: list[Any] = [2, -1, "c:0", True, 1.5]
    for destination in destinations:
        with pytest.raises(UsageError, match="no member"):
            stream_pair.ab.send(1, destination)
    await goes_on(stream_pair.a, stream_pair.b)


def test_bad_arguments_of_init(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AIORLINF_ADDRESS", "AIORLINF_MANAGER", "AIORLINF_TOKEN", "RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="AIORLINF_ADDRESS"):
        init()
    with pytest.raises(UsageError, match="backend"):
        init("a:0", backend="smoke")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="loop"):
        init("a:0", loop="main")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="host:port"):
        init("a:0", manager="nowhere", token="secret")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"no manager.*AIORLINF_MANAGER"):
        init()
    monkeypatch.setenv("AIORLINF_ADDRESS", "nonsense")
    with pytest.raises(UsageError, match="nonsense"):
        init()


# ---- addresses nobody has


@pytest.mark.asyncio
async def test_waiting_for_a_worker_that_does_not_come(monkeypatch: pytest.MonkeyPatch, complaints: list[str]) -> None:
    """It is said in the log, and by the error of an operation whose own limit passes."""
    monkeypatch.setattr(connecting, "_SILENCE_SECONDS", 0.1)
    async with init("a:0") as a:
        with pytest.raises(DeadlineExceeded, match="c:0 did not join the job within"):
            await a.recv("c:0", timeout=0.3)
        assert complaints == ["a:0 waits for c:0, which has not joined the job yet"]
        complaints.clear()


@contextlib.asynccontextmanager
async def closed_job(*expected: str, **network: Any) -> AsyncIterator[ManagerService]:
    """A manager that knows who will ever join."""
    config = load_config({"cluster": {"network": network}})
    manager = ManagerService(config=config, token=b"secret", expected=expected)
    await manager.start()
    try:
        yield manager
    finally:
        await manager.close()


@pytest.mark.asyncio
async def test_an_address_that_is_not_in_the_job() -> None:
    async with (
        closed_job("a:0", "b:0", "late:0", rendezvous_timeout_s=0.3) as manager,
        init("a:0", manager=manager.address, token="secret") as a,
        init("b:0", manager=manager.address, token="secret") as b,
    ):
        for use in (lambda: a.send(1, "c:0"), lambda: a.recv("c:0"), lambda: a.send_tensor(torch.ones(3), "c:0")):
            with pytest.raises(UsageError, match=r"not a worker of this job.*a:0"):
                await use()
        with pytest.raises(RendezvousError, match="late:0"):
            await a.recv("late:0")
        await goes_on(a, b)


@pytest.mark.asyncio
async def test_an_address_that_is_taken() -> None:
    async with init("a:0") as a, init("b:0") as b:
        with pytest.raises(RendezvousError, match="a:0"):
            async with init("a:0", manager=a.manager_address, token=a.token):
                pytest.fail("it has joined")
        await goes_on(a, b)


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where connections are refused, and that nobody else gets meanwhile: bound, but not listening."""
    with socket.socket() as idle:
        idle.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{idle.getsockname()[1]}"


@pytest.mark.asyncio
async def test_no_manager_there(nobody: str) -> None:
    with pytest.raises(RendezvousError, match=nobody):
        async with init("a:0", manager=nobody, token="secret", config={"cluster": {"network": {"rendezvous_timeout_s": 0.3}}}):
            pytest.fail("it has joined")


@pytest.mark.asyncio
async def test_waiting_for_a_manager_that_does_not_come(monkeypatch: pytest.MonkeyPatch, complaints: list[str], nobody: str) -> None:
    monkeypatch.setattr(dial, "_SILENCE_S", 0.1)
    with pytest.raises(RendezvousError):
        async with init("a:0", manager=nobody, token="secret", config={"cluster": {"network": {"rendezvous_timeout_s": 2.0}}}):
            pytest.fail("it has joined")
    (line,) = complaints
    assert line.startswith(f"a:0: the manager is not reached yet, trying on: {nobody}: ")
    complaints.clear()


def test_no_manager_there_for_synchronous_code(nobody: str) -> None:
    """The thread that it would have lived in is gone, too."""
    for _ in range(2):
        with pytest.raises(RendezvousError, match=nobody):
            init("a:0", manager=nobody, token="secret", config={"cluster": {"network": {"rendezvous_timeout_s": 0.2}}})


@pytest.mark.asyncio
async def test_joining_that_is_given_up(complaints: list[str]) -> None:
    """The caller's own limit, on a manager that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        for _ in range(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1), init("a:0", manager=where, token="secret"):
                    pytest.fail("it has joined")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await init("a:0", manager=where, token="secret")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await init("a:0", manager=where, token="secret", loop="thread")
            comm = init("a:0", manager=where, token="secret")
            pending = comm.recv("b:0")
            await asyncio.sleep(0.05)
            await comm.close()
            with pytest.raises(ClosedError):
                await pending
    assert complaints == []


# ---- limits


@pytest.mark.asyncio
async def test_a_message_over_the_limit() -> None:
    for carrier in ("frame", "stream"):
        config = carried_by(carrier, max_message_bytes=1_000_000, max_manifest_bytes=10_000)
        async with init("a:0", config=config) as a, init("b:0", config=config) as b:
            uses: list[Callable[[], Any]] = [
                lambda: a.send(torch.ones(300_000), "b:0"),
                lambda: a.send([torch.ones(150_000), torch.ones(150_000)], "b:0"),
                lambda: a.send_tensor(torch.ones(300_000), "b:0"),
                lambda: a.send(b"x" * 1_200_000, "b:0"),
            ]
            for use in uses:
                with pytest.raises(UsageError, match=r"over the limit.*cluster\.collective\.max_message_bytes is 1000000"):
                    use()
            with pytest.raises(UsageError, match=r"cluster\.collective\.max_manifest_bytes"):
                a.send([{number: str(number) for number in range(5000)}, torch.ones(100_000)], "b:0")
            await goes_on(a, b)
            sending = a.send(torch.ones(249_000), "b:0")
            assert (await b.recv("a:0", timeout=20)).sum() == 249_000
            await sending


@pytest.mark.asyncio
async def test_pickling_switched_off() -> None:
    config = {"cluster": {"collective": {"allow_pickle": False}}}
    async with init("a:0", config=config) as a, init("b:0", config=config) as b:
        with pytest.raises(UnsupportedObject, match=r"obj\['e'\]"):
            a.send({"e": ValueError("no")}, "b:0")
        message = {"t": [torch.ones(3)], "n": np.arange(3), "s": {1, "x"}, "none": None}
        sending = a.send(message, "b:0")
        got = await b.recv("a:0", timeout=20)
        await sending
        assert got["s"] == message["s"]
        assert got["n"].tolist() == [0, 1, 2]
        await goes_on(a, b)


# ---- configuration


def test_bad_configuration_fails_at_init(tmp_path: Path) -> None:
    for config, path, text in (
        ({"cluster": {"collective": {"inline_max_byte": 1}}}, "cluster.collective.inline_max_byte", "inline_max_bytes"),
        ({"cluster": {"colective": {}}}, "cluster.colective", "collective"),
        ({"cluster": {"collective": {"window_bytes": "64M"}}}, "cluster.collective.window_bytes", "64M"),
        ({"cluster": {"collective": {"backend": "smoke"}}}, "cluster.collective.backend", "gloo"),
        ({"cluster": {"collective": {"inline_max_bytes": -1}}}, "cluster.collective.inline_max_bytes", "0"),
        ({"cluster": {"network": {"port_range": [2000, 1000]}}}, "cluster.network.port_range", "2000"),
        ({"cluster": 3}, "cluster", "3"),
    ):
        with pytest.raises(ConfigError, match=path.replace(".", r"\.")) as caught:
            init("a:0", config=config)
        assert caught.value.path == path
        assert text in str(caught.value)
    file = tmp_path / "job.yaml"
    file.write_text(
        textwrap.dedent("""
        cluster:
          network:
            conect_timeout_s: 3
        """)
    )
    with pytest.raises(ConfigError, match=r"conect_timeout_s.*connect_timeout_s.*line 4"):
        init("a:0", config=file)
    with pytest.raises(ConfigError, match=r"missing\.yaml"):
        init("a:0", config=tmp_path / "missing.yaml")


@pytest.mark.asyncio
async def test_two_different_configurations_in_one_job() -> None:
    async with init("a:0", config={"cluster": {"collective": {"chunk_bytes": 4096}}}) as a, init("b:0") as b:
        with pytest.raises(ConfigError):
            async with init("c:0", config={"cluster": {"collective": {"chunk_bytes": 8192}}}):
                pytest.fail("it has joined")
        assert b.config == a.config
        await goes_on(a, b)


# ---- strangers


@pytest.mark.asyncio
async def test_a_wrong_token_or_none(complaints: list[str]) -> None:
    async with init("a:0") as a, init("b:0") as b:
        for token in ("wrong", a.token + b"x"):
            with pytest.raises(AuthenticationError) as caught:
                async with init("c:0", manager=a.manager_address, token=token):
                    pytest.fail("it has joined")
            assert a.manager_address in str(caught.value)
        with pytest.raises(AuthenticationError, match="AIORLINF_TOKEN"):
            async with init("c:0", manager=a.manager_address):
                pytest.fail("it has joined")
        await asyncio.sleep(0.05)
        assert any("refused a connection" in text for text in complaints)
        await goes_on(a, b)
        complaints.clear()


@pytest.mark.asyncio
async def test_a_worker_that_failed_to_join_says_why_at_every_operation(complaints: list[str]) -> None:
    async with init("a:0") as a:
        stranger = init("c:0", manager=a.manager_address, token="wrong")
        work = stranger.send(1, "a:0")
        with pytest.raises(AuthenticationError):
            await work
        with pytest.raises(AuthenticationError):
            await stranger
        with pytest.raises(AiorlinfError):
            await stranger.recv("a:0")
        await stranger.close()
        await asyncio.sleep(0.05)
        complaints.clear()


STRANGERS = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: example\r\n\r\n",
    "TLS": bytes([0x16, 3, 1, 2, 0, 1, 0, 1, 0xFC, 3, 3]) + bytes(500),
    "noise": bytes(range(256)) * 4,
    "zeros": bytes(100_000),
    "text": b"hello?\n",
}


@pytest.mark.asyncio
async def test_strangers_at_every_port(complaints: list[str]) -> None:
    """Somebody speaks HTTP, TLS or nothing sensible to the manager's and the workers' ports."""
    before = listening_ports()
    async with init("a:0") as a, init("b:0") as b:
        ports = listening_ports() - before
        assert len(ports) >= 3
        for port in ports:
            for name, words in STRANGERS.items():
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    writer.write(words)
                    with contextlib.suppress(OSError):
                        await writer.drain()
                        if name == "text":
                            writer.write_eof()
                    # The answer, if any, is the preamble and a short reason; then the connection ends.
                    with contextlib.suppress(OSError):
                        assert len(await asyncio.wait_for(reader.read(100_000), 10)) < 2000
                finally:
                    writer.close()
                    with contextlib.suppress(OSError):
                        await writer.wait_closed()
        await asyncio.sleep(0.05)
        for protocol in ("HTTP", "TLS"):
            assert sum(protocol in text for text in complaints) >= 3, complaints
        assert not any("Traceback" in text for text in complaints)
        complaints.clear()
        await goes_on(a, b)


@pytest.mark.asyncio
async def test_silent_strangers_do_not_keep_anybody_out(complaints: list[str]) -> None:
    """Fifty connections that never say a word, then the real ones."""
    before = listening_ports()
    async with init("a:0") as a:
        silent = [await asyncio.open_connection("127.0.0.1", port) for port in listening_ports() - before for _ in range(50)]
        async with init("b:0") as b:
            await goes_on(a, b)
        for _, writer in silent:
            writer.close()
        for _, writer in silent:
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        await asyncio.sleep(0.05)
    complaints.clear()  # when the manager has ended, too, and so has said all that it says of them


# ---- closed


@pytest.mark.asyncio
async def test_after_close_every_call_says_so() -> None:
    async with init("b:0") as b:
        a = init("a:0")
        await a
        group = a.collective.create_collective_group(["a:0", "b:0"])
        pending = [a.recv("b:0"), group.recv_tensor(torch.zeros(3), tag=1)]
        await asyncio.sleep(0)
        await a.close()
        await a.close()
        for work in pending:
            with pytest.raises(ClosedError):
                await work
        for use in (
            lambda: a.send(1, "b:0"),
            lambda: a.recv("b:0"),
            lambda: group.send_tensor(torch.ones(3)),
            lambda: group.recv_tensor(torch.ones(3)),
            lambda: a.inbox(),
        ):
            with pytest.raises(ClosedError, match="closed"):
                use()
        # The other one lives on.
        await b.send("to myself", "b:0")
        assert await b.recv("b:0") == "to myself"


@pytest.mark.asyncio
async def test_before_it_has_joined_its_facts_are_not_there() -> None:
    a = init("a:0")
    for fact in ("incarnation", "config", "token", "manager_address", "job"):
        with pytest.raises(UsageError, match="await"):
            getattr(a, fact)
    await a
    assert a.incarnation == 1
    await a.close()


@pytest.mark.asyncio
async def test_what_listens_there_is_no_manager() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        limits = {"cluster": {"network": {"rendezvous_timeout_s": 1.0, "handshake_timeout_s": 0.2}}}
        with pytest.raises(RendezvousError, match="what listens there is no manager, or one that stands still"):
            async with init("a:0", manager=where, token="secret", config=limits):
                pytest.fail("it has joined")


def test_a_manager_without_a_port_is_said_before_the_token_is_missed() -> None:
    with pytest.raises(UsageError, match=r"'localhost' is not a network address .*host:port"):
        init("a:0", manager="localhost")


def test_no_address_names_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AIORLINF_ADDRESS", "RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match=r"aiorlinf run --workers rollout=2,trainer=1 script\.py"):
        init()
