"""Tables of the training benchmark, and its figures against limits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from textwrap import shorten

from umem.core.units import format_bytes
from umem_bench.results import (
    BUDGETED,
    VARIANTS,
    Method,
    Migration,
    ProcessResult,
    Run,
    TrainingResult,
    Workload,
    WorkloadName,
    median,
)
from umem_bench.tables import NOTHING, Check, Table, at_most, notes_table, provenance, size_text

__all__ = [
    "CARD_MARGIN_BYTES",
    "base_bytes",
    "batches",
    "checks",
    "device_peak_bytes",
    "exceeds_budget",
    "fits",
    "heading",
    "panels",
    "peak_and_base",
    "shares",
    "shown",
    "step_ms",
    "stock_of",
    "tables",
    "tokens_per_s",
    "working_set_bytes",
]

MAX_FAULT_SHARE = 0.01
"""Fault batches under a plan, as a share of demand paging's."""
MIN_SPEED_UP = 3.0
"""SFT at 60 %: demand paging's step over the plan's."""
MIN_STOCK_SHARE = 0.85
"""SFT at 60 % in the workload ``long``: speed, as a share of stock's."""
MAX_STEP_ERROR = 0.15
MAX_BYTES_ERROR = 0.1
"""Measured figures relative to the predicted ones."""

_PAGE_BYTES = 64 << 10
"""umem rounds blocks up to this, and torch does not: what is over a budget by less fits it."""

CARD_MARGIN_BYTES = 64 << 20
"""Over a budget and the process's base, before NVML's peak counts as over the budget."""

_SHOWN_LOSS = 8
"""Number of the step whose loss is shown."""

_OTHER_ARITHMETIC = ("bnb-paged-adamw", "torchao-offload", "deepspeed-offload")
"""Variants whose optimizer computes otherwise, so that their losses are not compared."""


# ---- figures ----


def tokens_per_s(run: Run, result: TrainingResult) -> float:
    """Tokens trained on in a second, at the median step; 0 if it was not measured."""
    step_s = median(result.steps_s)
    workload = run.training_settings.workload(result.workload)
    tokens = workload.model.batch * workload.model.tokens * (workload.trainer_batches or 1)
    return tokens / step_s if step_s else 0.0


def panels(run: Run) -> list[tuple[Workload, Method]]:
    """The workloads and methods of a run that have results."""
    return [
        (workload, method)
        for workload in run.training_settings.workloads
        for method in workload.methods
        if shown(run, workload.name, method)
    ]


def shown(run: Run, workload: WorkloadName, method: Method) -> list[TrainingResult]:
    """What was measured, and where umem gave up, in the order of the variants."""
    own = [
        it
        for it in run.trainings
        if (it.workload, it.method) == (workload, method) and it.state in ("measured", "off")
    ]
    return sorted(own, key=lambda it: (VARIANTS.index(it.variant), -(it.budget_percent or 0.0)))


def stock_of(run: Run, workload: WorkloadName, method: Method) -> TrainingResult | None:
    """The result with everything resident under torch's own allocator."""
    found = shown(run, workload, method)
    return next((it for it in found if it.variant == "stock"), None)


def working_set_bytes(stock: TrainingResult) -> int | None:
    """What the stock variant's tensors take of the card: budgets are shares of it."""
    if stock.card_peak_bytes is None:
        return stock.peak_allocated_bytes
    return stock.card_peak_bytes - (stock.outside_bytes or 0)


def base_bytes(result: ProcessResult, plain: ProcessResult | None) -> int:
    """Card memory that a process needs beside tensors: its context, and the kernels that it loads.

    A `plain` process, with torch's own allocator, shows both. A result alone has its contexts only,
    umem's own among them.
    """
    known = None if plain is None else plain.outside_bytes
    return (result.base_bytes or 0) if known is None else known


def exceeds_budget(result: ProcessResult, plain: ProcessResult | None) -> bool:
    """Whether NVML saw more in use than the budget, the process's base and a margin."""
    if result.budget_bytes is None or result.card_peak_bytes is None:
        return False
    more_bytes = result.card_peak_bytes - base_bytes(result, plain) - result.budget_bytes
    return more_bytes > CARD_MARGIN_BYTES


