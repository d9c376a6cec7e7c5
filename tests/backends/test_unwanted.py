"""Groups that are to be destroyed: by somebody else, each once, and never in a forked process."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from aiorlinf.backends import unwanted as module
from aiorlinf.backends.unwanted import Unwanted
from aiorlinf.errors import BackendUnavailable

__all__: list[str] = []


class Group:
    """Its end may be made to wait."""

    def __init__(self, *, waits: threading.Event | None = None, fails: bool = False) -> None:
        self.waits = waits
        self.fails = fails
        self.aborted: list[str] = []
        self.over = threading.Event()

    def abort(self) -> None:
        self.aborted.append(threading.current_thread().name)
        self.over.set()
        if self.waits is not None:
            assert self.waits.wait(20)
        if self.fails:
            raise RuntimeError("it cannot be aborted")


def pair(group: Group) -> Any:
    return SimpleNamespace(_group=group, _store=object())


def test_one_that_waits_keeps_no_other_waiting() -> None:
    unwanted, go_on = Unwanted(), threading.Event()
    first, second, third = Group(waits=go_on), Group(fails=True), Group()
    for group in (first, second, third):
        holder = pair(group)
        unwanted.take(holder)
        assert holder._group is None
        unwanted.take(holder)
        assert group.over.wait(20)
    go_on.set()
    unwanted.wait(20)
    assert [group.aborted for group in (first, second, third)] == [["aiorlinf-retire"]] * 3


def test_where_no_thread_can_be_had_they_are_left_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise BackendUnavailable("no more threads")

    unwanted, first, second = Unwanted(), Group(), Group()
    with monkeypatch.context() as patched:
        patched.setattr(module, "start_thread", refuse)
        unwanted.take(pair(first))
    assert not first.aborted
    unwanted.take(pair(second))
    unwanted.wait(20)
    assert len(first.aborted) == len(second.aborted) == 1


def test_a_forked_process_destroys_none_of_its_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    unwanted, group = Unwanted(), Group()
    with monkeypatch.context() as patched:
        patched.setattr(unwanted, "run", lambda thread: None)
        unwanted.take(pair(group))
    child = os.fork()
    if not child:
        unwanted.wait(20)
        os._exit(len(group.aborted))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    unwanted.wait(20)
    assert len(group.aborted) == 1
