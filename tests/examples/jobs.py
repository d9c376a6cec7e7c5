"""The job of an example: the workers that the command in its first lines asks for, each in a process that runs its file.

The command itself costs a new interpreter for each worker, with seconds of imports; as it stands it is run for the Atari example and for
the README's programs. Here a fork server that has imported everything makes the processes, and tells them what `aiorlinf run` would.
"""

from __future__ import annotations

import contextlib
import re
import runpy
import sys
from pathlib import Path

import torch

from aiorlinf import init
from aiorlinf.launch.spec import worker_addresses
from aiorlinf.testing.manager import ManagerThread
from tests.peers import Pipe, process

__all__ = ["EXAMPLES", "run_job", "run_script"]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LIMIT_S = 100.0


def run_script(pipe: Pipe, path: str, *args: str) -> None:
    """In the process: as ``python path args``."""
    torch.set_num_threads(1)
    sys.argv = [path, *args]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


_SLOW = ", which has not joined the job yet"
"""What a worker says of another one that takes seconds to begin, as on a busy machine."""


def run_job(name: str, *args: str, channel_worker: str | None = None) -> list[str]:
    """Run the example; what its workers printed, as `aiorlinf run` shows it, in order of their names.

    Args:
        name: of its file, in the folder of the examples.
        args: for its own command line.
        channel_worker: the name of the one that it has make its channels, for it to be there already.
    """
    text = (EXAMPLES / name).read_text()
    ((workers, _),) = re.findall(rf"^    aiorlinf run --workers (\S+) examples/{re.escape(name)}( .*)?$", text, re.MULTILINE)
    addresses = worker_addresses(workers)
    manager = ManagerThread(expected=addresses)
    manager.start()
    # Without asyncio's debug mode: on a busy machine it has something to say about every slow moment.
    env = {"AIORLINF_MANAGER": manager.address, "AIORLINF_TOKEN": manager.token.decode("ascii"), "PYTHONASYNCIODEBUG": ""}
    printed: list[str] = []
    with contextlib.ExitStack() as stack:
        stack.callback(manager.kill)
        holder = None
        if channel_worker is not None:
            holder = stack.enter_context(process(_hold_channels, env={**env, "AIORLINF_ADDRESS": f"channel.{channel_worker}:0"}))
            holder.wait_hear()
        env["AIORLINF_WORKERS"] = workers
        processes = {
            address: stack.enter_context(process(run_script, str(EXAMPLES / name), *args, env={**env, "AIORLINF_ADDRESS": address}))
            for address in addresses
        }
        for address, worker in processes.items():
            worker.wait_result(LIMIT_S)
            said = worker.said_on_stderr().splitlines()
            printed += [f"[{address}] {line}" for line in said if not line.endswith(_SLOW)]
        if holder is not None:
            holder.say("enough")
            holder.wait_result()
            assert holder.said_on_stderr() == ""
    return sorted(printed)


def _hold_channels(pipe: Pipe) -> None:
    with init(loop="thread") as comm:
        comm.hold_channels()
        pipe.say("there")
        pipe.hear(None)
