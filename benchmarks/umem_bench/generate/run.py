"""Runs the benchmark of text generation: its cases, its rows, and their budgets."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from umem.core.units import format_bytes
from umem_bench.card import Card
from umem_bench.generate.measure import GenerateJob, measure
from umem_bench.machine import git_commit, header
from umem_bench.results import (
    GENERATE_VARIANTS,
    GenerateCase,
    GenerateResult,
    GenerateSettings,
    GenerateVariant,
    LlamaShape,
    Run,
    median,
)
from umem_bench.rows import (
    ask_worker,
    continued,
    find_card,
    memory_ran_out,
    rows_named,
    run_missing,
    why_no_host_room,
    why_no_time,
)
from umem_bench.scale.run import growth
from umem_bench.shapes import CODE_LLAMA_34B, LLAMA_2_7B, LLAMA_2_13B, QWEN3_30B_A3B

__all__ = [
    "BUDGETS_BYTES",
    "CASES",
    "USUAL_VARIANTS",
    "Row",
    "host_bytes",
    "parse_rows",
    "run_generate",
]

_PROCESS_LIMIT_S = 480.0
"""accelerate takes seconds for each token of the largest model."""

_GIB = 1 << 30

_ONE_TEXT = {"batch": 1, "tokens": 64}

CASES: dict[GenerateCase, LlamaShape] = {
    "llama-2-7b": LLAMA_2_7B.model_copy(update=_ONE_TEXT),
    "llama-2-13b": LLAMA_2_13B.model_copy(update=_ONE_TEXT),
    "code-llama-34b": CODE_LLAMA_34B.model_copy(update=_ONE_TEXT),
    "qwen3-30b-a3b": QWEN3_30B_A3B.model_copy(update=_ONE_TEXT),
    # For tests, on the CPU too.
    "tiny": LlamaShape(
        hidden=64,
        intermediate=128,
        layers=3,
        heads=4,
        key_value_heads=2,
        vocabulary=256,
        batch=1,
        tokens=64,
    ),
}

BUDGETS_BYTES: dict[GenerateCase, int] = {
    "llama-2-7b": 8 * _GIB,
    "llama-2-13b": 16 * _GIB,
    "code-llama-34b": 16 * _GIB,
    "qwen3-30b-a3b": 16 * _GIB,
}
"""A case without a budget has the variant stock only."""

USUAL_VARIANTS: tuple[GenerateVariant, ...] = ("stock", "umem", "accelerate")
"""Those of a case alone; others run where they are named."""

Row = tuple[GenerateCase, GenerateVariant]
"""What one process measures."""


def parse_rows(text: str) -> list[Row]:
    """The rows that a text names, as :func:`umem_bench.rows.rows_named` reads it."""
    variants = {it: GENERATE_VARIANTS if it in BUDGETS_BYTES else ("stock",) for it in CASES}
    return rows_named(text, variants, USUAL_VARIANTS)


def host_bytes(settings: GenerateSettings, row: Row) -> int:
    """Host memory that a row's weights take: all, or what the budget has no room for."""
    case, variant = row
    if variant == "stock":
        return 0
    budget_bytes = settings.budgets_bytes[case] if variant == "umem" else 0
    return max(0, settings.cases[case].weight_bytes - budget_bytes)


def run_generate(
    settings: GenerateSettings,
    rows: Sequence[Row],
    on_progress: Callable[[str], None],
    on_results: Callable[[Run], None] = lambda _: None,
    *,
    seconds_limit: float,
    earlier: Run | None = None,
    again: bool = False,
    host_limit_bytes: int | None = None,
) -> Run:
    """Generate text for every row in a process of its own, never two at a time.

    Rows are left out, with the reason, where the time or the host's memory does not suffice.

    Without a GPU only ``tiny`` runs. With `earlier` results of the same settings and machine, the
    rows that they lack are run; with `again` all `rows` are. A row may take `host_limit_bytes` of
    host memory; by default what is available less 16 GiB.

    Raises
    ------
    UnsupportedError
        Where torch sees no GPU and a row needs one.
    UmemError
        If the earlier results are of other settings, another machine or other versions.
    """
    card, commit = find_card([case for case, _ in rows], "text generation"), git_commit()
    begun = continued(
        earlier, Run(header("generate", settings, "accelerate"), ()), same_commit=False
    )
    end_s = time.monotonic() + seconds_limit

    def measure_one(
        row: Row, known: list[GenerateResult], tried: GenerateResult | None
    ) -> GenerateResult:
        left_s = end_s - time.monotonic()
        on_progress(f"{row[0]}, {row[1]}: at most {left_s:.0f} s are left")
        reason = (
            why_no_time(row[1], [_as_of(settings, row[0], it) for it in known], tried, left_s)
            or why_no_host_room(host_bytes(settings, row), host_limit_bytes)
            or (card.why_not_idle() if card else "")
        )
        told: dict[str, Any] = {"case": row[0], "variant": row[1], "commit": commit}
        if row[1] != "stock":
            told["budget_bytes"] = settings.budgets_bytes[row[0]]
        if reason:
            told |= {"state": "left out", "reason": reason}
        else:
            told |= _ask(settings, row, card, end_s - time.monotonic())
        result = GenerateResult(**told)
        on_progress(_line(result))
        return result

    earlier_results = {(it.case, it.variant): it for it in begun.generations}
    return run_missing(begun, rows, earlier_results, measure_one, on_results, again=again)


def _ask(settings: GenerateSettings, row: Row, card: Card | None, left_s: float) -> dict[str, Any]:
    case, variant = row
    job = GenerateJob(
        model=settings.cases[case],
        variant=variant,
        budget_bytes=None if variant == "stock" else settings.budgets_bytes[case],
        tokens=settings.tokens,
        rounds=settings.rounds,
        limit_s=min(_PROCESS_LIMIT_S, left_s),
        card=card,
    )
    told = ask_worker(measure, job, card, left_s, process_limit_s=_PROCESS_LIMIT_S)
    return told | memory_ran_out(told)


def _as_of(settings: GenerateSettings, case: GenerateCase, known: GenerateResult) -> GenerateResult:
    """A row as if it were of this case: a larger model takes longer."""
    times = growth(settings.cases[case], settings.cases[known.case])
    return known.model_copy(update={"process_s": known.process_s * times})


def _line(result: GenerateResult) -> str:
    words = f"{result.case}, {result.variant}"
    token_s = median(result.token_s)
    if token_s is None:
        return f"{words}: {result.state}: {result.reason}"
    peak = f", card {format_bytes(result.card_peak_bytes)}" if result.card_peak_bytes else ""
    return f"{words}: {1e3 * token_s:.4g} ms a token{peak}, {result.process_s:.1f} s in all"
