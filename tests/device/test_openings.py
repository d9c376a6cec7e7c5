"""Memory of another process that stays open between messages: found again, bounded, and closed when its owner has given it back or died."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import torch

from aiorlinf import init
from aiorlinf.device import openings as module
from aiorlinf.device.openings import Openings, Use
from aiorlinf.device.runtime import Shared
from aiorlinf.testing.fake import FakeAccelerator

__all__: list[str] = []

VALUES = torch.arange(1000, dtype=torch.int32)


class Desk:
    """Openings with a clock of the test, and what was closed."""

    def __init__(self, fake: FakeAccelerator) -> None:
        self.fake = fake
        self.now = 0.0
        self.closed = 0
        self.kept: list[int] = []  # of what was to be closed, so many were still open after that
        self.openings = Openings(lambda: self.now, self._drop)

    def _drop(self, memories: list[torch.Tensor]) -> None:
        self.closed += len(memories)
        before = self.fake.mappings - len(memories)
        memories.clear()
        self.kept.append(self.fake.mappings - before)

    def use(self, *leaves: Shared) -> Use:
        return self.openings.use(self.fake, leaves, {"FAKE-0": 0})


@pytest.fixture
def fake() -> Iterator[FakeAccelerator]:
    with FakeAccelerator() as fake:
        yield fake


@pytest.fixture
def desk(fake: FakeAccelerator) -> Desk:
    return Desk(fake)


def test_what_is_open_is_found_again(fake: FakeAccelerator, desk: Desk) -> None:
    tensor = fake.tensor(VALUES)
    whole, part = fake.export(tensor), fake.export(tensor[500:])
    assert (part.handle, part.at, part.nbytes) == (whole.handle, 2000, 2000)
    assert not desk.openings.has([whole])
    use = desk.use(whole, part)
    assert desk.openings.has([whole, part])
    assert [each.numel() for each in use.tensors] == [4000, 2000]
    assert torch.equal(use.tensors[1].view(torch.int32).cpu(), VALUES[500:])
    use.end()
    use.end()
    desk.use(part).end()
    assert (desk.openings.opened, desk.openings.reused, desk.closed, fake.mappings) == (1, 2, 0, 1)
    desk.openings.close()
    assert (desk.closed, fake.mappings) == (1, 0)


def test_nobody_else_holds_what_is_to_be_closed(fake: FakeAccelerator, desk: Desk) -> None:
    """Or it would be closed in whatever thread lets go of it last, which may be a loop's."""
    tensors = [fake.tensor(VALUES) for _ in range(3)]
    idle, gone, in_use = map(fake.export, tensors)
    desk.use(idle).end()
    desk.now = 100.0
    desk.openings.sweep()
    desk.use(gone).end()
    use = desk.use(in_use)
    desk.openings.close()
    use.end()
    assert (desk.closed, desk.kept, fake.mappings) == (3, [0, 0, 0], 0)


def test_what_its_owner_gave_back_is_closed(fake: FakeAccelerator, desk: Desk) -> None:
    one, other, third = (fake.tensor(VALUES) for _ in range(3))
    for tensor in (one, other, third):
        desk.use(fake.export(tensor)).end()
    under_way = desk.use(fake.export(other))
    fake.empty_cache()
    desk.use(fake.export(third)).end()  # whatever was not named since then may be gone
    assert (fake.mappings, desk.closed) == (2, 1)
    under_way.end()
    assert (fake.mappings, desk.closed) == (1, 2)
    desk.use(fake.export(third)).end()
    assert desk.openings.opened == 3
    desk.openings.close()


def test_no_more_than_so_many(fake: FakeAccelerator, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST", 2)
    tensors = [fake.tensor(VALUES) for _ in range(4)]
    uses = [desk.use(fake.export(tensor)) for tensor in tensors]
    assert fake.mappings == 4  # what is used must stay
    for use in uses:
        use.end()
    desk.use(fake.export(tensors[0])).end()
    assert len(desk.openings) == fake.mappings == 2
    assert desk.openings.has([fake.export(tensors[0])])
    assert desk.openings.has([fake.export(tensors[3])])  # those that were used last
    desk.openings.close()


def test_what_is_idle_is_closed(fake: FakeAccelerator, desk: Desk) -> None:
    first, second = fake.tensor(VALUES), fake.tensor(VALUES)
    desk.use(fake.export(first)).end()
    busy = desk.use(fake.export(second))
    desk.now = module.IDLE_S
    desk.openings.sweep()
    assert fake.mappings == 1
    desk.now += module.IDLE_S
    busy.end()
    desk.openings.sweep()
    assert fake.mappings == 1  # it was used a moment ago
    desk.now += module.IDLE_S
    desk.openings.sweep()
    assert fake.mappings == 0


def test_what_is_opened_when_the_peer_is_gone_is_closed_after_its_use(fake: FakeAccelerator, desk: Desk) -> None:
    tensor = fake.tensor(VALUES)
    desk.openings.close()
    use = desk.use(fake.export(tensor))
    assert len(desk.openings) == 0
    assert fake.mappings == 1
    use.end()
    assert fake.mappings == 0


def test_what_cannot_be_opened_leaves_nothing(fake: FakeAccelerator, desk: Desk) -> None:
    tensor = fake.tensor(VALUES)
    fake.limbo = True
    with pytest.raises(RuntimeError, match="no such memory"):
        desk.use(fake.export(tensor), Shared("FAKE-0", b"nothing", 4))
    desk.openings.sweep(-1)
    assert fake.mappings == 0


@pytest.mark.asyncio
async def test_between_two_workers(fake: FakeAccelerator) -> None:
    """One opening for many messages, whose tensor is the sender's to write again each time; nothing is open when the link has ended."""
    async with init("a:0") as a:
        async with init("b:0") as b:
            weights = fake.tensor(VALUES)
            for step in range(4):
                fake.write(weights, VALUES + step)
                work = a.send([weights, weights[10:20]], "b:0")
                got = await b.recv("a:0")
                await work
                assert torch.equal(got[0].cpu(), VALUES + step)
                assert torch.equal(got[1].cpu(), VALUES[10:20] + step)
            (stats,) = b.stats().links
            assert (stats.device_opened, stats.device_opened + stats.device_reused) == (1, 8)
            assert fake.mappings == 1
        while fake.mappings:  # in a thread of its own
            await asyncio.sleep(0.01)
    assert all(thread.name != "aiorlinf-close-memory" for thread in threading.enumerate())
