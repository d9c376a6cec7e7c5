"""Problems planted in real jobs, and found by what `aiorlinf top` and `aiorlinf doctor` print, and by nothing else.

Each program is wrong in one way. What the commands print has to name the cause in words: the worker, the tag, the port, the consumer.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aiorlinf import init
from aiorlinf.cli import main
from aiorlinf.observe.doctor import peer
from tests import peers
from tests.cases.test_addresses import TOKEN, manager_on
from tests.launch.programs import child_env, script, start_cli
from tests.namespaces import Host, two_hosts

__all__: list[str] = []

pytestmark = pytest.mark.timeout(300)  # several processes import torch, on a machine that may have other things to do

LOOK = ["top", "--once", "--interval", "1"]
QUIET = child_env(PYTHONASYNCIODEBUG="")  # in debug mode asyncio has something to say about every slow moment of a busy machine


@contextlib.contextmanager
def running(folder: Path, workers: str, text: str) -> Iterator[Callable[[], str]]:
    """A job with this program; what `aiorlinf top` prints of it in another terminal."""
    job = start_cli("run", "--workers", workers, script(folder, text), cwd=folder)

    def look() -> str:
        line = [sys.executable, "-m", "aiorlinf", *LOOK, "--pid", str(job.pid)]
        done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False, env=QUIET)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    try:
        assert job.stdout is not None
        assert "go" in job.stdout.readline()
        yield look
    finally:
        job.terminate()
        job.communicate(timeout=20)


def until_it_says(look: Callable[[], str], wanted: str) -> str:
    """Look until it is said, which takes some seconds; the whole sentence."""
    shown = ""
    for _ in range(15):
        shown = look()
        said = shown.partition("what stands out\n")[2].partition("\n\n")[0]
        found = re.search(rf"^  ({wanted}.*)$", said, re.MULTILINE)
        if found:
            return found[1]
    raise AssertionError(f"it does not say {wanted!r}:\n{shown}")


# ---- a worker that never receives

ANOTHER_TAG = """
    import asyncio, aiorlinf

    async def main():
        async with aiorlinf.init() as comm:
            if comm.address == "trainer:0":
                print("go", flush=True)
                await comm.recv("rollout:0", tag=7)
                await comm.send("new weights", "rollout:0")
            else:
                await comm.send({"frames": 8}, "trainer:0")
                await comm.recv("trainer:0")  # the new weights

    asyncio.run(main())
"""


@pytest.mark.sampled(2, family="planted problems")
def test_a_worker_that_receives_another_tag(tmp_path: Path) -> None:
    with running(tmp_path, "rollout=1,trainer=1", ANOTHER_TAG) as look:
        said = until_it_says(look, "trainer:0 does not receive .* It waits for tag 7")
    assert "what rollout:0 sends with tag 0: 1 message of it lies there unread" in said
    assert re.search(r"It waits for tag 7 of rollout:0, begun at worker\.py:\d+", said)


FORGETS_TO = """
    import asyncio, aiorlinf, torch

    async def main():
        async with aiorlinf.init() as comm:
            if comm.address == "trainer:0":
                print("go", flush=True)
                await asyncio.sleep(3600)
            else:
                await comm.send_tensor(torch.zeros(1000), "trainer:0", tag=3)

    asyncio.run(main())
"""


@pytest.mark.sampled(2, family="planted problems")
def test_a_worker_that_receives_nothing(tmp_path: Path) -> None:
    with running(tmp_path, "rollout=1,trainer=1", FORGETS_TO) as look:
        said = until_it_says(
            look, "trainer:0 does not receive .* 1 send waits"
        )  # the message lies there a moment before it is said of the send
    assert "what rollout:0 sends with tag 3: " in said
    assert re.search(r"1 send waits for that, the oldest for \d+ s", said)
    assert said.endswith("It has no receive under way")


# ---- a port that is blocked


def says_hello(pipe: peers.Pipe, other: str) -> None:
    async def hello() -> None:
        async with init() as comm:
            pipe.say("joined")
            await comm.send("hello", other)

    asyncio.run(hello())


def is_there(pipe: peers.Pipe) -> None:
    async def stay() -> None:
        async with init():
            pipe.say("joined")
            await asyncio.to_thread(pipe.hear, None)

    asyncio.run(stay())


def prints(pipe: peers.Pipe, *args: str) -> str:
    """What the command line prints in this process, which has imported it already. Its patience with a host that is silent is short."""
    peer._SECONDS = 1.0
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        main(args)
    return shown.getvalue()


def command(host: Host, *args: str) -> str:
    """The same on that host."""
    with peers.process(prints, *args, env={"AIORLINF_TOKEN": TOKEN}, prepare=host.enter()) as there:
        return str(there.wait_result())


def test_a_port_that_is_blocked() -> None:
    """`top` names the address that does not answer, and the doctors say the same of the way between the two hosts."""
    with two_hosts() as (a, b), manager_on(a, connect_timeout_s=0.5) as manager:
        env = {"AIORLINF_TOKEN": TOKEN, "AIORLINF_MANAGER": manager}
        try:
            b.let_in(manager.rpartition(":")[2])
        except RuntimeError as error:
            pytest.skip(f"no packets can be dropped by port here: {error}")
        with (
            peers.process(is_there, env={**env, "AIORLINF_ADDRESS": "b:0"}, prepare=b.enter()) as there,
            peers.process(says_hello, "b:0", env={**env, "AIORLINF_ADDRESS": "a:0"}, prepare=a.enter()) as here,
        ):
            assert (there.wait_hear(), here.wait_hear()) == ("joined", "joined")
            said = until_it_says(lambda: command(a, *LOOK, "--manager", manager), "a:0 cannot connect to b:0 .* no answer within")
            there.say("end")
        assert re.search(rf"{re.escape(b.address)}:\d+: no answer within 0\.5 s\. Is that port blocked\?", said)
        assert "`aiorlinf doctor --listen` there and `aiorlinf doctor --peer` here" in said
        found = command(a, "doctor", "--peer", f"{b.address}:4711")
        assert re.search(rf"\[FAIL\] peer: {re.escape(b.address)}:4711 cannot be reached: .*timed out", found)
        assert "a firewall" in found.partition("[FAIL] peer")[2]


# ---- an unbalanced channel

ANOTHER_KEY = """
    import asyncio, aiorlinf

    async def main():
        async with aiorlinf.init() as comm:
            if comm.address == "trainer:0":
                channel = await comm.create_channel("prompts", maxsize=8)
                print("go", flush=True)
                while True:
                    await channel.put("prompt", key="math")
                    await asyncio.sleep(0.01)
            else:
                channel = await comm.connect_channel("prompts", consumer=True)
                while True:
                    await channel.get(key="math" if comm.address == "rollout:0" else "maths")

    asyncio.run(main())
"""


@pytest.mark.sampled(2, family="planted problems")
def test_an_unbalanced_channel(tmp_path: Path) -> None:
    with running(tmp_path, "rollout=2,trainer=1", ANOTHER_KEY) as look:
        said = until_it_says(look, "channel 'prompts' is uneven: .* 1 other waits")  # the second consumer may come a moment later
    assert re.search(r"rollout:0 gets \d[\d.]* items/s, rollout:1 0\.0, of 2 consumers; 1 other waits for items meanwhile", said)
    assert "rollout:1 has asked for key 'maths' only" in said
    assert "it has no policy" in said
