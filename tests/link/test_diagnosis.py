"""What is pending is said: by the worker, on a signal, and also while the loop is blocked."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

import aiorlinf
from aiorlinf import init
from aiorlinf.errors import UsageError

__all__: list[str] = []


def pair_config() -> dict[str, Any]:
    return {"cluster": {"collective": {"backend": "stream", "window_bytes": 1 << 16}}}


@pytest.mark.asyncio
async def test_every_kind_of_operation_is_listed_with_what_it_waits_for() -> None:
    async with init("a:0", config=pair_config()) as a, init("b:0", config=pair_config()) as b:
        assert a.pending() == []
        receiving = a.recv("b:0", tag=3)
        sending = a.send(torch.zeros(1 << 20, dtype=torch.uint8), "b:0", tag=4)
        nowhere = a.recv("c:0")
        inbox = a.inbox(tag=9)
        anyone = inbox.recv()
        while len(a.stats().links) < 2 or sending._detail.state == 0:
            await asyncio.sleep(0.001)
        found = {(each.operation, each.peer): each for each in a.pending()}
        assert set(found) == {("recv", "b:0"), ("send", "b:0"), ("recv", "c:0"), ("inbox", None)}
        assert found["recv", "b:0"].tag == 3
        assert found["recv", "b:0"].stage == "waits for a message"
        assert found["send", "b:0"].stage == "waits until the peer receives"
        assert (found["send", "b:0"].bytes_done, found["send", "b:0"].bytes_expected) == (0, 1 << 20)
        assert found["recv", "c:0"].stage == "waits for the connection"
        site = found["recv", "b:0"].site
        assert site is not None
        assert __file__ in site
        text = a.dump()
        for part in ("a:0", "recv <- b:0, tag 3", "send -> b:0, tag 4", "inbox <- anyone, tag 9", "recv <- c:0", "does not know it"):
            assert part in text, text
        assert "1 unread" not in text
        await b.send("for nobody yet", "a:0", tag=7)
        while not any(link.unread_messages for link in a.stats().links):
            await asyncio.sleep(0.001)
        assert "1 unread message (tags 7)" in a.dump()
        for work in (receiving, sending, nowhere, anyone):
            work.cancel()
        assert a.pending() == []
        await inbox.aclose()
        await b.close()
        while any(link.remote == "b:0" for link in a.stats().links):
            await asyncio.sleep(0.001)
        assert "1 unread message (tags 7)" in a.dump(), "also of one that has left"
        assert "is running" not in a.dump(), "nothing holds the loop up but this question"
        assert await a.recv("b:0", tag=7) == "for nobody yet"


@pytest.mark.asyncio
async def test_a_send_says_whether_it_waits_for_its_receive_or_for_room() -> None:
    async with init("a:0", config=pair_config()) as a, init("b:0", config=pair_config()) as b:
        works = [a.send(torch.zeros(40_000, dtype=torch.uint8), "b:0", tag=tag) for tag in (1, 2)]
        large = a.send_tensor(torch.zeros(1 << 20), "b:0", tag=3)
        async with asyncio.timeout(10):
            while {each.tag: each.stage for each in a.pending()}.get(2, "").startswith("waits for the connection"):
                await asyncio.sleep(0.001)
        stages = {each.tag: each.stage for each in a.pending()}
        assert "fills its window" in stages[2], stages
        assert stages[3] == "waits until the peer receives"
        for tag in (1, 2):
            await b.recv("a:0", tag=tag)
        await b.recv_tensor(torch.zeros(1 << 20), "a:0", tag=3)
        for work in (*works, large):
            await work
            assert "over" not in repr(work)


@pytest.mark.asyncio
async def test_operations_that_are_alike_share_a_line() -> None:
    async with init("a:0") as a:
        works = [a.recv("b:0", tag=tag) for tag in (1, 2, 2, 2)]
        lines = a.dump().splitlines()
        assert sum("recv <- b:0" in line for line in lines) == 2
        assert any("tag 2" in line and "and 2 more like it" in line for line in lines)
        for work in works:
            work.cancel()


@pytest.mark.asyncio
async def test_a_receive_whose_message_is_under_way_says_how_far_it_is() -> None:
    async with init("a:0", config=pair_config()) as a, init("b:0", config=pair_config()) as b:
        receiving = a.recv("b:0")
        sending = b.send(torch.zeros(8 << 20, dtype=torch.uint8), "a:0")
        while not (found := [each for each in a.pending() if each.bytes_expected]):
            await asyncio.sleep(0)
        assert found[0].bytes_expected == 8 << 20
        assert found[0].stage == "its message is on its way"
        await receiving
        await sending


def test_a_signal_prints_it_while_the_loop_is_blocked() -> None:
    """Of a worker that lives in another thread, and whose loop a user's function holds up."""
    shown = io.StringIO()
    before: list[int] = []
    old = signal.signal(signal.SIGUSR1, lambda number, frame: before.append(number))
    try:
        aiorlinf.dump_on_signal(signal.SIGUSR1, shown)
        with init("a:0", loop="thread") as a:
            release = threading.Event()

            def a_function_that_blocks() -> None:
                release.wait(20)

            receiving = a.recv("b:0", tag=5)
            a.home.call_soon(a_function_that_blocks)
            end = time.monotonic() + 10
            while "a_function_that_blocks" not in shown.getvalue() and time.monotonic() < end:
                os.kill(os.getpid(), signal.SIGUSR1)
                time.sleep(0.01)
            release.set()
            receiving.cancel()
        assert "recv <- b:0, tag 5" in shown.getvalue()
        assert "a_function_that_blocks" in shown.getvalue()
        assert before, "the handler that was there before is called, too"
    finally:
        signal.signal(signal.SIGUSR1, old)


def test_a_signal_handler_needs_the_main_thread() -> None:
    errors: list[BaseException] = []

    def elsewhere() -> None:
        try:
            aiorlinf.dump_on_signal()
        except UsageError as error:
            errors.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])
