"""`umem doctor`: what this machine offers, what works and what does not, and why."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from umem.doctor import Report, Status, Verdict, collect, diagnose

__all__ = ["doctor"]

_STATUS_STYLES = {
    Status.OK: "green",
    Status.WARN: "yellow",
    Status.FAIL: "bold red",
    Status.INFO: "dim",
}
_VERDICT_STYLES = {Verdict.YES: "green", Verdict.PARTLY: "yellow", Verdict.NO: "red"}


def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON and nothing else.")
    ] = False,
) -> None:
    """Show what this machine and environment offer umem, what works, and what to mend.

    Exits with 0 when the one-line swap would work here and with 1 when not.
    """
    report = diagnose(collect())
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        _print(report, Console())
    raise typer.Exit(0 if report.swap_works else 1)


def _print(report: Report, console: Console) -> None:
    for section in report.sections:
        table = Table(title=section.title, title_justify="left", show_header=False, box=None)
        table.add_column(width=4)
        table.add_column(ratio=1, overflow="fold")
        table.add_column(ratio=3, overflow="fold")
        for check in section.checks:
            mark = Text(check.status.upper(), style=_STATUS_STYLES[check.status])
            # As text, since names and values hold brackets that markup would eat.
            table.add_row(mark, Text(check.name), _lines(check.value, check.why, check.remedy))
        console.print(table)
        console.print()
    features = Table(
        title="What works here, and why", title_justify="left", show_header=False, box=None
    )
    features.add_column(width=6)
    features.add_column(ratio=2, overflow="fold")
    features.add_column(ratio=3, overflow="fold")
    for feature in report.features:
        mark = Text(feature.verdict.upper(), style=_VERDICT_STYLES[feature.verdict])
        features.add_row(mark, Text(feature.name), _lines(feature.why, "", feature.remedy))
    console.print(features)
    console.print()
    console.print(_conclusion(report))


def _lines(value: str, why: str, remedy: str) -> Text:
    """Stack the parts, leaving out empty ones."""
    text = Text(value)
    if why:
        text.append(f"\n{why}", style="italic")
    if remedy:
        text.append(f"\n-> {remedy}", style="bold")
    return text


def _conclusion(report: Report) -> Text:
    if report.swap_works:
        return Text("umem.enable() works here.", style="green")
    names = ", ".join(check.name for check in report.failures)
    return Text(f"umem.enable() does not work here: {names}.", style="bold red")
