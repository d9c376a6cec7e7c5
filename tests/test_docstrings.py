"""The examples in docstrings do what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import aiorlinf

ROOT = Path(__file__).resolve().parent.parent


def _examples() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = []
    for path in sorted((ROOT / "aiorlinf").rglob("*.py")):
        if ">>> " in path.read_text():
            parts = path.relative_to(ROOT).with_suffix("").parts
            module = importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
            # What a user has who has followed the README.
            found += [test for test in finder.find(module, extraglobs={"aiorlinf": aiorlinf}) if test.examples]
    return found


EXAMPLES = _examples()


@pytest.mark.parametrize("test", EXAMPLES, ids=lambda test: test.name)
def test_an_example(test: doctest.DocTest) -> None:
    said: list[str] = []
    failed, tried = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert tried
    assert not failed, "".join(said)


def test_the_first_calls_of_a_user_have_one() -> None:
    names = {test.name for test in EXAMPLES}
    works = ("work.combine.wait_all", "work.combine.wait_first")
    for name in ("worker.init", "channel.channel.Channel.local", "config.loading.load_config", *works):
        assert f"aiorlinf.{name}" in names
