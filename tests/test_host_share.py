"""A process's share of host memory: among the ranks of its job, and beside other jobs."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from umem.hardware import host_share
from umem.hardware.host_memory import PINNED_SHARE, HostMemory
from umem.hardware.host_share import Booking, HostShare, book, bookings, local_ranks
from umem.runtime.native_library import native

GIB, MIB = 1 << 30, 1 << 20
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


def test_what_others_may_take_is_subtracted_before_ranks_divide() -> None:
    others = (Booking(1, 30 * GIB), Booking(2, 10 * GIB))
    assert HostShare(100 * GIB, others, 4, "").share_bytes == 15 * GIB
    assert HostShare(30 * GIB, others, 4, "").share_bytes == 0


# ---- several processes ----


def _read_host(_root: Path = Path("/")) -> HostMemory:
    """A host whose memory is in a file, which processes change as they take it."""
    available_bytes = int(Path(os.environ["TEST_HOST"]).read_text())
    return HostMemory(HOST_BYTES, available_bytes, limit=None)


def _take_all(number: int, barrier: Barrier, folder: Path, variables: dict[str, str]) -> None:
    """Take page-locked memory from the allocator until its cap refuses more."""
    os.environ.update(variables, TEST_HOST=str(folder / "host"))
    setattr(host_share, "host_memory", _read_host)  # noqa: B010
    share = book(PINNED_SHARE)
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


@pytest.mark.slow
def test_eight_processes_of_no_launcher_do_not_over_book_a_host(tmp_path: Path) -> None:
    found = _run(tmp_path, RANKS, dict.fromkeys(host_share.RANK_COUNTS, ""))
    shares = sorted((share for share, _ in found), reverse=True)
    assert shares[0] == HOST_BYTES, "the first to come"
    # What their heaps grow by counts as taken of their bookings.
    assert (1 - PINNED_SHARE) * HOST_BYTES <= shares[1] < 0.3 * HOST_BYTES
    assert sum(taken for _, taken in found) <= HOST_BYTES


# ---- a booking, seen by another process ----


def _hold(connection: Any, variables: dict[str, str], forks: bool) -> None:
    """Book 100 MiB, then take 40 MiB when told to."""
    memory = HostMemory(GIB, 200 * MIB, limit=None)
    setattr(host_share, "host_memory", lambda *_: memory)  # noqa: B010
    book(0.5, {**dict.fromkeys(host_share.RANK_COUNTS, ""), **variables})
    child = os.fork() if forks else None
    if child == 0:
        connection.close()
        signal.pause()
    connection.send((os.getpid(), child))
    held = [connection.recv(), bytearray(b"1") * (40 * MIB)]
    connection.send(len(held[1]))
    connection.recv()


Holder = Callable[..., tuple[Any, int, int | None]]


@pytest.fixture
def holder() -> Iterator[Holder]:
    spawning = multiprocessing.get_context("spawn")
    processes = []

    def start(variables: dict[str, str] | None = None, forks: bool = False) -> Any:
        here, there = spawning.Pipe()
        process = spawning.Process(target=_hold, args=(there, variables or {}, forks))
        process.start()
        processes.append(process)
        pid, child = here.recv()
        return here, pid, child

    yield start
    for process in processes:
        process.kill()
        process.join()


def booked_by(process: int, job: str = "") -> list[int]:
    return [other.bytes for other in bookings(job) if other.process == process]


@pytest.mark.slow
def test_a_booking_shrinks_by_what_its_process_takes(holder: Holder) -> None:
    connection, process, _ = holder()
    (before,) = booked_by(process)
    assert 90 * MIB < before <= 100 * MIB
    connection.send("take")
    connection.recv()
    (after,) = booked_by(process)
    assert 35 * MIB < before - after < 60 * MIB


@pytest.mark.slow
def test_a_booking_ends_with_its_process_and_is_no_childs(holder: Holder) -> None:
    _, process, child = holder(forks=True)
    assert child is not None
    assert len(booked_by(process)) == 1
    assert booked_by(child) == []
    os.kill(process, 9)
    os.waitpid(process, 0)
    try:
        assert booked_by(process) == booked_by(child) == []
    finally:
        os.kill(child, 9)


@pytest.mark.slow
def test_ranks_of_one_job_do_not_count_each_other(
    holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29512"}
    _, process, _ = holder(job)

    def share(variables: dict[str, str]) -> list[int]:
        found = host_share.host_share(variables)
        assert found is not None
        return [other.process for other in found.others]

    assert process not in share(job)
    assert process in share({**job, "MASTER_PORT": "29513"})
    assert process in share({})


def test_where_the_kernel_refuses_files_in_memory_nothing_is_booked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError("seccomp")

    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr(host_share, "_booking", None)
    share = book(PINNED_SHARE)
    assert share is not None
    assert share.share_bytes > 0
    assert booked_by(os.getpid()) == []


@pytest.mark.parametrize("folder", ["/no/such/folder", "/proc"])
def test_a_folder_that_cannot_be_locked_is_passed_over(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_share, "_LOCK_FOLDER", folder)
    monkeypatch.setattr(host_share, "_booking", None)
    assert book(PINNED_SHARE) is not None
