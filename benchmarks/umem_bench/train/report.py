"""The results of `umem bench training` as tables."""

from __future__ import annotations

from collections.abc import Iterator

from umem.core.units import format_bytes
from umem_bench.report import Grid
from umem_bench.train.cells import (
    METHOD_WORDS,
    NOTHING,
    allocated_cell,
    batches,
    budget_cell,
    clock_cell,
    device_cell,
    fits_cell,
    losses_cell,
    predicted_cell,
    share_cell,
    speed_cell,
    step_cell,
)
from umem_bench.train.details import details
from umem_bench.train.figures import (
    FLOPS_FORMULA,
    fits,
    median_s,
    shown_of,
    step_flops,
    stock_of,
    tokens_per_s,
)
from umem_bench.train.results import (
    BUDGETED,
    VARIANTS,
    Method,
    Outcome,
    TrainingRun,
    Variant,
    Workload,
)
from umem_bench.train.targets import target_grid

__all__ = ["grids", "heading"]


def heading(run: TrainingRun) -> str:
    """One line that says where, when and with what a run was made."""
    machine, settings = run.machine, run.settings
    commit = f" ({run.git_commit})" if run.git_commit else ""
    versions = [f"{name} {version}" for name, version in run.packages.items() if version]
    counts = [f"{count / 1e6:,.0f} million parameters" for count in run.parameters.values()][:1]
    layers = settings.workloads[0].model.layers
    parts = [
        machine.gpu or machine.cpu,
        f"driver {machine.driver}" if machine.driver else "",
        f"CUDA {machine.cuda}" if machine.cuda else "",
        f"torch {machine.torch}" if machine.torch else "",
        f"rmm {machine.rmm}" if machine.rmm else "",
        *versions,
        f"umem {machine.umem}{commit}",
        " ".join(["a Llama of", *counts, f"in {layers} layers, bfloat16"]),
        "deterministic algorithms" if settings.deterministic else "",
        f"medians of {settings.steps} steps [minimum to maximum]",
        run.date,
        f"in {len(run.sittings)} sittings, the last {run.sittings[-1].date}"
        if len(run.sittings) > 1
        else "",
    ]
    return ", ".join(part for part in parts if part)


def grids(run: TrainingRun) -> Iterator[Grid]:
    """The tables: speeds by budget, what the workloads are, steps, targets, and details."""
    pairs = [
        (workload, method) for workload in run.settings.workloads for method in workload.methods
    ]
    for workload, method in pairs:
        if shown_of(run, workload.name, method):
            yield _speeds(run, workload, method)
    if grid := _intensities(run):
        yield grid
    for workload, method in pairs:
        if shown_of(run, workload.name, method):
            yield _steps(run, workload, method)
    if grid := _drift(run):
        yield grid
    if (held := target_grid(run)).rows:
        yield held
    yield from details(run)


def _title(run: TrainingRun, workload: Workload, method: Method) -> str:
    stock = stock_of(run, workload.name, method)
    whole = stock.peak_allocated_bytes if stock else None
    words = f", working set {format_bytes(whole)}" if whole else ""
    return f"{METHOD_WORDS[method]}, {batches(workload.model)}{words}"


def _speeds(run: TrainingRun, workload: Workload, method: Method) -> Grid:
    """One row for each variant, one column for each budget."""
    shown = shown_of(run, workload.name, method)
    rows = [
        (
            variant,
            _speed_without_budget(run, shown, variant),
            *(_speed(run, shown, variant, percent) for percent in workload.budgets_percent),
        )
        for variant in VARIANTS
        if any(it.variant == variant for it in shown)
    ]
    return Grid(
        f"{_title(run, workload, method)}: tokens/s (share of stock's) by device budget",
        ("variant", "told no budget", *(f"{it:g} %" for it in workload.budgets_percent)),
        tuple(rows),
    )


def _speed_without_budget(run: TrainingRun, shown: list[Outcome], variant: Variant) -> str:
    """Speed, and what is on the device; for variants that are told no budget."""
    if variant in BUDGETED:
        return NOTHING
    (outcome,) = (it for it in shown if it.variant == variant)
    on_device = device_cell(outcome)
    return f"{speed_cell(run, outcome)}, {'not counted' if on_device == NOTHING else on_device}"


