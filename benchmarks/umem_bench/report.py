"""Benchmark results as tables, and against the targets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.table import Table

from umem.core.units import format_bytes
from umem_bench.results import ALLOCATORS, AllocatorName, BenchmarkName, Measurement, Run, median_s

__all__ = [
    "MAX_ALLOC_RATIO",
    "MAX_RESERVED_RATIO",
    "MAX_STEP_RATIO",
    "Check",
    "Grid",
    "checks",
    "grids",
    "heading",
    "markdown",
    "rich_table",
]

MAX_ALLOC_RATIO = 1.2
"""Target: time of one allocation and its free, as a multiple of torch's own cache."""

MAX_STEP_RATIO = 1.03
"""Target: time of a training step that fits on the device, as a multiple of torch's own cache."""

MAX_RESERVED_RATIO = 1.1
"""Target: peak reserved memory of that step, as a multiple of torch's own cache."""

_TITLES: dict[BenchmarkName, str] = {
    "alloc": "One allocation and its free through torch, µs",
    "step": "One training step, ms",
    "core": "The native core over host memory, from Python: allocation with free, and hook, ns",
}
_SCALES: dict[BenchmarkName, float] = {"alloc": 1e6, "step": 1e3, "core": 1e9}
_NOT_RUN = "failed"
_NOT_COUNTED = "—"


