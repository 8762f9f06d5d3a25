"""`umem simulate`: what migration would cost a training step, here or on another machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from umem.cli.output import Progress, check_can_write, print_json, progress
from umem.cli.predictions import print_details, print_predictions
from umem.cli.workloads import (
    DEFAULT_HARDWARE,
    AccumulateOption,
    BatchOption,
    BudgetOption,
    CheckpointOption,
    HardwareOption,
    ModelOption,
    PolicyOption,
    SeqOption,
    TraceOption,
    WindowOption,
    find_policy,
    find_workloads,
    known_name,
    known_names,
)
from umem.core.report import MigrationReport
from umem.hardware import Hardware, load_hardware
from umem.planning.prediction import predict, report_row
from umem.trace import with_step_in_backward

if TYPE_CHECKING:
    from umem.trace import Trace

__all__ = ["draw", "simulate"]

_MODES = ("both", "lora", "sft")


def simulate(
    model: ModelOption = None,
    mode: Annotated[
        str | None, typer.Option(help="How the model is trained: lora, sft or both (both).")
    ] = None,
    batch: BatchOption = None,
    seq: SeqOption = None,
    accumulate: AccumulateOption = None,
    checkpoint: CheckpointOption = None,
    trace: TraceOption = None,
    hardware: HardwareOption = DEFAULT_HARDWARE,
    policy: PolicyOption = None,
    planner: Annotated[
        str, typer.Option(help="fault, lookahead, planned, oracle; some, with commas between.")
    ] = "fault,planned",
    budget: BudgetOption = None,
    addresses: Annotated[
        str,
        typer.Option(
            help="reused: the newborn get the memory of the dead; own: every tensor has its own "
            "address and fault never frees it, as some published baselines assume."
        ),
    ] = "reused",
    window: WindowOption = 8,
    step_in_backward: Annotated[
        bool,
        typer.Option(
            "--step-in-backward",
            help="Update each parameter in the backward pass, as umem.manage(..., "
            "step_in_backward=True) does.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON for a program to read.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Draw pictures into this folder.")
    ] = None,
    plot_format: Annotated[str, typer.Option(help="png or svg.")] = "png",
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show what moved, why, and what stalled.")
    ] = False,
) -> None:
    """Predict a training step: its time, what moves, and unified memory's share.

    The machine need not be this one, and no GPU is needed.
    """
    from umem.planning import PLANNERS
    from umem.telemetry import FORMATS, require_matplotlib

    planners = known_names("--planner", planner, PLANNERS)
    known_name("--addresses", addresses, ("reused", "own"))
    known_name("--plot-format", plot_format, FORMATS)
    workloads = find_workloads(
        _MODES,
        model=model,
        mode=mode,
        batch=batch,
        seq=seq,
        accumulate=accumulate,
        checkpoint=checkpoint,
        trace=trace,
    )
    machine = load_hardware(hardware)
    # All of them before the first trace, which may take long.
    policies = [find_policy(policy or workload.preset, machine, budget) for workload in workloads]
    if plot is not None:
        require_matplotlib()
        check_can_write("--plot", plot, folder=True)

    results: list[tuple[Trace, tuple[MigrationReport, ...]]] = []
    with progress() as say:
        for workload, resolved in zip(workloads, policies, strict=True):
            made = workload.make(say)
            if step_in_backward:
                moved, _ = with_step_in_backward(made)
                made = replace(moved, name=f"{made.name}-in-backward")
            reports = predict(
                made,
                machine,
                resolved,
                planners,
                addresses="own" if addresses == "own" else "reused",
                window=window,
                timeline=plot is not None,
                progress=say,
            )
            results.append((made, reports))
        pictures = [] if plot is None else draw(results, machine, plot, plot_format, say)
    if as_json:
        rows = [report_row(report) for _, reports in results for report in reports]
        print_json({"results": rows})
        return
    console = Console()
    for (_, reports), resolved in zip(results, policies, strict=True):
        print_predictions(console, reports, resolved.device_budget_bytes or machine.device_bytes)
        console.print()
        for report in reports if verbose else ():
            print_details(console, report)
            console.print()
    for picture in pictures:
        console.print(f"wrote {picture}", highlight=False, markup=False, soft_wrap=True)


def draw(
    results: Sequence[tuple[Trace, Sequence[MigrationReport]]],
    hardware: Hardware,
    folder: Path,
    kind: str,
    say: Progress,
) -> list[Path]:
    """Draw residency and link for each report, and the shares of all; the files, in order.

    Raises
    ------
    UmemError
        If a file cannot be written.
    """
    from umem.telemetry import link_figure, residency_figure, save, shares_figure

    every = [report for _, reports in results for report in reports]
    figures = {folder / f"um-shares.{kind}": shares_figure(every)}
    for trace, reports in results:
        for report in reports:
            # The name of a workload comes from a file, and may hold anything.
            name = re.sub(r"[^\w-]+", "-", f"{report.workload}-{report.planner}")
            figures[folder / f"residency-{name}.{kind}"] = residency_figure(report, trace)
            figures[folder / f"link-{name}.{kind}"] = link_figure(report, hardware)
    for path, figure in figures.items():
        say(f"Drawing {path.name}")
        save(figure, path)
    return list(figures)
