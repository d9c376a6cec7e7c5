"""The manager within a worker's process."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator

import pytest

from aiorlinf.config import JobConfig
from aiorlinf.errors import AuthenticationError, ConfigError, RendezvousError
from aiorlinf.manager import embedded
from aiorlinf.manager.client import ManagerClient
from aiorlinf.manager.embedded import EmbeddedManager, acquire_embedded, manager_host, random_token
from aiorlinf.rendezvous.hosts import bind_listener
from tests.manager.support import config_with, spawn


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "aiorlinf manager"]


@pytest.fixture(autouse=True)
def _none_is_left() -> Iterator[None]:
    assert threads() == []
    yield
    assert threads() == []
    assert embedded._current is None


async def meet(manager: EmbeddedManager) -> None:
    client = await ManagerClient.connect(manager.address, manager.token, manager.job, deadline=10.0)
    await client.register("a:0", port=1)
    await client.close()


@pytest.mark.asyncio
async def test_it_is_shared_and_ends_with_its_last_user() -> None:
    first, second = acquire_embedded(), acquire_embedded()
    assert (first.address, first.token, first.job) == (second.address, second.token, second.job)
    assert first.address.startswith("127.0.0.1:")
    assert first.config == JobConfig()
    await meet(first)
    first.release()
    first.release()
    assert "released" in repr(first)
    assert threads() == ["aiorlinf manager"]
    await meet(second)
    second.release()
    assert threads() == []


@pytest.mark.asyncio
async def test_the_next_one_is_another_job() -> None:
    first = acquire_embedded()
    first.release()
    second = acquire_embedded(job="mine", token=b"secret")
    try:
        assert (second.job, second.token) == ("mine", b"secret")
        assert first.token != second.token
        await meet(second)
    finally:
        second.release()


def test_a_second_user_takes_what_there_is_or_is_refused() -> None:
    config = config_with(close_timeout_s=1.0)
    first = acquire_embedded(config, b"secret", "mine")
    try:
        for same in (acquire_embedded(), acquire_embedded(JobConfig()), acquire_embedded(config, b"secret", "mine")):
            assert same.config == config
            same.release()
        with pytest.raises(ConfigError, match="runs with another configuration already"):
            acquire_embedded(config_with(close_timeout_s=2.0))
        with pytest.raises(AuthenticationError, match="another token"):
            acquire_embedded(token=b"other")
        with pytest.raises(RendezvousError, match="runs job mine, not yours"):
            acquire_embedded(job="yours")
        assert threads() == ["aiorlinf manager"]
    finally:
        first.release()


def test_a_start_that_fails_leaves_nothing() -> None:
    with bind_listener("127.0.0.1") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RendezvousError, match="the port is taken"):
            acquire_embedded(config_with(port_range=(port, port)))
    with pytest.raises(ConfigError, match="'no-such-0' is not an interface"):
        acquire_embedded(config_with(interface="no-such-0"))
    manager = acquire_embedded(config_with(port_range=(port, port)))
    assert manager.address == f"127.0.0.1:{port}"
    manager.release()


def test_many_threads_start_one() -> None:
    made: list[EmbeddedManager] = []
    users = [threading.Thread(target=lambda: made.append(acquire_embedded())) for _ in range(16)]
    for user in users:
        user.start()
    for user in users:
        user.join()
    assert len({manager.address for manager in made}) == 1
    for manager in made:
        assert len(threads()) == 1
        manager.release()


def test_it_does_not_mind_who_set_which_loop_policy() -> None:
    program = """
import asyncio
from aiorlinf.manager.embedded import acquire_embedded

class Policy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self):
        raise RuntimeError("not for you")

asyncio.set_event_loop_policy(Policy())
manager = acquire_embedded()
manager.release()
print("fine")
"""
    child = spawn(program.replace("asyncio.set_event", "import warnings; warnings.simplefilter('ignore'); asyncio.set_event"))
    out, err = child.communicate(timeout=50)
    assert (out.strip(), err) == ("fine", "")


def test_where_it_listens() -> None:
    assert manager_host(JobConfig()) == "127.0.0.1"
    assert manager_host(config_with(bind_host="10.0.0.5", interface="lo")) == "10.0.0.5"
    assert manager_host(config_with(interface="lo")) == "127.0.0.1"


def test_random_tokens_are_text() -> None:
    assert random_token() != random_token()
    assert len(random_token().decode("ascii")) == 64


def test_a_child_after_a_fork_has_none_and_may_have_its_own() -> None:
    program = """
import asyncio, os, threading, time, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # later Pythons warn of any fork with threads
from aiorlinf.manager import embedded
from aiorlinf.manager.client import ManagerClient
from aiorlinf.manager.embedded import acquire_embedded

async def meet(manager):
    client = await ManagerClient.connect(manager.address, manager.token, deadline=10.0)
    print((await client.register("a:0", port=1)).identity, flush=True)
    await client.close()

manager = acquire_embedded()
with embedded._lock:  # as if another thread were starting or stopping one at this moment
    child = os.fork()
    if child == 0:
        code = 1
        try:
            manager.release()
            own = acquire_embedded()
            assert own.address != manager.address
            assert own.token != manager.token
            asyncio.run(meet(own))
            own.release()
            code = 0
        finally:
            os._exit(code)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
asyncio.run(meet(manager))
manager.release()
assert threading.active_count() == 1
"""
    out, err = spawn(program).communicate(timeout=50)
    assert (out.split(), err) == (["a:0#1", "a:0#1"], "")


def test_an_exit_without_release_is_prompt() -> None:
    program = """
import asyncio
from aiorlinf.manager.client import ManagerClient
from aiorlinf.manager.embedded import acquire_embedded

async def main():
    manager = acquire_embedded()
    client = await ManagerClient.connect(manager.address, manager.token, deadline=10.0)
    await client.register("a:0", port=1)
    client.abort()

asyncio.run(main())
print("ends")
"""
    child = spawn(program)
    out, err = child.communicate(timeout=50)
    # On a busy machine asyncio's debug mode says of a slow moment that it was one.
    said = [line for line in err.splitlines() if not line.startswith("Executing <")]
    assert (out.strip(), said, child.returncode) == ("ends", [], 0)


@pytest.mark.asyncio
async def test_releasing_from_a_coroutine_while_members_are_connected() -> None:
    manager = acquire_embedded()
    lost: list[Exception] = []
    client = await ManagerClient.connect(manager.address, manager.token, deadline=10.0, on_lost=lost.append)
    manager.release()
    while not lost:
        await asyncio.sleep(0.005)
    await client.close()
    assert os.getpid() == client._pid
