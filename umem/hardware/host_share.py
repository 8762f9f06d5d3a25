"""This process's share of host memory: what the ranks of a job, and other jobs, leave of it.

Two kinds of processes share a host. The ranks of one job start together, and their launcher says
how many there are: each gets an equal part. Other processes of the same user come and go: the first
books what it may take, and a later one leaves that alone. A booking is a file in memory that its
process holds open, and that others find under ``/proc``: it needs no folder that can be written to,
and ends with its process.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from umem.hardware.host_memory import host_memory

__all__ = [
    "RANK_COUNTS",
    "Booking",
    "HostShare",
    "book",
    "bookings",
    "host_share",
    "local_ranks",
    "share_bytes",
]

RANK_COUNTS = (
    "LOCAL_WORLD_SIZE",  # torchrun, accelerate, DeepSpeed
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",  # Intel MPI, MPICH
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "SLURM_STEP_TASKS_PER_NODE",  # srun: "4(x2),3" for nodes of 4, 4 and 3 tasks
)
"""Variables by which launchers say how many processes they started on a host, best first."""

_JOB = ("MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE")
"""Variables that the ranks of one job have in common, and no two jobs of a host."""

_NAME = "umem-host-memory"
_MOST_BYTES = 4096

_LOCK_FOLDER, _LOCK_TIMEOUT_S, _LOCK_POLL_S = "/tmp", 2.0, 0.01


@dataclass(frozen=True)
class Booking:
    """Host memory that another process may take and has not taken yet."""

    process: int
    bytes: int


@dataclass(frozen=True)
class HostShare:
    """Host memory for this process, and how it comes about."""

    available_bytes: int
    """:attr:`umem.hardware.host_memory.HostMemory.available_bytes`."""
    others: tuple[Booking, ...]
    """Other processes of this user under umem, which are no ranks of this job."""
    ranks: int
    """Processes of this job on this host."""
    source: str
    """The variable that says so; "" where none does."""

    @property
    def booked_bytes(self) -> int:
        """Of the available bytes, what others may still take."""
        return sum(other.bytes for other in self.others)

    @property
    def share_bytes(self) -> int:
        """What this process may take."""
        return max(self.available_bytes - self.booked_bytes, 0) // self.ranks


def local_ranks(variables: Mapping[str, str] = os.environ) -> tuple[int, str]:
    """Processes of this job on this host, and the variable that says so; (1, "") if none does."""
    for name in RANK_COUNTS:
        counts = re.findall(r"(?:^|,)([0-9]{1,6})(?=$|,|\()", variables.get(name, ""))
        if counts:
            # Which of the counts is this host's is not told: the largest is safe.
            return max(1, *map(int, counts)), name
    return 1, ""


def host_share(
    variables: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> HostShare | None:
    """Read this process's share of host memory, as it is now.

    Parameters
    ----------
    variables
        The environment, in which launchers count ranks.
    root
        The directory in which ``proc`` and ``sys`` lie.

    Returns
    -------
    HostShare or None
        None where the kernel does not report memory, as on macOS.
    """
    memory = host_memory(root)
    if memory is None:
        return None
    ranks, source = local_ranks(variables)
    others = tuple(bookings(_job(variables), root))
    return HostShare(memory.available_bytes, others, ranks, source)


def share_bytes() -> int | None:
    """The bytes of :func:`host_share` for this process, as it is now; None if unknown."""
    share = host_share()
    return None if share is None else share.share_bytes


_booking: tuple[int, int] | None = None
"""This process's number and the file in memory that others read, open as long as it lives."""


def book(part: float, variables: Mapping[str, str] = os.environ) -> HostShare | None:
    """Read this process's share, and let later processes leave a part of it alone.

    Parameters
    ----------
    part
        The part of the share that this process may take.
    variables
        The environment, in which launchers count ranks.

    Returns
    -------
    HostShare or None
        The share; None where the kernel does not report memory. Where the kernel refuses a file in
        memory, nothing is booked.
    """
    global _booking
    with _one_at_a_time():
        share = host_share(variables)
        if share is None:
            return None
        booking = {
            "process": os.getpid(),
            "job": _job(variables),
            "bytes": int(part * share.share_bytes),
            "held_bytes": _own_bytes(Path("/proc/self")),
        }
        # Closed in programs that this one starts. A forked child keeps it, and is told by its
        # number from the process that booked.
        with suppress(OSError):
            if _booking is None or _booking[0] != os.getpid():
                _booking = os.getpid(), os.memfd_create(_NAME, os.MFD_CLOEXEC)
            os.pwrite(_booking[1], json.dumps(booking).encode().ljust(_MOST_BYTES), 0)
    return share


def bookings(job: str = "", root: Path = Path("/")) -> Iterator[Booking]:
    """What other processes of this user may still take; ranks of `job` are left out."""
    with suppress(OSError):
        for entry in os.scandir(root / "proc"):
            if not entry.name.isdecimal() or int(entry.name) == os.getpid():
                continue
            # The process may end meanwhile, or be closed to others.
            with suppress(OSError, ValueError, KeyError, TypeError):
                if entry.stat().st_uid == os.getuid():
                    yield from _bookings_of(Path(entry.path), job)


def _bookings_of(process: Path, job: str) -> Iterator[Booking]:
    for file in (process / "fd").iterdir():
        # The kernel shows it as "/memfd:umem-host-memory (deleted)".
        if _NAME not in os.readlink(file):
            continue
        booked = json.loads(file.read_text())
        if booked["process"] == int(process.name) and (not job or booked["job"] != job):
            # Its own memory has grown by what it has taken, above all.
            taken_bytes = max(_own_bytes(process) - booked["held_bytes"], 0)
            yield Booking(booked["process"], max(booked["bytes"] - taken_bytes, 0))


def _job(variables: Mapping[str, str]) -> str:
    """What the ranks of a job have in common; "" for a process that is alone."""
    ranks, _ = local_ranks(variables)
    return "" if ranks == 1 else " ".join(variables.get(name, "-") for name in _JOB)


def _own_bytes(process: Path) -> int:
    """Memory of a process that is no file's; page-locked memory is part of it."""
    status = re.search(r"^RssAnon:\s*(\d+) kB$", (process / "status").read_text(), re.MULTILINE)
    return int(status.group(1)) * 1024 if status else 0


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Keep other processes from booking meanwhile, where a folder can be locked.

    Locking changes nothing in it, so that it may be read-only. A lock that somebody else holds for
    long is passed over: a booking at the same time is better than a program that hangs.
    """
    try:
        import fcntl

        folder = os.open(_LOCK_FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (ImportError, OSError):  # the module is missing on Windows
        yield
        return
    try:
        end_s = time.monotonic() + _LOCK_TIMEOUT_S
        while time.monotonic() < end_s:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_LOCK_POLL_S)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(folder)
