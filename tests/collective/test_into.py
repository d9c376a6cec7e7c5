"""Broadcasts received in place, and those of what has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from aiorlinf import init
from aiorlinf.collective import spread
from aiorlinf.collective.changes import Changes
from aiorlinf.collective.into import Target
from aiorlinf.errors import Mismatch, RemoteError, UsageError
from tests.collective.company import Company, company


def model(width: int = 300) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width))


SMALL = {"0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked", "2.bias"}


def same(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.asyncio
@pytest.mark.parametrize("hosts", [["", "", ""], ["a", "b", "b"], ["a", "b", "c"]])
async def test_weights_go_into_the_models_that_are_there(hosts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread, "PIECE_BYTES", 100_000)
    async with company(hosts) as workers:
        models = [model() for _ in hosts]
        places = [[tensor.data_ptr() for tensor in each.state_dict().values()] for each in models]
        for _ in range(2):
            await check_weights(workers, models)
        assert places == [[tensor.data_ptr() for tensor in each.state_dict().values()] for each in models]
        await workers.all_is_free()


async def check_weights(workers: Company, models: list[nn.Module]) -> None:
    """From w:1 to all."""
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.add_(1)
    versions = [each.state_dict()["0.weight"]._version for each in models]
    got = await workers.all(lambda rank: workers[rank].broadcast(models[rank].state_dict(), 1, into=models[rank]))
    assert got[0] is models[0]
    assert got[2] is models[2]
    assert all(same(each, models[1]) for each in models)
    assert [each.state_dict()["0.weight"]._version > old for each, old in zip(models, versions, strict=True)] == [True, False, True]
    assert all(parameter.requires_grad and parameter.grad is None for parameter in models[0].parameters())


@pytest.mark.asyncio
async def test_other_targets() -> None:
    async with company(["", "", "", ""]) as workers:
        tensor = torch.zeros(50_000, dtype=torch.bfloat16)
        rows = [torch.zeros(2), torch.zeros(3, 3)]
        state = {"w": torch.zeros(4, 4).t(), "n": torch.tensor(0)}
        await workers.all(lambda rank: workers[rank].broadcast(torch.full((50_000,), 2.0), 0, into=tensor if rank == 1 else None))
        await workers.all(lambda rank: workers[rank].broadcast([torch.ones(2), torch.ones(3, 3)], 0, into=rows if rank == 1 else None))
        await workers.all(
            lambda rank: workers[rank].broadcast({"w": torch.ones(4, 4), "n": torch.tensor(5)}, 0, into=state if rank else None)
        )
        assert (tensor == 2).all()
        assert rows[0].sum() == 2
        assert rows[1].sum() == 9
        assert state["w"].sum() == 16
        assert state["n"] == 5


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("target", "text"),
    [
        (model(299), "of shape"),
        (model(300)[0], "sent also"),  # type: ignore[index]
        ({**model().state_dict(), "more": torch.zeros(1)}, "expected also more"),
        (torch.zeros(3), "sent also"),
    ],
)
async def test_what_does_not_fit_is_left_as_it_is(target: Any, text: str) -> None:
    async with company(["", ""]) as workers:
        before = {name: tensor.clone() for name, tensor in Target(target)._tensors.items()}  # type: ignore[union-attr]
        got = await workers.outcomes(lambda rank: workers[rank].broadcast(model().state_dict(), 0, into=target))
        assert isinstance(got[0], RemoteError)
        assert isinstance(got[1], Mismatch)
        assert text in str(got[1])
        assert all(torch.equal(tensor, before[name]) for name, tensor in Target(target)._tensors.items())  # type: ignore[union-attr]
        await workers.check_works()


def test_what_is_no_target() -> None:
    for target in (5, "text", [1, 2], {"a": torch.zeros(1), 3: torch.zeros(1)}):
        with pytest.raises(UsageError, match="into= is a"):
            Target(target)
    with pytest.raises(UsageError, match="on device 'meta'"):
        Target(torch.zeros(1, device="meta"))


# ---- only what has changed


def test_what_counts_as_changed() -> None:
    net = model()
    changes = Changes()
    assert changes.since(net.state_dict()).keys() == net.state_dict().keys()
    changes.remember(changes.note(net.state_dict()))
    assert set(changes.since(net.state_dict())) == SMALL
    with torch.no_grad():
        net.get_parameter("0.weight").mul_(2)
    assert set(changes.since({**net.state_dict(), "step": 3})) == SMALL | {"0.weight", "step"}
    changes.remember(changes.note(net.state_dict()))
    assert set(changes.since(net.state_dict())) == SMALL
    net.get_parameter("2.weight").data = torch.zeros(300, 300)
    assert set(changes.since(net.state_dict())) == SMALL | {"2.weight"}
    changes.clear()
    assert len(changes.since(net.state_dict())) == len(net.state_dict())


def test_what_training_writes_has_changed() -> None:
    net, changes = model(), Changes()
    changes.remember(changes.note(net.state_dict()))
    optimizer = torch.optim.Adam(net[2].parameters())  # type: ignore[index]
    net(torch.randn(4, 300)).sum().backward()
    assert set(changes.since(net.state_dict())) == SMALL, "the running statistics among them, which the counters say nothing of"
    optimizer.step()
    assert set(changes.since(net.state_dict())) == SMALL | {"2.weight"}


async def send_changes(workers: Company, models: list[nn.Module]) -> set[str]:
    """From w:0 into w:1; what w:2, who has no target, got."""
    calls = [
        lambda: workers[0].broadcast(models[0].state_dict(), 0, changed_only=True),
        lambda: workers[1].broadcast(into=models[1]),
        lambda: workers[2].broadcast(),
    ]
    got = await workers.all(lambda rank: calls[rank]())
    assert same(models[0], models[1])
    return set(got[2])


@pytest.mark.asyncio
async def test_only_what_has_changed_is_sent() -> None:
    async with company(["", "", ""]) as workers:
        models = [model(), model()]
        everything = set(models[0].state_dict())
        assert await send_changes(workers, models) == everything
        assert await send_changes(workers, models) == SMALL
        with torch.no_grad():
            models[0].get_parameter("2.weight").add_(1)
        assert await send_changes(workers, models) == SMALL | {"2.weight"}
        got = await workers.outcomes(lambda rank: workers[rank].broadcast({"x": torch.zeros(1)}, 0, into=model() if rank == 2 else None))
        assert isinstance(got[2], Mismatch)
        assert await send_changes(workers, models) == everything, "somebody may not have what was sent last"
        await workers.workers[1].close()
        async with init("w:1", config=workers.config) as again:
            workers.workers[1] = again
            models[1] = model()
            assert await send_changes(workers, models) == everything, "a new life has nothing yet"


@pytest.mark.asyncio
async def test_changes_of_what() -> None:
    async with company(["", ""]) as workers:
        got = await workers.outcomes(lambda rank: workers[rank].broadcast([torch.zeros(1)], 0, changed_only=True))
        assert isinstance(got[0], UsageError)
        assert "changed_only=True with a list" in str(got[0])
        assert isinstance(got[1], RemoteError)
        await workers.check_works()
