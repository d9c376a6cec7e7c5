"""What the doctor says of accelerators: the devices, what stands for and against each way, and the ways to a peer."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator

import pytest

from aiorlinf.backends.device_pairs import register_pairs, unregister_pairs
from aiorlinf.cli import main
from aiorlinf.device.registry import accelerator
from aiorlinf.link.device_facts import DeviceFacts
from aiorlinf.observe.doctor import peer
from aiorlinf.observe.doctor.devices import check_devices, facts_here, ways_to_peer
from aiorlinf.observe.doctor.findings import Finding, Level
from aiorlinf.rendezvous.hosts import parse_endpoint
from aiorlinf.testing.fake import FakeAccelerator
from aiorlinf.testing.fake.pairs import FakeMaker

__all__: list[str] = []

NONE = DeviceFacts("far away")


@pytest.fixture
def fake() -> Iterator[FakeAccelerator]:
    with FakeAccelerator(3) as fake:
        yield fake


@pytest.fixture
def maker(fake: FakeAccelerator) -> Iterator[FakeMaker]:
    maker = FakeMaker(fake)
    register_pairs("fake", maker)
    yield maker
    unregister_pairs("fake")


def said(found: Iterator[Finding]) -> dict[str, str]:
    return {finding.subject: finding.text for finding in found}


def test_the_devices_and_the_ways_on_this_host(fake: FakeAccelerator, maker: FakeMaker) -> None:
    found = said(check_devices())
    assert found["fake:1"] == "fake accelerator, 16384 of 16384 MiB free, UUID FAKE-1"
    assert found["fake:1 peer access"] == "reads the memory of fake:0, fake:2"
    assert found["cuda_ipc"] == "memory and events can be shared between processes"
    assert found["nccl"] == "fake pairs"
    assert found["fake:0 -> fake:0"] == "cuda_ipc: both workers use the same device"
    assert found["fake:0 -> fake:1, fake:2"] == "cuda_ipc: the peer reads the sender's device itself"
    fake.islands = True
    found = said(check_devices())
    assert found["fake:2 peer access"] == "reads the memory of no other device, not of fake:0, fake:1"
    assert found["fake:0 -> fake:1, fake:2"] == "nccl: two devices"


def test_what_stands_against_the_quick_ways(fake: FakeAccelerator) -> None:
    fake.islands = True
    fake.fail_next("export")
    found = {finding.subject: finding for finding in check_devices()}
    assert "export fails" in found["cuda_ipc"].text
    assert found["nccl"].text == "nothing connects fake devices"
    way = found["fake:0 -> fake:1, fake:2"]
    assert way.level is Level.WARNING
    assert way.text == "staging: no cuda_ipc: the peer's device has no access to the sender's; no nccl: nothing connects fake devices"


def test_ways_to_a_peer(fake: FakeAccelerator, maker: FakeMaker) -> None:
    here = facts_here()
    far = [dataclasses.replace(facts, process="far away", uuids=("X-0", "X-1", "X-2"), target=f"X-{i}") for i, facts in enumerate(here)]
    found = said(ways_to_peer(here, far, same_host=False))
    assert found["fake:0 -> peer's fake:0, peer's fake:1, peer's fake:2"] == "nccl: two devices"
    assert found["peer's fake:2 -> our fake:0, our fake:1, our fake:2"] == "nccl: two devices"
    assert said(ways_to_peer(here, [NONE], same_host=False))["fake:1 -> peer's CPU memory"] == "staging: the peer has no accelerator"
    assert said(ways_to_peer([NONE], here, same_host=False))["peer's fake:1 -> our CPU memory"] == "staging: the peer has no accelerator"
    assert said(ways_to_peer([NONE], [NONE], same_host=True)) == {"devices": "neither side has an accelerator"}


def test_two_doctors_tell_each_other(fake: FakeAccelerator, capsys: pytest.CaptureFixture[str]) -> None:
    where: list[str] = []
    told = threading.Event()

    def say(text: str) -> None:
        where.append(text.rpartition(" ")[2])
        told.set()

    found: list[Finding] = []
    waiting = threading.Thread(target=lambda: found.extend(peer.wait_for_peer("127.0.0.1", 0, say, 20)))
    waiting.start()
    assert told.wait(20)
    here = said(peer.meet(*parse_endpoint(where[0])))
    waiting.join(20)
    # Both are one process here, and a fake accelerator opens what its own process has exported.
    assert here["fake:1 -> peer's fake:1"] == "cuda_ipc: both workers use the same device"
    assert said(iter(found))["fake:1 -> peer's fake:0, peer's fake:2"] == "cuda_ipc: the peer reads the sender's device itself"


@pytest.mark.skipif(accelerator() is not None, reason="this machine has an accelerator")
def test_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    (finding,) = check_devices()
    assert finding.level is Level.NOTE
    assert finding.text.startswith("none that this torch can use (")
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    assert "accelerators" in capsys.readouterr().out


@pytest.mark.parametrize("told", [{}, {"host": 1, "devices": ["[]"]}, {"host": "h", "devices": []}, {"host": "h", "devices": [1]}])
def test_who_tells_nonsense_of_devices_is_a_stranger(told: dict[str, object]) -> None:
    with pytest.raises(Exception, match=r"doctor"):
        list(peer._ways(told))


def test_a_driver_that_does_not_work(fake: FakeAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there for who only counts devices."""

    def broken() -> int:
        raise RuntimeError("the driver is too old\nand so on")

    monkeypatch.setattr(fake, "current_device", broken)
    assert said(check_devices()) == {"accelerator": "none that this torch can use (the driver is too old)"}
    assert [facts.kind for facts in facts_here()] == [""]
