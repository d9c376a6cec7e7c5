"""A worker's side of the connection to the manager."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from aiorlinf.address import WorkerAddress
from aiorlinf.config import NetworkConfig
from aiorlinf.errors import AuthenticationError, ClosedError, LinkError, RendezvousError, UsageError, WireError
from aiorlinf.manager.client import ManagerClient
from aiorlinf.manager.protocol import encode
from aiorlinf.manager.service import ManagerService
from aiorlinf.rendezvous.hosts import bind_listener
from aiorlinf.wire.handshake import Hello, ServerHandshake, Write
from tests.manager.support import TOKEN, join, manager, spawn, until

Speak = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]


@asynccontextmanager
async def server(speak: Speak) -> AsyncIterator[str]:
    """Something that is no manager listens here."""
    tasks: set[asyncio.Task[Any]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await speak(reader, writer)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await listening.wait_closed()


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


def deaf(*answers: bytes) -> Speak:
    """Proves itself, then says these things and hears nothing."""

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        machine = ServerHandshake(TOKEN, Hello(role="manager", job="deaf"))
        while machine.state.name != "DONE":
            for item in machine.feed(await reader.read(65536)):
                if isinstance(item, Write):
                    writer.write(item.data)
        for answer in answers:
            writer.write(answer)
        await reader.read(-1)

    return speak


# ------------------------------------------------------------------------------------------------------------- reaching


@pytest.mark.asyncio
async def test_a_manager_that_starts_later_is_waited_for() -> None:
    with bind_listener("127.0.0.1") as probe:
        port = probe.getsockname()[1]
    connecting = asyncio.create_task(ManagerClient.connect(f"127.0.0.1:{port}", TOKEN, deadline=30.0))
    await asyncio.sleep(0.1)
    assert not connecting.done()
    async with manager(port=port):
        await (await connecting).close()


@pytest.mark.asyncio
async def test_nobody_there() -> None:
    with bind_listener("127.0.0.1") as probe:
        port = probe.getsockname()[1]
    with pytest.raises(RendezvousError) as caught:
        await ManagerClient.connect(f"127.0.0.1:{port}", TOKEN, deadline=0.2, worker="a:0")
    for text in (f"127.0.0.1:{port}: connection refused", "a:0", "attempts", "AIORLINF_MANAGER"):
        assert text in str(caught.value)
    assert caught.value.elapsed is not None


class _Budget:
    def __init__(self, left: float | None) -> None:
        self.left = left

    def remaining(self) -> float | None:
        return self.left


@pytest.mark.asyncio
async def test_deadlines_of_all_kinds() -> None:
    with pytest.raises(RendezvousError, match="in 0 attempts: no time was left"):
        await ManagerClient.connect("127.0.0.1:1", TOKEN, deadline=_Budget(0.0))
    async with manager() as service:
        for deadline in (None, 10, 10.0, _Budget(10.0), _Budget(None)):
            await (await ManagerClient.connect(service.address, TOKEN, deadline=deadline)).close()


@pytest.mark.asyncio
async def test_a_name_with_several_addresses() -> None:
    async with manager() as service:
        port = service.address.rpartition(":")[2]
        await (await ManagerClient.connect(f"localhost:{port}", TOKEN, deadline=10.0)).close()
    with pytest.raises(RendezvousError, match=r"no-such-host\.invalid: name look-up failed"):
        await ManagerClient.connect("no-such-host.invalid:5", TOKEN, deadline=0.3)


@pytest.mark.asyncio
@pytest.mark.parametrize("token", [None, b""])
async def test_no_token_says_what_to_set(token: bytes | None) -> None:
    with pytest.raises(AuthenticationError, match="set AIORLINF_TOKEN"):
        await ManagerClient.connect("127.0.0.1:1", token)


@pytest.mark.asyncio
async def test_not_an_address() -> None:
    with pytest.raises(UsageError, match="is not a network address"):
        await ManagerClient.connect("manager", TOKEN)
    with pytest.raises(UsageError, match="is not a worker address"):
        await ManagerClient.connect("127.0.0.1:1", TOKEN, worker="nonsense")


@pytest.mark.asyncio
async def test_somebody_else_answers_on_the_port() -> None:
    async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")

    async with server(http) as address:
        with pytest.raises(WireError, match="HTTP server") as caught:
            await ManagerClient.connect(address, TOKEN, deadline=30.0)
        assert caught.value.address == address


@pytest.mark.asyncio
async def test_somebody_silent_on_the_port() -> None:
    async with server(silent) as address:
        network = NetworkConfig(handshake_timeout_s=0.1)
        with pytest.raises(RendezvousError, match=rf"{address}: what listens there is no manager.*: no preamble .* within 0\.1 s"):
            await ManagerClient.connect(address, TOKEN, deadline=0.5, network=network)


@pytest.mark.asyncio
async def test_a_hang_up_in_the_handshake_is_tried_again() -> None:
    async with manager() as service:
        attempts = 0

        async def relay_the_third(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal attempts
            attempts += 1
            if attempts < 3:
                return
            host, _, port = service.address.rpartition(":")
            inner_reader, inner_writer = await asyncio.open_connection(host, int(port))

            async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
                try:
                    while data := await source.read(65536):
                        sink.write(data)
                finally:
                    sink.close()

            await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))

        async with server(relay_the_third) as address:
            client = await ManagerClient.connect(address, TOKEN, deadline=30.0)
            await client.register("a:0", port=1)
            await client.close()
        assert attempts == 3


@pytest.mark.asyncio
async def test_a_job_that_is_not_ours_is_final() -> None:
    async with server(deaf()) as address:
        with pytest.raises(LinkError, match="job deaf"):
            await ManagerClient.connect(address, TOKEN, "other", deadline=30.0)


@pytest.mark.asyncio
@pytest.mark.parametrize("pause", [0.0, 0.001, 0.01, 0.05])
async def test_cancelling_a_connect_leaves_nothing_open(pause: float) -> None:
    with bind_listener("127.0.0.1") as listener:  # the kernel makes the connection, and nobody ever answers
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        connecting = asyncio.create_task(ManagerClient.connect(address, TOKEN, deadline=30.0))
        await asyncio.sleep(pause)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
    del connecting
    gc.collect()  # an unclosed socket would be a warning, which fails the test


def test_no_file_descriptors_left_is_said_to_be_our_own_trouble() -> None:
    program = """
