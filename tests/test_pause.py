"""A paused GPU: what it gives back, what comes back, and the errors, over host memory."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cards import H200
from managed_training import BEFORE_PLANNED, Training

import umem
from umem.core.classes import TensorClass
from umem.core.schedule import HintOp
from umem.hardware.host_share import HostShare, host_share
from umem.pages import ManagerState
from umem.policy import load_policy
from umem.runtime import state
from umem.runtime.classification import Classifier, gradient_hook
from umem.runtime.native_library import native
from umem.swap import resolve_for

MIB = 1 << 20
GPUS = 2
CARD_BYTES = 192 * MIB
"""Of both GPUs together, which is how one of them takes what the other one gave back."""

PINNED_BYTES = 128 * MIB
"""Cap on page-locked memory."""

TABLE_BYTES = 48 * MIB
PAGED = TensorClass.ACTIVATIONS
"""The class in managed memory. All others are in plain device memory."""


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Any:
    """umem as it is enabled, over host memory that is mapped as that of GPUs is."""
    library, policy = native(), load_policy("sft")
    settings = [library.ClassSetting("device")] * len(TensorClass)
    settings[PAGED.number] = library.ClassSetting("managed")
    config = library.Config(settings, pinned_limit_bytes=PINNED_BYTES)
    made = library.Allocator.on_host(config, CARD_BYTES, GPUS, expandable=True)
    resolved = resolve_for(policy, [H200])[0]
    classifier = Classifier(made, gradient_hook(made))
    budgets = (None,) * GPUS
    runtime = state.Runtime(policy, resolved, budgets, (H200,) * GPUS, made, classifier, 0.85)
    monkeypatch.setattr(state, "_runtime", runtime)
    return made


class Table:
    """A tensor of the allocator with contents that a lost or moved page would change."""

    def __init__(self, allocator: Any, size_bytes: int, device: int = 0) -> None:
        self.allocator, self.device = allocator, device
        self.address = allocator.malloc(size_bytes, device)
        buffer = (ctypes.c_char * size_bytes).from_address(self.address)
        self.tensor = torch.frombuffer(buffer, dtype=torch.int64)
        self.expected = torch.arange(len(self.tensor)) * 2654435761 + self.address
        self.tensor.copy_(self.expected)

    def is_intact(self) -> bool:
        return torch.equal(self.tensor, self.expected)

    def free(self) -> None:
        self.allocator.free(self.address, self.device)


@pytest.mark.slow
def test_contents_and_addresses_come_back(allocator: Any) -> None:
    tables = [Table(allocator, size) for size in (TABLE_BYTES, 1000, 3 * MIB)]
    for _ in range(2):
        report = umem.pause(0)
        assert report == umem.PausedMemory(
            returned_bytes=58 * MIB, kept_bytes=0, evicted_bytes=0, host_bytes=51 * MIB + 1024
        )
        umem.resume(0)
        assert all(table.is_intact() for table in tables)


@pytest.mark.slow
def test_statistics_tell_of_the_pause(allocator: Any) -> None:
    Table(allocator, TABLE_BYTES)
    before = umem.memory_summary(0)
    assert "reserved 48 MiB" in before
    lines = before.splitlines()
    assert [line.split()[0] for line in lines[4:-4]] == list(TensorClass)
    assert len({len(line) for line in lines[1:-1]}) == 1
    with umem.paused(0):
        assert allocator.is_paused(0)
        stats = allocator.stats(0)
        assert stats["allocated_bytes"]["all"]["current"] == TABLE_BYTES
        assert stats["reserved_bytes"]["all"]["current"] == 0
        summary = umem.memory_summary(0)
        assert "reserved 0 B" in summary
        assert "umem.resume()" in summary
    assert not allocator.is_paused(0)
    assert umem.memory_summary(0) == before


def test_calls_come_in_turns(allocator: Any) -> None:
    with pytest.raises(umem.PauseError, match=r"umem\.pause\(\) before"):
        umem.resume(0)
    umem.pause(0)
    with pytest.raises(umem.PauseError, match=r"umem\.resume\(\) before"):
        umem.pause(0)
    umem.pause(1)  # each GPU by itself
    umem.resume(0)
    umem.resume(1)


def test_allocations_name_the_remedy(allocator: Any) -> None:
    umem.pause(0)
    with pytest.raises(RuntimeError, match=r"GPU 0 is paused .* umem\.resume\(\)") as caught:
        allocator.malloc(100)
    assert "out of memory" not in str(caught.value)  # a smaller batch is no remedy
    Table(allocator, MIB, device=1).free()
    umem.resume(0)
    assert Table(allocator, MIB).is_intact()


@pytest.mark.slow
def test_without_room_the_gpu_stays_paused(allocator: Any) -> None:
    table, freed = Table(allocator, TABLE_BYTES), Table(allocator, 40 * MIB)
    umem.pause(0)
    freed.free()
    others = [Table(allocator, TABLE_BYTES, device=1) for _ in range(4)]
    for _ in range(2):
        with pytest.raises(umem.PauseError, match=r"48\.00 MiB .*stays paused"):
            umem.resume(0)
        assert allocator.is_paused(0)
    others.pop().free()
    allocator.empty_cache()
    umem.resume(0)
    assert table.is_intact()
    assert all(other.is_intact() for other in others)


@pytest.mark.slow
def test_the_host_must_have_the_memory(
    allocator: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    table = Table(allocator, TABLE_BYTES)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 99999 kB\nMemAvailable: 9999 kB\n")
    monkeypatch.setattr("umem.pausing.host_share", lambda: host_share({}, tmp_path))
    with pytest.raises(umem.PauseError, match=r"48\.00 MiB of host memory"):
        umem.pause(0)
    assert not allocator.is_paused(0)
    assert table.is_intact()


@pytest.mark.slow
def test_what_other_ranks_took_counts_once(allocator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of eight ranks pauses too: the others' copies are in host memory already."""
    table, other = Table(allocator, TABLE_BYTES), Table(allocator, TABLE_BYTES, device=1)
    left_bytes = 2 * TABLE_BYTES
    monkeypatch.setattr(
        "umem.pausing.host_share", lambda: HostShare(left_bytes, 8, "RANKS", 1 << 40)
    )
    assert umem.pause(0).host_bytes == TABLE_BYTES
    left_bytes -= TABLE_BYTES
    assert umem.pause(1).host_bytes == TABLE_BYTES
    umem.resume(0)
    umem.resume(1)
    assert table.is_intact()
    assert other.is_intact()
    left_bytes = TABLE_BYTES - 1
    with pytest.raises(umem.PauseError, match="host memory"):
        umem.pause(0)


