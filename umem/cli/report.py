"""`umem report`: show the migrations of a recorded run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from umem import telemetry
from umem.cli import options, output
from umem.cli.output import plain
from umem.core.report import MeasuredReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["app"]

_MOST_TENSORS = 10

app = output.make_app()


@app.command(no_args_is_help=True)
def report(
    files: Annotated[
        list[Path],
        typer.Argument(
            readable=False,
            metavar="FILE...",
            help="Saved profiles, such as run.npz.",
        ),
    ],
    as_json: options.Json = False,
    plot: options.Plot = None,
    plot_format: options.PlotFormat = "png",
    html: Annotated[
        Path | None,
        typer.Option(
            readable=False, metavar="FILE", help="Write one page with tables and pictures."
        ),
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(
            readable=False,
            metavar="FILE",
            help="Write a timeline for ui.perfetto.dev (.json, .json.gz).",
        ),
    ] = None,
) -> None:
    """Show what migrated in a recorded run: by cause and tensor, and unified memory's share."""
    options.check_plot(plot, plot_format)
    for option, target in (("--html", html), ("--perfetto", perfetto)):
        if target is not None:
            output.check_can_write(option, target)

    console = output.make_console()
    written: list[Path] = []
    recordings = []
    with output.progress() as say:
        for file in files:
            say(f"Reading {file.name}")
            recordings.append(telemetry.load_recording(file))
        if plot is not None:
            written += output.save_figures(_figures(recordings, plot, plot_format), say)
        if html is not None:
            say(f"Writing {html.name}")
            telemetry.write_html(recordings, html)
            written.append(html)
        if perfetto is not None:
            say(f"Writing {perfetto.name}")
            telemetry.write_perfetto(recordings, perfetto)
            written.append(perfetto)
    reports = [telemetry.report_of(recording) for recording in recordings]
    if as_json:
        output.print_json({"results": [telemetry.measured_row(it) for it in recordings]})
        return
    for recording, report in zip(recordings, reports, strict=True):
        _print_measured(console, recording, report)
        console.print()
    output.print_written(written)


def _figures(recordings: list[telemetry.Recording], folder: Path, kind: str) -> dict[Path, Figure]:
    """Pictures of the data that each recording has, by the file to save them in."""
    figures: dict[Path, Figure] = {}
    for number, recording in enumerate(recordings):
        name = output.file_name(recording.workload)[:60]
        if len(recordings) > 1:
            name = f"{number}-{name}"
        report = telemetry.report_of(recording)
        for what, (_, draw) in telemetry.figures_of_recording(recording, report).items():
            figures[folder / f"{what}-{name}.{kind}"] = draw()
    return figures


def _print_measured(
    console: Console, recording: telemetry.Recording, report: MeasuredReport
) -> None:
    console.print(
        f"[bold]{plain(report.workload)}[/bold] on {plain(report.hardware)}, "
        f"policy {plain(report.policy)}, measured:\n{telemetry.SOURCE_WORDS[report.source]}"
    )
    for note in report.notes:
        console.print(f"note: {plain(note)}", style="yellow")
    for table in telemetry.report_tables(recording, report, _MOST_TENSORS):
        shown = output.make_table(*table.text, numbers=table.numbers, narrow=True)
        for row in table.rows:
            shown.add_row(*map(plain, row))
        if table.title:
            console.print(table.title, style="bold")
        if table.rows:
            output.print_table(console, shown)
        if table.words:
            console.print(table.words)