import asyncio, os, resource
from aiorlinf.errors import RendezvousError
from aiorlinf.manager.client import ManagerClient

async def main():
    held = [os.dup(0) for _ in range(50)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    try:
        await ManagerClient.connect("127.0.0.1:9", b"t", deadline=0.2)
    except RendezvousError as error:
        print(error)

asyncio.run(main())
"""
    out, err = spawn(program).communicate(timeout=50)
    assert "127.0.0.1:9: this process has no file descriptors left" in out, err


# ------------------------------------------------------------------------------------------------------------ requests


@pytest.mark.asyncio
async def test_a_lookup_in_vain_names_everybody() -> None:
    async with manager(expected=["a:0", "b:0", "b:1"]) as service, join(service, "a:0") as a, join(service, "b:1"):
        with pytest.raises(RendezvousError) as caught:
            await a.client.lookup("b:0", 0.1)
        error = caught.value
        assert "a:0 waited for b:0, which never registered; registered: a:0, b:1; expected and missing: b:0" in str(error)
        assert (error.local, error.remote, error.address, error.elapsed) == ("a:0", "b:0", service.address, 0.1)
        with pytest.raises(RendezvousError, match="there is no worker c:0 in this job, which has a:0, b:0, b:1"):
            await a.client.lookup("c:0", 60.0)
        a.client.expect(["c:0"])
        with pytest.raises(RendezvousError, match="waited for c:0"):
            await a.client.lookup("c:0", 0.05)


@pytest.mark.asyncio
async def test_cancelling_a_lookup_withdraws_it() -> None:
    async with manager() as service, join(service, "a:0") as a:
        waiting = asyncio.create_task(a.client.lookup("b:0"))
        await until(lambda: len(service._directory.waiting) > 0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until(lambda: len(service._directory.waiting) == 0)
        async with join(service, "b:0"):
            assert (await a.client.lookup("b:0")).incarnation == 1


@pytest.mark.asyncio
async def test_many_lookups_of_one_worker_at_once() -> None:
    async with manager() as service, join(service, "a:0") as a:
        waiting = [asyncio.create_task(a.client.lookup("b:0", 30.0)) for _ in range(200)]
        await until(lambda: service._directory.waiting.on(WorkerAddress("b:0")) == 200)
        async with join(service, "b:0"):
            assert {record.address for record in await asyncio.gather(*waiting)} == {"b:0"}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "arguments",
    [
        {"port": 0},
        {"port": 70000},
        {"host": "a b"},
        {"labels": {"x": 1}},
        {"devices": [1]},
        {"host_id": "x" * 300},
        {"pid": -1},
        {"address": "nonsense"},
    ],
)
async def test_malformed_arguments_are_errors_at_the_call(arguments: dict[str, Any]) -> None:
    async with manager() as service, join(service) as member:
        with pytest.raises(UsageError):
            await member.client.register(**{"address": "a:0", "port": 1, **arguments})
        with pytest.raises(UsageError):
            await member.client.lookup("a:0", timeout=-1.0)
        assert (await member.client.register("a:0", port=1)).identity == ("a:0", 1)


@pytest.mark.asyncio
async def test_registering_twice_on_one_connection() -> None:
    async with manager() as service, join(service, "a:0") as a:
        with pytest.raises(UsageError, match="already registered a:0#1"):
            await a.client.register("a:1", port=1)


@pytest.mark.asyncio
async def test_a_manager_that_does_not_answer() -> None:
    async with server(deaf()) as address:
        client = await ManagerClient.connect(address, TOKEN, deadline=30.0)
        with pytest.raises(WireError, match="did not tell the job's configuration"):
            _ = client.config
        with pytest.raises(RendezvousError, match=r"the manager did not answer the request 'register' within 0\.1 s"):
            await client.register("a:0", port=1, timeout=0.1)
        await client.close(timeout=0.1)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "answer",
    [
        {"id": 1},
        {"id": 1, "ok": []},
        {"id": 1, "ok": {}},
        {"id": 1, "ok": {"worker": 3}},
        {"id": 1, "error": "no"},
        {"id": 1, "error": {"kind": "exec"}},
    ],
)
async def test_a_manager_that_talks_nonsense(answer: dict[str, Any]) -> None:
    async with server(deaf(encode({"id": 99, "ok": {}}) + encode({"id": "x"}) + encode({"event": "gone"}))) as address:
        client = await ManagerClient.connect(address, TOKEN, deadline=30.0)
        asking = asyncio.create_task(client.lookup("a:0", 30.0))
        await until(lambda: bool(client._pending))
        # as if it had come from the connection
        try:
            client.take(answer)
        except WireError as error:
            client._connection.abort(error)
        with pytest.raises((WireError, RendezvousError)):
            await asking
        await client.close()


# -------------------------------------------------------------------------------------------------------- loss, closing


@pytest.mark.asyncio
async def test_losing_the_manager_fails_what_waits_and_is_told_once() -> None:
    service = ManagerService(config=(await _default_config()), token=TOKEN)
    await service.start()
    async with join(service, "a:0") as a:
        waiting = [asyncio.create_task(a.client.lookup(address)) for address in ("b:0", "b:1")]
        await until(lambda: len(service._directory.waiting) == 2)
        await service.close()
        errors = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(error, RendezvousError) and "the connection to the manager is lost" in str(error) for error in errors)
        assert errors[0] is not errors[1]
        await until(lambda: len(a.lost) == 1)
        assert isinstance(a.lost[0], LinkError)
        with pytest.raises(RendezvousError, match="is lost"):
            await a.client.lookup("a:0")
        with pytest.raises(RendezvousError, match="is lost"):
            a.client.expect(["x:0"])
        assert "closed" in repr(a.client)
    assert len(a.lost) == 1


async def _default_config() -> Any:
    async with manager() as service:
        return service.config


@pytest.mark.asyncio
async def test_closing_is_an_orderly_leave_and_may_be_repeated() -> None:
    async with manager() as service, join(service, "a:0") as a, join(service, "b:0") as b:
        await a.client.lookup("b:0")
        waiting = asyncio.create_task(b.client.lookup("c:0"))
        await until(lambda: len(service._directory.waiting) > 0)
        await asyncio.gather(b.client.close(), b.client.close())
        await b.client.close()
        with pytest.raises(ClosedError):
            await waiting
        with pytest.raises(ClosedError):
            await b.client.lookup("a:0")
        await until(lambda: len(a.events) == 1)
        assert a.news == [("gone", "b:0", 1, "left")]
        assert b.lost == []
        async with join(service, "b:0") as again:
            assert again.client.registration is not None
            assert again.client.registration.identity.incarnation == 2


@pytest.mark.asyncio
async def test_aborting_is_a_loss_for_the_others() -> None:
    async with manager() as service, join(service, "a:0") as a, join(service, "b:0") as b:
        await a.client.lookup("b:0")
        b.client.abort()
        await until(lambda: len(a.events) == 1)
        assert a.news == [("gone", "b:0", 1, "lost")]


@pytest.mark.asyncio
async def test_cancelling_close_cuts_the_connection() -> None:
    async with server(deaf()) as address:
        client = await ManagerClient.connect(address, TOKEN, deadline=30.0)
        registering = asyncio.create_task(client.register("a:0", port=1, timeout=30.0))
        await until(lambda: bool(client._pending))
        client.take({"id": 1, "ok": {"address": "a:0", "incarnation": 1, "host": "h", "config": {}, "job": "deaf", "expected": None}})
        await registering
        closing = asyncio.create_task(client.close(timeout=60.0))
        await until(lambda: bool(client._pending))
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await client._connection.wait_closed()


@pytest.mark.asyncio
async def test_a_callback_that_raises_does_not_harm_the_connection() -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

    def fail(event: dict[str, Any]) -> None:
        raise ZeroDivisionError(event["address"])

    async with manager() as service, join(service) as other:
        client = await ManagerClient.connect(service.address, TOKEN, deadline=10.0, on_event=fail)
        waiting = asyncio.create_task(client.lookup("b:0", 30.0))
        await until(lambda: len(service._directory.waiting) > 0)
        await other.client.register("b:0", port=1)
        assert (await waiting).address == "b:0"
        await client.close()
    assert [type(context["exception"]) for context in reported] == [ZeroDivisionError]


@pytest.mark.asyncio
async def test_what_the_connection_knows() -> None:
    async with manager() as service, join(service, "a:0") as a:
        assert a.client.local_host == a.client.peer_host == "127.0.0.1"
        assert a.client.address == service.address
        assert a.client.config == service.config
        assert repr(a.client) == f"<ManagerClient of a:0#1 at {service.address} job {service.job} open, 0 requests pending>"


# ---------------------------------------------------------------------------------------------------------- other loops


async def whole_story() -> list[tuple[Any, ...]]:
    async with manager() as service, join(service, "a:0") as a:
        waiting = asyncio.create_task(a.client.lookup("b:0", 30.0))
        await asyncio.sleep(0.01)
        async with join(service, "b:0"):
            assert (await waiting).identity == ("b:0", 1)
        await until(lambda: len(a.events) == 2)
        with pytest.raises(RendezvousError):
            await a.client.lookup("b:0", 0.05)
        with pytest.raises(AuthenticationError):
            await ManagerClient.connect(service.address, b"wrong", deadline=10.0)
        return a.news


@pytest.mark.parametrize("loop_factory", [asyncio.SelectorEventLoop, uvloop.new_event_loop])
def test_on_both_kinds_of_loop(loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    with asyncio.Runner(debug=True, loop_factory=loop_factory) as runner:
        assert runner.run(whole_story()) == [("joined", "b:0", 1, None), ("gone", "b:0", 1, "left")]


# ----------------------------------------------------------------------------------------------------------------- fork


@pytest.mark.asyncio
async def test_a_fork_inherits_nothing_usable_and_does_no_harm() -> None:
    program = """
import asyncio, os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # later Pythons warn of any fork with threads
from aiorlinf.errors import ForkedHandle
from aiorlinf.manager.client import ManagerClient
from tests.manager.support import TOKEN

async def main():
    client = await ManagerClient.connect(sys.argv[1], TOKEN)
    await client.register("a:0", port=1)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            try:
                client.expect(["b:0"])
            except ForkedHandle:
                client.abort()
                try:
                    client.close().send(None)
                except StopIteration:
                    code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    record = await client.lookup("a:0")
    await client.close()
    print(record.identity)

asyncio.run(main())
"""
    async with manager() as service:
        child = spawn(program, service.address, env={**os.environ})
        out, err = await asyncio.to_thread(child.communicate, None, 50)
        assert (out.strip(), err) == ("a:0#1", "")
