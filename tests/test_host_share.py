"""A process's share of host memory, among the ranks of its job."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from queue import Queue
from subprocess import PIPE
from typing import Any

import pytest

from umem.hardware import host_share
from umem.hardware.host_memory import PINNED_SHARE, HostMemory
from umem.hardware.host_share import local_ranks
from umem.runtime import live_socket
from umem.runtime.host_room import divide_host
from umem.runtime.live_socket import serve
from umem.runtime.native_library import native

MIB = 1 << 20
HOST_BYTES = 400 * MIB
RANKS = 4


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
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "LOCAL_WORLD_SIZE": "8"}, (8, "LOCAL_WORLD_SIZE")),
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


def _take_in_turns(number: int, barrier: Barrier, folder: Path, variables: dict[str, str]) -> None:
    """Take page-locked memory, beside others that begin at any moment, until the cap refuses more.

    No launcher tells how many there are.
    """
    os.environ.update(variables, TEST_HOST=str(folder / "host"), XDG_RUNTIME_DIR=str(folder))
    for name in host_share.RANK_COUNTS:
        os.environ.pop(name, None)
    setattr(host_share, "host_memory", _read_host)  # noqa: B010
    config = native().Config([native().ClassSetting("pinned")] * 6, pinned_limit_bytes=1)
    allocator = native().Allocator.on_host(config)
    taken_bytes = 0
    if number % 2:  # the others have taken a quarter of the host
        barrier.wait()
    serve(dict, partial(divide_host, allocator, PINNED_SHARE))
    if number % 2 == 0:
        taken_bytes += _take(allocator, folder, HOST_BYTES // RANKS // 2)
        barrier.wait()
    barrier.wait()  # all have begun
    taken_bytes += _take(allocator, folder, HOST_BYTES)
    barrier.wait()
    (folder / f"{number}.json").write_text(json.dumps([allocator.pinned_room_bytes(), taken_bytes]))


def _take(allocator: Any, folder: Path, most_bytes: int) -> int:
    """Take memory until the cap refuses more, and note it as the kernel does.

    Returns the bytes that the allocator has locked for it.
    """

    def locked_bytes() -> int:
        return int(allocator.kind_stats(0)["pinned"]["reserved_bytes"])

    first_bytes = locked_bytes()
    while (taken_bytes := locked_bytes() - first_bytes) < most_bytes:
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            before_bytes = locked_bytes()
            try:
                allocator.malloc(2 * MIB)
            except MemoryError:
                return taken_bytes
            host = folder / "host"
            host.write_text(str(int(host.read_text()) - locked_bytes() + before_bytes))
    return taken_bytes


def _run(
    folder: Path, count: int, variables: dict[str, str], take: Callable[..., None] = _take_all
) -> list[list[int]]:
    (folder / "host").write_text(str(HOST_BYTES))
    spawning = multiprocessing.get_context("spawn")
    barrier = spawning.Barrier(count)
    processes = [
        spawning.Process(target=take, args=(number, barrier, folder, variables))
        for number in range(count)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * count
    return [json.loads((folder / f"{number}.json").read_text()) for number in range(count)]


@pytest.mark.slow
def test_ranks_take_equal_shares_of_a_host(tmp_path: Path) -> None:
    found = _run(tmp_path, RANKS, {"LOCAL_WORLD_SIZE": str(RANKS), "MASTER_PORT": "29511"})
    assert [share for share, _ in found] == [HOST_BYTES // RANKS] * RANKS
    taken = [taken for _, taken in found]
    assert len(set(taken)) == 1
    assert 0.8 * HOST_BYTES < sum(taken) <= PINNED_SHARE * HOST_BYTES


@pytest.mark.slow
def test_processes_that_see_each_other_do_not_over_book_a_host(tmp_path: Path) -> None:
    found = _run(tmp_path, RANKS, {}, _take_in_turns)
    taken = [taken for _, taken in found]
    assert min(taken) > 0
    assert 0.5 * HOST_BYTES < sum(taken) <= PINNED_SHARE * HOST_BYTES
    # What the cap still leaves to all of them is there.
    left_bytes = int((tmp_path / "host").read_text())
    assert left_bytes == HOST_BYTES - sum(taken)
    assert sum(room for room, _ in found) <= left_bytes


def test_a_process_that_begins_or_ends_moves_the_others_caps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    counts: Queue[int] = Queue()
    monkeypatch.setattr(live_socket, "_serves", False)
    serve(dict, counts.put)
    assert counts.get(timeout=10) == 1
    script = "from umem.runtime.live_socket import serve; serve(dict); print('on', flush=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{script}; input()"], stdin=PIPE, stdout=PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "on\n"
    assert counts.get(timeout=30) == 2
    process.communicate("\n")
    assert counts.get(timeout=30) == 1


def test_seen_processes_count_where_no_launcher_tells() -> None:
    def ranks(variables: dict[str, str], processes: int) -> int:
        share = host_share.host_share(variables, processes=processes)
        assert share is not None
        return share.ranks

    assert ranks({}, 3) == 3
    assert ranks({}, 0) == 1
    assert ranks({"LOCAL_WORLD_SIZE": "2"}, 3) == 2
