"""``aiorlinf.launch`` is a package and a function, whatever is imported first."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import aiorlinf.launch
from aiorlinf.errors import UsageError
from aiorlinf.launch.api import launch
from tests.launch.programs import child_env

CALL = "aiorlinf.launch('nowhere.py', 'a=1')"
MODULE = "aiorlinf.launch.spec.parse_workers('a=1')"


@pytest.mark.parametrize(
    "lines",
    [
        ["import aiorlinf.launch", CALL],
        ["from aiorlinf.launch.spec import parse_workers", "import aiorlinf", MODULE, CALL],
        ["import aiorlinf.launch.manager_command", "import aiorlinf.launch.printer", MODULE, "aiorlinf.launch.printer", CALL],
        ["from aiorlinf.launch import launch", "launch('nowhere.py', 'a=1')"],
        ["from aiorlinf import launch", "launch.spec.parse_workers('a=1')", "launch('nowhere.py', 'a=1')"],
        ["import importlib, aiorlinf.launch", "importlib.reload(aiorlinf.launch)", CALL],
    ],
)
def test_any_order(lines: list[str]) -> None:
    run = subprocess.run([sys.executable, "-c", "\n".join(lines)], env=child_env(), capture_output=True, text=True, check=False)
    assert run.stderr.splitlines()[-1].startswith("aiorlinf.errors.UsageError: no script 'nowhere.py'")


def test_it_looks_like_the_function() -> None:
    call: object = aiorlinf.launch
    assert callable(call)
    assert inspect.signature(call) == inspect.signature(launch)
    with pytest.raises(UsageError, match=r"no script 'nowhere.py'"):
        call("nowhere.py", "a=1")


def test_nothing_heavy_is_imported() -> None:
    code = "import sys, aiorlinf.launch; print([name for name in ('torch', 'numpy', 'uvloop', 'multiprocessing') if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], env=child_env(), capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
