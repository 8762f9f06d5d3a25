"""Figures that follow from the results of a training benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from umem.core.block_sizes import LARGE_STEP_BYTES
from umem_bench.train.results import (
    BUDGETED,
    VARIANTS,
    Method,
    Outcome,
    TrainingModel,
    TrainingRun,
    WorkloadName,
)

__all__ = [
    "FLOPS_FORMULA",
    "device_peak_bytes",
    "fits",
    "is_over",
    "lower_bound_s",
    "median_s",
    "outcomes_of",
    "shown_of",
    "step_flops",
    "stock_of",
    "tokens_per_s",
]

FLOPS_FORMULA = (
    "FLOP a step: 6 x weights of matrix products x tokens (LoRA: 4 x, for frozen weights have no "
    "gradients) + 12 x layers x hidden x tokens² / 2 for each sequence's causal attention + the "
    "forward pass of what is computed again: layers with checkpoints, and always the head"
)


def step_flops(model: TrainingModel, method: Method) -> float:
    """Floating-point operations of a training step, by :data:`FLOPS_FORMULA`.

    A forward pass takes 2 for each weight and token, and 4 x layers x hidden x tokens² / 2 for
    attention; the backward pass takes the same for the gradients of what flows through the layers,
    and for those of the weights. Adapters are not counted, nor what is no matrix product.
    """
    tokens = model.batch * model.tokens
    layer_weights = 4 * model.hidden**2 + 3 * model.hidden * model.intermediate
    layers = 2.0 * model.layers * layer_weights * tokens
    head = 2.0 * model.hidden * model.vocabulary * tokens
    attention = 4.0 * model.layers * model.hidden * model.tokens * tokens / 2
    passes = 3 if method == "sft" else 2
    again = layers + attention if model.checkpoint else 0.0
    return passes * (layers + head) + 3 * attention + again + head


def median_s(outcome: Outcome) -> float | None:
    """Median over the timed steps, seconds; None if there are none."""
    return statistics.median(outcome.steps_s) if outcome.steps_s else None


def tokens_per_s(run: TrainingRun, outcome: Outcome) -> float | None:
    """Tokens trained on in a second, at the median step; None if it was not measured."""
    step_s = median_s(outcome)
    model = run.settings.workload(outcome.workload).model
    return model.batch * model.tokens / step_s if step_s else None


def stock_of(run: TrainingRun, workload: WorkloadName, method: Method) -> Outcome | None:
    """The outcome with everything resident under torch's own allocator; None if not measured."""
    for outcome in outcomes_of(run, workload, method):
        if (outcome.variant, outcome.state) == ("stock", "measured"):
            return outcome
    return None


def device_peak_bytes(outcome: Outcome) -> int | None:
    """The most that a variant has on the device, as far as somebody counts.

    What is allocated, without the optimizer's state where that is on the host, and with managed
    memory of a variant's own: nothing keeps that off a device with room for it. For variants that
    are told a budget, what umem meant to have there.
    """
    if outcome.variant in BUDGETED:
        return outcome.resident_bytes
    if outcome.peak_allocated_bytes is None:
        return None
    if outcome.variant == "umem-optimizer-host":
        state_bytes = outcome.host_state_bytes
        if state_bytes is None:  # in files of earlier days
            state_bytes = outcome.optimizer_state_bytes or 0
        return outcome.peak_allocated_bytes - state_bytes
    return outcome.peak_allocated_bytes + (outcome.unseen_bytes or 0)


def is_over(size_bytes: int, budget_bytes: float) -> bool:
    """Whether so much is over a budget: by a step of large blocks, for less is mere rounding.

    At 100 % the budget is what stock has allocated, to the byte.
    """
    return size_bytes - budget_bytes >= LARGE_STEP_BYTES


def fits(run: TrainingRun, outcome: Outcome, percent: float) -> bool:
    """Whether a measured variant has no more on the device than a budget, in percent.

    A variant that is told a budget fits that one and larger ones, if it kept to its own.
    """
    peak_bytes = device_peak_bytes(outcome)
    if outcome.state != "measured" or peak_bytes is None:
        return False
    if outcome.variant in BUDGETED:
        assert outcome.budget_percent is not None
        assert outcome.budget_bytes is not None
        return outcome.budget_percent <= percent and not is_over(peak_bytes, outcome.budget_bytes)
    stock = stock_of(run, outcome.workload, outcome.method)
    if stock is None or stock.peak_allocated_bytes is None:
        return False
    return not is_over(peak_bytes, percent / 100 * stock.peak_allocated_bytes)


def lower_bound_s(run: TrainingRun, workload: WorkloadName) -> float | None:
    """Least time of an SFT step whose optimizer state is on the host all the time.

    max(compute, bytes / bandwidth): compute is the stock variant's median step, the bytes are those
    of the optimizer's state, read once and written once, and the bandwidth is that of memory used
    in place, as measured in this run. None where one of them was not measured.
    """
    stock = stock_of(run, workload, "sft")
    for outcome in outcomes_of(run, workload, "sft"):
        if outcome.variant == "umem-optimizer-host" and outcome.mapped_bytes_per_s:
            compute_s = median_s(stock) if stock else None
            if compute_s is None or outcome.optimizer_state_bytes is None:
                return None
            moved_bytes = 2 * outcome.optimizer_state_bytes
            return max(compute_s, moved_bytes / outcome.mapped_bytes_per_s)
    return None


def outcomes_of(run: TrainingRun, workload: WorkloadName, method: Method) -> Iterator[Outcome]:
    """Outcomes of a method, in the order of :data:`VARIANTS`, the largest budget first."""
    own = [it for it in run.outcomes if (it.workload, it.method) == (workload, method)]
    yield from sorted(own, key=lambda it: (VARIANTS.index(it.variant), -(it.budget_percent or 0.0)))


def shown_of(run: TrainingRun, workload: WorkloadName, method: Method) -> list[Outcome]:
    """What was measured, and where umem gave up: both are results."""
    every = outcomes_of(run, workload, method)
    return [it for it in every if it.state in ("measured", "off")]
