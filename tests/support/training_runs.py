"""Runs of the training benchmark that nobody has made, for its tables and its picture.

The figures are made up; no machine has their GPU.
"""

from __future__ import annotations

from typing import Any

from machines import MADE_UP_MACHINE
from umem_bench.train.results import (
    METHODS,
    ManagerFigures,
    Method,
    Outcome,
    ProfiledStep,
    TrainingModel,
    TrainingRun,
    TrainingSettings,
    TransferTotal,
    Variant,
    Workload,
)

__all__ = ["GIB", "MANAGER", "PROFILE", "TINY", "made_up_run", "outcome", "settings"]

GIB = 1 << 30
TINY = TrainingModel(
    hidden=64,
    intermediate=128,
    layers=2,
    heads=4,
    vocabulary=256,
    batch=2,
    tokens=32,
    checkpoint=False,
    loss_chunk_tokens=16,
)


def settings(model: TrainingModel = TINY, **changes: Any) -> TrainingSettings:
    """Of one workload, ``long``; `changes` are of it or of the run."""
    workload: dict[str, Any] = {
        "name": "long",
        "model": model,
        "methods": METHODS,
        "variants": ("stock",),
        "budgets_percent": (100.0, 60.0, 30.0),
    }
    workload |= {name: changes.pop(name) for name in set(workload) & set(changes)}
    asked: dict[str, Any] = {
        "workloads": (Workload.model_validate(workload),),
        "steps": 3,
        "deterministic": False,
        "managed_limit_bytes": GIB,
        "seconds_limit": 300.0,
    }
    return TrainingSettings.model_validate(asked | changes)


def outcome(
    variant: Variant,
    step_s: float = 0.1,
    peak_bytes: int | None = 10 * GIB,
    method: Method = "sft",
    percent: float | None = None,
    **more: Any,
) -> Outcome:
    """A median step of a process; a variant that is told a budget is just within it."""
    budget_bytes = None if percent is None else int(percent / 100 * 10 * GIB)
    made: dict[str, Any] = {
        "workload": "long",
        "method": method,
        "variant": variant,
        "budget_percent": percent,
        "budget_bytes": budget_bytes,
        "resident_bytes": budget_bytes,
        "state": "measured",
        "steps_s": (step_s * 0.9, step_s, step_s * 1.2),
        "losses_hex": ((10.5).hex(), (10.25).hex()),
        "peak_allocated_bytes": peak_bytes,
        "process_s": 7.0,
    }
    return Outcome.model_validate(made | more)


PROFILE = ProfiledStep(
    step_s=0.25,
    um_time_share=0.5,
    um_ops_share=0.25,
    um_bytes_share=0.125,
    fault_batches=12,
    gpu_faults=3456,
    cpu_faults=0,
    fault_bytes=GIB // 2,
    transfers=(
        TransferTotal(
            direction="to_device", cause="hint", bytes=3 * GIB // 2, count=9, seconds=0.03
        ),
        TransferTotal(direction="to_device", cause="fault", bytes=GIB // 2, count=99, seconds=0.05),
        TransferTotal(direction="to_host", cause="hint", bytes=GIB, count=8, seconds=0.04),
    ),
    notes=(),
    predicted_bytes={"to_device": GIB, "to_host": GIB},
)
MANAGER = ManagerFigures(
    state="running",
    reason="",
    steps=17,
    diverged_steps=2,
    unplanned=0,
    wait_timeouts=0,
    corrections=1,
    wait_s=0.0015,
    predicted_step_s=0.19,
    predicted_ideal_s=0.1,
    predicted_bound_s=0.16,
)


def made_up_run(*outcomes: Outcome, **changes: Any) -> TrainingRun:
    """Of these outcomes, or of some."""
    return TrainingRun(
        date="2026-01-02T03:04:05+00:00",
        git_commit="0123456789ab",
        machine=MADE_UP_MACHINE,
        packages={"transformers": "5.0", "deepspeed": None},
        settings=settings(TrainingModel(batch=1, tokens=1000), **changes),
        parameters={"sft": 558_000_000},
        device_flops_per_s=660e12,
        outcomes=outcomes
        or (
            outcome("stock", sm_clock_mhz=1800.0),
            outcome(
                "umem-planned",
                0.2,
                percent=60.0,
                plan_running=True,
                manager=MANAGER,
                sm_clock_mhz=1755.5,
            ),
            outcome("umem-planned", 0.4, percent=30.0, plan_running=False, profile=PROFILE),
            outcome(
                "umem-optimizer-host", 0.3, optimizer_state_bytes=2 * GIB, mapped_bytes_per_s=16e9
            ),
            outcome(
                "umem-fault",
                percent=30.0,
                state="off",
                reason="phases[3] uses 8 GiB at once, and the device budget is 3 GiB",
                steps_s=(),
                losses_hex=(),
            ),
            outcome("save-on-cpu", 0.5, 6 * GIB),
            outcome("torchao-offload", 0.8, 7 * GIB, notes=("made up",)),
            outcome(
                "deepspeed-offload", steps_s=(), state="not installed", reason="no such package"
            ),
            outcome("rmm-pool", 0.125, None, profile=PROFILE),
        ),
        seconds=70.0,
    )
