"""`umem report`: show the migrations of a recorded run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from umem.cli import options, output
from umem.cli.output import format_milliseconds, plain
from umem.core.lazy_names import loads_names
from umem.core.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from umem.core.report import HintReport, MeasuredReport, Source
    from umem.telemetry import (
        HINT_COUNTS,
        MeasuredRun,
        load_run,
        measured_row,
        residency_over_run_figure,
    )

__all__ = ["app"]

_loads_names = loads_names(
    globals(),
    {
        "umem.telemetry": "HINT_COUNTS load_run measured_row residency_over_run_figure",
    },
)

_MOST_TENSORS = 10

_SOURCES: dict[Source, str] = {
    "driver": "recorded by the driver, copies and memory sets by CUPTI",
    "driver_only": "recorded by the driver, copies and memory sets not recorded",
    "cupti": "recorded by CUPTI",
    "hints": "memory operations not recorded, hints as the hint engine counts them",
    "none": "memory operations not recorded",
}

app = output.make_app()


@app.command(no_args_is_help=True)
@_loads_names
def report(
    files: Annotated[
        list[Path],
        typer.Argument(readable=False, metavar="FILE...", help="Saved profiles, such as run.json."),
    ],
    as_json: options.Json = False,
    plot: options.Plot = None,
) -> None:
    """Show what migrated in a recorded run: by cause and tensor, and unified memory's share."""
    options.check_plot(plot)
    written: list[Path] = []
    runs = []
    with output.progress() as say:
        for file in files:
            say(f"Reading {file.name}")
            runs.append(load_run(file))
        if plot is not None:
            for number, run in enumerate(runs):
                name = output.file_name(run.typical.workload)[:60]
                name = f"{number}-{name}" if len(runs) > 1 else name
                if run.residency is not None:
                    figure = residency_over_run_figure(run)
                    written += output.save_figures({plot / f"residency-{name}.png": figure}, say)
    if as_json:
        output.print_json({"results": [measured_row(it) for it in runs]})
        return
    console = output.make_console()
    for run in runs:
        _print(console, run)
        console.print()
    output.print_written(written)


def _print(console: Console, run: MeasuredRun) -> None:
    report = run.typical
    console.print(
        f"[bold]{plain(report.workload)}[/bold] on {plain(report.hardware)}, "
        f"policy {plain(report.policy)}, measured:\n{_SOURCES[report.source]}"
    )
    for note in report.notes:
        console.print(f"note: {plain(note)}", style="yellow")
    table = output.make_table("", numbers=("in a step",), narrow=True)
    for row in _summary(run, report):
        table.add_row(*row)
    output.print_table(console, table)
    if report.source != "none" or report.traffic:
        console.print("What moved", style="bold")
        output.print_traffic(console, report.traffic, "transfers" if report.collected else "calls")
    if report.hints is not None:
        _print_hints(console, report.hints)
    if report.collected and (tensors := run.tensors):
        console.print("Tensors that moved most, over all steps", style="bold")
        table = output.make_table("tensor", "class", numbers=("moved", "transfers"), narrow=True)
        for it in tensors[:_MOST_TENSORS]:
            size = format_bytes(it.bytes)
            table.add_row(plain(it.name), it.tensor_class.value, size, f"{it.count:,}")
        output.print_table(console, table)
        if len(tensors) > _MOST_TENSORS:
            console.print(f"and {len(tensors) - _MOST_TENSORS:,} tensors more")


def _summary(run: MeasuredRun, report: MeasuredReport) -> Iterator[tuple[str, str]]:
    steps = report.step_count
    what = f"median step of {steps:,}" if steps > 1 else "step" if steps else "whole recording"
    yield f"{what}, ms", format_milliseconds(report.step_s)
    if report.ideal_s is not None:
        yield "all resident, ms", format_milliseconds(report.ideal_s)
    if report.exposed_stall_s is not None:
        yield "exposed stall, ms", format_milliseconds(report.exposed_stall_s)
    if report.exposed_stall_share is not None:
        yield "exposed stall, % of the step", _percent(report.exposed_stall_share)
    if report.has_copies:
        yield "unified memory, % of the time of memory operations", _percent(report.um_time_share)
        yield "the same by count, %", _percent(report.um_ops_share)
        yield "the same by bytes, %", _percent(report.um_bytes_share)
    if report.source != "none" or report.traffic:
        by = "" if report.collected else " by umem"
        yield f"moved to the device{by}", format_bytes(report.moved_bytes("to_device"))
        yield f"moved to the host{by}", format_bytes(report.moved_bytes("to_host"))
    if report.collected:
        yield "moved between devices", format_bytes(report.moved_bytes("between_devices"))
        yield "of class other, hit no known tensor", format_bytes(report.unattributed_bytes)
        yield "batches of faults on the device", f"{report.fault_batches:,}"
        yield "faults on the device", f"{report.gpu_faults:,}"
        yield "faults on the host", f"{report.cpu_faults:,}"
    if report.has_copies:
        yield "copies and memory sets", f"{report.memory_ops_count:,}"
        yield "bytes copied and set", format_bytes(report.memory_ops_bytes)
    if run.residency is not None:
        yield "on the device at most", format_bytes(run.residency.total_peak_bytes())
        for of, size_bytes in run.residency.peak_bytes().items():
            yield f"{of.value} on the device at most", format_bytes(size_bytes)


def _print_hints(console: Console, hints: HintReport) -> None:
    counts = HINT_COUNTS
    console.print("Hints", style="bold")
    table = output.make_table("hint", "class", numbers=(*counts, "moved", "ms late"), narrow=True)
    for use in hints.uses:
        table.add_row(
            use.op.replace("_", " "),
            use.tensor_class.value,
            *(f"{getattr(use, name):,}" for name in counts),
            format_bytes(use.moved_bytes),
            format_milliseconds(use.late_s),
        )
    if hints.uses:
        output.print_table(console, table)
    late_s = sum(use.late_s for use in hints.uses)
    console.print(
        f"{format_milliseconds(late_s)} ms late in all, {hints.refused:,} requests refused, "
        f"{hints.failures:,} driver calls failed"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
