"""The list of mutants is one of the code as it is: each is in its file once, and no wait or hold is missing from the list."""

from __future__ import annotations

import ast
import re

import pytest

from tests.device.mutants import FILES, MUTANTS, ROOT, Mutant, mutated

__all__: list[str] = []

_CALL = re.compile(r"\b(?:\w*runtime|other)\.(?:wait|hold)\(")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_is_a_program_that_differs(mutant: Mutant) -> None:
    text = mutated(mutant)
    ast.parse(text)
    assert text != (ROOT / "aiorlinf" / mutant.file).read_text()
    for killer in mutant.killers:
        assert not killer.startswith("tests/") or (ROOT / killer).is_file()


@pytest.mark.parametrize("file", FILES)
def test_no_wait_and_no_hold_is_missing(file: str) -> None:
    text = (ROOT / "aiorlinf" / file).read_text()
    here = [mutant for mutant in MUTANTS if mutant.file == file]
    for call in _CALL.finditer(text):
        taken = [mutant for mutant in here if text.find(mutant.code) <= call.start() < text.find(mutant.code) + len(mutant.code)]
        assert taken, f"{file}, line {text.count(chr(10), 0, call.start()) + 1}: no mutant takes this out"
