"""What a type checker tells a user of the public names; `scripts/check` holds it, and here it runs, so that the values agree.

Each ``type: ignore`` is a mistake that a type checker must find: mypy objects to one that is not needed.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_type

import pytest
import torch

import aiorlinf

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Trajectory:
    rewards: torch.Tensor


def scale(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return tensor * factor


async def total(tensor: torch.Tensor) -> float:
    return float(tensor.sum())


@pytest.mark.asyncio
async def test_operations_and_what_follows_them() -> None:
    async with aiorlinf.init("a:0") as comm:
        assert_type(comm, aiorlinf.Worker)
        assert_type(comm.address, aiorlinf.WorkerAddress)

        sent = comm.send_tensor(torch.ones(4), "a:0")
        assert_type(sent, aiorlinf.AsyncWork[None])
        received = comm.recv_tensor(torch.empty(4), "a:0")
        assert_type(received, aiorlinf.AsyncWork[torch.Tensor])
        assert_type(await received.then(scale, 2.0), torch.Tensor)
        assert_type(await received.then(scale, factor=2.0), torch.Tensor)
        summed: aiorlinf.AsyncWork[float] = received.then(scale, 2.0).then(total)
        assert assert_type(await summed, float) == 8.0
        received.then(scale, "two").cancel()  # type: ignore[call-overload]

        def send_on(tensor: torch.Tensor) -> aiorlinf.AsyncWork[None]:
            return comm.send_tensor(tensor, "a:0")

        onward = received.then(send_on)  # a work is followed to its end
        following: aiorlinf.AsyncWork[None] = onward
        await comm.recv_tensor(torch.empty(4), "a:0")
        await following
        await sent

        work = comm.send(1, "a:0")
        assert_type(comm.recv("a:0"), aiorlinf.AsyncWork[Any])
        await work
        both = aiorlinf.wait_all([received, received])
        assert_type(await both, list[torch.Tensor])
        first = aiorlinf.wait_first([received, received])
        index, tensor = assert_type(await first, tuple[int, torch.Tensor])
        assert (index, tensor.shape) == (0, (4,))
        assert_type(await asyncio.wait_for(received, 1), torch.Tensor)
        assert len(assert_type(await asyncio.gather(received, summed), tuple[torch.Tensor, float])) == 2
        assert_type(received.wait(), torch.Tensor)
        assert_type(received.result(), torch.Tensor)
        assert_type(await received.async_wait(1), torch.Tensor)
        assert isinstance(assert_type(comm.stats(), aiorlinf.WorkerStats), aiorlinf.WorkerStats)


def test_waiting_at_once() -> None:
    with aiorlinf.init("a:0") as comm:
        work = comm.send({"a": 1}, "a:0")
        assert assert_type(comm.recv("a:0", async_op=False), Any) == {"a": 1}
        work.wait()
        work = comm.send_tensor(torch.ones(2), "a:0")
        assert_type(comm.recv_tensor(torch.empty(2), "a:0", async_op=False), torch.Tensor)
        work.wait()


@pytest.mark.asyncio
async def test_inbox_and_membership() -> None:
    async with aiorlinf.init("a:0") as comm:
        sent = comm.send(3, "a:0")
        async with comm.inbox() as inbox:
            async for sender, message in inbox:
                assert_type(sender, aiorlinf.WorkerAddress)
                assert assert_type(message, Any) == 3
                break
        await sent
        assert assert_type(await comm.peers(), tuple[aiorlinf.Peer, ...]) == ()
        async with comm.membership() as news:
            assert_type(news, aiorlinf.Membership)


@pytest.mark.asyncio
async def test_channels_of_something() -> None:
    channel: aiorlinf.Channel[Trajectory] = aiorlinf.Channel.local("trajectories")
    for _ in range(5):
        await channel.put(Trajectory(torch.ones(3)), weight=3)
    with pytest.raises(aiorlinf.errors.UsageError):
        await channel.put(Trajectory(torch.ones(3)), weight="3")  # type: ignore[call-overload]
    assert isinstance(assert_type(await channel.get(), Trajectory), Trajectory)
    assert [type(item) for item in assert_type(await channel.get_batch(6), list[Trajectory])] == [Trajectory, Trajectory]
    async with channel.lease() as item:
        assert_type(item, Trajectory)
    async with channel.lease(target_weight=3) as items:
        assert len(assert_type(items, list[Trajectory])) == 1
    assert assert_type(await channel.qsize(), int) == 0
    await channel.close()
    async for item in channel:
        assert_type(item, Trajectory)


def misuses() -> None:
    """Never called: each line is a mistake that a type checker finds before it is made."""
    aiorlinf.init("a:0", loop="treads")  # type: ignore[arg-type]
    aiorlinf.init("a:0", backend="tcp")  # type: ignore[arg-type]
    aiorlinf.init(0)  # type: ignore[arg-type]
    comm = aiorlinf.init("a:0")
    comm.send("b:0")  # type: ignore[call-overload]
    comm.send_tensor("text", "b:0")  # type: ignore[call-overload]
    comm.recv_tensor("b:0")  # type: ignore[call-overload]
    typed: aiorlinf.Channel[Trajectory] = aiorlinf.Channel.local()
    typed.put(3)  # type: ignore[call-overload]


def _pyright(*args: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("pyright") or shutil.which("basedpyright")
    if program is None:
        pytest.skip("pyright is not on the PATH")
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **env}
    return subprocess.run(
        [program, *args], cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=170, check=False
    )


@pytest.mark.timeout(180)
def test_pyright_agrees(tmp_path: Path) -> None:
    """Pyright takes mypy's word for what is wrong here, and comes to the same types itself."""
    config = tmp_path / "pyrightconfig.json"  # what is pyright's own default, and not basedpyright's
    config.write_text(json.dumps({"include": [__file__], "typeCheckingMode": "standard", "enableTypeIgnoreComments": True}))
    done = _pyright("--project", str(config), "--pythonpath", sys.executable, cwd=ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.timeout(180)
def test_pyright_knows_the_type_of_every_public_name(tmp_path: Path) -> None:
    """No name, method or attribute has a type that each checker might see in another way, also of what the public ones are made of."""
    found = importlib.util.find_spec("aiorlinf")
    assert found is not None
    # It looks only at installed packages.
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "aiorlinf").symlink_to(ROOT / "aiorlinf")
    done = _pyright("--outputjson", "--ignoreexternal", "--verifytypes", "aiorlinf", cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    symbols = json.loads(done.stdout)["typeCompleteness"]["symbols"]
    homes = {f"aiorlinf.{home}.{name}" for name, home in aiorlinf._HOMES.items() if home is not None}
    names = {symbol["name"] for symbol in symbols}
    assert homes <= names
    unclear = [
        f"{symbol['name']}: {fault['message']}"
        for symbol in symbols
        for fault in symbol["diagnostics"]
        # The rest follows from these: whatever has such an attribute is partially unknown, too.
        if fault["severity"] == "error" and "partially unknown" not in fault["message"]
    ]
    assert unclear == []
