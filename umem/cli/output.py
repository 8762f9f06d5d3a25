"""How commands print: progress, tables and JSON."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from umem.cli import INTERRUPTED_STATUS, QuickGroup
from umem.core.errors import UmemError
from umem.core.progress import notify_by
from umem.core.units import format_bytes, time_unit
from umem.io.problems import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.align import VerticalAlignMethod
    from rich.console import Console
    from rich.table import Table

    from umem.core.report import Traffic
    from umem.predict.stream_prediction import UnitChoice

__all__ = [
    "Progress",
    "check_can_write",
    "file_name",
    "format_milliseconds",
    "format_seconds",
    "format_size",
    "interruptible",
    "make_app",
    "make_console",
    "make_table",
    "plain",
    "print_choices",
    "print_json",
    "print_table",
    "print_traffic",
    "print_written",
    "progress",
    "save_figures",
    "stall_words",
]

Progress = Callable[[str], None]
"""Shows a message about the work in progress."""

_LONGEST_WORD = 24
"""Cells of words that a table does not break, however narrow the terminal."""

_WIDEST = 500
"""Columns of the widest terminal that tables are laid out for."""

_PATIENCE_S = 2.0
"""Shorter work is over before a message about it can be read."""


def make_app(**settings: Any) -> typer.Typer:
    """Make the Typer application of one command."""
    return typer.Typer(cls=QuickGroup, add_completion=False, rich_markup_mode=None, **settings)


@contextmanager
def progress() -> Iterator[Progress]:
    """Show messages on standard error, if it is a terminal, once the work takes long."""
    console = make_console(stderr=True)
    if not console.is_terminal:
        with notify_by(lambda _: None):
            yield lambda _: None
        return
    status = console.status("Starting ...", spinner="line")  # its signs are ASCII
    timer = threading.Timer(_PATIENCE_S, status.start)
    timer.daemon = True
    timer.start()

    def say(message: str) -> None:
        status.update(f"{plain(message)} ...")

    try:
        with notify_by(lambda message: say(message.capitalize())):
            yield say
    finally:
        timer.cancel()
        timer.join()
        status.stop()


@contextmanager
def interruptible() -> Iterator[None]:
    """End the process at once on Ctrl-C, for work inside torch and numba.

    Python's handler raises an exception. There is C++ code in torch that aborts then, and numba's
    compiler fails with errors of its own. The work may write no files but numba's cache, which
    puts each in place when it is whole. Only the main thread sets handlers. SIGINT may be ignored,
    as in a job of a shell.
    """
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, end_at_once)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end_at_once(*_: object) -> None:
    """End the process as interrupted, without Python's exception: a handler of signals."""
    make_console(stderr=True).show_cursor()
    os.write(2, b"umem: interrupted\n")
    os._exit(INTERRUPTED_STATUS)


def make_console(*, stderr: bool = False) -> Console:
    """Make the console of standard output, or of standard error."""
    # Here and below: `--help` prints without rich, which takes as long to import as all else.
    from rich.console import Console

    # rich believes any COLUMNS and LINES, such as 0 or a number of lines that memory does not hold.
    size = shutil.get_terminal_size()
    given = {"COLUMNS", "LINES"} & os.environ.keys()
    width, height = (min(size.columns, _WIDEST), size.lines) if given else (None, None)
    return Console(highlight=False, stderr=stderr, width=width, height=height)


def plain(words: str) -> str:
    """Text from a file, without the control characters of terminals and the markup of rich."""
    from rich.markup import escape

    return escape(visible(words))


def print_json(data: Any) -> None:
    """Print data as JSON."""
    typer.echo(json.dumps(data, indent=2))


def print_written(paths: Sequence[Path]) -> None:
    """Name the files that a command has written."""
    for path in paths:
        typer.echo(f"wrote {path}")


def print_table(console: Console, table: Table) -> None:
    """Print a table, wider than the terminal if numbers or words would be cut otherwise."""
    from rich.cells import cell_len

    for column in table.columns:
        lines = [
            line.plain
            for cell in (column.header, *column.cells)
            for line in console.render_str(str(cell)).split()
        ]
        # A column of numbers is not wrapped; others may be broken between words.
        words = lines if column.no_wrap else [word for line in lines for word in line.split()]
        least = max(map(cell_len, words), default=0)
        column.min_width = least if column.no_wrap else min(least, _LONGEST_WORD)
    gap = 1 if table.collapse_padding else 2
    least = sum(column.min_width or 0 for column in table.columns) + gap * (len(table.columns) - 1)
    if least > console.width:
        table.width = least
    console.print(table, crop=False)


