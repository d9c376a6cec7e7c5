"""What `scripts/gpu-check` checks, on the accelerators of this machine. Without one, `tests/device` runs some of it on the fake one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aiorlinf.device.registry import usable_runtime
from scripts.gpuchecks.checks import CHECKS, Check
from scripts.gpuchecks.place import place
from scripts.gpuchecks.running import Partner, run_check

__all__: list[str] = []

pytestmark = pytest.mark.skipif(usable_runtime("cuda") is None, reason="this machine has no CUDA or ROCm device")


@pytest.fixture(scope="module")
def partner() -> Iterator[Partner]:
    with Partner("cuda") as partner:
        yield partner


@pytest.mark.timeout(150)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_on_a_real_device(check: Check, partner: Partner) -> None:
    with place("cuda") as where:
        word, text, _ = run_check(check, "cuda", where, partner)
    if word == "skipped":
        pytest.skip(text)
    assert word == "passed", text
