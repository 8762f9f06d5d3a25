"""The host's memory, as far as this process may use it."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["host_memory_bytes"]


def host_memory_bytes() -> tuple[int, int] | None:
    """(total, available) host memory in bytes; a container's own limit counts.

    Returns
    -------
    tuple of int or None
        None where the kernel does not say.
    """
    path = Path("/proc/meminfo")
    if not path.exists():
        return None
    kib = dict(re.findall(r"^(\w+):\s+(\d+) kB$", path.read_text(), re.MULTILINE))
    total_bytes, available_bytes = int(kib["MemTotal"]) * 1024, int(kib["MemAvailable"]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    used = Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        limit_bytes = int(limit.read_text())
        total_bytes = min(total_bytes, limit_bytes)
        available_bytes = min(available_bytes, max(0, limit_bytes - int(used.read_text())))
    return total_bytes, available_bytes
