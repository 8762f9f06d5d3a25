"""The training benchmark's tables of details: bounds, predictions, migration, and what is not."""

from __future__ import annotations

from collections.abc import Iterator

from umem.core.units import format_bytes
from umem.telemetry.comparison import Difference, difference_words
from umem_bench.report import Grid
from umem_bench.train.cells import (
    NOTHING,
    budget_cell,
    clock_cell,
    device_cell,
    moved_cell,
    over_bound_cell,
    step_cell,
    subject_cell,
)
from umem_bench.train.figures import lower_bound_s, median_s, outcomes_of, stock_of, tokens_per_s
from umem_bench.train.results import METHODS, Outcome, TrainingRun, Variant, Workload

__all__ = ["details", "differences"]

_OFF_DEVICE: tuple[Variant, ...] = (
    "stock",
    "umem-optimizer-host",
    "torchao-offload",
    "deepspeed-offload",
    "save-on-cpu",
)
"""Rows of the table about an optimizer's state that is not on the device, and what is beside it.
That of bitsandbytes is on a device with room for it: every step prefetches it there, and only
another's need takes it away."""

_MAX_CLOCK_DIFFERENCE = 0.02
"""Of stock's SM clock: times under clocks farther apart differ by what the device did."""


def details(run: TrainingRun) -> Iterator[Grid]:
    """Tables that have rows."""
    for workload in run.settings.workloads:
        if grid := _optimizer_off_device(run, workload):
            yield grid
    ordered = [
        outcome
        for workload in run.settings.workloads
        for method in METHODS
        for outcome in outcomes_of(run, workload.name, method)
    ]
    tables = (
        _predictions(ordered),
        _managers(ordered),
        _migration(ordered),
        Grid("Notes", ("run", "budget", "note"), tuple(_notes(run, ordered))),
        _not_measured(ordered),
    )
    yield from (grid for grid in tables if grid.rows)


def _optimizer_off_device(run: TrainingRun, workload: Workload) -> Grid | None:
    own = [
        it
        for it in outcomes_of(run, workload.name, "sft")
        if it.variant in _OFF_DEVICE and it.state == "measured"
    ]
    rows: list[tuple[str, ...]] = [
        (
            outcome.variant,
            step_cell(outcome),
            f"{tokens_per_s(run, outcome) or 0:,.0f}",
            over_bound_cell(run, outcome),
            device_cell(outcome),
        )
        for outcome in own
    ]
    ours = next((it for it in own if it.mapped_bytes_per_s is not None), None)
    bound_s = lower_bound_s(run, workload.name)
    if ours is None or bound_s is None:
        return None
    assert ours.mapped_bytes_per_s is not None
    assert ours.optimizer_state_bytes is not None
    rows.append(("lower bound", f"{bound_s * 1e3:.4g}", NOTHING, "1.00x", NOTHING))
    return Grid(
        f"SFT ({workload.name}) with the optimizer's state off the device: "
        f"{format_bytes(ours.optimizer_state_bytes)}, used in place at "
        f"{ours.mapped_bytes_per_s / 1e9:.4g} GB/s, both ways together",
        ("variant", "step, ms", "tokens/s", "over the lower bound", "on the device at most"),
        tuple(rows),
    )


def _predictions(outcomes: list[Outcome]) -> Grid:
    """Steps against the median timed one, bytes against those of the profiled step."""
    rows = [
        (subject_cell(it), budget_cell(it), *difference_words(difference))
        for it in outcomes
        for difference in differences(it)
    ]
    return Grid(
        "Predicted by umem's plans, and measured; bytes are those of unified-memory transfers",
        ("run", "budget", "figure", "predicted", "measured", "difference", "relative"),
        tuple(rows),
    )


