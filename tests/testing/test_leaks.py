"""`check_leaks` used directly, in a block."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import mmap
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aiorlinf.testing.leaks import KINDS, LeakError, Snapshot, check_leaks

__all__: list[str] = []


def test_a_clean_block_passes() -> None:
    with check_leaks(), socket.create_server(("127.0.0.1", 0)), ThreadPoolExecutor(1) as pool:
        assert pool.submit(int).result() == 0


def test_what_is_left_is_told_with_its_kind_and_how_long_it_was_given() -> None:
    server = None
    with pytest.raises(LeakError) as caught, check_leaks(grace=0.05):
        server = socket.create_server(("127.0.0.1", 0))
    assert server is not None
    port = server.getsockname()[1]
    server.close()
    (leak,) = caught.value.leaks
    assert leak.kind == "descriptors"
    assert leak.what.endswith(f"-> tcp socket, local port {port}, remote port 0, listening")
    assert leak.pid is None
    assert str(caught.value) == f"left behind, and still there after 0.05 s:\n  {leak}"


def test_unix_sockets_pipes_and_files_are_told_apart(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    held: list[int] = []
    with socket.socket(socket.AF_UNIX) as server, pytest.raises(LeakError) as caught, check_leaks(grace=0):
        server.bind(path)
        server.listen()
        held += os.pipe()
        held.append(os.open(tmp_path, os.O_RDONLY))
        held.append(os.dup(server.fileno()))
    for number in held:
        os.close(number)
    text = str(caught.value)
    assert f"-> unix socket {path}" in text
    assert len(re.findall(r"-> pipe:\[\d+\]", text)) == 2
    assert f"-> {tmp_path}\n" in text


def test_a_number_that_is_used_again_is_still_a_new_descriptor() -> None:
    first = socket.socket()
    number = first.fileno()
    with pytest.raises(LeakError, match=rf"descriptors: {number} -> "), check_leaks(grace=0):
        first.close()
        second = socket.socket()
        assert second.fileno() == number
    second.close()


def test_what_was_there_before_may_go() -> None:
    held = socket.socket()
    with check_leaks():
        held.close()


def test_things_may_take_a_moment_and_no_longer_than_they_take() -> None:
    begin = time.monotonic()
    with check_leaks(grace=30):
        threading.Timer(0.05, int).start()
    assert time.monotonic() - begin < 20


def test_what_comes_and_goes_after_the_block_is_not_left_by_it() -> None:
    # As the files of other programs in /dev/shm do: there is always one, and never the same one.
    stop = threading.Event()

    def come_and_go() -> None:
        file, other = os.pipe()
        while not stop.wait(0.005):
            files = os.pipe()
            os.close(file)
            os.close(other)
            file, other = files
        os.close(file)
        os.close(other)

    thread = threading.Thread(target=come_and_go)
    with check_leaks(grace=1, ignore=["threads"]):
        thread.start()
    stop.set()
    thread.join()


class _Cycle:
    def __init__(self) -> None:
        self.me = self
        self.file, self.other = os.pipe()

    def __del__(self) -> None:
        os.close(self.file)
        os.close(self.other)


def test_what_only_the_garbage_collector_frees_is_not_left_behind() -> None:
    gc.disable()
    try:
        with check_leaks(grace=0):
            _Cycle()
    finally:
        gc.enable()


def test_the_error_of_the_block_comes_first() -> None:
    stop = threading.Event()
    with pytest.raises(KeyError), check_leaks():
        threading.Thread(target=stop.wait).start()
        raise KeyError
    stop.set()


def test_kinds_can_be_left_out() -> None:
    stop = threading.Event()
    with check_leaks(ignore=["threads"]):
        thread = threading.Thread(target=stop.wait)
        thread.start()
    stop.set()
    thread.join()


def test_a_kind_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"not a kind of leak: thread \(there are: tasks, threads, "):
        check_leaks(ignore=["thread"])


def test_leaving_without_entering_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="entered"):
        check_leaks().__exit__(None, None, None)


def test_a_thread_is_shown_where_it_stands() -> None:
    stop = threading.Event()

    def stands_here() -> None:
        stop.wait()

    with pytest.raises(LeakError, match=rf"threads: 'left' at {re.escape(__file__)}:\d+ in stands_here"), check_leaks(grace=0.05):
        thread = threading.Thread(target=stands_here, name="left")
        thread.start()
    stop.set()
    thread.join()


def test_children_count_until_they_are_waited_for() -> None:
    with pytest.raises(LeakError, match=r"children: pid \d+ \(state \w\): ") as caught, check_leaks(grace=0.3):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert {leak.pid for leak in caught.value.leaks if leak.kind == "children"} == {child.pid}
    with pytest.raises(LeakError, match=r"children: pid \d+ \(dead, not waited for\)"), check_leaks(grace=0.3):
        other = subprocess.Popen(["true"])
    child.communicate(b"\n")
    other.wait()
    with check_leaks():
        subprocess.run(["true"], check=True)


def test_the_helpers_of_multiprocessing_do_not_count() -> None:
    with check_leaks():
        process = multiprocessing.get_context("spawn").Process(target=int)
        process.start()
        process.join()
        process.close()


def test_shared_memory_that_another_process_uses_is_not_ours() -> None:
    path = f"/dev/shm/aiorlinf_test_leaks_{os.getpid()}"
    # The one that makes and maps the file is a grandchild: no child of ours, so somebody else.
    program = (
        "import mmap, os, sys\n"
        "if os.fork(): sys.exit()\n"
        f"file = open({path!r}, 'w+b'); file.truncate(4096); held = mmap.mmap(file.fileno(), 4096)\n"
        "print(flush=True); sys.stdin.read()\n"
    )
    stranger = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert stranger.stdin is not None
    assert stranger.stdout is not None
    with check_leaks(grace=0, ignore=["children"]):
        assert stranger.stdout.readline() == b"\n"
        stranger.wait()
    # Mapped until it is gone, so that it is no one else's, should other tests run at the same time.
    with contextlib.ExitStack() as mapped:
        with pytest.raises(LeakError, match=rf"shm: {path}_ours \(4096 bytes\)"), check_leaks(grace=0, ignore=["descriptors"]):
            file = mapped.enter_context(open(f"{path}_ours", "w+b"))
            file.truncate(4096)
            mapped.enter_context(mmap.mmap(file.fileno(), 4096))
        os.unlink(f"{path}_ours")
    os.unlink(path)
    stranger.stdin.close()
    stranger.stdout.close()


def test_a_semaphore_is_ours_while_we_have_it_open() -> None:
    with check_leaks(grace=0):
        orphan = f"/dev/shm/sem.mp-aiorlinf-test-{os.getpid()}"  # as somebody who was killed leaves it
        with open(orphan, "wb") as file:
            file.truncate(32)
    kept = []
    with pytest.raises(LeakError, match=r"shm: /dev/shm/sem\.mp-\w+ \(32 bytes\)"), check_leaks(grace=0):
        kept.append(multiprocessing.get_context("spawn").Semaphore())
    with check_leaks(grace=0):
        kept.append(multiprocessing.get_context("spawn").Semaphore())
        kept.clear()
    os.unlink(orphan)


@pytest.mark.parametrize(
    ("debug", "said"), [(True, rf"made at {re.escape(__file__)}:\d+ in leave"), (False, "PYTHONASYNCIODEBUG=1 shows where")]
)
def test_in_debug_mode_a_task_says_where_it_was_made(debug: bool, said: str) -> None:
    async def leave() -> asyncio.Future[tuple[None]]:
        with pytest.raises(LeakError, match=said):
            async with check_leaks(grace=0.05):
                left = asyncio.gather(asyncio.sleep(1000))  # the task is made in asyncio
        return left

    with asyncio.Runner(debug=debug) as runner:
        runner.run(leave()).cancel()


@pytest.mark.asyncio
async def test_in_a_coroutine_the_tasks_of_its_loop_count_too() -> None:
    before = asyncio.create_task(asyncio.sleep(1000))
    left = None
    with pytest.raises(LeakError) as caught:
        async with check_leaks(grace=0.05):
            left = asyncio.create_task(asyncio.sleep(1000), name="left")
    (leak,) = caught.value.leaks
    assert leak.what.startswith(repr(left))
    before.cancel()
    assert left is not None
    left.cancel()
    async with check_leaks():
        asyncio.get_running_loop().call_later(0.01, asyncio.create_task(asyncio.sleep(1000)).cancel)
        await asyncio.to_thread(int)


def test_a_task_of_a_named_loop_is_seen_from_outside() -> None:
    loop = asyncio.new_event_loop()
    before = Snapshot.take([loop])
    task = loop.create_task(asyncio.sleep(0))
    assert [leak.kind for leak in Snapshot.take([loop]).leaks_since(before, ["tasks"])] == ["tasks"]
    loop.run_until_complete(task)
    after = Snapshot.take([loop])
    assert after.same_as(before, KINDS[:1])
    loop.close()


@pytest.mark.asyncio
async def test_cancelling_the_grace_period_ends_it() -> None:
    async def leave_something() -> None:
        async with check_leaks(grace=1000):
            held.append(asyncio.create_task(asyncio.sleep(1000)))

    held: list[asyncio.Task[None]] = []
    task = asyncio.create_task(leave_something())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    held[0].cancel()
