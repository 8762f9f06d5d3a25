"""Tables of the benchmark of loading, and its figures against limits."""

from __future__ import annotations

from collections.abc import Iterator

from umem.core.units import format_bytes
from umem_bench.results import LOAD_VARIANTS, LoadCase, LoadParts, LoadResult, Run, median
from umem_bench.tables import NOTHING, Check, Table, notes_table, provenance
from umem_bench.training.tables import CARD_MARGIN_BYTES, base_bytes

__all__ = ["checks", "heading", "read_s", "tables"]

_PARTS = {
    "python_s": "interpreter, s",
    "imports_s": "torch and transformers, s",
    "enable_s": "umem, s",
    "load_s": "loading, s",
    "pass_s": "first pass, s",
}


# ---- figures ----


def _measured(run: Run, case: LoadCase) -> list[LoadResult]:
    found = (it for it in run.loads if it.case == case and it.state == "measured")
    return sorted(found, key=lambda it: LOAD_VARIANTS.index(it.variant))


def _other(run: Run, result: LoadResult, variant: str) -> LoadResult | None:
    return next((it for it in _measured(run, result.case) if it.variant == variant), None)


def read_s(run: Run, case: LoadCase) -> float | None:
    """Seconds that reading the files takes, and nothing else."""
    found = next((it for it in _measured(run, case) if it.variant == "read"), None)
    return None if found is None else median(found.read_s)


def _is_over_budget(run: Run, result: LoadResult) -> bool:
    """Whether NVML saw more in use than the budget, the process's base and a margin."""
    if result.budget_bytes is None or result.card_peak_bytes is None:
        return False
    more_bytes = result.card_peak_bytes - _base_bytes(run, result) - result.budget_bytes
    return more_bytes >= CARD_MARGIN_BYTES


def _base_bytes(run: Run, result: LoadResult) -> int:
    """Card memory that a process needs beside tensors: that of stock's, or its own at the end."""
    return base_bytes(result, _other(run, result, "stock") or result)


# ---- tables ----


def heading(run: Run) -> str:
    """One line that says where, when and with what a run was made."""
    settings = run.load_settings
    return provenance(
        run.header,
        "files dropped from the page cache" if settings.cold else "files in the page cache",
        f"medians of {settings.rounds} processes [minimum to maximum]",
    )


def tables(run: Run) -> Iterator[Table]:
    """Each case's rows, and their parts; then reasons and notes."""
    whole = (
        *("variant", "to the first token, s", "of the read"),
        *("card's peak (base)", "budget", "host", "token and logits"),
    )
    parts = ("variant", *_PARTS.values(), "loading, of the read")
    for case in run.load_settings.cases:
        if rows := _measured(run, case):
            yield Table(_title(run, case), whole, [_row(run, it) for it in rows])
            yield Table(
                f"{case}: its parts", parts, [_part_row(run, it) for it in rows if it.parts]
            )
    yield from notes_table(
        (f"{it.case}, {it.variant}", _size(it.budget_bytes), it) for it in run.loads
    )


def _title(run: Run, case: LoadCase) -> str:
    shape = run.load_settings.cases[case]
    return (
        f"{case}: safetensors files of {_size(_measured(run, case)[0].file_bytes)}, "
        f"{shape.weights}, {shape.batch} x {shape.tokens} tokens of a prompt"
    )


def _row(run: Run, result: LoadResult) -> tuple[str, ...]:
    if result.variant == "read":
        return ("read", _spread(result.read_s), *(NOTHING,) * 5)
    totals_s = [it.total_s for it in result.parts]
    peak = f"{_size(result.card_peak_bytes)} ({_size(_base_bytes(run, result) or None)})"
    return (
        result.variant,
        _spread(totals_s),
        _share(median(totals_s), read_s(run, result.case)),
        f"{peak}, over its budget" if _is_over_budget(run, result) else peak,
        _size(result.budget_bytes),
        _size(result.host_bytes),
        _bits(run, result) or NOTHING,
    )


def _part_row(run: Run, result: LoadResult) -> tuple[str, ...]:
    parts_s = {name: _median_part(result.parts, name) for name in _PARTS}
    loading = _share(parts_s["load_s"], read_s(run, result.case))
    return (result.variant, *(f"{it:.3g}" for it in parts_s.values()), loading)


def _median_part(parts: tuple[LoadParts, ...], name: str) -> float:
    return median(getattr(it, name) for it in parts) or 0.0


def _spread(times_s: tuple[float, ...] | list[float]) -> str:
    return f"{median(times_s) or 0:.3g} [{min(times_s):.3g} to {max(times_s):.3g}]"


def _share(own_s: float | None, base_s: float | None) -> str:
    return f"{own_s / base_s:.2f}x" if own_s and base_s else NOTHING


def _size(size_bytes: int | None) -> str:
    return NOTHING if size_bytes is None else format_bytes(size_bytes)


def _bits(run: Run, result: LoadResult) -> str:
    """Whether the token and its logits have stock's bits; empty for stock, and without it."""
    stock = _other(run, result, "stock")
    if stock is None or stock is result:
        return ""
    pairs = {
        "token": (result.tokens_hash, stock.tokens_hash),
        "logits": (result.logits_hash, stock.logits_hash),
    }
    other = [name for name, (own, its) in pairs.items() if own != its]
    return f"{' and '.join(other)} differ" if other else "same bits"


# ---- limits ----


def checks(run: Run) -> Iterator[Check]:
    """Hold umem's rows against their budget, and against the token and the logits of stock."""
    for it in (it for it in run.loads if it.variant == "umem"):
        subject = f"{it.case}, {it.variant}"
        if it.state != "measured":
            yield Check(subject, None, f"{it.state}: {it.reason}")
            continue
        words = f"{_size(it.card_peak_bytes)} of {_size(it.budget_bytes)}"
        yield Check(f"{subject}: within its budget by NVML", not _is_over_budget(run, it), words)
        bits = _bits(run, it)
        if bits:
            yield Check(f"{subject}: token and logits", bits == "same bits", bits)
