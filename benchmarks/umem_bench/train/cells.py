"""Cells of the training benchmark's tables."""

from __future__ import annotations

from textwrap import shorten

from umem.core.units import format_bytes
from umem_bench.train.figures import (
    device_peak_bytes,
    fits,
    is_over,
    lower_bound_s,
    median_s,
    stock_of,
    tokens_per_s,
)
from umem_bench.train.results import (
    BUDGETED,
    Method,
    Outcome,
    ProfiledStep,
    TrainingModel,
    TrainingRun,
)

__all__ = [
    "METHOD_WORDS",
    "NOTHING",
    "allocated_cell",
    "batches",
    "budget_cell",
    "clock_cell",
    "device_cell",
    "fits_cell",
    "losses_cell",
    "moved_cell",
    "over_bound_cell",
    "predicted_cell",
    "share_cell",
    "speed_cell",
    "step_cell",
    "subject_cell",
]

METHOD_WORDS: dict[Method, str] = {"sft": "Full fine-tuning (SFT)", "lora": "LoRA"}

NOTHING = "—"

_SHOWN_LOSS = 8
"""Number of the step whose loss is shown, or the last one before it that a variant has."""

_REASON_CHARACTERS = 80

_SAME_LOSSES = (
    *BUDGETED,
    "umem-optimizer-host",
    "backward-step",
    "save-on-cpu",
    "rmm-pool",
    "stock-again",
)
"""Variants that do the same arithmetic as the stock one: only memory differs."""


def batches(model: TrainingModel) -> str:
    """Batches and checkpoints, in words."""
    kept = "checkpoints at every layer" if model.checkpoint else "no checkpoints"
    return f"batches of {model.batch} x {model.tokens:,} tokens, {kept}"


def subject_cell(outcome: Outcome) -> str:
    """Which process of the run it is, but for the budget."""
    return f"{outcome.workload}, {outcome.method}, {outcome.variant}"


def budget_cell(outcome: Outcome) -> str:
    """Device budget that it was told."""
    if outcome.budget_percent is None:
        return NOTHING
    text = f"{outcome.budget_percent:g} %"
    return f"{text}, {format_bytes(outcome.budget_bytes)}" if outcome.budget_bytes else text


def allocated_cell(outcome: Outcome) -> str:
    """What its allocator gave out at most; under umem's, part of it is on the host."""
    size_bytes = outcome.peak_allocated_bytes
    return NOTHING if size_bytes is None else format_bytes(size_bytes)


def step_cell(outcome: Outcome) -> str:
    """Time of a step; or, where umem's manager gave up, why."""
    middle_s = median_s(outcome)
    if middle_s is None:
        return f"{outcome.state}: {outcome.reason}"
    low, high = min(outcome.steps_s) * 1e3, max(outcome.steps_s) * 1e3
    text = f"{middle_s * 1e3:.4g} [{low:.4g} to {high:.4g}]"
    return f"{text}, without its plan" if outcome.plan_running is False else text


def clock_cell(outcome: Outcome) -> str:
    """The device's SM clock during the timed steps, MHz."""
    return NOTHING if outcome.sm_clock_mhz is None else f"{outcome.sm_clock_mhz:.0f}"


def speed_cell(run: TrainingRun, outcome: Outcome) -> str:
    """Tokens in a second, and their share of the stock variant's; or why umem gave up."""
    speed = tokens_per_s(run, outcome)
    if speed is None:
        return shorten(f"{outcome.state}: {outcome.reason}", _REASON_CHARACTERS, placeholder=" …")
    if outcome.variant == "stock":
        return f"{speed:,.0f}"
    lost = " without its plan" if outcome.plan_running is False else ""
    return f"{speed:,.0f} ({share_cell(run, outcome)}){lost}"


def share_cell(run: TrainingRun, outcome: Outcome) -> str:
    """Speed, as a share of the stock variant's."""
    stock = stock_of(run, outcome.workload, outcome.method)
    stock_s, own_s = (median_s(it) if it else None for it in (stock, outcome))
    return f"{100 * stock_s / own_s:.3g} %" if stock_s and own_s else NOTHING


def over_bound_cell(run: TrainingRun, outcome: Outcome) -> str:
    """Time of a step over the lower bound for an optimizer's state on the host."""
    bound_s, own_s = lower_bound_s(run, outcome.workload), median_s(outcome)
    # The stock variant's optimizer state is on the device: the bound is not its own.
    if outcome.variant in ("stock", "save-on-cpu") or not bound_s or not own_s:
        return NOTHING
    return f"{own_s / bound_s:.2f}x"


def device_cell(outcome: Outcome) -> str:
    """The most that is on the device, as far as somebody counts."""
    size_bytes = device_peak_bytes(outcome)
    if size_bytes is None:
        return NOTHING
    text = format_bytes(size_bytes)
    if outcome.variant == "bnb-paged-adamw" and outcome.unseen_bytes is None:
        return f"{text}*"
    if outcome.budget_bytes is not None and is_over(size_bytes, outcome.budget_bytes):
        return f"{text}, over its budget"
    return text


def fits_cell(run: TrainingRun, outcome: Outcome) -> str:
    """Budgets that it fits, percent."""
    budgets = run.settings.workload(outcome.workload).budgets_percent
    fitted = [it for it in budgets if fits(run, outcome, it)]
    return ", ".join(f"{it:g}" for it in fitted) or "none"


def predicted_cell(outcome: Outcome) -> str:
    """Step and lower bound as umem's plan has them, ms."""
    manager = outcome.manager
    if manager is None or manager.predicted_step_s is None or manager.predicted_bound_s is None:
        return NOTHING
    return f"{manager.predicted_step_s * 1e3:.4g} / {manager.predicted_bound_s * 1e3:.4g}"


def losses_cell(run: TrainingRun, outcome: Outcome) -> str:
    """Loss of an early step, and whether all that both kept have the stock variant's bits."""
    if not outcome.losses_hex:
        return NOTHING
    text = f"{float.fromhex(outcome.losses_hex[:_SHOWN_LOSS][-1]):.4f}"
    stock = stock_of(run, outcome.workload, outcome.method)
    if stock is None or outcome is stock or outcome.variant not in _SAME_LOSSES:
        return text
    pairs = zip(outcome.losses_hex, stock.losses_hex, strict=False)
    if stock.losses_hex and all(mine == its for mine, its in pairs):
        return f"{text} same bits"
    return f"{text} differs" if run.settings.deterministic else text


def moved_cell(step: ProfiledStep, direction: str) -> str:
    """Bytes of a direction, and by cause where there is one."""
    whole = format_bytes(step.moved_bytes(direction))
    causes = [it for it in step.transfers if it.direction == direction and it.bytes]
    if not causes:
        return whole
    return f"{whole} ({', '.join(f'{it.cause} {format_bytes(it.bytes)}' for it in causes)})"
