"""Reading how much memory is left."""

from __future__ import annotations

from pathlib import Path

from aiorlinf.codec.pressure import group_memory, installed_memory, memory_is_short, system_memory

MEMINFO = "MemTotal:       1000 kB\nMemFree:           5 kB\nMemAvailable:   {available} kB\n\nHugePages_Total:    0\n"


def system(folder: Path, available: int) -> Path:
    (folder / "self").mkdir(parents=True, exist_ok=True)
    (folder / "meminfo").write_text(MEMINFO.format(available=available))
    return folder


def group(folder: Path, limit: str, used: int, spare: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 7\ninactive_file {spare}\n")


def test_the_system(tmp_path: Path) -> None:
    proc = system(tmp_path / "proc", 300)
    assert system_memory(proc) == (300 * 1024, 1000 * 1024)
    assert not memory_is_short(proc, tmp_path)
    assert installed_memory(proc, tmp_path) == 1000 * 1024
    assert memory_is_short(system(tmp_path / "proc", 49), tmp_path)


def test_groups_around_the_process(tmp_path: Path) -> None:
    proc, groups = system(tmp_path / "proc", 300), tmp_path / "groups"
    (proc / "self" / "cgroup").write_text("3:cpu:/other\n0::/job/worker\n")
    group(groups / "job" / "worker", "max", 50)
    group(groups / "job", "1000", 980, spare=100)
    assert group_memory(proc, groups) == [(120, 1000)]
    assert installed_memory(proc, groups) == 1000
    assert not memory_is_short(proc, groups)
    group(groups / "job", "1000", 980, spare=20)
    assert memory_is_short(proc, groups)


def test_nothing_to_read(tmp_path: Path) -> None:
    assert system_memory(tmp_path) is None
    assert group_memory(tmp_path, tmp_path) == []
    assert not memory_is_short(tmp_path, tmp_path)
    (tmp_path / "meminfo").write_text("nonsense\nMemTotal: lots\n")
    assert not memory_is_short(tmp_path, tmp_path)


def test_this_system() -> None:
    assert memory_is_short() in (True, False)


def test_where_nothing_tells_nothing_is_too_large(tmp_path: Path) -> None:
    assert installed_memory(tmp_path, tmp_path) == 1 << 62
