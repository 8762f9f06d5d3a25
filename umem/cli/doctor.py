"""`umem doctor`: what this machine offers, what works and what does not, and why."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from umem.cli import options, output
from umem.doctor import Report, Status, Verdict, collect, diagnose

__all__ = ["app"]

_STATUS_STYLES = {
    Status.OK: "green",
    Status.WARN: "yellow",
    Status.FAIL: "bold red",
    Status.INFO: "dim",
}
_VERDICT_STYLES = {Verdict.YES: "green", Verdict.PARTLY: "yellow", Verdict.NO: "red"}


app = output.make_app()


@app.command()
def doctor(as_json: options.Json = False) -> None:
    """Show what this machine offers umem, what works, and what to mend.

    Exits with 0 if `umem.enable()` would work here, and with 1 if not.
    """
    report = diagnose(collect())
    if as_json:
        output.print_json(report.to_dict())
    else:
        _print(report, Console())
    raise typer.Exit(0 if report.swap_works else 1)


def _print(report: Report, console: Console) -> None:
    for section in report.sections:
        table = _table(section.title, mark_width=4)
        for check in section.checks:
            mark = Text(check.status.upper(), style=_STATUS_STYLES[check.status])
            # As text: names and values hold brackets, which rich would read as markup.
            table.add_row(mark, Text(check.name), _lines(check.value, check.why, check.remedy))
        console.print(table, "")
    table = _table("What works here, and why", mark_width=6)
    for feature in report.features:
        mark = Text(feature.verdict.upper(), style=_VERDICT_STYLES[feature.verdict])
        table.add_row(mark, Text(feature.name), _lines(feature.why, "", feature.remedy))
    console.print(table, "")
    if report.swap_works:
        console.print("umem.enable() works here.", style="green")
        return
    names = ", ".join(check.name for check in report.failures)
    console.print(Text(f"umem.enable() does not work here: {names}.", style="bold red"))


def _table(title: str, mark_width: int) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None)
    table.add_column(width=mark_width)
    table.add_column(ratio=2, overflow="fold")
    table.add_column(ratio=5, overflow="fold")
    return table


def _lines(value: str, why: str, remedy: str) -> Text:
    """Stack the parts, leaving out empty ones."""
    text = Text(value)
    if why:
        text.append(f"\n{why}", style="italic")
    if remedy:
        text.append(f"\n-> {remedy}", style="bold")
    return text
