"""Runs the training benchmark: one process after the other, within a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

from umem.core.units import format_bytes
from umem_bench.card import Card
from umem_bench.compile_planner import compile_planner
from umem_bench.machine import header
from umem_bench.results import (
    BUDGETED,
    VARIANTS,
    Method,
    Run,
    TrainingResult,
    TrainingSettings,
    Variant,
    WorkloadName,
    median,
)
from umem_bench.rows import ask_worker, continued, require_gpu, run_missing, why_no_time
from umem_bench.training.measure import measure
from umem_bench.training.tables import working_set_bytes
from umem_bench.training.variants import TrainingJob, plans_pages

__all__ = [
    "MANAGED_BYTES",
    "Cell",
    "cells",
    "run_training",
]

MANAGED_BYTES = 16 << 30
"""Managed memory of a process, at most: one process runs at a time."""


Cell = tuple[WorkloadName, Method, Variant, float | None]
"""Workload, method, variant, and budget in percent: what one process measures."""


def cells(settings: TrainingSettings) -> list[Cell]:
    """All that a run measures, in the order in which it goes.

    Stock comes first, for budgets are shares of its peak, and once more at the end, where asked
    for: the difference is the machine's drift. Adapters have next to no optimizer state that could
    be held on the host.
    """
    found: list[Cell] = []
    for workload in settings.workloads:
        for method in workload.methods:
            for variant in VARIANTS:
                if variant not in ("stock", *workload.variants):
                    continue
                if (variant, method) == ("umem-optimizer-host", "lora"):
                    continue
                budgets = workload.budgets_percent if variant in BUDGETED else (None,)
                found += [(workload.name, method, variant, percent) for percent in budgets]
    return sorted(found, key=lambda cell: cell[2] == "stock-again")


def run_training(
    settings: TrainingSettings,
    on_progress: Callable[[str], None],
    on_results: Callable[[Run], None] = lambda _: None,
    *,
    seconds_limit: float = 280.0,
    device: Literal["cuda", "cpu"] = "cuda",
    earlier: Run | None = None,
) -> Run:
    """Train with every variant and budget, each in a process of its own, never two at a time.

    A variant that fails, is not installed or does not fit the time leaves a result that says why.

    Processes that would not end within `seconds_limit` are left out. After each process
    `on_progress` gets a line and `on_results` the results so far. With `earlier` results of the
    same settings and machine, what they lack is run. On the CPU only the stock variant is
    measured, and without its memory.

    Raises
    ------
    UnsupportedError
        Where torch sees no GPU to train on.
    UmemError
        If the earlier results are of other settings, another machine or other versions.
    """
    if device == "cuda":
        require_gpu()
    begun = continued(earlier, Run(header("training", settings), ()))
    card = None if device == "cpu" else Card.find()
    end_s = time.monotonic() + seconds_limit

    def measure_one(
        cell: Cell, known: list[TrainingResult], tried: TrainingResult | None
    ) -> TrainingResult:
        result = _measure_cell(cell, settings, known, tried, end_s, card)
        on_progress(_line(result))
        return result

    earlier_results = {_cell_of(it): it for it in begun.trainings}
    return run_missing(begun, cells(settings), earlier_results, measure_one, on_results)


def _measure_cell(
    cell: Cell,
    settings: TrainingSettings,
    known: list[TrainingResult],
    tried: TrainingResult | None,
    end_s: float,
    card: Card | None,
) -> TrainingResult:
    """Measure one cell in a process of its own, unless there is a reason not to."""
    workload, method, variant, percent = cell
    told: dict[str, Any] = {
        "workload": workload,
        "method": method,
        "variant": variant,
        "budget_percent": percent,
    }
    left_s = end_s - time.monotonic()
    reason = why_no_time(variant, known, tried, left_s) or (card.why_not_idle() if card else "")
    if percent is not None:
        stock = (it for it in known if _cell_of(it) == (workload, method, "stock", None))
        stock_bytes = next((working_set_bytes(it) for it in stock), None)
        if stock_bytes is None:
            reason = "budgets are shares of the stock variant's peak, which was not measured"
        else:
            told["budget_bytes"] = int(percent / 100 * stock_bytes)
    if reason:
        return TrainingResult(**told, state="left out", reason=reason)
    if plans_pages(variant):
        compile_planner()
        left_s = end_s - time.monotonic()
    job = TrainingJob(
        model=settings.workload(workload).model,
        trainer_batches=settings.workload(workload).trainer_batches,
        method=method,
        variant=variant,
        budget_bytes=told.get("budget_bytes"),
        steps=settings.steps,
        deterministic=settings.deterministic,
        managed_limit_bytes=settings.managed_limit_bytes,
        device="cuda" if card else "cpu",
        card=card,
    )
    return TrainingResult(**told | ask_worker(measure, job, card, left_s, parts=2))


def _cell_of(result: TrainingResult) -> Cell:
    return result.workload, result.method, result.variant, result.budget_percent


def _line(result: TrainingResult) -> str:
    at = "" if result.budget_percent is None else f" at {result.budget_percent:g} %"
    of = f" of {format_bytes(result.budget_bytes)}" if result.budget_bytes else ""
    words = f"{result.workload}, {result.method}, {result.variant}{at}"
    step_s = median(result.steps_s)
    if step_s is None:
        return f"{words}: {result.state}: {result.reason}"
    lost = "; its plan was not running" if result.plan_running is False else ""
    return f"{words}{of}: {step_s * 1e3:.4g} ms a step, {result.process_s:.1f} s{lost}"
