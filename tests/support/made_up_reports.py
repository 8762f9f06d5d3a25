"""A prediction of one step, made up, for what shows it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from umem.core.classes import TensorClass
from umem.core.report import Cause, Direction, MigrationReport, Timeline, Traffic

GIB = 1 << 30
PHASES = 8
STEP_S = 0.4


def moved(direction: Direction, cause: Cause, size_bytes: int, count: int) -> Traffic:
    return Traffic(
        direction, cause, TensorClass.OPTIMIZER_STATE, size_bytes, size_bytes / 300e9, count
    )


def made_up_report(
    workload: str = "llama-2-7b-sft", planner: str = "planned", **changes: Any
) -> MigrationReport:
    start_s = np.arange(PHASES) * STEP_S / PHASES
    resident = np.zeros((PHASES, len(TensorClass)), np.int64)
    resident[:, TensorClass.WEIGHTS.number] = 12 * GIB
    resident[:, TensorClass.OPTIMIZER_STATE.number] = 40 * GIB
    resident[:, TensorClass.ACTIVATIONS.number] = np.arange(PHASES) * GIB
    report = MigrationReport(
        workload=workload,
        hardware="gh200-96",
        policy="sft",
        planner=planner,
        step_s=STEP_S,
        ideal_s=0.39,
        lower_bound_s=0.39,
        traffic=(
            moved("to_device", "hint", 4 * 10**9, 40),
            moved("to_host", "hint", 3 * 10**9, 20),
        ),
        memory_ops_s=0.1,
        memory_ops_bytes=7 * 10**9,
        memory_ops_count=40,
        fault_pages=0,
        fault_batches=0,
        hint_count=6,
        hints_late=1,
        hints_wasted=0,
        stall_s={"prefetch": 0.01},
        timeline=Timeline(
            phase_start_s=start_s,
            phase_end_s=start_s + STEP_S / PHASES,
            resident_bytes=resident,
            budget_bytes=60 * GIB,
        ),
    )
    return replace(report, **changes)
