"""Host memory that this process may use: the machine's, or what its control groups leave of it.

Control groups (cgroups) of the kernel are nested, and each may have a limit, so the group with the
least memory left decides. Both versions of the interface are read, as they may be mounted side by
side: https://docs.kernel.org/admin-guide/cgroup-v2.html ("Memory Interface Files") and
https://docs.kernel.org/admin-guide/cgroup-v1/memory.html (5.2, "stat file").

On a Grace Hopper the kernel counts the GPU's memory as the host's, on a NUMA node without CPUs.
Only nodes with CPUs count, and of those the ones of ``Mems_allowed_list`` of ``/proc/self/status``.
``RLIMIT_MEMLOCK`` is not read: it bounds ``mlock``, and CUDA's driver locks pages without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

__all__ = [
    "PINNED_SHARE",
    "HostMemory",
    "MemoryLimit",
    "host_memory",
    "host_memory_bytes",
    "numa_memory",
]

PINNED_SHARE = 0.85
"""Cap on page-locked memory, as a share of the host memory that is available when umem starts: it
cannot be swapped, and a host without any other memory ends programs."""


@dataclass(frozen=True)
class MemoryLimit:
    """The limit of one control group that this process is in, or that its group is nested in."""

    path: Path
    """The file that sets it, such as ``/sys/fs/cgroup/user.slice/memory.max``."""
    limit_bytes: int
    available_bytes: int
    """What the group may still take, page cache that the kernel can drop included."""
    used_bytes: int = 0
    """What its programs use, that page cache included."""
    cache_bytes: int = 0
    """Of that, page cache that the kernel can drop."""


@dataclass(frozen=True)
class HostMemory:
    """Host memory that this process may use."""

    total_bytes: int
    """The machine's, or the lowest limit of its control groups if that is less."""
    available_bytes: int
    """Can be taken now without swapping."""
    limit: MemoryLimit | None
    """The limit that leaves these available bytes; None where the machine itself has no more."""
    other_nodes_bytes: int = 0
    """What else the kernel calls available: memory of GPUs, and of NUMA nodes that this process may
    not allocate on."""


class _Interface(NamedTuple):
    """Names of one version's files, and of figures in ``memory.stat`` that count nested groups."""

    limits: tuple[str, ...]
    usage: str
    cache: tuple[str, ...]
    """Page cache of files: the kernel's lists of recently and of less recently used pages."""
    unwritten: tuple[str, ...]
    """The part of it that is not on its disk yet."""


# A group that reaches `memory.high` is "throttled and put under heavy reclaim pressure". Locked
# memory cannot be reclaimed, so that its owner would be throttled for good.
_V2 = _Interface(
    limits=("memory.max", "memory.high"),
    usage="memory.current",
    cache=("active_file", "inactive_file"),
    unwritten=("file_dirty", "file_writeback"),
)
_V1 = _Interface(
    limits=("memory.limit_in_bytes",),
    usage="memory.usage_in_bytes",
    cache=("total_active_file", "total_inactive_file"),
    unwritten=("total_dirty", "total_writeback"),
)


def host_memory(root: Path = Path("/")) -> HostMemory | None:
    """Read how much host memory this process may use; None where the kernel does not report it.

    `root` is the directory in which ``proc`` and ``sys`` lie.
    """
    meminfo = _figures(root / "proc/meminfo")
    if "MemTotal:" not in meminfo or "MemAvailable:" not in meminfo:
        return None
    other_total_bytes, other_bytes = _other_nodes(root)
    total_bytes = meminfo["MemTotal:"] * 1024 - other_total_bytes
    available_bytes = max(meminfo["MemAvailable:"] * 1024 - other_bytes, 0)
    # A group of version 1 without a limit has one near 2**63. None beyond the machine's memory can
    # be reached.
    limits = [limit for limit in _limits(root) if limit.limit_bytes < total_bytes]
    tightest = min(limits, key=lambda limit: limit.available_bytes, default=None)
    if tightest is not None and tightest.available_bytes >= available_bytes:
        tightest = None
    return HostMemory(
        total_bytes=min([total_bytes, *(limit.limit_bytes for limit in limits)]),
        available_bytes=available_bytes if tightest is None else tightest.available_bytes,
        limit=tightest,
        other_nodes_bytes=other_bytes,
    )


def host_memory_bytes(root: Path = Path("/")) -> tuple[int, int] | None:
    """The (total, available) bytes of :func:`host_memory`."""
    memory = host_memory(root)
    return None if memory is None else (memory.total_bytes, memory.available_bytes)


def _other_nodes(root: Path) -> tuple[int, int]:
    """Bytes of the NUMA nodes that are no host memory for this process: (total, available)."""
    status = "\n".join(_lines(root / "proc/self/status"))
    stated = re.search(r"^Mems_allowed_list:\s*([\d,-]+)$", status, re.MULTILINE)
    allowed = None if stated is None else _numbers(stated.group(1))
    total_bytes = available_bytes = 0
    for number, has_cpus, kib in numa_memory(root / "sys/devices/system/node"):
        if has_cpus and (allowed is None or number in allowed):
            continue
        total_bytes += kib.get("MemTotal:", 0) * 1024
        available_bytes += 1024 * sum(
            kib.get(name, 0) for name in ("MemFree:", "Active(file):", "Inactive(file):")
        )
    return total_bytes, available_bytes


