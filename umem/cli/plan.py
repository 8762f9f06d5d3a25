"""`umem plan`: decide where every tensor is at every moment of a step, and keep the plan."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from umem.cli.output import check_can_write, format_seconds, print_json, progress
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
)
from umem.core.classes import TensorClass
from umem.core.errors import UmemError
from umem.core.schedule import HintOp, ResidencyMode, Schedule
from umem.core.units import format_bytes
from umem.hardware import load_hardware, with_durations

if TYPE_CHECKING:
    from umem.trace import Trace

__all__ = ["plan"]


def plan(
    model: ModelOption = None,
    mode: Annotated[
        str | None, typer.Option(help="How the model is trained: lora or sft (sft).")
    ] = None,
    batch: BatchOption = None,
    seq: SeqOption = None,
    accumulate: AccumulateOption = None,
    checkpoint: CheckpointOption = None,
    trace: TraceOption = None,
    hardware: HardwareOption = DEFAULT_HARDWARE,
    policy: PolicyOption = None,
    planner: Annotated[str, typer.Option(help="fault, lookahead, planned or oracle.")] = "planned",
    budget: BudgetOption = None,
    window: WindowOption = 8,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the plan.")
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Keep the plan in this folder, under a key of all that it depends on, and take it "
            "from there if it is there.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON for a program to read.")
    ] = False,
) -> None:
    """Plan a training step: which hints are issued when, and how each tensor is held."""
    from umem import planning

    if output is not None and store is not None:
        raise UmemError("--output and --store: give one of them")
    known_name("--planner", planner, planning.PLANNERS)
    (workload,) = find_workloads(
        ("sft", "lora"),
        model=model,
        mode=mode,
        batch=batch,
        seq=seq,
        accumulate=accumulate,
        checkpoint=checkpoint,
        trace=trace,
    )
    machine = load_hardware(hardware)
    resolved = find_policy(policy or workload.preset, machine, budget)
    if output is not None:
        check_can_write("--output", output)
    if store is not None:
        check_can_write("--store", store, folder=True)

    with progress() as say:
        timed = with_durations(workload.make(say), machine)
        key = planning.plan_key(timed, machine, resolved, planner, window=window)
        schedule = None if store is None else planning.stored_plan(store, key, timed)
        reused = schedule is not None
        began_s = time.perf_counter()
        if schedule is None:
            say(f"Planning {timed.name} with {planner}")
            schedule = planning.plan(timed, machine, resolved, planner, window=window)
        planning_s = time.perf_counter() - began_s
        if output is not None:
            planning.save_schedule(schedule, output, key=key)
        elif store is not None and not reused:
            planning.store_plan(store, key, schedule)

    data: dict[str, Any] = {
        "workload": timed.name,
        "hardware": machine.name,
        "policy": resolved.name,
        "device_budget_bytes": resolved.device_budget_bytes or machine.device_bytes,
        "planner": schedule.planner,
        "key": key,
        "file": None if output is None else str(output),
        "store": None if store is None else str(store),
        "reused": reused,
        "planning_s": None if reused else planning_s,
        "hints": _hints(schedule, timed),
        "residency": _residency(schedule, timed),
    }
    if as_json:
        print_json(data)
    else:
        _print(Console(), data)


def _hints(schedule: Schedule, trace: Trace) -> dict[str, dict[str, dict[str, int]]]:
    """Count and bytes of the hints, by op and class; what is there only."""
    classes = trace.tensor_class[schedule.hint_tensor]
    sizes = trace.tensor_bytes[schedule.hint_tensor]
    found: dict[str, dict[str, dict[str, int]]] = {}
    for op in HintOp:
        for member in TensorClass:
            which = (schedule.hint_op == op) & (classes == member.number)
            if which.any():
                found.setdefault(op.name.lower(), {})[member.value] = _count(sizes, which)
    return found


def _residency(schedule: Schedule, trace: Trace) -> dict[str, dict[str, dict[str, int]]]:
    """Count and bytes of the tensors, by residency mode and class; what is there only."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    for mode in ResidencyMode:
        for member in TensorClass:
            which = (schedule.residency == mode) & (trace.tensor_class == member.number)
            if which.any():
                row = _count(trace.tensor_bytes, which)
                found.setdefault(mode.name.lower(), {})[member.value] = row
    return found


def _count(sizes: np.ndarray[Any, np.dtype[np.int64]], which: Any) -> dict[str, int]:
    return {"count": int(which.sum()), "bytes": int(sizes[which].sum())}


def _print(console: Console, data: dict[str, Any]) -> None:
    how = (
        "taken from the store"
        if data["reused"]
        else f"made in {format_seconds(data['planning_s'])}"
    )
    console.print(
        f"[bold]{escape(data['workload'])}[/bold] on {escape(data['hardware'])}, "
        f"policy {escape(data['policy'])}, {format_bytes(data['device_budget_bytes'])} of device "
        f"memory\nplanner {data['planner']}, {how}",
        highlight=False,
    )
    for heading, rows in (("hint", data["hints"]), ("held by", data["residency"])):
        console.print()
        if not rows:
            console.print("no hints: nothing is moved ahead of need")
            continue
        table = Table(box=None, pad_edge=False)
        table.add_column(heading, min_width=10)
        table.add_column("class", min_width=16)
        table.add_column("hints" if heading == "hint" else "tensors", justify="right")
        table.add_column("bytes", justify="right", no_wrap=True)
        for name, by_class in rows.items():
            for member, row in by_class.items():
                words = name.replace("_", " ")
                table.add_row(words, member, f"{row['count']:,}", format_bytes(row["bytes"]))
        console.print(table)
    if data["file"] is not None:
        where = f"wrote {data['file']}"
    elif data["store"] is not None:
        where = f"{'found' if data['reused'] else 'stored'} in {data['store']} as {data['key']}"
    else:
        return
    console.print(f"\n{where}", highlight=False, markup=False, soft_wrap=True)
