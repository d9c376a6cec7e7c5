"""What is set when a group of NCCL's is made; torch's own class only where torch has it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aiorlinf.backends.nccl import group_options

__all__: list[str] = []

UNDEFINED = -(2**31)
"""NCCL's mark for what nobody has set."""


def options(**config: int) -> Any:
    """As torch's, with a configuration of these fields."""
    return SimpleNamespace(config=SimpleNamespace(**config)) if config else SimpleNamespace()


def test_it_is_set_up_without_blocking() -> None:
    made = group_options(options(max_ctas=UNDEFINED, blocking=UNDEFINED), (2, 27, 5), {})
    assert made.config.blocking == 0
    assert made.config.max_ctas > 0
    assert made.is_high_priority_stream


@pytest.mark.parametrize(
    ("version", "environment"), [((2, 26, 2), {}), ((2, 27, 5), {"TORCH_NCCL_USE_COMM_NONBLOCKING": "0"})], ids=["hangs in it", "told"]
)
def test_but_not(version: tuple[int, ...], environment: dict[str, str]) -> None:
    assert group_options(options(max_ctas=UNDEFINED, blocking=UNDEFINED), version, environment).config.blocking == UNDEFINED


def test_nor_with_rccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert group_options(options(max_ctas=UNDEFINED, blocking=UNDEFINED), (2, 27, 5), {}).config.blocking == UNDEFINED


def test_what_an_old_nccl_has_not_got() -> None:
    assert not hasattr(group_options(options(), (2, 16, 2), {}), "config")
    assert not hasattr(group_options(options(max_ctas=0), (2, 17, 1), {}).config, "blocking")


def test_the_class_of_torch() -> None:
    group: Any = getattr(torch.distributed.distributed_c10d, "ProcessGroupNCCL", None)
    if group is None:
        pytest.skip("this torch was built without NCCL")
    made = group_options(group.Options(), (2, 27, 5), {})
    if hasattr(made, "config") and hasattr(made.config, "blocking"):
        assert made.config.blocking == 0
