"""Memory of a file: it is there as long as somebody looks at it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from aiorlinf.backends.shm.mapping import Mapping, let_go
from tests.system import memory_file_mappings

SIZE = 1 << 20


def memory_file(size: int = SIZE) -> int:
    fd = os.memfd_create("aiorlinf", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return fd


def test_two_mappings_of_one_file_show_the_same() -> None:
    fd = memory_file()
    one, two = np.asarray(Mapping(fd, SIZE)), np.asarray(Mapping(fd, SIZE))
    os.close(fd)
    one[12345] = 7
    assert two[12345] == 7
    two[:] = 3
    assert one.sum(dtype=np.int64) == 3 * SIZE


def test_it_ends_with_the_last_view() -> None:
    fd = memory_file()
    before = memory_file_mappings()
    mapping = Mapping(fd, SIZE)
    os.close(fd)
    view = np.asarray(mapping)[100:200]
    view[0] = 9
    address = mapping.address
    del mapping
    assert (address, address + SIZE) in memory_file_mappings()
    assert view[0] == 9
    del view
    assert memory_file_mappings() == before


def test_pages_are_made_when_asked_for() -> None:
    fd = memory_file()
    mapping = Mapping(fd, SIZE)
    assert os.fstat(fd).st_blocks == 0
    if not mapping.make_pages():
        pytest.skip("the kernel cannot do that")
    assert os.fstat(fd).st_blocks * 512 == SIZE
    mapping.enter_pages()
    os.close(fd)


def test_what_cannot_be_mapped_raises() -> None:
    fd = memory_file()
    os.close(fd)
    with pytest.raises(OSError, match="descriptor"):
        Mapping(fd, SIZE)
    fd = memory_file()
    with pytest.raises(OSError, match="argument"):
        Mapping(fd, 0)
    with pytest.raises(OSError, match="memory"):
        Mapping(fd, 1 << 60)
    os.close(fd)


def test_pages_beyond_the_file_raise_instead_of_killing() -> None:
    fd = memory_file()
    mapping = Mapping(fd, 2 * SIZE)
    os.close(fd)
    try:
        made = mapping.make_pages()
    except OSError:
        return
    assert not made, "the kernel cannot do that"


def test_last_references_are_let_go_in_a_thread_of_their_own() -> None:
    threads = []

    class Thing:
        def __del__(self) -> None:
            threads.append(threading.current_thread())

    let_go([Thing(), Thing()])
    end = time.monotonic() + 10
    while len(threads) < 2:
        assert time.monotonic() < end
        time.sleep(0.001)
    assert threading.main_thread() not in threads
    let_go([])


def test_views_that_live_until_the_interpreter_ends_do_no_harm() -> None:
    program = (
        "import os, numpy as np\n"
        "from aiorlinf.backends.shm.segment import create_segment\n"
        "class Keeper: pass\n"
        "keeper = Keeper(); keeper.me = keeper\n"
        "keeper.view = create_segment(1, 1 << 20).view(0, 100)\n"
        "view = create_segment(2, 1 << 20).view(0, 100)\n"
        "print(view.sum())\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "0\n", "")
