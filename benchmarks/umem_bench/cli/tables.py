"""What the commands of `umem bench` have in common: lists of names, progress, tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, TypeVar

import typer
from rich.console import Console

from umem_bench import report
from umem_bench.report import Grid, markdown, rich_table

__all__ = ["Check", "Markdown", "hold", "named", "print_tables", "progress"]

_Name = TypeVar("_Name", bound=str)

Check = Annotated[
    bool, typer.Option("--check", help="Hold umem against its targets; exit 1 if one is missed.")
]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print tables for a document.")]


def named(value: str, known: Sequence[_Name]) -> tuple[_Name, ...]:
    """A list such as "torch,umem", every name known, in the order of `known`."""
    names = [name.strip() for name in value.split(",")]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}")
    return tuple(name for name in known if name in names)


def progress() -> Callable[[str], None]:
    """Prints lines to standard error."""
    return Console(stderr=True, style="dim", markup=False, highlight=False, soft_wrap=True).print


def print_tables(heading: str, grids: Iterable[Grid], *, as_markdown: bool) -> None:
    """Print tables to standard output."""
    if as_markdown:
        print(heading)
        for grid in grids:
            print(f"\n{markdown(grid)}")
        return
    console = Console()
    console.print(heading, markup=False, highlight=False)
    for grid in grids:
        console.print()
        console.print(rich_table(grid))


def hold(outcomes: Iterable[report.Check]) -> None:
    """Print every target and whether it holds; exit 1 if one is missed."""
    missed = False
    for outcome in outcomes:
        print(f"{'pass' if outcome.passed else 'FAIL'}  {outcome.subject}: {outcome.detail}")
        missed = missed or not outcome.passed
    if missed:
        raise typer.Exit(1)