def peak_and_base(result: ProcessResult, plain: ProcessResult | None) -> str:
    """The card's peak by NVML, the base in it, and whether it is over the budget."""
    text = f"{size_text(result.card_peak_bytes)} ({size_text(base_bytes(result, plain) or None)})"
    return f"{text}, over its budget" if exceeds_budget(result, plain) else text


def device_peak_bytes(run: Run, result: TrainingResult) -> int | None:
    """The most memory on the card, without the process's base, as far as it is counted.

    Results without NVML's figure have residency: for variants with a budget what umem keeps on the
    device. For the others what is allocated, without optimizer state on the host, and with
    bitsandbytes' managed state: nothing keeps that off a device with room for it.
    """
    if result.card_peak_bytes is not None:
        stock = stock_of(run, result.workload, result.method)
        return result.card_peak_bytes - base_bytes(result, stock)
    if result.variant in BUDGETED:
        return result.resident_bytes
    if result.peak_allocated_bytes is None:
        return None
    outside_bytes = (result.paged_state_bytes or 0) - (result.host_state_bytes or 0)
    return result.peak_allocated_bytes + outside_bytes


def fits(run: Run, result: TrainingResult, percent: float) -> bool:
    """Whether a measured variant has no more on the device than a budget.

    A variant with a budget fits that one and larger ones, if it kept to its own.
    """
    peak_bytes = device_peak_bytes(run, result)
    if result.state != "measured" or peak_bytes is None:
        return False
    if result.variant in BUDGETED:
        return (result.budget_percent or 0.0) <= percent and not _is_over_budget(run, result)
    stock = stock_of(run, result.workload, result.method)
    whole_bytes = working_set_bytes(stock) if stock else None
    if whole_bytes is None:
        return False
    return peak_bytes - percent / 100 * whole_bytes < _margin_bytes(result)


def _is_over_budget(run: Run, result: TrainingResult) -> bool:
    peak_bytes = device_peak_bytes(run, result)
    if peak_bytes is None or result.budget_bytes is None:
        return False
    return peak_bytes - result.budget_bytes >= _margin_bytes(result)


def _margin_bytes(result: TrainingResult) -> int:
    return _PAGE_BYTES if result.card_peak_bytes is None else CARD_MARGIN_BYTES


# ---- tables ----


def heading(run: Run) -> str:
    """One line that says where, when and with what a run was made."""
    settings = run.training_settings
    return provenance(
        run.header,
        "deterministic algorithms" if settings.deterministic else "",
        f"medians of {settings.steps} steps [minimum to maximum]",
    )


def tables(run: Run) -> Iterator[Table]:
    """Speeds by budget, then every step, then reasons and notes."""
    for workload, method in panels(run):
        yield _speeds(run, workload, method)
    for workload, method in panels(run):
        yield _steps(run, workload, method)
    yield from notes_table(
        (f"{it.workload}, {it.method}, {it.variant}", _budget(it), it) for it in run.trainings
    )


def batches(workload: Workload, method: Method) -> str:
    """Method, batches and checkpoints, in words."""
    model, summed = workload.model, workload.trainer_batches
    words = "Full fine-tuning (SFT)" if method == "sft" else "LoRA"
    kept = "checkpoints at every layer" if model.checkpoint else "no checkpoints"
    loop = f"Trainer, {summed} " if summed else ""
    return f"{words}, {loop}batches of {model.batch} x {model.tokens:,} tokens, {kept}"


def _title(run: Run, workload: Workload, method: Method) -> str:
    stock = stock_of(run, workload.name, method)
    whole = working_set_bytes(stock) if stock else None
    of = f"{stock.parameters:,} parameters in " if stock and stock.parameters else ""
    words = f", working set {format_bytes(whole)}" if whole else ""
    model = f"a Llama of {of}{workload.model.layers} layers, {workload.model.weights}"
    return f"{batches(workload, method)}, {model}{words}"


