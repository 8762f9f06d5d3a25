"""`umem report`: show the migrations of a recorded run, and compare them with a prediction."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from umem import telemetry
from umem.cli import options, output
from umem.core.report import HintReport, MeasuredReport
from umem.core.units import format_bytes
from umem.telemetry.comparison import (
    Comparison,
    StepFigures,
    comparison_row,
    difference_words,
    figures_of,
    read_predictions,
)

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
            metavar="FILE...",
            help="Saved profiles (run.npz), or SQLite exports of Nsight Systems.",
        ),
    ],
    as_json: options.Json = False,
    plot: options.Plot = None,
    plot_format: options.PlotFormat = "png",
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one page with tables and pictures.")
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write a timeline for ui.perfetto.dev (.json, .json.gz)."
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Compare with predictions, from `umem simulate --json`: those for the same "
            "workload, or all if no name matches.",
        ),
    ] = None,
) -> None:
    """Show what migrated in a recorded run: by cause and tensor, and unified memory's share."""
    options.check_plot(plot, plot_format)
    for option, target in (("--html", html), ("--perfetto", perfetto)):
        if target is not None:
            output.check_can_write(option, target)

    console = Console(highlight=False)
    written: list[Path] = []
    recordings = []
    predictions = () if against is None else read_predictions(against)
    with output.progress() as say:
        for file in files:
            say(f"Reading {file.name}")
            recordings.append(telemetry.read_recording(file))
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
    comparisons = [_compared(report, predictions) for report in reports]
    if as_json:
        data: dict[str, Any] = {"results": [telemetry.measured_row(it) for it in recordings]}
        if against is not None:
            data["comparisons"] = [comparison_row(it) for found in comparisons for it in found]
        output.print_json(data)
        return
    for recording, report, found in zip(recordings, reports, comparisons, strict=True):
        _print_measured(console, report, telemetry.tensor_traffic(recording))
        _print_residency(console, recording)
        for comparison in found:
            _print_comparison(console, comparison)
        console.print()
    output.print_written(written)


def _compared(report: MeasuredReport, predictions: Sequence[StepFigures]) -> list[Comparison]:
    # By default a run is named after its script, and then no prediction has its name.
    same = [it for it in predictions if it.workload == report.workload]
    return [Comparison(it, figures_of(report)) for it in same or predictions]


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
    console: Console, report: MeasuredReport, tensors: tuple[telemetry.TensorTraffic, ...]
) -> None:
    what = "the whole recording"
    if report.step_count:
        what = "one step" if report.step_count == 1 else f"the median step of {report.step_count}"
    console.print(
        f"[bold]{_plain(report.workload)}[/bold] on {_plain(report.hardware)}, "
        f"policy {_plain(report.policy)}, measured\n"
        f"{what}: {output.format_seconds(report.step_s)}"
    )
    for note in report.notes:
        console.print(f"note: {_plain(note)}", style="yellow")
    if report.exposed_stall_s is not None:
        share = report.exposed_stall_share
        of_step = "" if share is None else f", {100 * share:.1f} % of the step"
        console.print(
            f"exposed stall: {output.format_seconds(report.exposed_stall_s)}{of_step} "
            f"(all resident: {output.format_seconds(report.ideal_s or 0.0)})"
        )
    if report.collected:
        _print_recorded(console, report)
    elif report.source == "hints":
        console.print("by the hint engine's own count, without page faults:")
        _print_moved(console, report)
    if report.hints is not None:
        _print_hints(console, report.hints)
    if report.collected and tensors:
        _print_tensors(console, tensors)


def _print_recorded(console: Console, report: MeasuredReport) -> None:
    if report.has_copies:
        shares = (report.um_time_share, report.um_ops_share, report.um_bytes_share)
        time, count, size = (f"{100 * share:.1f} %" for share in shares)
        console.print(
            f"unified memory's share of memory operations: {time} of time, {count} of operations, "
            f"{size} of bytes"
        )
    _print_moved(console, report)
    console.print(
        f"{report.gpu_faults:,} faults on the device, in {report.fault_batches:,} batches; "
        f"{report.cpu_faults:,} faults on the host"
    )


def _print_moved(console: Console, report: MeasuredReport) -> None:
    if not report.traffic:
        console.print("nothing moved")
        return
    output.print_traffic(console, report.traffic)
    if report.unattributed_bytes:
        console.print(
            f"{format_bytes(report.unattributed_bytes)} of class other hit no known tensor"
        )


def _print_hints(console: Console, hints: HintReport) -> None:
    names = telemetry.HINT_COUNTS
    table = output.make_table("hint", "class", numbers=(*names, "moved"), narrow=True)
    for use in hints.uses:
        counts = (f"{getattr(use, name):,}" for name in names)
        op, moved = use.op.replace("_", " "), format_bytes(use.moved_bytes)
        table.add_row(op, use.tensor_class.value, *counts, moved)
    if hints.uses:
        console.print(table)
    late_s = sum(use.late_s for use in hints.uses)
    console.print(
        f"hints late by {output.format_seconds(late_s)} in all; {hints.refused:,} refused, "
        f"{hints.failures:,} driver calls failed,\n{format_bytes(hints.over_budget_bytes)} over "
        "the budget"
    )


def _print_residency(console: Console, recording: telemetry.Recording) -> None:
    residency = recording.residency
    if residency is None:
        return
    peaks = ", ".join(
        f"{it.value} {format_bytes(size)}" for it, size in residency.peak_bytes().items()
    )
    console.print(
        f"on the device at most {format_bytes(residency.total_peak_bytes())}"
        + (f"; by class: {peaks}" if peaks else ""),
    )


def _print_comparison(console: Console, comparison: Comparison) -> None:
    predicted = comparison.predicted
    console.print(
        f"against [bold]{_plain(predicted.workload)}[/bold] on {_plain(predicted.hardware)}, "
        f"policy {_plain(predicted.policy)}, planner {_plain(predicted.planner)}, predicted"
    )
    table = output.make_table("figure", numbers=("predicted", "measured", "difference", "relative"))
    for difference in comparison.differences():
        table.add_row(*difference_words(difference))
    console.print(table)


def _plain(words: str) -> str:
    """Text from a file, without the control codes of terminals and the markup of rich."""
    return escape("".join(mark if mark.isprintable() else "?" for mark in words))


def _print_tensors(console: Console, tensors: tuple[telemetry.TensorTraffic, ...]) -> None:
    table = output.make_table("tensor", "class", numbers=("moved in all", "transfers"))
    for it in tensors[:_MOST_TENSORS]:
        sizes = (format_bytes(it.bytes), f"{it.count:,}")
        table.add_row(_plain(it.name), it.tensor_class.value, *sizes)
    console.print(table)
    if len(tensors) > _MOST_TENSORS:
        console.print(f"and {len(tensors) - _MOST_TENSORS:,} tensors more")
