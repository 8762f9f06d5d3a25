"""Tables of the benchmark of text generation, and its figures against limits."""

from __future__ import annotations

from collections.abc import Iterator

from umem.core.units import format_bytes
from umem_bench.results import (
    GENERATE_VARIANTS,
    GenerateCase,
    GenerateResult,
    Run,
    TextResult,
    median,
)
from umem_bench.tables import NOTHING, Check, Table, notes_table, provenance, size_text
from umem_bench.training.tables import exceeds_budget, peak_and_base

__all__ = [
    "LINK_BYTES_PER_S",
    "bound_s",
    "checks",
    "compared_bits",
    "heading",
    "is_over_budget",
    "tables",
    "text_checks",
]

LINK_BYTES_PER_S = 55e9
"""Copies from page-locked memory to the device: the profile `h100-sxm`."""


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

    Of streamed experts those count that a token chooses and that the cache lacked. Without stock's
    row only the latter. None for the other variants.
    """
    if result.streamed_bytes is None:
        return None
    stock = _stock(run, result)
    stock_s = median(stock.token_s) if stock else None
    chosen = run.generate_settings.cases[result.case].chosen_share
    crossing_bytes = result.streamed_bytes * chosen * (1.0 - (result.cached_share or 0.0))
    return max(stock_s or 0.0, crossing_bytes / LINK_BYTES_PER_S) or None


def is_over_budget(run: Run, result: GenerateResult) -> bool:
    """Whether NVML saw more in use than the budget, the process's base and a margin."""
    return exceeds_budget(result, _stock(run, result))


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
        (f"{it.case}, {it.variant}", size_text(it.budget_bytes), it) for it in run.generations
    )


def _title(run: Run, case: GenerateCase) -> str:
    settings, shape = run.generate_settings, run.generate_settings.cases[case]
    return (
        f"{case}: {format_bytes(shape.weight_bytes)} of weights in {shape.weights}, "
        f"{shape.batch} x {shape.tokens} tokens of a prompt, {settings.tokens} new ones"
    )


def _row(run: Run, result: GenerateResult) -> tuple[str, ...]:
    least_s, token_s = bound_s(run, result), median(result.token_s)
    share = f"{token_s / least_s:.2f}x" if token_s and least_s else NOTHING
    return (
        result.variant,
        _token_ms(result),
        NOTHING if least_s is None else f"{1e3 * least_s:.4g}",
        "over its budget" if is_over_budget(run, result) else share,
        f"{result.first_s or 0:.3g}",
        peak_and_base(result, _stock(run, result)),
        size_text(result.budget_bytes),
        compared_bits(result, _stock(run, result), "tokens") or NOTHING,
    )


def _token_ms(result: GenerateResult) -> str:
    low, high = 1e3 * min(result.token_s), 1e3 * max(result.token_s)
    return f"{1e3 * (median(result.token_s) or 0):.4g} [{low:.4g} to {high:.4g}]"


def compared_bits(result: TextResult, stock: TextResult | None, tokens: str) -> str:
    """Whether tokens and logits have stock's bits; empty for stock, and without it.

    `tokens` is the word for them: a single one is a token.
    """
    if stock is None or stock is result:
        return ""
    pairs = {
        tokens: (result.tokens_hash, stock.tokens_hash),
        "logits": (result.logits_hash, stock.logits_hash),
    }
    other = [name for name, (own, its) in pairs.items() if own != its]
    return f"{' and '.join(other)} differ" if other else "same bits"


# ---- limits ----


def checks(run: Run) -> Iterator[Check]:
    """Hold umem's rows against their budget, and against the tokens and the logits of stock."""
    for it in (it for it in run.generations if it.variant == "umem"):
        yield from text_checks(it.case, it, _stock(run, it), "tokens")


def text_checks(
    case: str, result: TextResult, stock: TextResult | None, tokens: str
) -> Iterator[Check]:
    """Hold a row against its budget, and against stock's tokens, by this word, and logits."""
    subject = f"{case}, {result.variant}"
    if result.state != "measured":
        yield Check(subject, None, f"{result.state}: {result.reason}")
        return
    words = f"{size_text(result.card_peak_bytes)} of {size_text(result.budget_bytes)}"
    yield Check(f"{subject}: within its budget by NVML", not exceeds_budget(result, stock), words)
    if bits := compared_bits(result, stock, tokens):
        yield Check(f"{subject}: {tokens} and logits", bits == "same bits", bits)