@dataclass(frozen=True)
class Grid:
    """A table before it has a look: texts only."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Check:
    """One target: what was compared, whether it holds, and the figures."""

    subject: str
    passed: bool
    detail: str


def heading(run: Run) -> str:
    """One line that says where, when and with what a run was made."""
    machine, settings = run.machine, run.settings
    parts = [
        machine.gpu or machine.cpu,
        f"driver {machine.driver}" if machine.driver else "",
        f"CUDA {machine.cuda}" if machine.cuda else "",
        f"torch {machine.torch}" if machine.torch else "",
        f"rmm {machine.rmm}" if machine.rmm else "",
        f"umem {machine.umem}" + (f" ({run.git_commit})" if run.git_commit else ""),
        f"policy {settings.policy}",
        f"medians of {settings.rounds} rounds [minimum to maximum]",
        run.date,
    ]
    return ", ".join(part for part in parts if part)


def grids(run: Run) -> Iterator[Grid]:
    """The tables of a run: times by benchmark, then the memory and losses of the steps."""
    for benchmark, title in _TITLES.items():
        if rows := _by_case(run, benchmark):
            yield _times(benchmark, title, rows)
    if steps := _by_case(run, "step"):
        yield _memory(steps)


def rich_table(grid: Grid) -> Table:
    """A table for the terminal."""
    table = Table(title=grid.title, title_justify="left")
    for number, column in enumerate(grid.columns):
        table.add_column(column, justify="right" if number else "left")
    for row in grid.rows:
        table.add_row(*row)
    return table


def markdown(grid: Grid) -> str:
    """A table for a document."""
    lines = [
        f"**{grid.title}**",
        "",
        _markdown_row(grid.columns),
        _markdown_row(["---", *["---:"] * (len(grid.columns) - 1)]),
        *map(_markdown_row, grid.rows),
    ]
    return "\n".join(lines)


def checks(run: Run) -> Iterator[Check]:
    """Hold umem against torch's own cache, case by case.

    A case that either of them did not finish fails. Benchmarks that are not in the run, and the
    native core, which has nothing to be compared with, have no checks.
    """
    limits: dict[BenchmarkName, float] = {"alloc": MAX_ALLOC_RATIO, "step": MAX_STEP_RATIO}
    for benchmark, limit in limits.items():
        for case, row in _by_case(run, benchmark).items():
            umem, torch = row.get("umem"), row.get("torch")
            subject = f"{benchmark}: {case}"
            if umem is None or torch is None:
                yield Check(subject, False, "needs both torch and umem among the allocators")
            elif umem.error or torch.error:
                yield Check(subject, False, str(umem.error or torch.error))
            else:
                yield _limit_check(subject + ", time", limit, median_s(umem), median_s(torch))
                if benchmark == "step":
                    yield _limit_check(
                        subject + ", peak reserved",
                        MAX_RESERVED_RATIO,
                        umem.peak_reserved_bytes,
                        torch.peak_reserved_bytes,
                    )
                    yield Check(
                        subject + ", loss to the last bit",
                        umem.loss_hex == torch.loss_hex,
                        f"umem {umem.loss_hex}, torch {torch.loss_hex}",
                    )


def _limit_check(subject: str, limit: float, umem: float | None, torch: float | None) -> Check:
    if not umem or not torch:
        return Check(subject, False, "not measured")
    ratio = umem / torch
    return Check(subject, ratio <= limit, f"{ratio:.3f}x torch, at most {limit}x")


def _by_case(run: Run, benchmark: BenchmarkName) -> dict[str, dict[AllocatorName, Measurement]]:
    cases: dict[str, dict[AllocatorName, Measurement]] = {}
    for measurement in run.measurements:
        if measurement.benchmark == benchmark:
            cases.setdefault(measurement.case, {})[measurement.allocator] = measurement
    return cases


def _columns(
    cases: dict[str, dict[AllocatorName, Measurement]],
) -> tuple[AllocatorName, ...]:
    return tuple(name for name in ALLOCATORS if any(name in row for row in cases.values()))


def _times(
    benchmark: BenchmarkName, title: str, cases: dict[str, dict[AllocatorName, Measurement]]
) -> Grid:
    names = _columns(cases)
    rows = []
    for case, row in cases.items():
        reference = row.get("torch")
        reference_s = median_s(reference) if reference else None
        cells = [_time_cell(row.get(name), _SCALES[benchmark], reference_s) for name in names]
        rows.append((case, *cells))
    return Grid(title, ("case", *names), tuple(rows))


def _time_cell(measurement: Measurement | None, scale: float, reference_s: float | None) -> str:
    if measurement is None:
        return _NOT_COUNTED
    middle_s = median_s(measurement)
    if middle_s is None:
        return _NOT_RUN
    low, high = min(measurement.rounds_s) * scale, max(measurement.rounds_s) * scale
    text = f"{middle_s * scale:.4g} [{low:.4g} to {high:.4g}]"
    if reference_s is None or measurement.allocator == "torch":
        return text
    return f"{text} {middle_s / reference_s:.2f}x"


def _memory(cases: dict[str, dict[AllocatorName, Measurement]]) -> Grid:
    names = _columns(cases)
    rows: list[tuple[str, ...]] = []
    for case, row in cases.items():
        torch = row.get("torch")
        reserved = torch.peak_reserved_bytes if torch else None
        loss = torch.loss_hex if torch else None
        rows.append((f"{case}: peak allocated", *(_allocated_cell(row.get(n)) for n in names)))
        rows.append(
            (f"{case}: peak reserved", *(_reserved_cell(row.get(n), reserved) for n in names))
        )
        rows.append((f"{case}: loss", *(_loss_cell(row.get(n), loss) for n in names)))
    title = "Memory of those steps, and the loss after a few steps under deterministic algorithms"
    return Grid(title, ("case", *names), tuple(rows))


def _allocated_cell(measurement: Measurement | None) -> str:
    if measurement is None or measurement.peak_allocated_bytes is None:
        return _NOT_COUNTED
    return format_bytes(measurement.peak_allocated_bytes)


def _reserved_cell(measurement: Measurement | None, reference_bytes: int | None) -> str:
    if measurement is None or measurement.peak_reserved_bytes is None:
        return _NOT_COUNTED
    text = format_bytes(measurement.peak_reserved_bytes)
    if not reference_bytes or measurement.allocator == "torch":
        return text
    return f"{text} {measurement.peak_reserved_bytes / reference_bytes:.2f}x"


def _loss_cell(measurement: Measurement | None, reference: str | None) -> str:
    if measurement is None or measurement.loss_hex is None:
        return _NOT_COUNTED
    text = f"{float.fromhex(measurement.loss_hex):.6f}"
    if reference is None or measurement.allocator == "torch":
        return text
    return f"{text} {'same bits' if measurement.loss_hex == reference else 'differs'}"


def _markdown_row(cells: tuple[str, ...] | list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