def differences(outcome: Outcome) -> Iterator[Difference]:
    """What umem predicted of a step, beside what was measured."""
    manager, profile, step_s = outcome.manager, outcome.profile, median_s(outcome)
    if manager and manager.predicted_step_s is not None and step_s is not None:
        yield Difference("step_s", manager.predicted_step_s, step_s)
    if profile and profile.predicted_bytes is not None and not profile.is_lower_bound:
        for direction, predicted in profile.predicted_bytes.items():
            yield Difference(direction, predicted, profile.moved_bytes(direction))
    elif (hinted := outcome.hinted) and hinted.predicted_bytes is not None:
        for direction, predicted in hinted.predicted_bytes.items():
            yield Difference(f"hinted_{direction}", predicted, hinted.moved_bytes[direction])


def _managers(outcomes: list[Outcome]) -> Grid:
    rows = [
        (
            subject_cell(outcome),
            budget_cell(outcome),
            manager.state,
            f"{manager.steps:,}",
            f"{manager.corrections}",
            f"{manager.wait_s * 1e3:.3g}",
            device_cell(outcome),
        )
        for outcome in outcomes
        if (manager := outcome.manager)
    ]
    return Grid(
        "What umem's manager said after the timed steps",
        (
            "run",
            "budget",
            "state",
            "planned steps so far",
            "corrections",
            "the thread's waits in a step, ms",
            "on the device at most",
        ),
        tuple(rows),
    )


def _migration(outcomes: list[Outcome]) -> Grid:
    rows = [
        (
            subject_cell(outcome) + (" (lower bounds)" if step.is_lower_bound else ""),
            budget_cell(outcome),
            f"{step.step_s * 1e3:.4g}",
            " / ".join(
                "?" if share is None else f"{100 * share:.3g}"
                for share in (step.um_time_share, step.um_ops_share, step.um_bytes_share)
            ),
            f"{step.gpu_faults:,}",
            f"{step.fault_batches:,}",
            format_bytes(step.fault_bytes),
            moved_cell(step, "to_device"),
            moved_cell(step, "to_host"),
        )
        for outcome in outcomes
        if (step := outcome.profile)
    ]
    return Grid(
        "Unified memory in one profiled step",
        (
            "run",
            "budget",
            "step, ms",
            "share by time / count / bytes, %",
            "faults on the device",
            "fault batches",
            "moved by faults",
            "to the device",
            "to the host",
        ),
        tuple(rows),
    )


def _notes(run: TrainingRun, outcomes: list[Outcome]) -> Iterator[tuple[str, str, str]]:
    for outcome in outcomes:
        subject = subject_cell(outcome), budget_cell(outcome)
        for note in outcome.notes:
            yield *subject, note
        if outcome.hinted is not None and outcome.profile is None:
            yield (
                *subject,
                "hinted bytes are the hint engine's own count: pages that were there already are "
                "in it, and pages that faulted are not",
            )
        stock = stock_of(run, outcome.workload, outcome.method)
        if stock is not None and _clocks_differ(outcome, stock):
            yield (
                *subject,
                f"the SM clock was {clock_cell(outcome)} MHz, and {clock_cell(stock)} under stock: "
                "compare their times with care",
            )
        manager = outcome.manager
        if manager and manager.reason and outcome.state == "measured":
            yield *subject, f"umem's manager is {manager.state}: {manager.reason}"
        if manager and manager.diverged_steps + manager.unplanned + manager.wait_timeouts:
            yield (
                *subject,
                f"of {manager.steps} planned steps: {manager.diverged_steps} diverged, "
                f"{manager.unplanned} had no plan of their own, {manager.wait_timeouts} waits "
                "were given up",
            )


def _clocks_differ(outcome: Outcome, stock: Outcome) -> bool:
    own_mhz, stock_mhz = outcome.sm_clock_mhz, stock.sm_clock_mhz
    if own_mhz is None or stock_mhz is None:
        return False
    return abs(own_mhz - stock_mhz) > _MAX_CLOCK_DIFFERENCE * stock_mhz


def _not_measured(outcomes: list[Outcome]) -> Grid:
    rows = [
        (subject_cell(it), budget_cell(it), it.state, it.reason or "")
        for it in outcomes
        if it.state != "measured"
    ]
    return Grid("Not measured", ("run", "budget", "what", "why"), tuple(rows))