def numa_memory(folder: Path) -> Iterator[tuple[int, bool, dict[str, int]]]:
    """NUMA nodes below a folder: number, whether it has CPUs, and KiB by name of a figure."""
    for node in folder.glob("node[0-9]*"):
        has_cpus = any(line.strip() for line in _lines(node / "cpulist"))
        # Lines read "Node 1 MemFree:       24623428 kB".
        fields = (line.split() for line in _lines(node / "meminfo"))
        kib = {words[2]: int(words[3]) for words in fields}
        yield int(node.name.removeprefix("node")), has_cpus, kib


def _numbers(ranges: str) -> set[int]:
    """Numbers of a list of the kernel's, such as "0-3,8"."""
    ends = [[int(end) for end in part.split("-")] for part in ranges.split(",")]
    return {number for part in ends for number in range(part[0], part[-1] + 1)}


def _limits(root: Path) -> Iterator[MemoryLimit]:
    """The limits of this process's control groups, of both versions, and of those around them."""
    mounts = list(_mounts(root))
    for line in _lines(root / "proc/self/cgroup"):
        # As in "4:cpu,memory:/user.slice"; in version 2 no controllers are named: "0::/user.slice".
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        interface = _V1 if controllers else _V2
        for mount in mounts:
            if mount.interface is interface:
                for path in _path_to_top(PurePosixPath(group), mount.top):
                    yield from _limits_of(root / mount.point / path, interface)


class _Mount(NamedTuple):
    """A place where control groups can be read."""

    interface: _Interface
    top: PurePosixPath
    """The group whose files are at the mount's point; others are directories below it."""
    point: str
    """Without the leading slash."""


def _mounts(root: Path) -> Iterator[_Mount]:
    """Where memory groups are mounted; the columns are those of ``man 5 proc_pid_mountinfo``."""
    for line in _lines(root / "proc/self/mountinfo"):
        place, _, filesystem = line.partition(" - ")
        _, _, _, top, point, *_ = place.split(" ")
        kind, _, options = filesystem.split(" ", 2)
        if kind == "cgroup2":
            interface = _V2
        elif kind == "cgroup" and "memory" in options.split(","):
            interface = _V1
        else:
            continue
        yield _Mount(interface, PurePosixPath(_unescaped(top)), _unescaped(point).lstrip("/"))


def _unescaped(text: str) -> str:
    r"""A path as the kernel lists it, with spaces and backslashes as octal numbers: ``\040``."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)


def _path_to_top(group: PurePosixPath, top: PurePosixPath) -> list[PurePosixPath]:
    """Directories of a group and of those around it, below the mount of `top`.

    Empty where `top` is not around the group. Both are named from the group in which the process's
    cgroup namespace began, which is ``/``; what lies above it is ``/..``.
    """
    if group.is_relative_to(top):
        below = group.relative_to(top)
        # The process was moved out of its namespace, to a group that it cannot see.
        return [] if ".." in below.parts else [below, *below.parents]
    if set(top.parts) == {"/", ".."}:
        # The mount is older than the namespace. Which directory the namespace began in is not told.
        return [PurePosixPath()]
    return []


def _limits_of(directory: Path, interface: _Interface) -> Iterator[MemoryLimit]:
    # The root group has no such files, and a directory may be missing where a container sees its
    # group's name of the host and only its own part of the tree.
    for name in interface.limits:
        limit_bytes = _number(directory / name)
        if limit_bytes is None:
            continue
        stat = _figures(directory / "memory.stat")
        # Of version 1: the least limit of this group and of all around it, those too that a
        # container does not see.
        limit_bytes = min(limit_bytes, stat.get("hierarchical_memory_limit", limit_bytes))
        used_bytes = _number(directory / interface.usage) or 0
        cache_bytes = _reclaimable_bytes(stat, interface)
        unused_bytes = limit_bytes - used_bytes + cache_bytes
        yield MemoryLimit(
            directory / name,
            limit_bytes,
            available_bytes=min(max(unused_bytes, 0), limit_bytes),
            used_bytes=used_bytes,
            cache_bytes=cache_bytes,
        )


def _reclaimable_bytes(stat: Mapping[str, int], interface: _Interface) -> int:
    """Page cache that a group's processes get memory from at once, without swapping.

    A group's usage counts the files that its processes have read. ``MemAvailable`` counts "the size
    of the file LRU lists" for that reason (https://docs.kernel.org/filesystems/proc.html). These
    leave out what cannot be dropped: tmpfs and shared memory, which have no disk behind them, and
    pages locked by ``mlock``. Pages that wait to be written are subtracted, as page-locking would
    wait for the disk. Slab memory, which *might* be reclaimed, is left out: locked memory that was
    promised in error cannot be swapped out.
    """
    cache_bytes = sum(stat.get(name, 0) for name in interface.cache)
    return max(cache_bytes - sum(stat.get(name, 0) for name in interface.unwritten), 0)


def _figures(path: Path) -> dict[str, int]:
    """Lines of a name and a number, with or without a unit."""
    fields = (line.split() for line in _lines(path))
    return {name: int(number) for name, number, *_ in fields}


def _number(path: Path) -> int | None:
    """The number in a file; None for ``max`` and for a file that is missing."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdecimal() else None


def _lines(path: Path) -> list[str]:
    """Lines of a file; none if it is missing, may not be read, or its group was removed."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
