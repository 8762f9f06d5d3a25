"""`umem simulate`: predict the cost of migration for a training step, on any machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from umem.cli import options, output
from umem.cli.output import plain
from umem.core.classes import TensorClass
from umem.core.errors import UmemError
from umem.core.lazy_names import loads_names
from umem.core.units import format_bytes
from umem.pages.plan import PLANNERS

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

    from umem.core.report import MigrationReport
    from umem.hardware import Hardware
    from umem.policy import ResolvedPolicy
    from umem.predict.prediction import predict, report_row
    from umem.predict.prediction_cache import predict_once
    from umem.predict.stream_prediction import (
        StreamPrediction,
        predict_stream,
        stream_row,
    )
    from umem.trace import Trace
    from umem.trace.published import PUBLISHED_BY, published_share

__all__ = ["app", "print_streamed"]

_loads_names = loads_names(
    globals(),
    {
        "umem.predict.prediction": "predict report_row",
        "umem.predict.prediction_cache": "predict_once",
        "umem.predict.stream_prediction": "predict_stream stream_row",
        "umem.trace.published": "PUBLISHED_BY published_share",
    },
)

app = output.make_app()


@app.command(no_args_is_help=True)
@options.takes_workload()
@_loads_names
def simulate(
    given: options.WorkloadOptions,
    mode: Annotated[
        str | None,
        typer.Option(help="How the model is trained: lora, sft or both (default: both)."),
    ] = None,
    hardware: options.HardwareName = options.DEFAULT_HARDWARE,
    policy: options.PolicyName = options.DEFAULT_POLICY,
    planner: Annotated[
        str, typer.Option(help="fault, lookahead or planned; several with commas between.")
    ] = "fault,planned",
    budget: options.Budget = None,
    runnable: Annotated[
        bool,
        typer.Option(
            "--runnable",
            help="Predict the plan that umem.manage would run: only what a running training can "
            "carry out.",
        ),
    ] = False,
    step_in_backward: Annotated[
        bool,
        typer.Option(
            "--step-in-backward",
            help="Under a policy that streams optimizer state: update each block in the backward "
            "pass, as umem.manage(..., step_in_backward=True) does.",
        ),
    ] = False,
    as_json: options.Json = False,
    plot: options.Plot = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show what moved, why, and what stalled.")
    ] = False,
) -> None:
    """Predict a training step: its time, what moves, and unified memory's share.

    The prediction may be for any machine that has a profile, and needs no GPU. Pages migrate
    under the policy managed; the optimizer's state, and weights that have no room, are streamed
    under sft, lora and inference.
    """
    planners = options.known_names("--planner", planner, PLANNERS)
    workloads = options.find_workloads(("both", "lora", "sft"), replace(given, mode=mode))
    machine = options.find_machine(hardware)
    # Before the first trace, which may take long.
    resolved = options.find_policy(policy, machine, budget)
    options.check_plot(plot)
    if resolved.streams_state:
        if plot is not None:
            raise UmemError("--plot: pictures are of pages, and this policy streams state")
        _simulate_streamed(
            workloads, machine, resolved, in_backward=step_in_backward, as_json=as_json
        )
        return
    if step_in_backward:
        raise UmemError(
            f"--step-in-backward: policy {resolved.name} streams no optimizer state on "
            f"{machine.name}: give one that does, such as --policy sft"
        )

    results: list[tuple[Trace, tuple[MigrationReport, ...]]] = []
    pictures: list[Path] = []
    with output.progress() as say:
        for workload in workloads:
            made = workload(say)
            with output.interruptible():
                asked = (made, machine, resolved, planners)
                if plot is None:
                    reports = predict_once(*asked, runnable=runnable, progress=say)
                else:
                    reports = predict(*asked, runnable=runnable, timeline=True, progress=say)
            results.append((made, reports))
        if plot is not None:
            pictures = output.save_figures(_figures(results, plot), say)
    if as_json:
        rows = [
            report_row(report) | {"rates": machine.rates}
            for _, reports in results
            for report in reports
        ]
        output.print_json({"results": rows})
        return
    console = output.make_console()
    for _, reports in results:
        _print_predictions(console, reports, resolved.device_budget_bytes or machine.device_bytes)
        console.print()
        for report in reports if verbose else ():
            _print_details(console, report)
            console.print()
    console.print(options.rates_line(plain(machine.name), machine.rates), style="dim")
    output.print_written(pictures)


def _simulate_streamed(
    workloads: Sequence[Callable[[output.Progress], Trace]],
    hardware: Hardware,
    policy: ResolvedPolicy,
    *,
    in_backward: bool,
    as_json: bool,
) -> None:
    """Predict and show trainings whose optimizer state is streamed."""
    with output.progress() as say:
        traces = [workload(say) for workload in workloads]
        with output.interruptible():
            predictions = [
                predict_stream(trace, hardware, policy, in_backward=in_backward) for trace in traces
            ]
    if as_json:
        rows = [stream_row(prediction) | {"rates": hardware.rates} for prediction in predictions]
        output.print_json({"results": rows})
        return
    console = output.make_console()
    for prediction in predictions:
        print_streamed(console, prediction)
        console.print()
    console.print(options.rates_line(plain(hardware.name), hardware.rates), style="dim")


@_loads_names
def print_streamed(console: Console, prediction: StreamPrediction) -> None:
    """Print one prediction: its times, what is copied, and its memory."""
    plan, step, training = prediction.plan, prediction.step, prediction.training
    units = step.units
    timing = plan.predicted
    with_state = [number for number, unit in enumerate(units) if unit.state_bytes]
    resident = sum(number in plan.resident for number in with_state)
    temporary = f" and {len(plan.temporary)} temporary ones" if plan.temporary else ""
    twice = f", {len(training.recomputed)} computed twice" if training.recomputed else ""
    twice += f", checkpoints of {len(training.left_out)} left out" if training.left_out else ""
    by_host = f", {len(plan.hosts)} updated by the host" if plan.hosts else ""
    speed = f", {prediction.model_flops_per_s / 1e12:.0f} model TFLOP/s" if step.model_flops else ""
    console.print(
        f"[bold]{plain(prediction.workload)}[/bold] on {plain(prediction.hardware)}, "
        f"policy {plain(prediction.policy)}, {format_bytes(prediction.budget_bytes)} of device "
        f"memory\npasses alone {output.format_seconds(step.passes_s)}, "
        f"all resident {output.format_seconds(timing.compute_s)}{speed}\n"
        f"state of {resident} of {len(with_state)} blocks resident, {plan.slots} slots of "
        f"{format_bytes(plan.slot_bytes)}{temporary}{by_host}, "
        f"activations of {len(plan.copied)} blocks copied{twice}"
    )
    if prediction.weight_homes_bytes:
        console.print(_where_weights_are(prediction))
    if plan.copied_gradients:
        left, back = (
            format_bytes(sum(units[number].gradient_bytes for number in numbers))
            for numbers in (plan.copied_gradients, plan.returning_gradients)
        )
        console.print(
            f"gradients of {len(plan.copied_gradients)} blocks copied out, {left}, "
            f"and {back} of them back for the step"
        )
    if prediction.in_place_s:
        in_place = output.format_seconds(prediction.in_place_s)
        console.print(f"{in_place} more for computations that use host memory in place")
    copies = ("each way:\nstate", "acti-\nvations")
    numbers = ("step", "of\npasses", "exposed", "slowed", *copies, "peak:\ndevice", "host")
    table = output.make_table("updates", numbers=numbers, narrow=True)
    table.add_row(
        "backward" if prediction.in_backward else "deferred",
        output.format_seconds(timing.step_s),
        f"{100 * prediction.floor_share:.0f} %",
        # The difference of two sums of floats may be off zero by a little.
        output.format_seconds(max(round(timing.exposed_s, 9), 0.0)),
        output.format_seconds(max(round(timing.slowed_s, 9), 0.0)),
        *(
            output.format_size(timing.to_host_bytes.get(name, 0))
            for name in (TensorClass.OPTIMIZER_STATE, TensorClass.ACTIVATIONS)
        ),
        output.format_size(training.device_bytes),
        output.format_size(prediction.host_bytes),
    )
    output.print_table(console, table)


def _where_weights_are(prediction: StreamPrediction) -> str:
    """Weights on the device and at home, and what they are staged in; some are at home."""
    training, timing = prediction.training, prediction.plan.predicted
    weights = training.weights
    assert weights is not None
    resident_bytes = prediction.step.weight_bytes - prediction.weight_homes_bytes
    words = [f"weights: {format_bytes(resident_bytes)} resident"]
    if weights.streamed_bytes:
        extra = f" and up to {training.most_extra} more" if training.most_extra else ""
        copied_bytes = timing.to_device_bytes.get(TensorClass.WEIGHTS, 0)
        words.append(
            f"{format_bytes(weights.streamed_bytes)} streamed ({format_bytes(copied_bytes)} a step)"
            f" through {weights.slots} buffers of {format_bytes(weights.slot_bytes)}{extra}"
        )
    if weights.in_place_bytes:
        words.append(f"{format_bytes(weights.in_place_bytes)} read in place")
    return ", ".join(words)


def _figures(
    results: Sequence[tuple[Trace, Sequence[MigrationReport]]], folder: Path
) -> dict[Path, Figure]:
    """Residency of each report, by the file to save it in."""
    from umem.telemetry import residency_figure

    figures = {}
    for trace, reports in results:
        for report in reports:
            name = output.file_name(f"{report.workload}-{report.planner}")
            figures[folder / f"residency-{name}.png"] = residency_figure(report, trace)
    return figures


def _print_predictions(
    console: Console, reports: Sequence[MigrationReport], budget_bytes: int
) -> None:
    """Print the predictions for one workload: a row for each planner, and the published share.

    The reports are of the same workload, machine and policy; the step may use `budget_bytes` of
    device memory.
    """
    first = reports[0]
    console.print(
        f"[bold]{plain(first.workload)}[/bold] on {plain(first.hardware)}, "
        f"policy {plain(first.policy)}, {format_bytes(budget_bytes)} of device memory\n"
        f"all resident {output.format_seconds(first.ideal_s)}, "
        f"quick lower bound, to which regret refers, {output.format_seconds(first.lower_bound_s)}"
    )
    moved = ("moved to:\ndevice", "host")
    numbers = ("step", "regret", "stall", "UM, %:\ntime", "ops", "bytes", *moved, "pages\nfaulted")
    table = output.make_table("planner", numbers=numbers, narrow=True)
    for report in reports:
        shares = (report.um_time_share, report.um_ops_share, report.um_bytes_share)
        table.add_row(
            report.planner,
            output.format_seconds(report.step_s),
            f"{report.regret:.2f}",
            # The difference of two sums of floats may be off zero by a little.
            output.format_seconds(max(round(report.exposed_stall_s, 9), 0.0)),
            *(f"{100 * share:.1f}" for share in shares),
            output.format_size(report.moved_bytes("to_device")),
            output.format_size(report.moved_bytes("to_host")),
            f"{report.fault_pages:,}",
        )
    output.print_table(console, table)
    for report in reports:
        if report.faster_s is not None:
            took = map(output.format_seconds, (report.faster_s, report.step_s))
            console.print(f"{report.planner}: not settled; steps take {' to '.join(took)}")
        if report.copied_bytes_share > 0:
            console.print(
                f"{report.planner}: {100 * report.copied_bytes_share:.1f} % of what moved are "
                "explicit copies, which UM does not count"
            )
    published = published_share(first)
    if published is not None:
        console.print(
            f"published: {100 * published:.1f} % of memory operations (of count, time or "
            f"bytes: not said), by\n{PUBLISHED_BY}",
            style="dim",
        )


def _print_details(console: Console, report: MigrationReport) -> None:
    """Print one planner's traffic, its hints, and the causes of its stalls."""
    console.print(f"[bold]{plain(report.planner)}[/bold]: what moved")
    output.print_traffic(console, report.traffic)
    console.print(
        f"{report.hint_count:,} hints: {report.hints_late:,} waited for, "
        f"{report.hints_wasted:,} with nothing to do. "
        f"{report.fault_pages:,} pages faulted, in {report.fault_batches:,} batches."
    )
    console.print(f"stalls: {output.stall_words(report.stall_s)}")
