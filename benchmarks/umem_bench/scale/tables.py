"""Tables of the real-scale benchmark, and its figures against limits."""

from __future__ import annotations

from collections.abc import Iterator

from umem_bench.results import (
    LORA_CASES,
    SCALE_VARIANTS,
    Run,
    ScaleCase,
    ScaleResult,
    ScaleVariant,
    median,
)
from umem_bench.scale.small_cards import GOALS, Goal
from umem_bench.tables import NOTHING, Check, Table, notes_table, provenance, size_text
from umem_bench.training.tables import exceeds_budget, peak_and_base, step_ms

__all__ = [
    "checks",
    "heading",
    "is_over_budget",
    "measured",
    "of_variant",
    "tables",
    "title",
    "tokens_per_s",
]

MAX_DISAGREEMENT = 0.1
"""Of the time of all steps from the median's: more would be work that the median does not have."""

_SHOWN_LOSS = 8

_OTHER_ARITHMETIC: tuple[ScaleVariant, ...] = (
    "torchao",
    "deepspeed",
    "deepspeed-3",
    "fsdp-offload",
)
"""Variants whose losses are not compared: their optimizers do not compute as stock's does."""


# ---- figures ----


def measured(run: Run, case: ScaleCase) -> list[ScaleResult]:
    """A case's rows with timed steps, in the order of the variants."""
    found = (it for it in run.scales if it.case == case and it.state == "measured")
    return sorted(found, key=lambda it: SCALE_VARIANTS.index(it.variant))


def of_variant(run: Run, case: ScaleCase, variant: str) -> ScaleResult | None:
    """A case's measured row of one variant."""
    return next((it for it in measured(run, case) if it.variant == variant), None)


def tokens_per_s(run: Run, result: ScaleResult) -> float:
    """Tokens trained on in a second, at the median step; 0 if it was not measured."""
    settings, step_s = run.scale_settings, median(result.steps_s)
    shape = settings.cases[result.case]
    step_tokens = shape.batch * shape.tokens * settings.batches(result.case)
    return step_tokens / step_s if step_s else 0.0


def is_over_budget(run: Run, result: ScaleResult) -> bool:
    """Whether NVML saw more in use than the budget, the process's base and a margin."""
    return exceeds_budget(result, _plain(run, result))


def _plain(run: Run, result: ScaleResult) -> ScaleResult | None:
    """The same batches under torch's own allocator."""
    found = (_beside(run, result, name) for name in ("floor", "stock"))
    return next((it for it in found if it is not None), None)


def _beside(run: Run, result: ScaleResult, variant: ScaleVariant) -> ScaleResult | None:
    """A variant's row of the same case, or of one with the same batches, of which a floor has one.

    A floor has no budget, and takes as long for each of several batches.
    """
    settings, case = run.scale_settings, result.case
    kind = settings.cases[case], case in LORA_CASES
    alike = [name for name, it in settings.cases.items() if (it, name in LORA_CASES) == kind]
    names = [case, *alike] if variant == "floor" and settings.holds_all else [case]
    found = (of_variant(run, it, variant) for it in names)
    return next((it for it in found if it is not None), None)


def _mean_s(result: ScaleResult) -> float | None:
    return result.wall_s / len(result.steps_s) if result.wall_s and result.steps_s else None


def _agrees(result: ScaleResult) -> bool:
    """Whether all steps together took as long as so many median ones."""
    mean_s, step_s = _mean_s(result) or 0.0, median(result.steps_s) or 0.0
    return abs(mean_s - step_s) <= MAX_DISAGREEMENT * step_s


def _why_not_compared(run: Run, result: ScaleResult) -> str:
    if is_over_budget(run, result):
        return "over its budget"
    return "" if _agrees(result) else "total disagrees"


def _share(run: Run, result: ScaleResult, variant: ScaleVariant) -> str:
    """Speed as a share of a variant's; why not, where there is no fair one."""
    other = _beside(run, result, variant)
    percent = _percent(run, result, other) if other else None
    share = NOTHING if percent is None else f"{percent:.3g} %"
    return _why_not_compared(run, result) or share


def _percent(run: Run, result: ScaleResult, other: ScaleResult) -> float | None:
    """Speed as a share of another row's; None where one was not measured."""
    speed, others = tokens_per_s(run, result), tokens_per_s(run, other)
    return 100 * speed / others if speed and others else None


# ---- tables ----


def heading(run: Run) -> str:
    """One line that says where, when and with what a run was made."""
    settings = run.scale_settings
    found = {it.case in LORA_CASES for it in run.scales} or {False}
    kinds = [name for name, it in (("full fine-tuning", False), ("LoRA", True)) if it in found]
    return provenance(
        run.header,
        f"{' and '.join(kinds)} of random weights in published shapes",
        "checkpoints at every layer, fused AdamW",
        "clipping at 1" if settings.clip else "no clipping",
        "deterministic algorithms" if settings.deterministic else "",
        f"medians of {settings.steps} steps [minimum to maximum]",
    )


def tables(run: Run) -> Iterator[Table]:
    """Each case's rows, or those of small cards side by side; then reasons and notes."""
    settings = run.scale_settings
    if settings.holds_all:
        yield _side_by_side(run)
    for case in (it for it in settings.cases if measured(run, it) and not settings.holds_all):
        columns = (
            *("variant", "step, ms", "mean, ms", "tokens/s", "of the floor"),
            *(("of stock",) if of_variant(run, case, "stock") else ()),
            *("first step, s", "card's peak (base)", "budget", "host", "loss"),
        )
        yield Table(title(run, case), columns, [_row(run, it) for it in measured(run, case)])
    yield from notes_table(
        (f"{it.case}, {it.variant}", size_text(it.budget_bytes), it) for it in run.scales
    )


