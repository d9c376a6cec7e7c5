"""`aiorlinf manager` is killed and started again, as a supervisor would, with the same command."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aiorlinf import init
from aiorlinf.rendezvous.hosts import bind_listener
from tests import peers
from tests.life.roles import echo

ROOT = Path(__file__).parents[2]


def start(port: int, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "aiorlinf", "manager", "--port", str(port), "--job", "j7", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "AIORLINF_TOKEN": "secret"})
    assert process.stdout is not None
    assert process.stdout.readline() == f"AIORLINF_MANAGER=127.0.0.1:{port}\n"
    return process


def end(process: subprocess.Popen[str], how: signal.Signals) -> None:
    process.send_signal(how)
    process.communicate(timeout=20)


@pytest.mark.asyncio
async def test_a_manager_is_killed_and_started_again_by_the_same_command(tmp_path: Path) -> None:
    with bind_listener("127.0.0.1") as listener:
        port = listener.getsockname()[1]
    config = tmp_path / "job.yaml"
    config.write_text("cluster: {network: {heartbeat_timeout_s: 3.0}}\n")
    process = await asyncio.to_thread(start, port, "--config", str(config), "--expect", "a=1,b=2")
    try:
        async with init("a:0", manager=f"127.0.0.1:{port}", token="secret") as a, peers.worker(a, "b:0", echo):
            await a.send(0, "b:0")
            assert await a.recv("b:0", timeout=20) == 0
            for turn in (1,):
                await asyncio.to_thread(end, process, signal.SIGKILL)
                sending = asyncio.gather(*(a.send(number, "b:0") for number in range(100)))
                assert [await a.recv("b:0", timeout=20) for _ in range(100)] == list(range(100))
                await sending
                process = await asyncio.to_thread(start, port)
                begin = time.monotonic()
                async with peers.worker(a, "b:1", echo) as newcomer:
                    assert str(await a.wait_for("b:1", 20)) == f"b:1#{turn}"
                    assert time.monotonic() - begin < 10
                    await a.send(turn, "b:1")
                    assert await a.recv("b:1", timeout=20) == turn
                    assert [str(peer) for peer in await a.peers()] == ["b:0#1", f"b:1#{turn}"]
                    newcomer.kill()
            assert a.config.cluster.network.heartbeat_timeout_s == 3.0
            async with init("b:1", manager=f"127.0.0.1:{port}", token="secret") as late:
                assert late.config == a.config, "learnt from the workers"
                assert late.incarnation == 2
                assert late._self is not None
                assert sorted(late._self.expected or ()) == ["a:0", "b:0", "b:1"]
    finally:
        await asyncio.to_thread(end, process, signal.SIGKILL)
