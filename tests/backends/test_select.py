"""Which backend is chosen, for every combination of what can be."""

from __future__ import annotations

import itertools

import pytest

from aiorlinf.backends.select import select_backend
from aiorlinf.errors import BackendUnavailable

__all__: list[str] = []

SHM, GLOO = "there is no memfd", "torch has no Gloo"


def choose(
    wanted: str = "auto", *, fallback: bool = True, same_host: bool = True, same_worker: bool = False, shm: bool = True, gloo: bool = True
) -> tuple[str, str, bool]:
    """Name, reason, required."""
    return tuple(
        select_backend(
            wanted,
            fallback=fallback,
            same_host=same_host,
            same_worker=same_worker,
            shm_problem=None if shm else SHM,
            gloo_problem=None if gloo else GLOO,
        )
    )  # type: ignore[return-value]


def test_on_one_host_memory_is_shared() -> None:
    assert choose() == ("shm", "both workers are on one host", False)
    assert choose(gloo=False)[0] == "shm"
    assert choose(shm=False) == ("stream", f"both workers are on one host, but {SHM}", False)


def test_between_hosts_gloo_carries() -> None:
    assert choose(same_host=False) == ("gloo", "the workers are on different hosts", False)
    assert choose(same_host=False, gloo=False) == ("stream", f"the workers are on different hosts, but {GLOO}", False)


@pytest.mark.parametrize("wanted", ["auto", "stream", "shm", "gloo"])
def test_to_oneself_nothing_leaves_the_worker(wanted: str) -> None:
    name, reason, required = choose(wanted, fallback=False, same_worker=True, shm=False, gloo=False)
    assert (name, required) == ("stream", False)
    assert "itself" in reason


@pytest.mark.parametrize("same_host", [False, True])
@pytest.mark.parametrize("wanted", ["stream", "shm", "gloo"])
def test_what_is_asked_for_is_taken_where_it_can_be_had(wanted: str, same_host: bool) -> None:
    assert choose(wanted, same_host=same_host)[:2] == (wanted, "asked for")


@pytest.mark.parametrize("wanted", ["shm", "gloo"])
def test_without_fallback_what_is_asked_for_is_required(wanted: str) -> None:
    assert choose(wanted, fallback=False)[2]
    assert not choose(wanted, fallback=True)[2]


@pytest.mark.parametrize(("wanted", "problem"), [("shm", SHM), ("gloo", GLOO)])
def test_what_cannot_be_had_is_replaced_or_refused(wanted: str, problem: str) -> None:
    assert choose(wanted, shm=False, gloo=False) == ("stream", f"{wanted} was asked for, but {problem}", False)
    with pytest.raises(BackendUnavailable, match=problem) as caught:
        choose(wanted, fallback=False, shm=False, gloo=False)
    assert caught.value.candidates == {wanted: problem}


def test_every_combination_gives_a_backend_that_works_and_a_reason() -> None:
    switches = itertools.product((False, True), repeat=5)
    for wanted, (fallback, same_host, same_worker, shm, gloo) in itertools.product(("auto", "stream", "shm", "gloo"), switches):
        try:
            name, reason, _ = choose(wanted, fallback=fallback, same_host=same_host, same_worker=same_worker, shm=shm, gloo=gloo)
        except BackendUnavailable:
            assert not fallback
            assert not same_worker
            continue
        assert {"stream": True, "shm": shm, "gloo": gloo}[name]
        assert reason
