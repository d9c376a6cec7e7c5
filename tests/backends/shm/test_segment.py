"""Memory files: made, mapped, checked."""

from __future__ import annotations

import fcntl
import os
import tempfile
import weakref
from typing import Any

import pytest
import torch

from aiorlinf.backends.shm.segment import Segment, create_segment, open_segment, shm_problem
from aiorlinf.errors import WireError
from tests.system import memory_file_mappings, no_more_descriptors

SIZE = 1 << 18


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def twin(segment: Segment) -> Segment:
    """As the peer gets it."""
    return open_segment(segment.number, segment.size, os.dup(segment.fd))


def test_both_sides_see_one_memory() -> None:
    made = create_segment(3, SIZE)
    opened = twin(made)
    assert (opened.number, opened.size, opened.fd) == (3, SIZE, -1)
    made.view(4096, 100)[:] = 5
    assert opened.view(4096, 100).sum() == 500
    opened.view(0, 8)[3] = 9
    made.close()
    assert made.view(0, 8).tolist() == [0, 0, 0, 9, 0, 0, 0, 0]


def test_its_pages_exist_unless_they_are_not_asked_for() -> None:
    ready, lazy = create_segment(1, SIZE), create_segment(2, SIZE, populate=False)
    assert os.fstat(ready.fd).st_blocks * 512 == SIZE
    assert os.fstat(lazy.fd).st_blocks == 0
    lazy.view(8192, 1)[0] = 1
    assert os.fstat(lazy.fd).st_blocks > 0


def test_its_size_cannot_be_changed() -> None:
    segment = create_segment(1, SIZE)
    for size in (SIZE // 2, 2 * SIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(segment.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_it_has_no_name() -> None:
    segment = create_segment(1, SIZE)
    assert os.readlink(f"/proc/self/fd/{segment.fd}") == "/memfd:aiorlinf (deleted)"
    assert os.get_inheritable(segment.fd) is False


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW])
def test_a_file_that_could_be_cut_short_is_refused(seals: int) -> None:
    fd = os.memfd_create("aiorlinf", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    with pytest.raises(WireError, match="cut short"):
        open_segment(1, SIZE, fd)
    assert not is_open(fd)


@pytest.mark.parametrize("size", [SIZE - 4096, SIZE + 4096, SIZE + 1])
def test_a_file_of_another_size_is_refused(size: int) -> None:
    segment = create_segment(1, SIZE)
    fd = os.dup(segment.fd)
    with pytest.raises(WireError, match="bytes instead of"):
        open_segment(1, size, fd)
    assert not is_open(fd)


def test_what_is_no_memory_file_is_refused() -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(SIZE)
        fd = os.dup(file.fileno())
        with pytest.raises(OSError, match="argument"):
            open_segment(1, SIZE, fd)
        assert not is_open(fd)


def test_closing_twice_closes_once() -> None:
    segment = create_segment(1, SIZE)
    number = segment.fd
    segment.close()
    other = os.dup(0)
    assert other == number, "the kernel gives the lowest number"
    segment.close()
    del segment
    assert is_open(other)
    os.close(other)


def test_a_segment_that_nobody_took_leaves_nothing() -> None:
    before = memory_file_mappings()
    segment = create_segment(1, SIZE)
    number = segment.fd
    del segment
    assert not is_open(number)
    assert memory_file_mappings() == before


def test_without_descriptors_none_is_made_and_nothing_is_left() -> None:
    before = memory_file_mappings()
    with no_more_descriptors(), pytest.raises(OSError, match="open files"):
        create_segment(1, SIZE)
    with pytest.raises(OSError, match="memory"):
        create_segment(1, 1 << 60)
    assert memory_file_mappings() == before


def test_the_last_view_of_a_root_can_be_noticed() -> None:
    segment = create_segment(1, SIZE)
    gone: list[str] = []

    def watched(name: str) -> Any:
        root = segment.view(4096, 4096)
        weakref.finalize(root, gone.append, name)
        return root

    tensor = torch.from_numpy(watched("tensor")).view(torch.float32).reshape(32, 32)
    row = tensor[5]
    array = row.numpy()[2:7]
    again = torch.from_numpy(array)[1:]
    del tensor, row, array
    assert gone == []
    again.fill_(1)
    del again
    assert gone == ["tensor"]

    view = memoryview(watched("buffer"))[10:20]
    assert gone == ["tensor"]
    del view
    assert gone == ["tensor", "buffer"]


def test_this_system_can() -> None:
    assert shm_problem() is None