def _speed(run: TrainingRun, shown: list[Outcome], variant: Variant, percent: float) -> str:
    for outcome in shown:
        if outcome.variant != variant:
            continue
        if variant in BUDGETED and outcome.budget_percent != percent:
            continue
        if outcome.state == "off" or fits(run, outcome, percent):
            return speed_cell(run, outcome)
        return "over its budget" if variant in BUDGETED else "does not fit"
    return NOTHING


def _intensities(run: TrainingRun) -> Grid | None:
    """How much is computed for each byte of the working set, and how fast stock does it."""
    rows = []
    for workload in run.settings.workloads:
        for method in workload.methods:
            stock = stock_of(run, workload.name, method)
            step_s = median_s(stock) if stock else None
            if stock is None or step_s is None:
                continue
            flops = step_flops(workload.model, method)
            whole_bytes, peak = stock.peak_allocated_bytes, run.device_flops_per_s
            rows.append(
                (
                    f"{workload.name}, {method}",
                    batches(workload.model),
                    f"{flops / 1e12:,.4g}",
                    format_bytes(whole_bytes) if whole_bytes else NOTHING,
                    f"{flops / whole_bytes:,.0f}" if whole_bytes else NOTHING,
                    f"{flops / step_s / 1e12:,.4g}",
                    f"{100 * flops / step_s / peak:.3g} %" if peak else NOTHING,
                )
            )
    if not rows:
        return None
    peak = run.device_flops_per_s
    of_peak = f"of {peak / 1e12:,.4g} TFLOP/s" if peak else "of the device's"
    return Grid(
        f"What is computed, everything resident. {FLOPS_FORMULA}",
        (
            "run",
            "what",
            "TFLOP a step",
            "working set",
            "FLOP per byte of it",
            "TFLOP/s of stock",
            of_peak,
        ),
        tuple(rows),
    )


def _drift(run: TrainingRun) -> Grid | None:
    """What a run in several sittings has of stock: what differs is the machine's drift."""
    rows = []
    for sitting in run.sittings:
        for again in sitting.stock:
            first = stock_of(run, again.workload, again.method)
            first_s, again_s = (median_s(it) if it else None for it in (first, again))
            if first is None or first_s is None:
                continue
            rows.append(
                (
                    f"{again.workload}, {again.method}",
                    first.date or run.date,
                    step_cell(first),
                    clock_cell(first),
                    again.date or sitting.date,
                    step_cell(again),
                    clock_cell(again),
                    f"{100 * (again_s / first_s - 1):+.1f} %" if again_s else NOTHING,
                )
            )
    if not rows:
        return None
    return Grid(
        "Stock in each sitting: what differs is the machine's drift",
        (
            "run",
            "first",
            "step, ms",
            "SM clock, MHz",
            "again",
            "step, ms",
            "SM clock, MHz",
            "difference",
        ),
        tuple(rows),
    )


def _steps(run: TrainingRun, workload: Workload, method: Method) -> Grid:
    rows = [
        (
            outcome.variant,
            budget_cell(outcome),
            allocated_cell(outcome),
            step_cell(outcome),
            clock_cell(outcome),
            f"{tokens_per_s(run, outcome) or 0:,.0f}" if outcome.steps_s else NOTHING,
            share_cell(run, outcome),
            device_cell(outcome),
            fits_cell(run, outcome),
            predicted_cell(outcome),
            losses_cell(run, outcome),
        )
        for outcome in shown_of(run, workload.name, method)
    ]
    return Grid(
        f"{_title(run, workload, method)}: a training step",
        (
            "variant",
            "budget",
            "allocated at most",
            "step, ms",
            "SM clock, MHz",
            "tokens/s",
            "of stock",
            "on the device at most",
            "fits the budgets, %",
            "predicted / lower bound, ms",
            "losses",
        ),
        tuple(rows),
    )
