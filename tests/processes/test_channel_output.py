"""A channel worker outlives the program that started it, while it has items: whoever reads the program's output does not wait for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

__all__: list[str] = []

pytestmark = pytest.mark.timeout(90)

PROGRAM = """
import os, signal, sys
import aiorlinf
from aiorlinf.channel import spawn

if __name__ == "__main__":
    comm = aiorlinf.init("a:0", loop="thread")
    channel = comm.create_channel("left").wait()
    channel.put("nobody takes this").wait()
    print(*spawn._children, flush=True)
    how = sys.argv[1]
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "exit at once":
        os._exit(0)
"""


def running(pid: int) -> bool:
    """It is no zombie either."""
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("how", ["killed", "exit at once"])
def test_a_pipe_ends_with_the_program(tmp_path: Path, how: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    # `cat` ends when the last one who could write into its pipe has gone.
    shell = f'"{sys.executable}" "{program}" "{how}" 2>&1 | cat'
    done = subprocess.run(["sh", "-c", shell], stdout=subprocess.PIPE, check=False)
    (pid,) = (int(line) for line in done.stdout.splitlines() if line.isdigit())
    assert running(pid), "it waits for whoever might still want its item"
    os.kill(pid, signal.SIGKILL)
