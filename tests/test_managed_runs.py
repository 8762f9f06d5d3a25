"""What umem managed is known after model and optimizer are gone; the last lines of `umem run`."""

from __future__ import annotations

import io
import os
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from umem.cli.run_end import end_lines
from umem.cli.top import view
from umem.core.classes import TensorClass
from umem.runtime import managed_runs as module
from umem.runtime.copies import CopyCounts
from umem.runtime.managed_runs import ManagedRun, managed_runs, new_run


@pytest.fixture(autouse=True)
def no_other_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_runs", type(module._runs)(maxlen=4))
    monkeypatch.setattr("umem.cli.run_end.copy_counts", CopyCounts())


def test_only_steps_under_the_present_plan_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([1.0, 2.0, 10.0, 12.0, 15.0, 100.0, 101.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    run = new_run(torch.nn.Linear(1, 1), "step", lambda: 3)
    run.ends(None, is_planned=False)
    run.ends(1.5, is_planned=True)  # the first with this plan: it may have moved state
    assert run.measured_s is None
    for _ in range(3):
        run.ends(1.5, is_planned=True)
    assert run.measured_s == pytest.approx(2.5)
    run.ends(0.5, is_planned=True)
    assert (run.measured_s, run.predicted_s) == (None, 0.5)
    assert (run.count, run.planned) == (6, 5)


def test_the_last_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert end_lines() == []
    run = new_run(torch.nn.Linear(1, 1), "step", lambda: 0)
    new_run(torch.nn.Linear(1, 1), "step", lambda: None)  # it made no step
    assert end_lines() == []
    now = iter(range(10))
    monkeypatch.setattr("time.perf_counter", lambda: next(now) * 0.5)
    for _ in range(5):
        run.ends(0.4, is_planned=True)
    assert end_lines() == [
        "5 steps of Linear, 5 of them under a plan",
        "2 steps/s, 0.5 s each; 0.4 s predicted",
        "nothing was copied",
    ]
    counts = CopyCounts()
    for direction, mib in (("to_device", 3), ("to_host", 2)):
        with counts.counted(direction, TensorClass.OPTIMIZER_STATE, mib << 20, None):  # type: ignore[arg-type]
            pass
    monkeypatch.setattr("umem.cli.run_end.copy_counts", counts)
    assert end_lines()[2] == (
        "copied to the device and to the host: optimizer state 3 MiB and 2 MiB"
    )


def test_steps_whose_memory_had_to_be_made_free(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waited = iter([0.0, 1.0, 2.0, 3.0]), iter([5.0, 5.25, 5.5])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    monkeypatch.setattr(module, "_waits_so_far_s", lambda: next(waited))
    run = new_run(torch.nn.Linear(1, 1), "step", lambda: 0)
    run.ends(0.4, is_planned=True)  # the first with this plan: what it waits for does not count
    assert run.waited_s is None
    for _ in range(3):
        run.ends(0.4, is_planned=True)
    assert run.waited_s == pytest.approx(0.25)
    assert end_lines()[2] == (
        "0.25 s of each step went to memory that had to be made free or put together first: a "
        "larger budget needs less of that"
    )


@pytest.mark.parametrize(
    ("own_gib", "whose", "rest"),
    [
        (7.5, "this process has 7.5 GiB of GPU 0 in use", " and libraries"),
        (None, "GPU 0 has 7.75 GiB more in use than before", ", libraries, and other processes"),
    ],
)
@pytest.mark.parametrize(
    ("free_gib", "managed_bytes", "says"),
    [(71.25, 0, True), (None, 0, False), (71.25, 1, False)],
)
def test_the_last_line_is_what_nvml_shows(
    monkeypatch: pytest.MonkeyPatch,
    free_gib: float | None,
    managed_bytes: int,
    says: bool,
    own_gib: float | None,
    whose: str,
    rest: str,
) -> None:
    """Beside the budget; pages that have left stay in NVML's count."""
    gib = 1 << 30
    kinds = {"device": 7 * gib, "managed": managed_bytes}
    state = SimpleNamespace(
        allocator=SimpleNamespace(
            kind_stats=lambda _: {name: {"reserved_bytes": it} for name, it in kinds.items()}
        ),
        device_budgets=(8 * gib,),
        capabilities=(SimpleNamespace(free_bytes=79 * gib, integrated=False),),
    )
    monkeypatch.setattr("umem.cli.run_end.is_enabled", lambda: True)
    monkeypatch.setattr("umem.cli.run_end.runtime", lambda: state)
    monkeypatch.setattr("umem.cli.run_end.device_pci_address", str)
    free_bytes = None if free_gib is None else int(free_gib * gib)
    monkeypatch.setattr("umem.cli.run_end.detect", lambda _: SimpleNamespace(free_bytes=free_bytes))
    processes = {1: gib} | ({} if own_gib is None else {os.getpid(): int(own_gib * gib)})
    monkeypatch.setattr("umem.cli.run_end.nvml_process_bytes", lambda _: processes)
    new_run(torch.nn.Linear(1, 1), "step", lambda: 0).ends(None, is_planned=False)
    line = f"NVML: {whose}: umem 7 GiB, of a budget of 8 GiB; the rest is CUDA's context{rest}"
    assert end_lines()[3:] == [line] * says


def test_runs_are_known_without_their_model() -> None:
    new_run(torch.nn.Linear(1, 1), "call", lambda: None).ends(None, is_planned=True)
    assert [(it.model, it.unit, it.count) for it in managed_runs()] == [("Linear", "call", 1)]
    assert isinstance(managed_runs()[0], ManagedRun)


def test_the_view_shows_each_class_and_the_link() -> None:
    gib = 1 << 30
    kinds = {
        "device": {"reserved_bytes": 60 * gib, "spilled_bytes": 0},
        "pinned": {"reserved_bytes": 30 * gib, "spilled_bytes": 2 * gib},
    }
    figures = {
        "pid": 7,
        "program": ["train.py", "--name", "[bold]"],
        "umem": "0",
        "policy": "sft",
        "not_in_use": None,
        "uptime_s": 3.0,
        "devices": [
            {
                "number": 0,
                "name": "NVIDIA H100",
                "total_bytes": 80 * gib,
                "budget_bytes": 76 * gib,
                "kinds": kinds,
                "classes": {"optimizer_state": {"device": 22 * gib, "pinned": 28 * gib}},
            }
        ],
        "link_bytes_per_s": {"to_device": 50e9, "to_host": 50e9},
        "copied": [{"direction": "to_device", "class": "optimizer_state", "bytes": 40_000_000_000}],
        "runs": [
            {
                "model": "Llama",
                "unit": "step",
                "count": 12,
                "planned": 8,
                "predicted_s": 1.36,
                "measured_s": 1.44,
                "late": 1,
            }
        ],
    }
    before = figures | {
        "copied": [{"direction": "to_device", "class": "optimizer_state", "bytes": 20_000_000_000}]
    }
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(view(figures, before, 1.0))
    print(console.export_text(clear=False))
    words = " ".join(console.export_text().split())
    assert "train.py --name [bold]" in words
    assert "60 GiB of 76 GiB, 30 GiB page-locked on the host (2 GiB of it" in words
    assert "optimizer state 22 GiB 28 GiB 0 B" in words
    assert "to device 37.25 GiB 20.0 GB/s 40 %" in words
    assert "Llama 12 8 1.44 s 1.36 s 1" in words
