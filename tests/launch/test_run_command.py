from __future__ import annotations

import contextlib
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from aiorlinf.cli import main
from tests.launch.programs import alive, child_env, cli, pids_in, script, start_cli, wait_until


def test_all_do_well(tmp_path: Path) -> None:
    script(tmp_path, "print('hello', sys.argv[1:])")
    run = cli("run", "--workers", "rollout=2,trainer=1", "worker.py", "--help", "--", "-m", "--workers", cwd=tmp_path)
    assert run.returncode == 0
    assert sorted(run.stdout.splitlines()) == [
        f"[{worker}] hello ['--help', '--', '-m', '--workers']" for worker in ("rollout:0", "rollout:1", "trainer:0")
    ]


def test_a_module(tmp_path: Path) -> None:
    script(tmp_path, "print(__name__, sys.argv[1:])", "worker.py")
    run = cli("run", "-w", "a=1", "--no-prefix", "-m", "worker", "--env", "x", cwd=tmp_path)
    assert (run.returncode, run.stdout) == (0, "__main__ ['--env', 'x']\n")


@pytest.mark.parametrize(("ending", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", 137), ("1/0", 1)])
def test_the_exit_code_is_the_failed_workers(tmp_path: Path, ending: str, code: int) -> None:
    script(tmp_path, f"note(ME)\nif ME == 'b:0': {ending}\ntime.sleep(60)")
    run = cli("run", "--workers", "a=1,b=1", "worker.py", tmp_path, cwd=tmp_path)
    assert run.returncode == code
    assert "aiorlinf: worker b:0 " in run.stderr
    if "1/0" in ending:
        assert run.stderr.endswith("    ZeroDivisionError: division by zero\n")


WAITING = """
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    note(ME + "-child", child.pid)
    note(ME)
    time.sleep(60)
"""
NAMES = ["a:0", "a:1", "a:0-child", "a:1-child"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_launchers_group_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    script(tmp_path, WAITING)
    with start_cli("run", "--workers", "a=2", "worker.py", tmp_path, cwd=tmp_path) as running:
        pids = pids_in(tmp_path, NAMES)
        os.killpg(running.pid, number)  # what the terminal does at Ctrl-C
        _, err = running.communicate(timeout=30)
    assert running.returncode == 128 + number
    assert not any(alive(pid) for pid in pids)
    assert f"aiorlinf: {number.name}: ending a:0, a:1" in err
    assert "KeyboardInterrupt" not in err


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    script(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN); note(ME); time.sleep(60)")
    with start_cli("run", "--workers", "a=1", "--grace", "50", "worker.py", tmp_path, cwd=tmp_path) as running:
        pids = pids_in(tmp_path, ["a:0"])
        running.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert running.poll() is None
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=30)
    assert running.returncode == 130
    assert not any(alive(pid) for pid in pids)


def test_a_killed_launcher_leaves_nothing_behind(tmp_path: Path) -> None:
    script(tmp_path, WAITING)
    with start_cli("run", "--workers", "a=2", "worker.py", tmp_path, cwd=tmp_path) as running:
        pids = pids_in(tmp_path, NAMES)
        running.kill()
        running.communicate(timeout=30)
    wait_until(lambda: not any(alive(pid) for pid in pids), "the end of workers and grandchildren")


@pytest.mark.parametrize("after", [0.0, 0.1, 0.2, 0.3])
def test_killed_while_it_starts_its_workers(tmp_path: Path, after: float) -> None:
    script(tmp_path, "note(ME + '-' + str(os.getpid())); time.sleep(60)")
    with start_cli("run", "--workers", "a=10", "worker.py", tmp_path, cwd=tmp_path) as running:
        wait_until(lambda: bool(children_of(running.pid)), "a first child")
        time.sleep(after)
        children = children_of(running.pid)
        running.kill()
        running.communicate(timeout=30)
    wait_until(lambda: not any(alive(pid) for pid in children), "the end of all children")
    time.sleep(0.1)
    assert not any(alive(int(path.name.rpartition("-")[2])) for path in tmp_path.glob("a:*-*") if not path.name.endswith(".new"))


def children_of(pid: int) -> list[int]:
    """Also those of the moment before they became workers."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(child) for child in task.read_text().split()]
    return found


def test_a_time_limit(tmp_path: Path) -> None:
    script(tmp_path, "time.sleep(60)")
    run = cli("run", "--workers", "a=1", "--timeout", "0.3", "worker.py", cwd=tmp_path)
    assert run.returncode == 124
    assert "the time limit of 0.3 s is over" in run.stderr


def test_ignored_signals_stay_ignored(tmp_path: Path) -> None:
    script(tmp_path, "note(ME); time.sleep(0.5); print('done')")
    shell = f"trap '' INT HUP; exec {sys.executable} -m aiorlinf run --workers a=1 worker.py {tmp_path}"
    with subprocess.Popen(["/bin/sh", "-c", shell], cwd=tmp_path, env=child_env(), stdout=subprocess.PIPE, text=True) as running:
        pids_in(tmp_path, ["a:0"])
        running.send_signal(signal.SIGINT)
        running.send_signal(signal.SIGHUP)
        assert running.communicate(timeout=30)[0] == "[a:0] done\n"
    assert running.returncode == 0


def test_exit_codes_arrive_although_the_parent_ignored_its_children(tmp_path: Path) -> None:
    script(tmp_path, "sys.exit(3)")
    code = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.executable, sys.argv[1:])"
    command = [sys.executable, "-m", "aiorlinf", "run", "-w", "a=1", "worker.py"]
    run = subprocess.run(
        [sys.executable, "-c", code, *command], cwd=tmp_path, env=child_env(), capture_output=True, check=False, timeout=30
    )
    assert run.returncode == 3


def test_on_a_terminal_prefixes_have_colour(tmp_path: Path) -> None:
    script(tmp_path, "print('hello')")
    master, slave = pty.openpty()
    seen = b""

    def read() -> None:
        nonlocal seen
        with contextlib.suppress(OSError):  # the other side is closed
            while data := os.read(master, 4096):
                seen += data

    reader = threading.Thread(target=read)
    reader.start()
    env = {name: value for name, value in child_env(TERM="xterm").items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    command = [sys.executable, "-m", "aiorlinf", "run", "--workers", "a=1", "worker.py"]
    subprocess.run(command, cwd=tmp_path, env=env, stdout=slave, stderr=subprocess.PIPE, check=True, timeout=30)
    os.close(slave)
    reader.join()
    os.close(master)
    assert seen == b"\x1b[36m[a:0]\x1b[0m hello\r\n"


def test_output_that_nobody_reads_any_more(tmp_path: Path) -> None:
    script(tmp_path, "print('first', flush=True); time.sleep(0.3); print('second' * 50_000, flush=True); note('done')")
    shell = f"{sys.executable} -m aiorlinf run --workers a=1 worker.py {tmp_path} | head -1"
    run = subprocess.run(["/bin/sh", "-c", shell], cwd=tmp_path, env=child_env(), capture_output=True, text=True, check=False, timeout=30)
    assert run.stdout == "[a:0] first\n"
    assert (tmp_path / "done").exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["worker.py", "--workers", "a=1"], "--workers is missing (hint: it comes before the script)"),
        (["worker.py"], "--workers is missing (hint: such as --workers rollout=2,trainer=1)"),
        (["--workers", "a", "worker.py"], "'a' is not a pair"),
        (["--workers", "a=1", "nowhere.py"], "no script 'nowhere.py'"),
        (["--workers", "a=1", "-m", "x/y"], "is not a module's name"),
        (["--workers", "a=1", "--env", "X", "worker.py"], "has no '='"),
        (["--workers", "a=1", "--grace", "-1", "worker.py"], "--grace is -1.0"),
        (["--workers", "a=1", "--grace", "x", "worker.py"], "invalid float value"),
        (["--workers", "a=1", "--config", "nowhere.yaml", "worker.py"], "nowhere.yaml"),
        (["--workers", "a=1"], "the following arguments are required: script, and --workers before it"),
        ([], "the following arguments are required: script, and --workers before it"),
    ],
)
def test_wrong_use(tmp_path: Path, args: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, "note('started')")
    monkeypatch.chdir(tmp_path)
    try:
        code = main(["run", *args])
    except SystemExit as error:  # what argparse finds itself
        code = error.code if isinstance(error.code, int) else -1
    assert code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "started").exists()


def test_configuration_reaches_the_manager(tmp_path: Path) -> None:
    script(tmp_path, "print(os.environ['AIORLINF_MANAGER'])")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (tmp_path / "job.yaml").write_text(f"cluster: {{network: {{port_range: [{port}, {port}]}}}}")
        command = ["run", "--workers", "a=1", "--no-prefix", "--config", "job.yaml", "worker.py"]
        run = cli(*command, cwd=tmp_path)
        assert run.returncode == 1
        assert run.stderr.startswith("aiorlinf: ")
        assert str(port) in run.stderr
        assert "Traceback" not in run.stderr
    run = cli(*command, cwd=tmp_path)
    assert (run.returncode, run.stdout) == (0, f"127.0.0.1:{port}\n"), run.stderr
