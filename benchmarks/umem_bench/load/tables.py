"""Tables of the benchmark of loading, and its figures against limits."""

from __future__ import annotations

from collections.abc import Iterator

from umem_bench.generate.tables import compared_bits, text_checks
from umem_bench.results import LOAD_VARIANTS, LoadCase, LoadParts, LoadResult, Run, median
from umem_bench.tables import NOTHING, Check, Table, notes_table, provenance, size_text
from umem_bench.training.tables import peak_and_base

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


def read_s(run: Run, case: LoadCase) -> float | None:
    """Seconds that reading the files takes, and nothing else."""
    found = next((it for it in _measured(run, case) if it.variant == "read"), None)
    return None if found is None else median(found.read_s)


def _stock(run: Run, result: LoadResult) -> LoadResult:
    """The same case with everything on the device; without one the result, for its own base."""
    return next((it for it in _measured(run, result.case) if it.variant == "stock"), result)


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
        (f"{it.case}, {it.variant}", size_text(it.budget_bytes), it) for it in run.loads
    )


def _title(run: Run, case: LoadCase) -> str:
    shape = run.load_settings.cases[case]
    return (
        f"{case}: safetensors files of {size_text(_measured(run, case)[0].file_bytes)}, "
        f"{shape.weights}, {shape.batch} x {shape.tokens} tokens of a prompt"
    )


def _row(run: Run, result: LoadResult) -> tuple[str, ...]:
    if result.variant == "read":
        return ("read", _spread(result.read_s), *(NOTHING,) * 5)
    totals_s = [it.total_s for it in result.parts]
    stock = _stock(run, result)
    return (
        result.variant,
        _spread(totals_s),
        _share(median(totals_s), read_s(run, result.case)),
        peak_and_base(result, stock),
        size_text(result.budget_bytes),
        size_text(result.host_bytes),
        compared_bits(result, stock, "token") or NOTHING,
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


# ---- limits ----


def checks(run: Run) -> Iterator[Check]:
    """Hold umem's rows against their budget, and against the token and the logits of stock."""
    for it in (it for it in run.loads if it.variant == "umem"):
        yield from text_checks(it.case, it, _stock(run, it), "token")
