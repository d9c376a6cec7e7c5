"""``aiorlinf manager`` as a user runs it."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aiorlinf import init
from aiorlinf.errors import RendezvousError
from aiorlinf.manager.client import ManagerClient
from aiorlinf.rendezvous.hosts import bind_listener

ROOT = Path(__file__).parents[2]


def start(*arguments: str, token: str | None = None) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("AIORLINF_")}
    environment.pop("PYTHONASYNCIODEBUG", None)  # it would tell on stderr how slow the machine is
    if token is not None:
        environment["AIORLINF_TOKEN"] = token
    return subprocess.Popen(
        [sys.executable, "-c", "import sys; from aiorlinf.cli import main; sys.exit(main())", "manager", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    )


@contextmanager
def running(*arguments: str, token: str | None = None, end: signal.Signals = signal.SIGTERM) -> Iterator[tuple[str, str]]:
    """The manager's address and what it says on stderr; it must end cleanly when told to."""
    process = start(*arguments, token=token)
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline().strip()
        assert line.startswith("AIORLINF_MANAGER=127.0.0.1:"), process.stderr.read()
        yield line.partition("=")[2], process.stderr.readline()
        process.send_signal(end)
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out, err) == (0, "", "")
    finally:
        process.kill()
        process.communicate()


async def lookup_in_vain(address: str, token: bytes, job: str | None) -> str:
    client = await ManagerClient.connect(address, token, job, deadline=30.0)
    try:
        await client.register("rollout:0", port=1)
        with pytest.raises(RendezvousError) as caught:
            await client.lookup("reward:0", 0.1)
        return str(caught.value)
    finally:
        await client.close()


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_workers_join_and_ctrl_c_ends_it(end: signal.Signals) -> None:
    with running("--expect", "rollout=2,trainer=1", "--job", "j7", token="secret", end=end) as (address, said):
        assert "job j7" in said
        assert f"AIORLINF_MANAGER={address} " in said
        assert "secret" not in said
        message = asyncio.run(lookup_in_vain(address, b"secret", "j7"))
        assert "there is no worker reward:0 in this job, which has rollout:0, rollout:1, trainer:0" in message


def test_who_was_not_expected_is_told_and_told_of(caplog: pytest.LogCaptureFixture) -> None:
    process = start("--expect", "a=1", token="secret")
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        address = process.stdout.readline().strip().partition("=")[2]
        assert "AIORLINF_ADDRESS=a:0 " in process.stderr.readline()
        for worker in ("a:0", "channel.c:0", "x:0"):
            with init(worker, manager=address, token="secret", loop="thread"):
                pass
        process.send_signal(signal.SIGTERM)
        err = process.communicate(timeout=30)[1]
    finally:
        process.kill()
        process.communicate()
    assert "x:0 joins, which was not expected" in err
    assert "a:0 joins" not in err
    (warning,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert "x:0 joins a job that began without it" in warning.getMessage()
    caplog.clear()


def test_a_random_token_is_told() -> None:
    with running() as (address, said):
        (token,) = (word.partition("=")[2] for word in said.split() if word.startswith("AIORLINF_TOKEN="))
        assert "waited for reward:0" in asyncio.run(lookup_in_vain(address, token.encode(), None))


def test_a_token_file_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "the token"
    tokens = []
    for _ in range(2):
        with running("--token-file", str(file)) as (address, said):
            tokens.append(file.read_text())
            assert f"$(cat '{file}')" in said
            assert tokens[0].strip() not in said
            asyncio.run(lookup_in_vain(address, tokens[0].strip().encode(), None))
    assert tokens[0] == tokens[1]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_the_configuration_is_used(tmp_path: Path) -> None:
    with bind_listener("127.0.0.1") as free:
        port = free.getsockname()[1]
    file = tmp_path / "job.yaml"
    file.write_text(f"cluster: {{network: {{port_range: [{port}, {port}], bind_host: 127.0.0.1}}}}\n")
    with running("--config", str(file)) as (address, _):
        assert address == f"127.0.0.1:{port}"


def test_what_cannot_be_started_says_why(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    with bind_listener("127.0.0.1") as taken:
        port = str(taken.getsockname()[1])
        processes = {
            f"127.0.0.1:{port}: the port is taken": (start("--port", port), 1),
            "is not a pair": (start("--expect", "rollout"), 2),
            "cannot read the configuration file": (start("--config", str(tmp_path / "missing.yaml")), 2),
            "is empty": (start("--token-file", str(empty)), 2),
            "cannot use the token file": (start("--token-file", str(tmp_path)), 2),
            "'70000' is not a port": (start("--port", "70000"), 2),
        }
        for said, (process, code) in processes.items():
            out, err = process.communicate(timeout=50)
            assert said in err
            assert "Traceback" not in err
            assert (process.returncode, out) == (code, "")