@pytest.mark.slow
def test_a_rank_takes_its_own_part_at_most(allocator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [Table(allocator, TABLE_BYTES) for _ in range(3)]  # more than the cap
    monkeypatch.setattr("umem.pausing.host_share", lambda: HostShare(1 << 30, 8, "RANKS", 1 << 40))
    with pytest.raises(umem.PauseError, match="host memory"):
        umem.pause(0)
    monkeypatch.setattr("umem.pausing.host_share", lambda: HostShare(2 << 30, 8, "RANKS", 1 << 40))
    umem.pause(0)
    umem.resume(0)
    assert all(it.is_intact() for it in tables)


def test_no_capture_is_broken(allocator: Any) -> None:
    allocator.begin_pool(0, (0, 1))
    with pytest.raises(umem.PauseError, match="captured"):
        umem.pause(0)
    allocator.end_pool(0, (0, 1))
    of_graph = Table(allocator, MIB)
    umem.pause(0)
    umem.resume(0)
    assert of_graph.is_intact()


def test_managed_memory_leaves_the_card(allocator: Any) -> None:
    with allocator.class_override(PAGED.number):
        table = Table(allocator, 20 * MIB)
    report = umem.pause(0)
    assert (report.returned_bytes, report.evicted_bytes) == (0, 20 * MIB)
    assert table.is_intact()  # the pages are on the host
    umem.resume(0)


@pytest.mark.slow
def test_hints_end_before_the_memory_goes(allocator: Any) -> None:
    """A hint that is carried out behind the pause would bring pages back to the card."""
    training = Training()
    manager = training.manage("lookahead", "40MiB", bytes_per_s=400e6)
    engine = manager.engine
    tickets = [engine.submit(HintOp.PREFETCH, (1 << 40) + n * 8 * MIB, 8 * MIB) for n in range(4)]
    assert engine.statistics().open_requests
    with umem.paused(0):
        assert engine.statistics().open_requests == 0
        assert all(engine.wait(ticket, timeout_s=0) == "done" for ticket in tickets)
    manager.close()


def test_buffers_go_before_the_memory_goes(allocator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        "umem.pausing.let_go", lambda device: seen.append((device, allocator.is_paused(0)))
    )
    with umem.paused(0), pytest.raises(umem.PauseError):
        umem.pause(0)  # now nothing may touch the memory
    assert seen == [(torch.device("cuda", 0), False)]


@pytest.mark.slow
def test_two_trainings_pause_between_their_steps(allocator: Any) -> None:
    """Hints of both end before, and both go on exactly behind it."""
    trainings, stock = [Training(), Training()], [Training(), Training()]
    managers = [
        it.manage("lookahead", "40MiB", bytes_per_s=bytes_per_s)
        for it, bytes_per_s in zip(trainings, (4e9, 100e6), strict=True)
    ]
    table = Table(allocator, TABLE_BYTES)
    for _ in range(2):
        for it in (*trainings, *stock):
            it.steps(BEFORE_PLANNED)
        for manager in managers:
            for number in range(4):
                manager.engine.submit(HintOp.PREFETCH, (1 << 40) + number * 8 * MIB, 8 * MIB)
        assert managers[1].engine.statistics().open_requests
        with umem.paused(0) as report:
            assert [it.engine.statistics().open_requests for it in managers] == [0, 0]
            assert report.host_bytes == TABLE_BYTES
        assert table.is_intact()
    for training, its, manager in zip(trainings, stock, managers, strict=True):
        training.step()
        its.step()
        assert manager.status().state is ManagerState.RUNNING
        assert training.equals(its)
        manager.close()


ENDING = """
import os, sys, umem
from umem.runtime.native_library import native

library = native()
config = library.Config([library.ClassSetting("device")] * 6)
allocator = library.Allocator.on_host(config, expandable=True)
kept, freed = allocator.malloc(20 << 20), allocator.malloc(30 << 20)
allocator.pause(0, 1 << 40)
child = os.fork()
allocator.free(freed)  # in both
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.slow
def test_a_process_may_fork_and_end_while_paused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_umem_must_be_enabled() -> None:
    for call in (umem.pause, umem.resume):
        with pytest.raises(umem.EnableError):
            call(0)
