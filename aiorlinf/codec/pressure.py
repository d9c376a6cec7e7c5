"""Whether the system, or the control group of this process, is short of memory."""

from __future__ import annotations

from pathlib import Path

__all__ = ["group_memory", "installed_memory", "memory_is_short", "system_memory"]

_SHORT = 0.05
"""Share of the memory that, still available, is too little."""


def memory_is_short(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> bool:
    """Less than a twentieth is available, of the system's memory or of what the control group may use. False where nothing tells."""
    known = [system_memory(proc), *group_memory(proc, groups)]
    return any(available < total * _SHORT for available, total in filter(None, known))


def installed_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process could have if it were alone. A very large number where nothing tells."""
    known = [system_memory(proc), *group_memory(proc, groups)]
    return min([total for _, total in filter(None, known)], default=1 << 62)


def system_memory(proc: Path) -> tuple[int, int] | None:
    """(available, total) bytes of the system; None where it does not say."""
    fields = _fields(_read(proc / "meminfo"))
    if "MemAvailable:" not in fields or "MemTotal:" not in fields:
        return None
    return fields["MemAvailable:"] * 1024, fields["MemTotal:"] * 1024


def group_memory(proc: Path, groups: Path) -> list[tuple[int, int]]:
    """(available, limit) bytes of this process's control group and of those around it, as far as they have a limit (version 2 only)."""
    line = next((line for line in _read(proc / "self" / "cgroup").splitlines() if line.startswith("0::")), None)
    if line is None:
        return []
    found = []
    group = groups / line[3:].lstrip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(groups):
            break
        limit, used = _read(folder / "memory.max").strip(), _read(folder / "memory.current").strip()
        if limit.isdecimal() and used.isdecimal():
            # Cached files count as used, but the kernel takes them back first.
            spare = _fields(_read(folder / "memory.stat")).get("inactive_file", 0)
            found.append((int(limit) - int(used) + spare, int(limit)))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _fields(text: str) -> dict[str, int]:
    """Lines of a name and a number."""
    fields = {}
    for line in text.splitlines():
        parts = line.split()
        if len(parts) > 1 and parts[1].isdecimal():
            fields[parts[0]] = int(parts[1])
    return fields
