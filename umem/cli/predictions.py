"""Predictions as tables: what a step costs, planner by planner, and where the cost comes from."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from umem.cli.output import format_seconds
from umem.core.report import MigrationReport, Traffic
from umem.core.units import format_bytes
from umem.planning.prediction import published_share

__all__ = ["print_details", "print_predictions", "print_traffic"]

_STALL_WORDS = {
    "fault": "page faults",
    "prefetch": "waiting for what was asked for",
    "room": "waiting for evictions",
    "mapped": "host memory used in place",
    "copy": "computing beside copies",
}


def print_predictions(
    console: Console, reports: Sequence[MigrationReport], budget_bytes: int
) -> None:
    """Print the table of one workload: a row for each planner, the published share below.

    Parameters
    ----------
    console
        Where to.
    reports
        On one workload, machine and policy; at least one.
    budget_bytes
        Device memory that the step had.
    """
    first = reports[0]
    console.print(
        f"[bold]{escape(first.workload)}[/bold] on {escape(first.hardware)}, "
        f"policy {escape(first.policy)}, {format_bytes(budget_bytes)} of device memory\n"
        f"all resident {format_seconds(first.ideal_s)}, "
        f"lower bound {format_seconds(first.lower_bound_s)}",
        highlight=False,
    )
    # One blank between columns keeps the table within 80.
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    table.add_column("planner", vertical="bottom", no_wrap=True)
    for heading in (
        "step",
        "regret",
        "stall",
        "UM, %:\ntime",
        "ops",
        "bytes",
        "moved to:\ndevice",
        "host",
        "pages\nfaulted",
    ):
        table.add_column(heading, justify="right", vertical="bottom", no_wrap=True)
    for report in reports:
        shares = (report.um_time_share, report.um_ops_share, report.um_bytes_share)
        table.add_row(
            report.planner,
            format_seconds(report.step_s),
            f"{report.regret:.2f}",
            # Sums of floats miss zero by a little.
            format_seconds(max(round(report.exposed_stall_s, 9), 0.0)),
            *(f"{100 * share:.1f}" for share in shares),
            _brief(report.moved_bytes("to_device")),
            _brief(report.moved_bytes("to_host")),
            f"{report.fault_pages:,}",
        )
    console.print(table)
    published = published_share(first)
    if published:
        console.print(
            f"published: {100 * published.share:.1f} % of memory operations (of count, time or "
            f"bytes: not said), by\n{published.source}",
            style="dim",
            highlight=False,
        )


def _brief(size_bytes: int) -> str:
    """A size in three digits, which the column has room for."""
    number, unit = format_bytes(size_bytes).split()
    return f"{float(number):.3g} {unit}" if float(number) < 1000 else f"{float(number):.0f} {unit}"


def print_traffic(console: Console, traffic: Sequence[Traffic]) -> None:
    """Print what moved, a row for each direction, cause and class."""
    table = Table(box=None, pad_edge=False)
    for heading in ("direction", "cause", "class"):
        table.add_column(heading)
    for heading in ("moved", "transfers", "link time"):
        table.add_column(heading, justify="right", no_wrap=True)
    for entry in traffic:
        table.add_row(
            entry.direction.replace("_", " "),
            entry.cause,
            entry.tensor_class.value,
            format_bytes(entry.bytes),
            f"{entry.count:,}",
            format_seconds(entry.seconds),
        )
    console.print(table)


def print_details(console: Console, report: MigrationReport) -> None:
    """Print what moved, by direction, cause and class, and where the time above ideal went."""
    console.print(f"[bold]{escape(report.planner)}[/bold]: what moved", highlight=False)
    if report.traffic:
        print_traffic(console, report.traffic)
    else:
        console.print("nothing")
    console.print(
        f"{report.hint_count:,} hints: {report.hints_late:,} waited for, "
        f"{report.hints_wasted:,} with nothing to do. "
        f"{report.fault_pages:,} pages faulted, in {report.fault_batches:,} batches.",
        highlight=False,
    )
    stalls = {cause: time_s for cause, time_s in report.stall_s.items() if time_s > 0}
    words = [
        f"{format_seconds(time_s)} {_STALL_WORDS.get(cause, cause)}"
        for cause, time_s in sorted(stalls.items(), key=lambda stall: -stall[1])
    ]
    console.print(f"stalls: {'; '.join(words) or 'none'}", highlight=False)
