"""Tensors as bytes: copies."""

from __future__ import annotations

import ast
from pathlib import Path

import torch

import aiorlinf
from aiorlinf.link.memory import byte_tensor, copy_bytes

PACKAGE = Path(aiorlinf.__file__).parent


def test_copy_bytes() -> None:
    for size in (0, 1, 63, 100_000):
        source = torch.arange(size + 8, dtype=torch.int64).to(torch.uint8)[8:]
        out = torch.zeros(size + 2, dtype=torch.uint8)
        copy_bytes(out[1 : size + 1], source)
        assert torch.equal(out[1 : size + 1], source)
        assert not out[0]
        assert not out[size + 1]
    whole = torch.ones(3, 4)
    copy_bytes(byte_tensor(whole), byte_tensor(torch.full((3, 4), 2.0)))
    assert bool((whole == 2).all())


def test_payloads_are_not_copied_by_torchs_threads() -> None:
    """Where those have no core of their own, a copy of 400 kB by them holds up the event loop for tens of milliseconds."""
    found: list[str] = []
    for path in [*(PACKAGE / "link").glob("*.py"), *(PACKAGE / "backends").rglob("*.py")]:
        found += [
            f"{path.name}:{node.lineno}"
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute) and node.attr in ("copy_", "clone", "zero_", "fill_")
        ]
    assert found == []
