"""The leak check itself: pytest runs in a process of its own on tests that leave things behind."""

from __future__ import annotations

import os
import re

import pytest

from tests.inner_pytest import InnerRun, run_pytest

__all__: list[str] = []

_SOURCE = """
    import asyncio, mmap, os, socket, subprocess, threading
    import pytest, pytest_asyncio

    kept = []
    SHM = "/dev/shm/aiorlinf_test_leak_check_{pid}"

    def test_leaves_a_thread():
        stop = threading.Event()
        kept.append(stop)
        threading.Thread(target=stop.wait, name="left-thread", daemon=True).start()

    def test_leaves_a_socket():
        kept.append(socket.create_server(("127.0.0.1", 0)))

    def test_leaves_a_pipe():
        kept.append(os.pipe())

    def test_leaves_a_child():
        kept.append(subprocess.Popen(["sleep", "1000"]))
        print("child", kept[-1].pid)

    def test_leaves_a_dead_child():
        kept.append(subprocess.Popen(["true"]))

    def test_leaves_shared_memory():
        # Mapped, as it would be in earnest: so it is no one else's, should other tests run at the same time.
        with open(SHM, "w+b") as file:
            file.truncate(4096)
            kept.append(mmap.mmap(file.fileno(), 4096))

    @pytest.mark.asyncio
    async def test_leaves_a_task():
        kept.append(asyncio.create_task(asyncio.sleep(1000), name="left-task"))

    @pytest.mark.asyncio(loop_scope="module")
    async def test_leaves_a_task_on_the_loop_of_the_module():
        kept.append(asyncio.create_task(asyncio.sleep(1000), name="left-task"))

    @pytest.mark.asyncio(loop_scope="module")
    async def test_is_not_blamed_for_the_task_of_another():
        await asyncio.sleep(0)

    @pytest.mark.asyncio
    async def test_may_use_the_threads_of_its_loop():
        await asyncio.to_thread(int)

    def test_may_take_a_moment():
        threading.Timer(0.1, int).start()

    @pytest.mark.allow_leaks("descriptors", reason="meant")
    def test_may_leave_what_it_says():
        kept.append(os.pipe())

    @pytest.mark.allow_leaks("threads", reason="meant")
    def test_may_not_leave_something_else():
        kept.append(os.pipe())

    @pytest.mark.allow_leaks(reason="meant")
    def test_may_leave_anything():
        kept.append(os.pipe())

    @pytest.mark.allow_leaks("threads")
    def test_says_no_reason():
        pass

    @pytest.fixture
    def server():
        with socket.create_server(("127.0.0.1", 0)) as server:
            yield server

    @pytest_asyncio.fixture
    async def worker():
        held = []
        yield held
        for task in held:
            task.cancel()

    @pytest.mark.asyncio
    async def test_may_leave_it_to_its_fixtures(server, worker):
        worker.append(asyncio.create_task(asyncio.sleep(1000)))

    @pytest.fixture(scope="module")
    def shared_server():
        with socket.create_server(("127.0.0.1", 0)) as server:
            yield server

    def test_may_use_a_wider_fixture(shared_server):
        pass

    def test_fails_by_itself_and_leaves_something():
        kept.append(os.pipe())
        assert False
"""

_CAUGHT = {
    "test_leaves_a_thread": r"threads: 'left-thread' \(daemon\) at .*threading\.py:\d+ in wait",
    "test_leaves_a_socket": r"descriptors: \d+ -> tcp socket, local port \d+, remote port 0, listening",
    "test_leaves_a_pipe": r"descriptors: \d+ -> pipe:\[\d+\]\n  descriptors: \d+ -> pipe:\[\d+\]",
    "test_leaves_a_child": r"children: pid \d+ \(state S\): sleep 1000",
    "test_leaves_a_dead_child": r"children: pid \d+ \(dead, not waited for\)",
    "test_leaves_shared_memory": r"shm: /dev/shm/aiorlinf_test_leak_check_\d+ \(4096 bytes\)",
    "test_leaves_a_task": r"tasks: <Task pending name='left-task' coro=<sleep\(\)",
    "test_leaves_a_task_on_the_loop_of_the_module": r"tasks: <Task pending name='left-task' coro=<sleep\(\)",
    "test_may_not_leave_something_else": r"descriptors: \d+ -> pipe",
    "test_says_no_reason": r"allow_leaks needs a reason",
}


@pytest.fixture(scope="module", params=[(), ("-n", "2")], ids=["one process", "xdist"])
def inner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> InnerRun:
    source = _SOURCE.replace("{pid}", str(os.getpid()))
    plugins = ("-p", "aiorlinf.testing.pytest_leaks", "-p", "no:randomly", "-o", "leak_grace=0.5")
    try:
        return run_pytest(tmp_path_factory.mktemp("inner"), source, *plugins, *request.param)
    finally:
        os.unlink(f"/dev/shm/aiorlinf_test_leak_check_{os.getpid()}")


@pytest.mark.parametrize("name", _CAUGHT)
def test_a_test_that_leaves_something_fails_and_says_what(inner: InnerRun, name: str) -> None:
    assert inner.outcomes[name] == "error", inner.output
    assert re.search(_CAUGHT[name], inner.texts[name]), inner.texts[name]


def test_all_others_pass_and_a_failed_test_is_not_blamed_twice(inner: InnerRun) -> None:
    others = {name: outcome for name, outcome in inner.outcomes.items() if name not in _CAUGHT}
    assert others.pop("test_fails_by_itself_and_leaves_something") == "failure"
    assert "left behind" not in inner.texts["test_fails_by_itself_and_leaves_something"]
    assert set(others.values()) == {"passed"}, inner.output
    assert len(others) == 7
    assert inner.status == 1


def test_a_child_left_behind_is_ended(inner: InnerRun) -> None:
    found = re.search(r"children: pid (\d+) \(state S\)", inner.texts["test_leaves_a_child"])
    assert found
    assert not os.path.exists(f"/proc/{found[1]}")
