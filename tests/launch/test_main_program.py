from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiorlinf.launch.main_program import MAIN_NAME, is_loading, load_main


@pytest.fixture(autouse=True)
def keep_our_own_main() -> Iterator[None]:
    names = ("__main__", MAIN_NAME)
    before = {name: sys.modules.get(name) for name in names}
    yield
    for name, module in before.items():
        if module is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = module


def test_loaded_under_another_name(tmp_path: Path) -> None:
    path = tmp_path / "program"  # without .py, as scripts may be
    path.write_text(
        """
from dataclasses import dataclass
from aiorlinf.launch.main_program import is_loading
seen = is_loading()
@dataclass
class Point:
    x: int
def main(comm): return Point(1)
if __name__ == "__main__":
    raise SystemExit("this must not run again")
"""
    )
    module = load_main(str(path))
    assert module.seen
    assert not is_loading()
    assert sys.modules["__main__"] is sys.modules[MAIN_NAME] is module
    point = module.main(None)
    assert pickle.loads(pickle.dumps(point)) == point


def test_a_program_that_fails(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text("1/0")
    with pytest.raises(ZeroDivisionError):
        load_main(str(path))
    assert not is_loading()
