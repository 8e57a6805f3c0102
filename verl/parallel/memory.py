"""Memory of the machine, in a container its own limits."""

from __future__ import annotations

from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def memory_limit() -> int:
    """Bytes of memory of the machine or the container."""
    total = int(psutil.virtual_memory().total)
    limit = content_of(CGROUP / "memory.max").strip()
    return min(total, int(limit)) if limit.isdigit() else total


def available_memory() -> int:
    """Bytes that a new process can allocate without swapping."""
    free = int(psutil.virtual_memory().available)
    limit, used = content_of(CGROUP / "memory.max").strip(), content_of(CGROUP / "memory.current").strip()
    if not (limit.isdigit() and used.isdigit()):
        return free
    statistics = dict(line.split() for line in content_of(CGROUP / "memory.stat").splitlines())
    return min(free, int(limit) - int(used) + int(statistics.get("inactive_file", 0)))


def content_of(path: Path) -> str:
    """The text of a file of the system; "" where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
