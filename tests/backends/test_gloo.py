"""Gloo itself, as this library uses it: two members in one process, a broadcast of bytes for each transfer."""

from __future__ import annotations

import datetime
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from aiorlinf.backends.gloo import GlooPair, gloo_available
from aiorlinf.rendezvous.store import PairStore

__all__: list[str] = []

ROOT = Path(__file__).parents[2]


def make_pair(timeout: float = 10.0, host: str = "127.0.0.1") -> tuple[GlooPair, GlooPair]:
    """Sender and receiver, each made in a thread as both block until they have met."""
    one = PairStore(lambda key, value: two.feed(key, value), timeout, "b:0")
    two = PairStore(lambda key, value: one.feed(key, value), timeout, "a:0")
    with ThreadPoolExecutor(2) as threads:
        making = [threads.submit(GlooPair, store, rank, host, timeout) for rank, store in enumerate((one, two))]
        return making[0].result(), making[1].result()


@pytest.fixture
def pair() -> Iterator[tuple[GlooPair, GlooPair]]:
    """Retired at the end."""
    made = make_pair()
    yield made
    for member in made:
        member.retire()
    no_threads()


def no_threads() -> None:
    """Groups that are being destroyed are gone."""
    end = time.monotonic() + 20
    while any(thread.name.startswith("aiorlinf-retire") for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.005)


def outcome() -> tuple[Callable[[BaseException | None], None], Future[BaseException | None]]:
    """A callback, and what it is called with."""
    future: Future[BaseException | None] = Future()
    return future.set_result, future


def bytes_of(size: int, seed: int = 0) -> torch.Tensor:
    return torch.arange(seed, seed + size, dtype=torch.int64).to(torch.uint8)


def test_this_torch_has_gloo() -> None:
    assert gloo_available() is None


def test_why_it_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    assert gloo_available() == "this torch was built without Gloo"
    monkeypatch.setattr(dist, "is_available", lambda: False)
    assert gloo_available() == "this torch was built without torch.distributed"


def test_several_leaves_in_one_transfer(pair: tuple[GlooPair, GlooPair]) -> None:
    sender, receiver = pair
    sent = [bytes_of(1), bytes_of(3_000_000, 5), bytes_of(77, 9)]
    out = [torch.zeros_like(leaf) for leaf in sent]
    told, sending = outcome()
    sender.transfer(list(sent), told)
    told, receiving = outcome()
    receiver.transfer(list(out), told)
    assert sending.result(20) is None
    assert receiving.result(20) is None
    assert all(torch.equal(*leaves) for leaves in zip(sent, out, strict=True))


def test_a_transfer_of_nothing_is_over_at_once(pair: tuple[GlooPair, GlooPair]) -> None:
    told, over = outcome()
    pair[0].transfer([], told)
    assert over.result(0) is None


def test_the_receiver_may_be_much_later(pair: tuple[GlooPair, GlooPair]) -> None:
    """Longer than the time that the connection was given to be made."""
    sender, receiver = make_pair(timeout=0.5)
    told, sending = outcome()
    sender.transfer([bytes_of(4_000_000)], told)
    time.sleep(0.8)
    out = torch.zeros(4_000_000, dtype=torch.uint8)
    told, receiving = outcome()
    receiver.transfer([out], told)
    assert receiving.result(20) is None
    assert sending.result(20) is None
    assert torch.equal(out, bytes_of(4_000_000))
    sender.retire()
    receiver.retire()


def test_nothing_is_kept_of_what_was_moved(pair: tuple[GlooPair, GlooPair]) -> None:
    sender, receiver = pair
    leaves = [bytes_of(100)]
    told, sending = outcome()
    sender.transfer(leaves, told)
    told, receiving = outcome()
    receiver.transfer([torch.zeros(100, dtype=torch.uint8)], told)
    receiving.result(20)
    sending.result(20)
    assert leaves == []


def test_retiring_fails_what_the_peer_waits_for(pair: tuple[GlooPair, GlooPair]) -> None:
    sender, receiver = pair
    told, receiving = outcome()
    receiver.transfer([torch.zeros(100, dtype=torch.uint8)], told)
    time.sleep(0.02)
    sender.retire()
    assert isinstance(receiving.result(20), BaseException)
    told, sending = outcome()
    sender.transfer([bytes_of(100)], told)
    assert isinstance(sending.result(20), RuntimeError)
    sender.retire()


def test_a_peer_that_never_comes_costs_the_time_limit() -> None:
    store = PairStore(lambda key, value: None, 0.2, "b:0")
    begin = time.monotonic()
    with pytest.raises(RuntimeError):
        GlooPair(store, 0, "127.0.0.1", 0.2)
    assert 0.15 < time.monotonic() - begin < 20


