"""Which backend carries tensors on accelerators: the table, and every combination."""

from __future__ import annotations

import itertools

import pytest

from aiorlinf.backends.cuda_ipc import ipc_problem
from aiorlinf.backends.select import Choice, select_device_backend
from aiorlinf.errors import BackendUnavailable

__all__: list[str] = []

ONE, TWO, OTHER_KIND = ("cuda", "GPU-1"), ("cuda", "GPU-2"), ("xpu", "XPU-1")
IPC, PAIR = "the peer does not see the sender's device", "this torch was built without NCCL"


def choose(
    wanted: str = "auto",
    *,
    dst: tuple[str, str] | None = TWO,
    ipc: bool = True,
    pair: bool = True,
    fallback: bool = True,
    emulated: str | None = None,
) -> Choice:
    return select_device_backend(
        wanted,
        fallback=fallback,
        src=ONE,
        dst=dst,
        ipc_problem=None if ipc else IPC,
        pair_problem=None if pair else PAIR,
        emulated=emulated,
    )


def test_the_table() -> None:
    assert choose(dst=ONE) == ("cuda_ipc", "both workers use the same device", False)
    assert choose(dst=TWO) == ("cuda_ipc", "the peer reads the sender's device itself", False)
    assert choose(ipc=False) == ("nccl", "two devices", False)
    assert choose(ipc=False, pair=False) == ("staging", f"no cuda_ipc: {IPC}; no nccl: {PAIR}", False)
    assert choose(dst=ONE, ipc=False) == ("staging", f"no cuda_ipc: {IPC}; no nccl: both workers use the same device", False)
    assert choose(dst=None) == ("staging", "the peer has no accelerator", False)
    assert choose(dst=OTHER_KIND) == ("staging", "the one side has cuda, the other xpu", False)
    assert choose("shm") == ("staging", "shm was asked for", False)
    assert choose(emulated="slow on purpose") == ("staging", "slow on purpose", False)


@pytest.mark.parametrize(("wanted", "problem"), [("cuda_ipc", IPC), ("nccl", PAIR)])
def test_what_is_asked_for(wanted: str, problem: str) -> None:
    assert choose(wanted) == (wanted, "asked for", False)
    assert choose(wanted, fallback=False) == (wanted, "asked for", True)
    assert choose(wanted, ipc=False, pair=False) == ("staging", f"{wanted} was asked for, but {problem}", False)
    with pytest.raises(BackendUnavailable, match=problem) as caught:
        choose(wanted, ipc=False, pair=False, fallback=False)
    assert caught.value.candidates == {wanted: problem}
    with pytest.raises(BackendUnavailable, match="no accelerator"):
        choose(wanted, dst=None, fallback=False)


def test_every_combination_gives_a_backend_that_works_and_a_reason() -> None:
    for wanted in ("auto", "stream", "shm", "gloo", "nccl", "cuda_ipc"):
        for fallback, ipc, pair, dst in itertools.product((False, True), (False, True), (False, True), (ONE, TWO, OTHER_KIND, None)):
            try:
                name, reason, required = choose(wanted, fallback=fallback, ipc=ipc, pair=pair, dst=dst)
            except BackendUnavailable:
                assert not fallback
                assert wanted in ("nccl", "cuda_ipc")
                continue
            same_kind = dst in (ONE, TWO)
            assert {"staging": True, "cuda_ipc": ipc and same_kind, "nccl": pair and dst == TWO}[name]
            assert reason
            assert not required or wanted == name


def test_who_can_open_memory_of_another() -> None:
    assert ipc_problem(same_host=True, same_process=False, opens_own=False, visible=True) is None
    assert ipc_problem(same_host=True, same_process=True, opens_own=True, visible=True) is None
    assert ipc_problem(same_host=False, same_process=False, opens_own=False, visible=True) == "the workers are on different hosts"
    assert ipc_problem(same_host=True, same_process=True, opens_own=False, visible=True) == "both workers are in one process"
    assert ipc_problem(same_host=True, same_process=False, opens_own=False, visible=False) == IPC
    far = ipc_problem(same_host=True, same_process=False, opens_own=False, visible=True, reads=False)
    assert far == "the peer's device has no access to the sender's"
