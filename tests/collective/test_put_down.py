"""Parts of middling size are put down where their receiver can see them: no message of their own, and never lost when he cannot."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from aiorlinf.collective import gather as gathering
from aiorlinf.collective.exchange import Exchange
from aiorlinf.errors import UnsupportedObject
from tests.collective.company import Company, company
from tests.system import memory_file_at, no_more_descriptors, soon

__all__: list[str] = []

NUMBERS = 50_000


class Sends:
    """How many parts went as messages of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        send = Exchange.send_flat

        def counted(exchange: Exchange, *args: Any) -> Any:
            self.count += 1
            return send(exchange, *args)

        monkeypatch.setattr(Exchange, "send_flat", counted)


@pytest.fixture
def sends(monkeypatch: pytest.MonkeyPatch) -> Sends:
    return Sends(monkeypatch)


def row(rank: int, size: int = NUMBERS) -> dict[str, Any]:
    return {"rows": [torch.full((size,), float(rank)), torch.full((3,), rank)], "name": f"of {rank}", "raw": bytes([rank]) * 70_000}


async def exchange_rows(workers: Company) -> None:
    """An all-to-all and a gather; everything is right, and in shared memory, and nobody sees what another writes."""
    everybody = range(len(workers))
    got = await workers.all(lambda rank: workers[rank].all_to_all([row(10 * rank + other) for other in everybody]))
    gathered = (await workers.all(lambda rank: workers[rank].gather(row(10 * rank))))[0]
    for rank in everybody:
        for other, part in enumerate(got[rank]):
            check_row(part, 10 * other + rank)
            part["rows"][0] += 1  # it is ours
    for other, part in enumerate(gathered):
        check_row(part, 10 * other)


def check_row(part: Any, rank: int) -> None:
    assert list(part) == ["rows", "name", "raw"]
    assert part["name"] == f"of {rank}"
    assert part["raw"] == bytes([rank]) * 70_000
    assert torch.equal(part["rows"][0], torch.full((NUMBERS,), float(rank)))
    assert torch.equal(part["rows"][1], torch.full((3,), rank))


@pytest.mark.asyncio
async def test_once_there_is_memory_no_message_is_sent(sends: Sends) -> None:
    async with company(["", "", ""]) as workers:
        await exchange_rows(workers)  # the memory is made for messages
        before = sends.count
        for _ in range(3):
            await exchange_rows(workers)
            await workers.all_is_free()
        assert sends.count == before
        (got, _, _) = await workers.all(lambda rank: workers[rank].gather(torch.ones(NUMBERS)))
        assert memory_file_at(got[1].data_ptr(), got[1].nbytes)
        del got
        await workers.all_is_free()


@pytest.mark.asyncio
@pytest.mark.parametrize("collective", [{"shared_memory": {"enabled": False}}, {"backend": "stream"}])
async def test_without_shared_memory_they_are_messages(collective: dict[str, Any], sends: Sends) -> None:
    async with company(["", "", ""], **collective) as workers:
        for _ in range(2):
            await exchange_rows(workers)
        assert sends.count == 2 * (6 + 2)
        await workers.all_is_free()


@pytest.mark.asyncio
async def test_who_cannot_open_the_memory_gets_a_message(sends: Sends) -> None:
    async with company(["", "", ""]) as workers:
        await workers.check_works()
        for worker in workers.workers:  # memory that nobody else has seen yet
            assert worker._table.memory is not None
            worker._table.memory.arena.make_now(4 << 20).release()  # type: ignore[union-attr]
        with no_more_descriptors():
            await exchange_rows(workers)
        assert sends.count
        await workers.all_is_free()
        await workers.check_works()


@pytest.mark.asyncio
async def test_who_does_not_listen_holds_a_bounded_amount(sends: Sends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "_LENT_MAX_BYTES", 1_100_000)
    async with company(["", ""]) as workers:
        await exchange_rows(workers)
        await workers.all_is_free()
        before = sends.count
        ahead = [workers[1].gather(torch.full((NUMBERS,), float(number))) for number in range(12)]
        await soon(lambda: sends.count == before + 7)  # five of 200,000 bytes are ahead
        for number in range(12):
            got = await workers[0].gather(None, timeout=20)
            assert got is not None
            assert torch.equal(got[1], torch.full((NUMBERS,), float(number)))
            del got
        await asyncio.gather(*ahead)
        await workers.all_is_free()


class Touchy:
    """Cannot be unpickled."""

    def __reduce__(self) -> Any:
        return _explode, ()


def _explode() -> None:
    raise LookupError("not here")


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["gather", "all_to_all"])
async def test_errors_as_results(kind: str) -> None:
    async with company(["", "", ""]) as workers:
        await exchange_rows(workers)

        def call(rank: int) -> Any:
            part = [Touchy() if rank == 1 else rank, torch.zeros(NUMBERS)]
            calls = workers[rank]
            return calls.gather(part, return_exceptions=True) if kind == "gather" else calls.all_to_all([part] * 3, return_exceptions=True)

        got = await workers.outcomes(call)
        assert isinstance(got[0][1], UnsupportedObject)
        assert [part[0] for part in (got[0][0], got[0][2])] == [0, 2]
        del got
        await workers.check_works()
        await workers.all_is_free()


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["gather", "all_to_all"])
async def test_a_member_that_is_gone_takes_nothing_along(kind: str) -> None:
    async with company(["", "", ""]) as workers:
        await exchange_rows(workers)

        def call(rank: int) -> Any:
            calls, part = workers[rank], torch.full((NUMBERS,), float(rank))
            return calls.gather(part, return_exceptions=True) if kind == "gather" else calls.all_to_all([part] * 3, return_exceptions=True)

        works = [call(rank) for rank in (0, 1)]
        await soon(lambda: all(work.done() or str(work.detail).startswith("waits for") for work in works))
        await workers.workers[2].close()
        got = await asyncio.wait_for(works[0], 20)
        assert torch.equal(got[1], torch.full((NUMBERS,), 1.0))
        assert isinstance(got[2], Exception)
        await asyncio.wait_for(works[1], 20)
