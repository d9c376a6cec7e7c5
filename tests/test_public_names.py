"""The package's public names: fetched when first used, and the same ones that a type checker sees."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import aiorlinf
from tests.launch.programs import child_env


def names_for_type_checkers() -> dict[str, str]:
    """Each name imported for type checkers, with its module."""
    tree = ast.parse(Path(aiorlinf.__file__).read_text(encoding="utf-8"))
    guarded = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for block in guarded for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def test_one_list() -> None:
    assert sorted(aiorlinf.__all__) == sorted(aiorlinf._HOMES) == sorted(names_for_type_checkers())
    assert aiorlinf.__all__ == sorted(aiorlinf.__all__)
    assert set(aiorlinf.__all__) <= set(dir(aiorlinf))


@pytest.mark.parametrize("name", aiorlinf.__all__)
def test_each_name(name: str) -> None:
    module = importlib.import_module(names_for_type_checkers()[name])
    found = getattr(aiorlinf, name)
    if name == "launch":
        assert found is sys.modules["aiorlinf.launch"]
        assert found.launch is module.launch
    else:
        assert found is getattr(module, name)


def test_no_other_name() -> None:
    with pytest.raises(AttributeError, match="module 'aiorlinf' has no attribute 'nonsense'"):
        _ = aiorlinf.nonsense  # type: ignore[attr-defined]


def test_nothing_of_weight_is_imported() -> None:
    code = """
import sys, aiorlinf, aiorlinf.cli
aiorlinf.launch, aiorlinf.launch_async, aiorlinf.load_config, aiorlinf.errors, aiorlinf.WorkerAddress
try: aiorlinf.cli.main(["run", "--help"])
except SystemExit: pass
print([name for name in ("torch", "numpy", "uvloop", "multiprocessing") if name in sys.modules])
"""
    run = subprocess.run([sys.executable, "-c", code], env=child_env(), capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"