def _speeds(run: Run, workload: Workload, method: Method) -> Table:
    """One row for each variant, one column for each budget."""
    own = shown(run, workload.name, method)
    budgets = sorted(workload.budgets_percent, reverse=True)
    rows = []
    for variant in dict.fromkeys(it.variant for it in own):
        results = [it for it in own if it.variant == variant]
        free = NOTHING
        if variant not in BUDGETED:
            counted = _device(run, results[0]).replace(NOTHING, "not counted")
            free = f"{_speed(run, results[0])}, {counted}"
        rows.append((variant, free, *(_speed_at(run, results, it) for it in budgets)))
    return Table(
        f"{_title(run, workload, method)}: tokens/s (share of stock's) by resident budget",
        ("variant", "without a budget, resident", *(f"{it:g} %" for it in budgets)),
        rows,
    )


def _speed_at(run: Run, results: list[TrainingResult], percent: float) -> str:
    for result in results:
        has_budget = result.variant in BUDGETED
        if has_budget and result.budget_percent != percent:
            continue
        if result.state == "off" or fits(run, result, percent):
            return _speed(run, result)
        return "over its budget" if has_budget else "does not fit"
    return NOTHING


def _speed(run: Run, result: TrainingResult) -> str:
    if not result.steps_s:
        return shorten(f"{result.state}: {result.reason}", 80, placeholder=" …")
    text = f"{tokens_per_s(run, result):,.0f}"
    if result.variant == "stock":
        return text
    lost = " without its plan" if result.plan_running is False else ""
    return f"{text} ({_share(run, result)}){lost}"


def _share(run: Run, result: TrainingResult) -> str:
    stock = stock_of(run, result.workload, result.method)
    stock_s, own_s = median(stock.steps_s) if stock else None, median(result.steps_s)
    return f"{100 * stock_s / own_s:.3g} %" if stock_s and own_s else NOTHING


def _device(run: Run, result: TrainingResult) -> str:
    size_bytes = device_peak_bytes(run, result)
    if size_bytes is None:
        return NOTHING
    return format_bytes(size_bytes) + (", over its budget" if _is_over_budget(run, result) else "")


def _steps(run: Run, workload: Workload, method: Method) -> Table:
    columns = (
        *("variant", "budget", "step, ms", "of stock", "resident at most", "predicted step, ms"),
        *("pages to the device (predicted)", "pages to the host (predicted)", "fault batches"),
        *("memory operations' time / number / bytes in unified memory (predicted)", "loss"),
    )
    rows = [
        (
            it.variant,
            _budget(it),
            step_ms(it),
            _share(run, it),
            _device(run, it),
            NOTHING if it.predicted_step_s is None else f"{it.predicted_step_s * 1e3:.4g}",
            *_migration(it.migration),
            _losses(run, it),
        )
        for it in shown(run, workload.name, method)
    ]
    return Table(f"{_title(run, workload, method)}: a training step", columns, rows)


def _budget(result: TrainingResult) -> str:
    if result.budget_percent is None:
        return NOTHING
    text = f"{result.budget_percent:g} %"
    return f"{text}, {format_bytes(result.budget_bytes)}" if result.budget_bytes else text


def step_ms(result: ProcessResult) -> str:
    """Median and extremes of the timed steps in milliseconds."""
    middle_s = median(result.steps_s)
    if middle_s is None:
        return result.state
    low, high = min(result.steps_s) * 1e3, max(result.steps_s) * 1e3
    text = f"{middle_s * 1e3:.4g} [{low:.4g} to {high:.4g}]"
    return f"{text}, without its plan" if result.plan_running is False else text


def _migration(it: Migration | None) -> tuple[str, str, str, str]:
    if it is None:
        return NOTHING, NOTHING, NOTHING, NOTHING
    least = "at least " if it.is_lower_bound else ""
    moved = [
        least
        + format_bytes(it.moved_bytes[way])
        + (f" ({format_bytes(it.predicted_bytes[way])})" if it.predicted_bytes else "")
        for way in ("to_device", "to_host")
    ]
    return moved[0], moved[1], f"{least}{it.fault_batches:,}", shares(it)


