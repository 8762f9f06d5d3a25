"""This process's share of host memory: the ranks of a job on one host divide what is available.

Their launcher says how many there are; else the processes that are seen divide it. What others may
still take is not known, and counts for nothing here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from umem.hardware.host_memory import PINNED_SHARE, HostMemory, host_memory

__all__ = ["RANK_COUNTS", "HostShare", "host_share", "local_ranks", "share_of"]

RANK_COUNTS = (
    "LOCAL_WORLD_SIZE",  # torchrun, accelerate, DeepSpeed
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",  # Intel MPI, MPICH
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "SLURM_STEP_TASKS_PER_NODE",  # srun: "4(x2),3" for nodes of 4, 4 and 3 tasks
)
"""Variables by which launchers say how many processes they started on a host, best first."""


@dataclass(frozen=True)
class HostShare:
    """Host memory for this process, and how it comes about."""

    available_bytes: int
    """:attr:`umem.hardware.host_memory.HostMemory.available_bytes`."""
    ranks: int
    """Processes of this job on this host, or those that are seen where nothing says so."""
    source: str
    """The variable that says so; "" where none does."""
    total_bytes: int
    """:attr:`umem.hardware.host_memory.HostMemory.total_bytes`."""

    @property
    def share_bytes(self) -> int:
        """What this process may take."""
        return self.available_bytes // self.ranks

    @property
    def left_bytes(self) -> int:
        """What this process may lock of what is left, where processes that are seen divide it.

        The rest of :data:`PINNED_SHARE` of the host is for everything else, however often they do.
        """
        left_bytes = self.available_bytes - (1.0 - PINNED_SHARE) * self.total_bytes
        return int(max(0.0, left_bytes) / self.ranks)


def local_ranks(variables: Mapping[str, str] = os.environ) -> tuple[int, str]:
    """Processes of this job on this host, and the variable that says so; (1, "") if none does."""
    for name in RANK_COUNTS:
        counts = re.findall(r"(?:^|,)([0-9]{1,6})(?=$|,|\()", variables.get(name, ""))
        if counts:
            # Which of the counts is this host's is not told: the largest is safe.
            return max(1, *map(int, counts)), name
    return 1, ""


def host_share(
    variables: Mapping[str, str] = os.environ, root: Path = Path("/"), processes: int = 1
) -> HostShare | None:
    """Read this process's share of host memory, as it is now; None where it is not reported.

    Launchers count ranks in the environment. `processes` are those that are seen, this one
    included, and count where no variable does. `root` is as for
    :func:`umem.hardware.host_memory.host_memory`.
    """
    memory = host_memory(root)
    return None if memory is None else share_of(memory, variables, processes)


def share_of(memory: HostMemory, variables: Mapping[str, str], processes: int) -> HostShare:
    """A process's share of a host's memory; the arguments are as for :func:`host_share`."""
    ranks, source = local_ranks(variables)
    ranks = ranks if source else max(1, processes)
    return HostShare(memory.available_bytes, ranks, source, memory.total_bytes)
