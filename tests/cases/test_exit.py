"""The end of a program: with code 0 and without a word, whether it has closed its workers or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.scripts import run_script

__all__: list[str] = []


def _ends_well(folder: Path, source: str) -> None:
    done = run_script(folder, source, debug=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_at_once_after_closing(tmp_path: Path) -> None:
    """Gloo's groups are still being destroyed then."""
    _ends_well(
        tmp_path,
        """
        import torch
        import aiorlinf

        with aiorlinf.init("a:0", backend="gloo") as a:
            with aiorlinf.init("b:0", manager=a.manager_address, token=a.token, backend="gloo") as b:
                sent = a.send(torch.ones(1 << 20), "b:0")
                b.recv("a:0").wait(20)
                sent.wait(20)
                assert a.stats().links[0].backend == "gloo"
        """,
    )


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_without_closing(tmp_path: Path, backend: str) -> None:
    _ends_well(
        tmp_path,
        f"""
        import torch
        import aiorlinf

        a = aiorlinf.init("a:0", backend={backend!r})
        b = aiorlinf.init("b:0", manager=a.manager_address, token=a.token, backend={backend!r})
        sent = a.send(torch.ones(1 << 20), "b:0")
        b.recv("a:0").wait(20)
        sent.wait(20)
        receiving = a.recv("b:0")
        """,
    )


def test_without_closing_in_a_coroutine(tmp_path: Path) -> None:
    _ends_well(
        tmp_path,
        """
        import asyncio
        import torch
        import aiorlinf

        async def main():
            a = await aiorlinf.init("a:0", backend="gloo")
            b = await aiorlinf.init("b:0", manager=a.manager_address, token=a.token, backend="gloo")
            sent = a.send(torch.ones(1 << 20), "b:0")
            await b.recv("a:0")
            await sent

        asyncio.run(main())
        """,
    )


def test_while_the_workers_thread_is_busy_in_torch(tmp_path: Path) -> None:
    """A thread that came back from C++ into an interpreter that is being finalized would take the process down."""
    _ends_well(
        tmp_path,
        """
        import torch
        import aiorlinf

        comm = aiorlinf.init("a:0")
        heap = []

        def churn():
            for _ in range(100):
                heap[:] = [torch.ones(10) for _ in range(10)]
            comm.home.loop.call_soon(churn)

        comm.home.loop.call_soon_threadsafe(churn)
        # Much to collect gives the thread time.
        garbage = [[] for _ in range(1_000_000)]
        """,
    )


def test_of_a_forked_process_while_its_parent_goes_on(tmp_path: Path) -> None:
    """It has the parent's Gloo groups, but not their threads."""
    _ends_well(
        tmp_path,
        """
        import os
        import sys
        import torch
        import aiorlinf

        a = aiorlinf.init("a:0", backend="gloo")
        b = aiorlinf.init("b:0", backend="gloo")

        def exchange():
            sent = a.send(torch.ones(1 << 20), "b:0")
            b.recv("a:0").wait(20)
            sent.wait(20)

        exchange()
        child = os.fork()
        if child == 0:
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        exchange()
        """,
    )


def test_of_a_close_that_was_begun(tmp_path: Path) -> None:
    """It has its threads until it is over, also those that were started after the worker's own."""
    _ends_well(
        tmp_path,
        """
        import torch
        import aiorlinf

        a = aiorlinf.init("a:0")
        b = aiorlinf.init("b:0", manager=a.manager_address, token=a.token)
        sent = a.send(torch.ones(1 << 20), "b:0")
        b.recv("a:0").wait(20)
        sent.wait(20)
        b.close()
        a.close()
        """,
    )


def test_of_a_forked_process_inside_a_block(tmp_path: Path) -> None:
    """What the child leaves the block with is what it ends with; the parent's worker goes on."""
    _ends_well(
        tmp_path,
        """
        import os
        import sys
        import aiorlinf

        with aiorlinf.init("a:0") as a:
            child = os.fork()
            if child == 0:
                sys.exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            sent = a.send(1, "a:0")
            assert a.recv("a:0").wait(20) == 1
            sent.wait(20)
        """,
    )


def test_of_a_loop_before_its_worker_has_joined(tmp_path: Path) -> None:
    """All tasks of the loop are cancelled then, and one that is begun would never be done."""
    _ends_well(
        tmp_path,
        """
        import asyncio
        import socket
        import threading
        import warnings
        import aiorlinf

        warnings.simplefilter("ignore", ResourceWarning)  # of the worker that nobody has closed

        async def main():
            with socket.create_server(("127.0.0.1", 0)) as silent:
                where = f"127.0.0.1:{silent.getsockname()[1]}"
                worker = aiorlinf.init("a:0", manager=where, token="x")
                await asyncio.sleep(0.05)
            return worker

        worker = asyncio.run(main())
        assert worker.closed
        assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
        """,
    )
