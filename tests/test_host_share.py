"""A process's share of host memory, among the ranks of its job."""

from __future__ import annotations

import json
import multiprocessing
import os
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from umem.hardware import host_share
from umem.hardware.host_memory import PINNED_SHARE, HostMemory
from umem.hardware.host_share import local_ranks
from umem.runtime.native_library import native

MIB = 1 << 20
HOST_BYTES = 400 * MIB
RANKS = 8


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (1, "")),
        ({"LOCAL_WORLD_SIZE": "8"}, (8, "LOCAL_WORLD_SIZE")),
        ({"LOCAL_WORLD_SIZE": "0"}, (1, "LOCAL_WORLD_SIZE")),
        ({"LOCAL_WORLD_SIZE": "x"}, (1, "")),
        ({"LOCAL_WORLD_SIZE": "12345678"}, (1, "")),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, (4, "OMPI_COMM_WORLD_LOCAL_SIZE")),
        ({"SLURM_STEP_TASKS_PER_NODE": "2"}, (2, "SLURM_STEP_TASKS_PER_NODE")),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}, (4, "SLURM_STEP_TASKS_PER_NODE")),
        ({"SLURM_STEP_TASKS_PER_NODE": "3,4(x12)"}, (4, "SLURM_STEP_TASKS_PER_NODE")),
        # torchrun under srun: a task of SLURM's starts the ranks.
        (
            {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "LOCAL_WORLD_SIZE": "8"},
            (8, "LOCAL_WORLD_SIZE"),
        ),
    ],
)
def test_ranks_by_launcher(variables: dict[str, str], expected: tuple[int, str]) -> None:
    assert local_ranks(variables) == expected


# ---- several processes ----


def _read_host(_root: Path = Path("/")) -> HostMemory:
    """A host whose memory is in a file, which processes change as they take it."""
    available_bytes = int(Path(os.environ["TEST_HOST"]).read_text())
    return HostMemory(HOST_BYTES, available_bytes, limit=None)


def _take_all(number: int, barrier: Barrier, folder: Path, variables: dict[str, str]) -> None:
    """Take page-locked memory from the allocator until its cap refuses more."""
    os.environ.update(variables, TEST_HOST=str(folder / "host"))
    setattr(host_share, "host_memory", _read_host)  # noqa: B010
    share = host_share.host_share()
    assert share is not None
    config = native().Config(
        [native().ClassSetting("pinned")] * 6,
        pinned_limit_bytes=int(PINNED_SHARE * share.share_bytes),
    )
    allocator = native().Allocator.on_host(config)
    barrier.wait()
    taken_bytes = 0
    while True:
        try:
            allocator.malloc(2 * MIB)
        except MemoryError:
            break
        taken_bytes += 2 * MIB
    barrier.wait()
    (folder / f"{number}.json").write_text(json.dumps([share.share_bytes, taken_bytes]))


def _run(folder: Path, count: int, variables: dict[str, str]) -> list[list[int]]:
    (folder / "host").write_text(str(HOST_BYTES))
    spawning = multiprocessing.get_context("spawn")
    barrier = spawning.Barrier(count)
    processes = [
        spawning.Process(target=_take_all, args=(number, barrier, folder, variables))
        for number in range(count)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * count
    return [json.loads((folder / f"{number}.json").read_text()) for number in range(count)]


@pytest.mark.slow
def test_eight_ranks_take_equal_shares_of_a_host(tmp_path: Path) -> None:
    found = _run(tmp_path, RANKS, {"LOCAL_WORLD_SIZE": str(RANKS), "MASTER_PORT": "29511"})
    assert [share for share, _ in found] == [HOST_BYTES // RANKS] * RANKS
    taken = [taken for _, taken in found]
    assert len(set(taken)) == 1
    assert 0.8 * HOST_BYTES < sum(taken) <= PINNED_SHARE * HOST_BYTES