def _side_by_side(run: Run) -> Table:
    """Rows of small cards beside what was predicted of them, in the order in which they ran."""
    columns = (
        *("row", "budget", "step, ms", "predicted, ms", "off", "tokens/s", "of the floor"),
        *("first step, s", "third", "card's peak (base)", "host"),
    )
    rows = []
    for it in run.scales:
        step_s, predicted_s = median(it.steps_s), it.predicted_s
        shown = step_ms(it) if step_s else it.state
        off = f"{100 * (predicted_s / step_s - 1):+.0f} %" if step_s and predicted_s else NOTHING
        figures = [NOTHING] * 6
        if step_s:
            figures = [
                f"{tokens_per_s(run, it):,.0f}",
                _share(run, it, "floor"),
                f"{it.first_step_s or 0:.3g}",
                f"{it.third_step_s:.3g}" if it.third_step_s else NOTHING,
                peak_and_base(it, _plain(run, it)),
                size_text(it.host_bytes),
            ]
        predicted = f"{1e3 * predicted_s:,.0f}" if predicted_s else NOTHING
        row = f"{it.case}, {it.variant}"
        rows.append((row, size_text(it.budget_bytes), shown, predicted, off, *figures))
    return Table("Measured beside predicted", columns, rows)


def title(run: Run, case: ScaleCase) -> str:
    """A case and its batches."""
    settings, shape = run.scale_settings, run.scale_settings.cases[case]
    batches = settings.batches(case)
    times = f", {batches} of them a step" if batches > 1 else ""
    return f"{case}: batches of {shape.batch} x {shape.tokens:,} tokens{times}"


def _row(run: Run, result: ScaleResult) -> tuple[str, ...]:
    of_stock = [_share(run, result, "stock")] if of_variant(run, result.case, "stock") else []
    return (
        result.variant,
        step_ms(result),
        f"{1e3 * (_mean_s(result) or 0):.4g}",
        f"{tokens_per_s(run, result):,.0f}",
        _share(run, result, "floor"),
        *of_stock,
        f"{result.first_step_s or 0:.3g}",
        peak_and_base(result, _plain(run, result)),
        size_text(result.budget_bytes),
        size_text(result.host_bytes),
        _losses(run, result),
    )


def _losses(run: Run, result: ScaleResult) -> str:
    """Loss of an early step, and whether all losses that both kept have the reference's bits."""
    text = f"{float.fromhex(result.losses_hex[:_SHOWN_LOSS][-1]):.4f}"
    same = _same_bits(run, result)
    if same is None:
        return text
    which = "first: " if result.variant == "floor" else ""
    return f"{text} {which}{'same bits' if same else 'differs'}"


def _same_bits(run: Run, result: ScaleResult) -> bool | None:
    """Whether a row's losses are those of the same arithmetic elsewhere; None without any.

    The reference is stock; where stock does not fit, umem with a wait after each step. The floor
    keeps its first weights, so that only its first loss is compared.
    """
    own = result.losses_hex[:1] if result.variant == "floor" else result.losses_hex
    others = (of_variant(run, result.case, it) for it in ("stock", "umem-waiting"))
    reference = next((it for it in others if it is not None), None)
    is_other = result.variant in _OTHER_ARITHMETIC or (
        result.variant == "umem-backward" and run.scale_settings.clip
    )
    if reference is None or reference is result or is_other:
        return None
    same = all(mine == its for mine, its in zip(own, reference.losses_hex, strict=False))
    # Without deterministic algorithms different bits say nothing.
    return same if same or run.scale_settings.deterministic else None


# ---- limits ----


def checks(run: Run) -> Iterator[Check]:
    """Hold umem's rows against their budget, their own total and the losses of stock."""
    for it in (it for it in run.scales if it.budget_bytes and it.variant.startswith("umem")):
        subject = f"{it.case}, {it.variant}"
        if it.state != "measured":
            yield Check(subject, None, f"{it.state}: {it.reason}")
            continue
        words = f"{size_text(it.card_peak_bytes)} of {size_text(it.budget_bytes)}"
        yield Check(f"{subject}: within its budget by NVML", not is_over_budget(run, it), words)
        words = f"{_mean_s(it) or 0:.4g} s a step of all"
        yield Check(f"{subject}: no work beside the median step", _agrees(it), words)
        same = _same_bits(run, it)
        if same is not None:
            yield Check(f"{subject}: losses", same, _losses(run, it))
        if run.scale_settings.holds_all and it.case in GOALS:
            yield _goal(run, it, GOALS[it.case])


def _goal(run: Run, result: ScaleResult, goal: Goal) -> Check:
    other = of_variant(run, goal.of, "umem") if goal.of else _beside(run, result, "floor")
    percent = _percent(run, result, other) if other else None
    words = "not measured" if percent is None else f"{percent:.3g} %"
    subject = f"{result.case}: at least {goal.percent} % of {goal.of or 'the floor'}"
    passed = None if percent is None else percent >= goal.percent
    return Check(subject, passed, words)
