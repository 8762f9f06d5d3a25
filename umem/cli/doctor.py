"""`umem doctor`: what this machine offers, what works and what does not, and why."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import typer

from umem.cli import options, output
from umem.core.lazy_names import loads_names

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from umem.doctor import Report, collect, diagnose

__all__ = ["app"]

_loads_names = loads_names(
    globals(),
    {
        "rich.table": "Table",
        "rich.text": "Text",
        "umem.doctor": "Status Verdict collect diagnose",
    },
)

_STATUS_STYLES = {
    "ok": "green",
    "warn": "yellow",
    "fail": "bold red",
    "info": "dim",
}
_VERDICT_STYLES = {"yes": "green", "partly": "yellow", "no": "red"}

_COMMAND = re.compile(r"(UMEM_CUDA=\d+ )?pip install ")
_WORD = re.compile(r"(?:'[^']*'|[^'\s])+|'")
"""Words of a shell, whose quotes may have blanks."""

app = output.make_app()


@app.command()
@_loads_names
def doctor(as_json: options.Json = False) -> None:
    """Show what works on this machine, what does not, and how to fix it.

    Exits with 0 if `umem.enable()` would work here, and with 1 if not.
    """
    with output.progress() as say:
        say("Importing torch and looking at the machine")
        report = diagnose(collect())
    if as_json:
        output.print_json(report.to_dict())
    else:
        _print(report, output.make_console())
    raise typer.Exit(0 if report.swap_works else 1)


def _print(report: Report, console: Console) -> None:
    for section in report.sections:
        rows = [
            _Row(it.status, _STATUS_STYLES[it.status], it.name, it.value, it.why, it.remedy)
            for it in section.checks
        ]
        _print_rows(console, section.title, rows)
    rows = [
        _Row(it.verdict, _VERDICT_STYLES[it.verdict], it.name, it.why, "", it.remedy)
        for it in report.features
    ]
    _print_rows(console, "What works here, and why", rows)
    if report.swap_works:
        console.print("umem.enable() works here.", style="green")
        return
    names = ", ".join(check.name for check in report.failures)
    console.print(Text(f"umem.enable() does not work here: {names}.", style="bold red"))


class _Row(NamedTuple):
    mark: str
    style: str
    name: str
    value: str
    why: str
    remedy: str


def _print_rows(console: Console, title: str, rows: Sequence[_Row]) -> None:
    """Print the rows of a section, with each remedy below its row, within the console's width."""
    console.print(Text(title, style="italic"))
    mark_width = max(len(row.mark) for row in rows)
    name_width = min(max(len(row.name) for row in rows), (console.width - mark_width) * 2 // 7)
    indent = " " * (mark_width + 3)
    for row in rows:
        table = Table(box=None, show_header=False)
        table.add_column(width=mark_width)
        longest = max(map(len, row.name.split()))
        table.add_column(width=max(name_width, longest), overflow="fold")
        table.add_column(overflow="fold")
        # As text: names and values hold brackets, which rich would read as markup.
        value = Text(row.value)
        if row.why:
            value.append(f"\n{row.why}", style="italic")
        table.add_row(Text(row.mark.upper(), style=row.style), Text(row.name), value)
        console.print(table)
        for number, line in enumerate(_remedy_lines(row.remedy, console.width - len(indent) - 3)):
            words = f"{indent}{'  ' if number else '->'} {line}"
            console.print(Text(words, style="bold"), soft_wrap=True)
    console.print()


def _remedy_lines(remedy: str, width: int) -> list[str]:
    """Break a remedy between words; a command so that its lines can be copied as one."""
    command = _COMMAND.search(remedy)
    begins = len(remedy) if command is None else command.start()
    lines: list[str] = []
    for text, end in ((remedy[:begins], ""), (remedy[begins:], " \\")):
        line = ""
        for word in _WORD.findall(text):
            if line and len(f"{line} {word}{end}") > width:
                lines.append(line + end)
                line = ""
            line = f"{line} {word}".lstrip()
        lines += filter(None, [line])
    return lines
