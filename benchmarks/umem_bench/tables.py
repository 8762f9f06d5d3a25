"""Tables for the terminal and for documents, and checks of results against limits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from textwrap import shorten

from rich.console import Console
from rich.table import Table as RichTable

from umem.core.units import format_bytes
from umem_bench.results import Header, Measurement, ProcessResult, median

__all__ = [
    "NOTHING",
    "Check",
    "Table",
    "at_most",
    "beside",
    "markdown",
    "notes_table",
    "print_tables",
    "provenance",
    "seconds",
    "size_text",
    "times_table",
]

NOTHING = "—"
"""The text of a cell without a figure."""

_MOST_WORDS = 160
"""Letters of a reason: an out of memory's ends in advice."""


@dataclass(frozen=True)
class Table:
    """A table of texts."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Check:
    """A figure held against a limit; `passed` is None where the run does not have the figure."""

    subject: str
    passed: bool | None
    detail: str


def at_most(subject: str, own: float | None, other: float | None, limit: float) -> Check:
    """Hold a figure against a multiple of another one."""
    if own is None or not other:
        return Check(subject, None, "not measured")
    return Check(subject, own <= limit * other, f"{own / other:.3f}x, at most {limit:.3g}x")


def provenance(header: Header, *more: str) -> str:
    """One line with machine, versions, further words and the date."""
    machine = header.machine
    parts = [
        machine.gpu or (f"{machine.cpu}, {machine.cpu_count} cores" if machine.cpu else ""),
        f"driver {machine.driver}" if machine.driver else "",
        f"CUDA {machine.cuda}" if machine.cuda else "",
        *(f"{name} {version}" for name, version in header.packages.items()),
        f"umem {header.umem}" + (f" ({header.commit})" if header.commit else ""),
        *more,
        header.date or "",
    ]
    return ", ".join(part for part in parts if part)


def beside(measurements: Iterable[Measurement]) -> dict[str, dict[str, Measurement]]:
    """Measurements by case and subject, in their order."""
    cases: dict[str, dict[str, Measurement]] = {}
    for it in measurements:
        cases.setdefault(it.case, {})[it.subject] = it
    return cases


def times_table(title: str, measurements: Sequence[Measurement], scale: float) -> Table:
    """One row for each case, one column for each subject.

    A cell has the median, the extremes, and the ratio of medians to the first subject's.
    """
    subjects = tuple(dict.fromkeys(it.subject for it in measurements))
    rows = []
    for case, row in beside(measurements).items():
        first_s = median(row[subjects[0]].rounds_s) if subjects[0] in row else None
        cells = []
        for subject in subjects:
            rounds_s = row[subject].rounds_s if subject in row else ()
            own_s = median(rounds_s)
            if own_s is None:
                cells.append("failed" if subject in row else NOTHING)
                continue
            low, high = min(rounds_s) * scale, max(rounds_s) * scale
            text = f"{own_s * scale:.4g} [{low:.4g} to {high:.4g}]"
            is_first = first_s is None or subject == subjects[0]
            cells.append(text if is_first else f"{text} {own_s / (first_s or 1):.2f}x")
        rows.append((case, *cells))
    return Table(title, ("case", *subjects), rows)


def notes_table(runs: Iterable[tuple[str, str, ProcessResult]]) -> list[Table]:
    """Why processes measured nothing, and their notes, by name and budget; no table without any."""
    rows = [
        (name, budget, state, shorten(words, _MOST_WORDS, placeholder=" …"))
        for name, budget, it in runs
        for state, words in ((it.state, it.reason), *(("note", note) for note in it.notes))
        if words
    ]
    columns = ("run", "budget", "state", "why")
    return [Table("Not measured, and notes", columns, rows)] if rows else []


def print_tables(heading: str, tables: Iterable[Table], *, as_markdown: bool) -> None:
    """Print a line and tables to standard output."""
    if as_markdown:
        print("\n\n".join([heading, *map(markdown, tables)]))
        return
    console = Console()
    console.print(heading, markup=False, highlight=False)
    for table in tables:
        shown = RichTable(title=table.title, title_justify="left")
        for column, is_text in zip(table.columns, _text_columns(table), strict=True):
            shown.add_column(column, justify="left" if is_text else "right")
        for row in table.rows:
            shown.add_row(*row)
        console.print()
        console.print(shown)


def markdown(table: Table) -> str:
    """A table for a document."""
    rule = ["---" if is_text else "---:" for is_text in _text_columns(table)]
    rows = [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
        for row in (table.columns, rule, *table.rows)
    ]
    return "\n".join([f"**{table.title}**", "", *rows])


def _text_columns(table: Table) -> list[bool]:
    """Whether each column is read as words: the first one, and where most cells are not figures."""
    columns = list(zip(*table.rows, strict=True)) or [() for _ in table.columns]
    return [number == 0 or _is_text(cells) for number, cells in enumerate(columns)]


def _is_text(cells: Iterable[str]) -> bool:
    """Whether most cells have more than the letters of units: three to a digit, as in 8 GiB."""
    said = [cell for cell in cells if cell.strip(NOTHING)]
    texts = [it for it in said if sum(map(str.isalpha, it)) > 3 * sum(map(str.isdigit, it))]
    return 2 * len(texts) > len(said)


def size_text(size_bytes: int | None) -> str:
    """A size in its unit."""
    return NOTHING if size_bytes is None else format_bytes(size_bytes)


def seconds(time_s: float | None) -> str:
    """A time in three digits."""
    if time_s is None:
        return NOTHING
    units = ((1.0, "s", 1.0), (1e3, "ms", 1e-3), (1e6, "µs", 0.0))
    scaled, unit = next((time_s * by, unit) for by, unit, least in units if time_s >= least)
    return f"{scaled:,.0f} {unit}" if scaled >= 100 else f"{scaled:.3g} {unit}"
