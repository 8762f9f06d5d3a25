"""`umem report`: what migrated in a real run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from umem.cli._output import check_can_write, format_seconds, print_json, progress
from umem.cli._predictions import print_traffic
from umem.cli._workloads import known_name
from umem.report import MeasuredReport
from umem.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from umem.telemetry import Recording, TensorTraffic

__all__ = ["report"]

_MOST_TENSORS = 10


def report(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Saved profiles (run.json.gz), or SQLite exports of Nsight Systems.",
        ),
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON for a program to read.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Draw pictures into this folder.")
    ] = None,
    plot_format: Annotated[str, typer.Option(help="png or svg.")] = "png",
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one page with tables and pictures.")
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write a timeline for ui.perfetto.dev (.json, .json.gz)."
        ),
    ] = None,
) -> None:
    """Show what migrated in a recorded run: why, whose it was, and unified memory's share."""
    from umem.plots import FORMATS, require_matplotlib
    from umem.telemetry import (
        measured_row,
        read_recording,
        report_of,
        tensor_traffic,
        write_html,
        write_perfetto,
    )

    known_name("--plot-format", plot_format, FORMATS)
    if plot is not None:
        require_matplotlib()
        check_can_write("--plot", plot, folder=True)
    for option, target in (("--html", html), ("--perfetto", perfetto)):
        if target is not None:
            check_can_write(option, target)

    console = Console()
    written: list[Path] = []
    recordings = []
    with progress() as say:
        for file in files:
            say(f"Reading {file.name}")
            recordings.append(read_recording(file))
        if plot is not None:
            written += _draw(recordings, plot, plot_format, say)
        if html is not None:
            say(f"Writing {html.name}")
            write_html(recordings, html)
            written.append(html)
        if perfetto is not None:
            say(f"Writing {perfetto.name}")
            write_perfetto(recordings, perfetto)
            written.append(perfetto)
    if as_json:
        print_json({"results": [measured_row(recording) for recording in recordings]})
        return
    for recording in recordings:
        _print_measured(console, report_of(recording), tensor_traffic(recording))
        console.print()
    for path in written:
        console.print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)


def _draw(
    recordings: list[Recording], folder: Path, kind: str, say: Callable[[str], None]
) -> list[Path]:
    from umem.plots import save
    from umem.telemetry import classes_figure, report_of, transfers_figure

    written = []
    for number, recording in enumerate(recordings):
        if not recording.records.is_transfer().any():
            continue  # there is nothing to draw
        # The name of a workload comes from a file, and may hold anything.
        name = re.sub(r"[^\w-]+", "-", recording.workload)[:60]
        if len(recordings) > 1:
            name = f"{number}-{name}"
        figures: dict[str, Figure] = {
            f"transfers-{name}.{kind}": transfers_figure(recording),
            f"moved-{name}.{kind}": classes_figure(recording, report_of(recording)),
        }
        for file, figure in figures.items():
            say(f"Drawing {file}")
            save(figure, folder / file)
            written.append(folder / file)
    return written


def _print_measured(
    console: Console, report: MeasuredReport, tensors: tuple[TensorTraffic, ...]
) -> None:
    what = "the whole recording"
    if report.step_count:
        what = "one step" if report.step_count == 1 else f"the median of {report.step_count} steps"
    console.print(
        f"[bold]{_plain(report.workload)}[/bold] on {_plain(report.hardware)}, "
        f"policy {_plain(report.policy)}, measured\n"
        f"{what}: {format_seconds(report.step_s)}",
        highlight=False,
    )
    for note in report.notes:
        console.print(f"note: {_plain(note)}", style="yellow", highlight=False)
    if not report.collected:
        return
    shares = (report.um_time_share, report.um_ops_share, report.um_bytes_share)
    time, count, size = (f"{100 * share:.1f} %" for share in shares)
    console.print(
        f"unified memory's share of memory operations: {time} of time, {count} of operations, "
        f"{size} of bytes",
        highlight=False,
    )
    _print_moved(console, report)
    console.print(
        f"{report.fault_pages:,} pages faulted on the device, in {report.gpu_faults:,} faults; "
        f"{report.cpu_faults:,} faults on the host",
        highlight=False,
    )
    if tensors:
        _print_tensors(console, tensors)


def _print_moved(console: Console, report: MeasuredReport) -> None:
    if not report.traffic:
        console.print("nothing moved")
        return
    print_traffic(console, report.traffic)
    if report.unattributed_bytes:
        console.print(
            f"{format_bytes(report.unattributed_bytes)} of class other hit no known tensor",
            highlight=False,
        )


def _plain(words: str) -> str:
    """Words from a file, without what a terminal would obey or rich would read as markup."""
    return escape("".join(mark if mark.isprintable() else "?" for mark in words))


def _print_tensors(console: Console, tensors: tuple[TensorTraffic, ...]) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("tensor", overflow="fold")
    table.add_column("class")
    table.add_column("moved in all", justify="right", no_wrap=True)
    table.add_column("transfers", justify="right", no_wrap=True)
    for it in tensors[:_MOST_TENSORS]:
        table.add_row(
            _plain(it.name), it.tensor_class.value, format_bytes(it.bytes), f"{it.count:,}"
        )
    console.print(table)
    if len(tensors) > _MOST_TENSORS:
        console.print(f"and {len(tensors) - _MOST_TENSORS:,} tensors more", highlight=False)