def shares(it: Migration) -> str:
    """Shares of unified memory in memory operations' time, number and bytes; predicted ones."""
    kinds = (it.um_time_share, it.um_ops_share, it.um_bytes_share)
    known = [each for each in kinds if each is not None]  # older files have that of time
    text = _percents(known) if known else NOTHING
    return f"{text} ({_percents(it.predicted_shares)})" if it.predicted_shares else text


def _percents(parts: Iterable[float]) -> str:
    return " / ".join(f"{100 * it:.3g}" for it in parts) + " %"


def _losses(run: Run, result: TrainingResult) -> str:
    """Loss of an early step, and whether all losses that both kept have stock's bits."""
    if not result.losses_hex:
        return NOTHING
    text = f"{float.fromhex(result.losses_hex[:_SHOWN_LOSS][-1]):.4f}"
    stock = stock_of(run, result.workload, result.method)
    if stock is None or result is stock or result.variant in _OTHER_ARITHMETIC:
        return text
    pairs = zip(result.losses_hex, stock.losses_hex, strict=False)
    if stock.losses_hex and all(mine == its for mine, its in pairs):
        return f"{text} same bits"
    return f"{text} differs" if run.training_settings.deterministic else text


# ---- limits ----


def checks(run: Run) -> Iterator[Check]:
    """Hold planned runs against demand paging, stock, their budget and their prediction."""
    for result in run.trainings:
        percent = result.budget_percent
        planner = BUDGETED.get(result.variant)
        if percent is None or planner not in ("planned", None):
            continue
        subject = f"{result.workload}, {result.method}, {result.variant} at {percent:g} %"
        if result.state != "measured" or result.plan_running is False:
            words = result.reason or "its plan was not running"
            yield Check(subject, None, f"{result.state}: {words}")
            continue
        own = shown(run, result.workload, result.method)
        paged = [it for it in own if (it.variant, it.budget_percent) == ("umem-fault", percent)]
        within = fits(run, result, percent)
        yield Check(f"{subject}: within its budget", within, _device(run, result))
        yield from _predictions(subject, result)
        if planner is None:
            continue
        ours, theirs = result.migration, paged[0].migration if paged else None
        if percent < 100 and ours and theirs:
            counts = ours.fault_batches, theirs.fault_batches
            yield at_most(f"{subject}: fault batches of demand paging's", *counts, MAX_FAULT_SHARE)
        if (result.method, percent) == ("sft", 60.0):
            step_s = median(result.steps_s)
            paged_s = median(paged[0].steps_s) if paged else None
            yield at_most(f"{subject}: step of demand paging's", step_s, paged_s, 1 / MIN_SPEED_UP)
            if result.workload == "long":
                stock = stock_of(run, result.workload, result.method)
                stock_s = median(stock.steps_s) if stock else None
                yield at_most(f"{subject}: step of stock's", step_s, stock_s, 1 / MIN_STOCK_SHARE)


def _predictions(subject: str, result: TrainingResult) -> Iterator[Check]:
    step_s, migration = median(result.steps_s), result.migration
    pairs: list[tuple[str, float | None, float | None, float]] = [
        ("step", step_s, result.predicted_step_s, MAX_STEP_ERROR)
    ]
    for way, predicted in ((migration and migration.predicted_bytes) or {}).items():
        assert migration is not None
        pairs.append((f"bytes {way}", migration.moved_bytes[way], predicted, MAX_BYTES_ERROR))
    for what, measured, expected, limit in pairs:
        if measured is not None and expected is not None:
            off = abs(measured - expected)
            words = f"{100 * off / expected:.1f} % off" if expected else f"{off:g} off"
            passed = off <= limit * expected
            detail = f"{words}, at most {100 * limit:g} %"
            yield Check(f"{subject}: {what} of the predicted", passed, detail)
