"""The examples in docstrings do what they say, and docstrings say what a user has to know."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from collections.abc import Callable
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


def _public_calls() -> list[tuple[str, Callable[..., object]]]:
    """The functions of `aiorlinf.__all__`, and the methods of its classes, also those that they inherit from us."""
    found: dict[Callable[..., object], str] = {}
    for name in aiorlinf.__all__:
        value = getattr(aiorlinf, name)
        for kind in value.__mro__ if inspect.isclass(value) else ():
            for attribute, member in vars(kind).items():
                function = getattr(member, "__func__", member)
                if kind.__module__.startswith("aiorlinf") and not attribute.startswith("_") and inspect.isfunction(function):
                    found.setdefault(function, f"{name}.{attribute}")
        if inspect.isfunction(value) or name == "launch":  # which is a package, too
            found.setdefault(value if inspect.isfunction(value) else value.launch, name)
    return [(name, function) for function, name in found.items()]


def test_what_users_call_says_what_becomes_of_it() -> None:
    """Each has a docstring; one that gives a work says what cancelling does, one that takes a time says that it is in seconds, and one that
    raises says so: by itself, or by naming another (``as `send` ``)."""
    calls = _public_calls()
    assert len(calls) > 70
    silent = []
    for name, function in calls:
        doc = inspect.getdoc(function) or ""
        elsewhere = re.search(r"\b([Aa]s|see) `|as for `", doc) is not None
        says = {
            "anything": bool(doc),
            "what cancelling does": elsewhere or "ancel" in doc or "AsyncWork" not in str(function.__annotations__.get("return", "")),
            "the unit of its time": "second" in doc or elsewhere or not {"timeout", "seconds"} & function.__annotations__.keys(),
            "what it raises": elsewhere or "aise" in doc or re.search(r"^ +raise \w", inspect.getsource(function), re.MULTILINE) is None,
        }
        abstract = "raise NotImplementedError" in inspect.getsource(function)
        silent += [f"{name} does not say {what}" for what, said in says.items() if not said and not abstract]
    assert silent == []
