"""Tables of the benchmark of text generation, and its figures against limits."""

from __future__ import annotations

from collections.abc import Iterator

from umem.core.units import format_bytes
from umem_bench.results import GENERATE_VARIANTS, GenerateCase, GenerateResult, Run, median
from umem_bench.tables import NOTHING, Check, Table, notes_table, provenance
from umem_bench.training.tables import CARD_MARGIN_BYTES, base_bytes

__all__ = ["LINK_BYTES_PER_S", "bound_s", "checks", "heading", "is_over_budget", "tables"]

LINK_BYTES_PER_S = 55e9
"""Copies from page-locked memory to the device: `policies/hardware/h100-pcie.yaml`."""


# ---- figures ----


def _measured(run: Run, case: GenerateCase) -> list[GenerateResult]:
    """A case's rows with timed rounds, in the order of the variants."""
    found = (it for it in run.generations if it.case == case and it.state == "measured")
    return sorted(found, key=lambda it: GENERATE_VARIANTS.index(it.variant))


def _stock(run: Run, result: GenerateResult) -> GenerateResult | None:
    """The same case with everything on the device."""
    return next((it for it in _measured(run, result.case) if it.variant == "stock"), None)


def bound_s(run: Run, result: GenerateResult) -> float | None:
    """Seconds a token that umem's row takes at least: stock's, or those of the streamed weights.

    Without stock's row only the latter. None for the other variants.
    """
    if result.streamed_bytes is None:
        return None
    stock = _stock(run, result)
    stock_s = median(stock.token_s) if stock else None
    return max(stock_s or 0.0, result.streamed_bytes / LINK_BYTES_PER_S) or None


def is_over_budget(run: Run, result: GenerateResult) -> bool:
    """Whether NVML saw more in use than the budget, the process's base and a margin."""
    if result.budget_bytes is None or result.card_peak_bytes is None:
        return False
    more_bytes = result.card_peak_bytes - _base_bytes(run, result) - result.budget_bytes
    return more_bytes >= CARD_MARGIN_BYTES


def _base_bytes(run: Run, result: GenerateResult) -> int:
    return base_bytes(result, _stock(run, result))


# ---- tables ----


def heading(run: Run) -> str:
    """One line that says where, when and with what a run was made."""
    settings = run.generate_settings
    return provenance(
        run.header,
        "text generation of random weights in published shapes",
        "greedy",
        f"medians of {settings.rounds} rounds [minimum to maximum]",
    )


def tables(run: Run) -> Iterator[Table]:
    """Each case's rows; then reasons and notes."""
    columns = (
        *("variant", "a token, ms", "bound, ms", "of the bound", "first two tokens, s"),
        *("card's peak (base)", "budget", "tokens and logits"),
    )
    for case in run.generate_settings.cases:
        if rows := [_row(run, it) for it in _measured(run, case)]:
            yield Table(_title(run, case), columns, rows)
    yield from notes_table(
        (f"{it.case}, {it.variant}", _size(it.budget_bytes), it) for it in run.generations
    )


def _title(run: Run, case: GenerateCase) -> str:
    settings, shape = run.generate_settings, run.generate_settings.cases[case]
    return (
        f"{case}: {format_bytes(shape.weight_bytes)} of weights in {shape.weights}, "
        f"{shape.batch} x {shape.tokens} tokens of a prompt, {settings.tokens} new ones"
    )


def _row(run: Run, result: GenerateResult) -> tuple[str, ...]:
    is_over = is_over_budget(run, result)
    least_s, token_s = bound_s(run, result), median(result.token_s)
    share = f"{token_s / least_s:.2f}x" if token_s and least_s else NOTHING
    peak = f"{_size(result.card_peak_bytes)} ({_size(_base_bytes(run, result) or None)})"
    return (
        result.variant,
        _token_ms(result),
        NOTHING if least_s is None else f"{1e3 * least_s:.4g}",
        "over its budget" if is_over else share,
        f"{result.first_s or 0:.3g}",
        f"{peak}, over its budget" if is_over else peak,
        _size(result.budget_bytes),
        _bits(run, result) or NOTHING,
    )


def _token_ms(result: GenerateResult) -> str:
    low, high = 1e3 * min(result.token_s), 1e3 * max(result.token_s)
    return f"{1e3 * (median(result.token_s) or 0):.4g} [{low:.4g} to {high:.4g}]"


def _size(size_bytes: int | None) -> str:
    return NOTHING if size_bytes is None else format_bytes(size_bytes)


def _bits(run: Run, result: GenerateResult) -> str:
    """Whether tokens and logits have stock's bits; empty for stock, and without it."""
    stock = _stock(run, result)
    if stock is None or stock is result:
        return ""
    pairs = {
        "tokens": (result.tokens_hash, stock.tokens_hash),
        "logits": (result.logits_hash, stock.logits_hash),
    }
    other = [name for name, (own, its) in pairs.items() if own != its]
    return f"{' and '.join(other)} differ" if other else "same bits"


# ---- limits ----


def checks(run: Run) -> Iterator[Check]:
    """Hold umem's rows against their budget, and against the tokens and the logits of stock."""
    for it in (it for it in run.generations if it.variant == "umem"):
        subject = f"{it.case}, {it.variant}"
        if it.state != "measured":
            yield Check(subject, None, f"{it.state}: {it.reason}")
            continue
        words = f"{_size(it.card_peak_bytes)} of {_size(it.budget_bytes)}"
        yield Check(f"{subject}: within its budget by NVML", not is_over_budget(run, it), words)
        bits = _bits(run, it)
        if bits:
            yield Check(f"{subject}: tokens and logits", bits == "same bits", bits)
