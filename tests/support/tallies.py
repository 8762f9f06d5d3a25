"""What campaigns print: a line for each thing that was tried, and the table of all of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn, Protocol, TypeVar


class Tally(Protocol):
    """What came of one thing."""

    wrong: list[str]
    """A line for each attempt that went wrong."""


T = TypeVar("T", bound=Tally)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    ]


def report(
    tried: Iterable[tuple[str, T]],
    table: Callable[[Sequence[tuple[str, T]]], str],
    output: str | None,
) -> NoReturn:
    """Print each result as it comes, then the table, which goes to a file too; exit.

    The status is 1 if anything is wrong. The last line of a table of one result is its row.
    """
    results = []
    for name, tally in tried:
        results.append((name, tally))
        print(table(results[-1:]).splitlines()[-1], flush=True)
        for wrong in tally.wrong:
            print(f"  {wrong}", flush=True)
    text = table(results)
    print(f"\n{text}")
    if output:
        with open(output, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    sys.exit(any(tally.wrong for _, tally in results))
