"""A notebook's cells, run by a real kernel: top-level await, synchronous calls, an interrupt, and on (section L of the cases)."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from tests.cases.scripts import run_script

# Runs the cells one after the other in one kernel; a cell that prints "waiting" is interrupted. Prints what each cell gave.
RUNNER = """
import asyncio, json, sys
import nbclient, nbformat

async def interrupt(client, cell):
    while not any("waiting" in output.get("text", "") for output in cell.outputs):
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.3)
    await client.km.interrupt_kernel()

async def main(cells):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(notebook, timeout=150, kernel_name="python3", allow_errors=True)
    async with client.async_setup_kernel():
        for index, cell in enumerate(notebook.cells):
            watcher = asyncio.ensure_future(interrupt(client, cell))
            try:
                await client.async_execute_cell(cell, index)
            finally:
                watcher.cancel()
    for cell in notebook.cells:
        texts = "".join(output["text"] for output in cell.outputs if output.output_type == "stream" and output.name == "stdout")
        errors = [output.ename for output in cell.outputs if output.output_type == "error"]
        print(json.dumps([texts, errors]))

asyncio.run(main(json.loads(CELLS)))
"""


def run_cells(folder: Path, cells: list[str], *, limit: float = 50.0) -> list[Any]:
    """What each cell printed, and the names of the errors that ended it; all of it within `limit` seconds."""
    # Not in debug mode: ipykernel itself does there what asyncio then complains about.
    done = run_script(folder, f"CELLS = {json.dumps(cells)!r}\n{RUNNER}", limit=limit, debug=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_await_wait_interrupt_and_on(tmp_path: Path) -> None:
    """A worker on the kernel's own loop is awaited; one in a thread is waited for, in the same notebook."""
    cells = [
        """
        import aiorlinf, asyncio, torch
        from dataclasses import dataclass
        @dataclass
        class Batch:
            data: torch.Tensor
        a = await aiorlinf.init('a:0')
        b = aiorlinf.init('b:0', loop='thread')
        await b
        print(a, b)
        """,
        """
        w = a.send(Batch(torch.ones(100_000)), 'b:0')
        got = await b.recv('a:0')
        await w
        print(type(got).__name__, got.data.sum().item())
        """,
        # Synchronous calls, though a loop is running in this thread: the worker has its own.
        """
        w = b.send([1, 2], 'b:0')
        print(b.recv('b:0').wait(10))
        w.wait(10)
        """,
        """
        try:
            a.recv('b:0', tag=5).wait()
        except aiorlinf.errors.WouldBlockLoop as error:
            print('await' in str(error))
        """,
        """
        pending = b.recv('a:0')
        print('waiting', flush=True)
        pending.wait(30)
        """,
        """
        w = a.send('after the interrupt', 'b:0')
        print(await pending)
        await w
        """,
        # An interrupted await cancels the receive, as everywhere in asyncio: it takes no message.
        """
        print('waiting', flush=True)
        await b.recv('a:0')
        """,
        """
        w = a.send('one more', 'b:0')
        print(await b.recv('a:0'))
        await w
        """,
        """
        w = b.send(Batch(torch.zeros(3)), 'a:0')
        print(isinstance(await a.recv('b:0'), Batch))
        await w  # not `wait`: what says that it is done comes from a worker on the loop that would be blocked
        """,
        """
        await a.close()
        b.close().wait(10)
        print(a, b)
        """,
    ]
    outcomes = run_cells(tmp_path, [textwrap.dedent(cell) for cell in cells])
    assert outcomes == [
        ["<Worker a:0 #1, 0 links> <Worker b:0 #1, 0 links>\n", []],
        ["Batch 100000.0\n", []],
        ["[1, 2]\n", []],
        ["True\n", []],
        ["waiting\n", ["KeyboardInterrupt"]],
        ["after the interrupt\n", []],
        ["waiting\n", [outcomes[6][1][0]]],
        ["one more\n", []],
        ["True\n", []],
        ["<Worker a:0 closed> <Worker b:0 closed>\n", []],
    ]
    assert outcomes[6][1][0] in ("KeyboardInterrupt", "CancelledError")


def test_an_interrupt_wakes_a_loop_that_has_nothing_to_do(tmp_path: Path) -> None:
    cells = [
        "import aiorlinf, time\na = await aiorlinf.init('a:0')\nb = await aiorlinf.init('b:0')",
        "began = time.monotonic(); print('waiting', flush=True)\nawait a.recv('b:0')",
        # Other things wake the loop every five seconds and more.
        "print(time.monotonic() - began < 4)\nw = a.send(1, 'b:0')\nprint(await b.recv('a:0'))\nawait w",
        "await a.close()\nawait b.close()",
    ]
    outcomes = run_cells(tmp_path, cells)
    assert outcomes[1] in (["waiting\n", ["KeyboardInterrupt"]], ["waiting\n", ["CancelledError"]])
    assert outcomes[2:] == [["True\n1\n", []], ["", []]]