def make_table(*text: str, numbers: Sequence[str] = (), narrow: bool = False) -> Table:
    """Make a table without lines: columns of text, then columns of numbers, aligned to the right.

    `narrow` leaves one blank between columns, so that many of them fit into a line of 80.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False, collapse_padding=narrow)
    two_lines = any("\n" in heading for heading in (*text, *numbers))
    vertical: VerticalAlignMethod = "bottom" if two_lines else "top"
    for heading in text:
        table.add_column(heading, vertical=vertical, overflow="fold")
    for heading in numbers:
        table.add_column(heading, vertical=vertical, justify="right", no_wrap=True)
    return table


def print_traffic(console: Console, traffic: Sequence[Traffic], counted: str = "transfers") -> None:
    """Print migrations and copies, a row for each direction, cause and class."""
    if not traffic:
        console.print("nothing")
        return
    numbers = ("moved", counted, "link time")
    table = make_table("direction", "cause", "class", numbers=numbers)
    for entry in traffic:
        table.add_row(
            entry.direction.replace("_", " "),
            entry.cause,
            entry.tensor_class.value,
            format_bytes(entry.bytes),
            f"{entry.count:,}",
            format_seconds(entry.seconds),
        )
    print_table(console, table)


def print_choices(console: Console, choices: Sequence[UnitChoice]) -> None:
    """Print what a plan does with activations: a row for each run of units that are alike."""
    found = [it for it in choices if it.saved_bytes]
    if all(it.choice == "kept" for it in found):
        console.print("activations: all kept")
        return
    table = make_table("activations", "units", numbers=("saved each", "copies", "again"))
    for (choice, *cells), its in groupby(found, _choice_cells):
        first, *_, last = [*its] * 2
        names = first.unit if first is last else f"{first.unit} to {last.unit}"
        table.add_row(choice, plain(names), *cells)
    print_table(console, table)
    console.print("copies: out and back, over the link alone; again: computed in the backward pass")


def _choice_cells(choice: UnitChoice) -> tuple[str, str, str, str]:
    times = format_seconds(choice.copy_s), format_seconds(choice.compute_s)
    return choice.choice, format_bytes(choice.saved_bytes), *times


_STALLS = {
    "fault": "page faults",
    "prefetch": "late prefetches",
    "room": "waiting for evictions",
    "mapped": "host memory used in place",
    "copy": "computing beside copies",
    "pages": "computing beside migration",
}


def stall_words(stall_s: Mapping[str, float]) -> str:
    """Causes of a step's stalls in words, the longest first."""
    stalls = {cause: time_s for cause, time_s in stall_s.items() if time_s > 0}
    words = [
        f"{format_seconds(time_s)} {_STALLS[cause]}"
        for cause, time_s in sorted(stalls.items(), key=lambda stall: -stall[1])
    ]
    return "; ".join(words) or "none"


def format_seconds(time_s: float) -> str:
    """Write a time in three digits, such as ``"12.3 ms"``."""
    factor, unit = time_unit(abs(time_s))
    scaled = time_s * factor
    digits = f"{scaled:,.0f}" if abs(scaled) >= 100 else f"{scaled:.3g}"
    return f"{digits} {unit}" if scaled else "0 s"


def format_milliseconds(time_s: float) -> str:
    """Write a time in milliseconds without the unit, to the microsecond."""
    return f"{time_s * 1e3:,.3f}"


def format_size(size_bytes: int) -> str:
    """Write a size in three digits, where a column has no room for more."""
    number, unit = format_bytes(size_bytes).split()
    return f"{float(number):.3g} {unit}" if float(number) < 1000 else f"{float(number):.0f} {unit}"


def file_name(words: str) -> str:
    """Make a part of a file's name of a name from a file, which may hold anything."""
    return re.sub(r"[^\w-]+", "-", words)


def save_figures(figures: Mapping[Path, Figure], say: Progress) -> list[Path]:
    """Save figures; return their paths, in order. ``UmemError`` if a file cannot be written."""
    from umem.telemetry import save

    for path, figure in figures.items():
        say(f"Drawing {path.name}")
        save(figure, path)
    return list(figures)


def check_can_write(
    option: str, path: Path, *, suffixes: Sequence[str] = (), folder: bool = False
) -> None:
    """Check that a file, or a folder, can be made, before the work that fills it.

    If it cannot, or its name has none of the suffixes, the ``UmemError`` names the option.
    """
    if path.is_dir() and not folder:
        raise UmemError(f"{option}: {path} is a folder: give the name of a file")
    if path.exists() and not path.is_file() and not folder:
        raise UmemError(f"{option}: {path} is a device or a pipe: give the name of a file")
    if suffixes and path.suffix not in suffixes:
        raise UmemError(f"{option}: {path} does not end in {suffixes[0]}: give a name that does")
    parent = path if folder and path.exists() else path.parent
    if not parent.exists():
        raise UmemError(f"{option}: there is no folder {parent}: make it, or choose another place")
    if not parent.is_dir():
        raise UmemError(f"{option}: {parent} is a file and no folder: choose another place")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UmemError(f"{option}: the folder {parent} is not writable: choose another place")
