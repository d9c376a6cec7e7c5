"""The notebooks run from their first cell to their last, in a clean kernel, and git has them without outputs."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cases.test_notebooks import run_cells

__all__: list[str] = []

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))

needs_kernel = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("ipykernel", "nbclient", "matplotlib")),
    reason="needs ipykernel, nbclient and matplotlib, of the extras 'test' and 'examples'",
)

needs_atari = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("ale_py", "gymnasium")), reason="needs ale_py, of the extra 'examples'"
)

# In a process of its own: what the notebook's client leaves behind is not ours.
RUNNER = """
import json, sys
import nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
print(json.dumps([output["text"] if output.output_type == "stream" else sorted(output.data) for output in outputs]))
"""


def _run(name: str, folder: Path) -> list[Any]:
    """What each cell printed or showed."""
    paths = [str(ROOT), str(ROOT / "examples"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, str(ROOT / "examples" / name)],
        cwd=folder,
        # Not in asyncio's debug mode: ipykernel itself does there what asyncio then complains about.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONASYNCIODEBUG": "", "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=160,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outputs: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return outputs


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_git_has_no_outputs(path: Path) -> None:
    notebook = json.loads(path.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert code
    assert [cell["id"] for cell in code if cell["outputs"] or cell["execution_count"] is not None] == []
    assert set(notebook["metadata"]) <= {"kernelspec", "language_info"}


@pytest.mark.sampled(2, family="notebooks")
@needs_kernel
@pytest.mark.timeout(180)
def test_first_steps(tmp_path: Path) -> None:
    printed = "".join(output for output in _run("first_steps.ipynb", tmp_path) if isinstance(output, str))
    for expected in (
        "1 torch.Size([8, 84, 84])\n",
        "tensor(2.)\n",
        "['message with tag 1', 'message with tag 2']\n",
        "tensor([1., 2., 3.])\n",
        "not over within 0.2 s; the work goes on",
        "recv <- rollout:0, tag 0, waits for a message",
        "here it is\n",
        "{'score': 21}\n",
        "to myself\n",
        "use `await work`",
        "[b:0] hello from another process\n",
        "True\n",
    ):
        assert expected in printed


@pytest.mark.sampled(2, family="notebooks")
@needs_kernel
@pytest.mark.timeout(180)
def test_compression(tmp_path: Path) -> None:
    *_, picture, table = _run("compression.ipynb", tmp_path)
    assert picture == ["image/png", "text/plain"]
    rows = [re.fullmatch(r"(.+?\)) +(lz4|zstd \d) +([\d.]+) +[\d.]+   (.*)", line) for line in table.splitlines()[1:]]
    found = {(row[1], row[2]): (float(row[3]), row[4]) for row in rows if row}
    assert len(found) == len(rows) == 9
    assert all(ratio > 2 for (kind, _), (ratio, _) in found.items() if "weights" not in kind)
    assert found["weights (float32)", "lz4"][1] == "{'random': 2}"


@pytest.mark.sampled(2, family="notebooks")
@needs_kernel
@pytest.mark.timeout(180)
def test_channels(tmp_path: Path) -> None:
    outputs = _run("channels.ipynb", tmp_path)
    assert outputs.count(["image/png", "text/plain"]) == 2
    printed = "".join(output for output in outputs if isinstance(output, str))
    for expected in (
        "for the evaluation\na batch of [30, 50] steps, and 2 samples left\n",
        "channel 'samples' is full: 6 of 6 items",
        "channel 'samples' had no room within",
        "6 items before, and 6 after\n",
        "dict and then 5\n",
    ):
        assert expected in printed
    rows = re.findall(r"^(\S.*\S) +[\d.]+ s   fast (\d+), middle (\d+), slow (\d+)$", outputs[-1], re.MULTILINE)
    shares = {name: [int(count) for count in counts] for name, *counts in rows}
    assert list(shares) == ["no policy", "weighted_round_robin", "performance_aware"]
    assert all(sum(counts) == 60 for counts in shares.values())
    assert shares["weighted_round_robin"] == [20, 20, 20]
    fast, _, slow = shares["performance_aware"]
    assert fast > slow


@pytest.mark.sampled(2, family="notebooks")
@needs_atari
@needs_kernel
@pytest.mark.timeout(180)
def test_a_live_rollout(tmp_path: Path) -> None:
    """Its cells from first to last; and its long one once more, for hours, and interrupted, as its text says."""
    notebook = json.loads((ROOT / "examples" / "live_rollout.ipynb").read_text())
    first, start, learn, look, *rest = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert "\nSECONDS = 4\n" in first
    assert '"waiting for more; ' in learn
    path = f"import sys\nsys.path.insert(0, {str(ROOT / 'examples')!r})"
    undisturbed = learn.replace("waiting", "playing")
    outcomes = run_cells(tmp_path, [path, first, start, undisturbed, look, "SECONDS = 9999", learn, look, *rest], limit=160)
    assert [index for index, (_, errors) in enumerate(outcomes) if errors] == [6]
    assert outcomes[6][1] in (["KeyboardInterrupt"], ["CancelledError"])
    for index in (4, 7):
        assert re.match(r"[1-9]\d* steps in \d+ episodes and [\d.]+ s; \d+ versions", outcomes[index][0])
    assert outcomes[-1][0] == "ended with [0, 0]\n"