def test_a_peer_that_goes_away_before_the_connection_is_made_costs_the_time_limit() -> None:
    """It has published an address at which nobody listens any more."""
    stale: dict[str, bytes] = {}
    one = PairStore(lambda key, value: None, 5.0, "b:0")
    two = PairStore(stale.__setitem__, 0.1, "a:0")
    with pytest.raises(RuntimeError):
        GlooPair(two, 1, "127.0.0.1", 0.1)
    for key, value in stale.items():
        one.feed(key, value)
    begin = time.monotonic()
    with pytest.raises(RuntimeError):
        GlooPair(one, 0, "127.0.0.1", 0.3)
    assert time.monotonic() - begin < 20


def silent_peer(rank: int, address: str) -> dict[str, bytes]:
    """What a member publishes that nobody will ever meet; a member of Gloo listens or connects, by the order of the two addresses."""
    published: dict[str, bytes] = {}
    with pytest.raises(RuntimeError):
        GlooPair(PairStore(published.__setitem__, 0.05, "nobody"), rank, "127.0.0.1", 0.05)
    own = socket.inet_aton("127.0.0.1")
    assert all(own in value for value in published.values())
    return {key: value.replace(own, socket.inet_aton(address)) for key, value in published.items()}


BELOW, ABOVE = "127.0.0.0", "127.9.9.9"
"""Addresses of this machine on either side of 127.0.0.1."""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("address", [BELOW, ABOVE])
def test_the_time_limit_is_the_limit_whichever_side_connects(rank: int, address: str) -> None:
    store = PairStore(lambda key, value: None, 30.0, "the peer")
    for key, value in silent_peer(1 - rank, address).items():
        store.feed(key, value)
    begin = time.monotonic()
    with pytest.raises(RuntimeError):
        GlooPair(store, rank, "127.0.0.1", 1.0)
    assert time.monotonic() - begin < 4.5, "Gloo by itself listens for 5 times as long as it is told"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("address", [BELOW, ABOVE])
@pytest.mark.parametrize("when", ["before the address is known", "while it is made"])
def test_an_attempt_that_is_given_up_ends_at_once(rank: int, address: str, when: str) -> None:
    published = threading.Event()
    store = PairStore(lambda key, value: published.set(), 60.0, "the peer")
    peer = silent_peer(1 - rank, address)
    with ThreadPoolExecutor(1) as threads:
        making = threads.submit(GlooPair, store, rank, "127.0.0.1", 60.0)
        assert published.wait(10)
        if when == "while it is made":
            for key, value in peer.items():
                store.feed(key, value)
            time.sleep(0.1)
        store.abort("nobody wants it any more")
        try:
            made = making.result(10)
        except RuntimeError:
            pass
        else:  # it leads nowhere
            made.retire()
    no_threads()


def test_an_attempt_that_was_given_up_before_it_began() -> None:
    store = PairStore(lambda key, value: None, 60.0, "the peer")
    store.abort("nobody wants it")
    with pytest.raises(RuntimeError, match="nobody wants it"):
        GlooPair(store, 0, "127.0.0.1", 60.0)


def test_a_host_that_is_not_ours() -> None:
    with pytest.raises((RuntimeError, ValueError)):
        GlooPair(PairStore(lambda key, value: None, 0.2, "b:0"), 0, "203.0.113.1", 0.2)


def test_torchs_default_group_is_left_alone(pair: tuple[GlooPair, GlooPair]) -> None:
    assert not dist.is_initialized()
    store = dist.HashStore()  # type: ignore[attr-defined]  # the stubs do not list it
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=datetime.timedelta(seconds=10))
    try:
        sender, receiver = make_pair()
        out = torch.zeros(10, dtype=torch.uint8)
        told, receiving = outcome()
        receiver.transfer([out], told)
        sender.transfer([bytes_of(10)], lambda error: None)
        assert receiving.result(20) is None
        assert torch.equal(out, bytes_of(10))
        assert dist.get_world_size() == 1
        sender.retire()
        receiver.retire()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("pending", [False, True])
def test_a_program_ends_with_a_pair_that_was_not_closed(pending: bool) -> None:
    """Its threads must not come back into an interpreter that is being torn down."""
    program = (
        "import torch\n"
        "from tests.backends.test_gloo import make_pair, bytes_of\n"
        "a, b = make_pair()\n"
        f"if {pending}:\n"
        "    b.transfer([torch.zeros(10, dtype=torch.uint8)], lambda error: print('told', flush=True))\n"
        "print('end', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("end")
