"""The launcher in a notebook's cells, where a loop is running already."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.launch.programs import child_env, script

CELLS = [
    "import aiorlinf, asyncio\nprint((await aiorlinf.launch_async('worker.py', 'a=1')).ok)",
    "try: aiorlinf.launch('worker.py', 'a=1')\nexcept aiorlinf.errors.WouldBlockLoop as error: print(error.hint)",
    "def main(comm): pass\ntry: await aiorlinf.launch_async(main, 'a=1')\nexcept aiorlinf.errors.UsageError as error: print(error.hint)",
    (
        "job = asyncio.create_task(aiorlinf.launch_async('worker.py', 'a=1', args=['.', 'wait']))\n"
        "await asyncio.sleep(0.5)\njob.cancel()\ntry: await job\nexcept asyncio.CancelledError: print('cancelled')"
    ),
]

# In a process of its own: what the notebook's client leaves behind is not ours.
RUNNER = """
import json, sys
import nbclient, nbformat
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in json.loads(sys.argv[1])])
nbclient.NotebookClient(notebook, timeout=40, kernel_name="python3").execute()
texts = ["".join(output["text"] for output in cell.outputs if output.get("name") == "stdout") for cell in notebook.cells]
print(json.dumps(texts))
"""


def test_cells(tmp_path: Path) -> None:
    script(tmp_path, "print('hello', flush=True); time.sleep(60 if 'wait' in sys.argv else 0)")
    run = subprocess.run(
        [sys.executable, "-c", RUNNER, json.dumps(CELLS)],
        cwd=tmp_path,
        env=child_env(NO_COLOR="1"),
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert run.returncode == 0, run.stderr
    first, *hints, last = json.loads(run.stdout.splitlines()[-1])
    assert first == "[a:0] hello\nTrue\n"
    assert hints == [
        "use: result = await aiorlinf.launch_async(...)\n",
        "put the function in a .py file beside it, and import it from there\n",
    ]
    assert last.endswith("cancelled\n")
