from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aiorlinf.errors import UsageError
from aiorlinf.launch.target import CALL_ENV, MAX_CALL, callable_target, module_target, resolve_target, script_target
from tests.launch.programs import child_env


def worker_main(comm: object) -> None:
    """A function that another process can find."""


class Holder:
    """A function that sits in a class can be found as well."""

    @staticmethod
    def main(comm: object) -> None: ...

    def method(self, comm: object) -> None: ...


shadowed = worker_main


def test_script(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.touch()
    assert script_target(path, ["--steps", "3", path]).argv == (sys.executable, str(path), "--steps", "3", str(path))
    assert resolve_target(str(path), []).env == {}


def test_module() -> None:
    assert module_target("pkg.train", ["-x"]).argv == (sys.executable, "-m", "pkg.train", "-x")


@pytest.mark.parametrize("module", ["", "pkg/train.py", "pkg..x", "train.py x"])
def test_not_a_module(module: str) -> None:
    with pytest.raises(UsageError, match="is not a module's name"):
        module_target(module, [])


def test_no_such_script() -> None:
    with pytest.raises(UsageError, match=r"no script 'nowhere.py' in /"):
        resolve_target("nowhere.py", [])


@pytest.mark.parametrize("args", [[3], [b"x"], ["a\0b"]])
def test_arguments_of_a_script_are_text(tmp_path: Path, args: list[Any]) -> None:
    with pytest.raises(UsageError, match="is not text"):
        script_target(tmp_path, args)


def test_function() -> None:
    target = callable_target(worker_main, [1, {"lr": 0.1}])
    call = json.loads(target.env[CALL_ENV])
    assert call["target"] == f"{__name__}:worker_main"
    assert call["main"] is None
    assert call["path"] == sys.path
    assert json.loads(callable_target(Holder.main, []).env[CALL_ENV])["target"] == f"{__name__}:Holder.main"


def test_functions_that_nobody_finds() -> None:
    def local(comm: object) -> None: ...

    bad: list[Any] = [local, lambda comm: None, functools.partial(worker_main), Holder, Holder()]
    for function in bad:
        with pytest.raises(UsageError, match="cannot be found by name in another process"):
            callable_target(function, [])
    for impostor in (functools.wraps(worker_main)(lambda comm: None), Holder().method):
        with pytest.raises(UsageError, match="is now something else"):
            callable_target(impostor, [])


@pytest.mark.parametrize("target", [None, 3, b"train.py"])
def test_not_a_target_at_all(target: Any) -> None:
    with pytest.raises(UsageError, match="a target is a script's path or a function"):
        resolve_target(target, [])


def test_arguments_that_cannot_travel() -> None:
    with pytest.raises(UsageError, match="cannot be pickled: "):
        callable_target(worker_main, [lambda: None])
    with pytest.raises(UsageError, match="are too large: "):
        callable_target(worker_main, [b"x" * MAX_CALL])


@pytest.mark.parametrize(("command", "said"), [(["-c"], "without a file"), ([], "without a file")])
def test_a_program_without_a_file(command: list[str], said: str) -> None:
    text = """
def main(comm): pass
from aiorlinf.launch.target import callable_target
callable_target(main, [])
"""
    run = subprocess.run(
        [sys.executable, *command, *([text] if command else [])],
        input=None if command else text,
        env=child_env(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert "UsageError: launch: main is defined in a program without a file" in run.stderr
    assert "hint: put the function in a .py file" in run.stderr


def test_a_main_program_with_a_name_is_found_by_it(tmp_path: Path) -> None:
    (tmp_path / "prog.py").write_text(
        """
def main(comm): pass
from aiorlinf.launch.target import CALL_ENV, callable_target
print(callable_target(main, []).env[CALL_ENV])
"""
    )
    for command, target, main in ((["-m", "prog"], "prog:main", None), (["prog.py"], "__mp_main__:main", str(tmp_path / "prog.py"))):
        run = subprocess.run([sys.executable, *command], cwd=tmp_path, env=child_env(), capture_output=True, text=True, check=True)
        call = json.loads(run.stdout)
        assert (call["target"], call["main"]) == (target, main)
