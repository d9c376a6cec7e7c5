"""A torch store between two threads, without a server."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed.distributed_c10d import PrefixStore

from aiorlinf.rendezvous.store import PairStore

__all__: list[str] = []


def joined(timeout: float = 10.0) -> tuple[PairStore, PairStore]:
    """Two stores that hear of each other's keys."""
    one = PairStore(lambda key, value: two.feed(key, value), timeout, "b:0")
    two = PairStore(lambda key, value: one.feed(key, value), timeout, "a:0")
    return one, two


def failure(fn: Callable[[], object]) -> str:
    """What it says."""
    with pytest.raises(RuntimeError) as caught:
        fn()
    return str(caught.value)


def test_what_one_sets_both_can_get() -> None:
    one, two = joined()
    one.set("address", "here")
    two.set("bytes", b"\x00\xff")
    for store in (one, two):
        assert store.get("address") == b"here"
        assert store.get("bytes") == b"\x00\xff"
        assert store.check(["address", "bytes"])
        assert not store.check(["address", "nothing"])


def test_get_waits_for_the_other_side() -> None:
    one, two = joined()
    with ThreadPoolExecutor(3) as threads:
        getting = threads.submit(one.get, "late")
        waiting = threads.submit(one.wait, ["late", "later"], datetime.timedelta(seconds=5))
        two.set("late", b"1")
        assert getting.result(5) == b"1"
        two.set("later", b"2")
        waiting.result(5)


def test_torch_itself_can_use_it() -> None:
    one, two = joined()
    first, second = PrefixStore("job/", one), PrefixStore("job/", two)
    with ThreadPoolExecutor(1) as threads:
        getting = threads.submit(first.get, "key")
        second.set("key", "value")
        assert getting.result(5) == b"value"
    assert second.get("key") == b"value"


def test_a_key_that_never_comes_costs_the_time_limit_and_names_who_was_waited_for() -> None:
    one, _ = joined(0.1)
    begin = time.monotonic()
    assert failure(lambda: one.get("never")) == "b:0 did not publish its address within 0.1 s"
    assert time.monotonic() - begin >= 0.1
    failure(lambda: one.wait(["never"]))


def test_the_limit_is_one_for_all_waits() -> None:
    one, two = joined(0.2)
    end = time.monotonic() + 0.2
    two.set("early", b"1")
    one.get("early")
    failure(lambda: one.get("never"))
    failure(lambda: one.get("never either"))
    assert time.monotonic() < end + 5


def test_abort_wakes_those_who_wait_and_gives_the_reason() -> None:
    one, two = joined()
    with ThreadPoolExecutor(2) as threads:
        getting = [threads.submit(one.get, key) for key in ("a", "b")]
        time.sleep(0.02)
        one.abort("the link ended")
        one.abort("another reason")
        assert [str(future.exception(5)) for future in getting] == ["the link ended", "the link ended"]
    assert failure(lambda: one.get("c")) == "the link ended"
    two.set("c", b"there")
    assert one.get("c") == b"there", "what is there needs no waiting"


def test_who_meets_by_a_store_hears_that_it_is_given_up() -> None:
    one, two = joined()
    told: list[list[bytes]] = []
    one.when_aborted(told.append)
    one.set("mine", b"1")
    two.set("theirs", b"2")
    assert told == []
    one.abort("the link ended")
    one.abort("again")
    assert told == [[b"1"]], "once, with what this side has set"
    one.when_aborted(told.append)
    assert told == [[b"1"], [b"1"]], "at once, if that has happened"
    assert failure(lambda: one.set("late", b"3")) == "the link ended"
    assert not two.check(["late"])


def test_a_failing_wire_is_the_error_of_set() -> None:
    def broken(key: str, value: bytes) -> None:
        raise ConnectionError("the link is gone")

    store = PairStore(broken, 1.0, "b:0")
    with pytest.raises(ConnectionError):
        store.set("key", b"value")


def test_many_threads_at_once() -> None:
    one, two = joined()
    keys = [f"key {number}" for number in range(50)]
    with ThreadPoolExecutor(20) as threads:
        getting = [threads.submit(one.get, key) for key in keys[:20]]

        def set_all() -> None:
            for key in keys:
                two.set(key, key.encode())

        setting = threading.Thread(target=set_all)
        setting.start()
        for key, future in zip(keys, getting, strict=False):
            assert future.result(5) == key.encode()
        setting.join()
