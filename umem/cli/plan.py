"""`umem plan`: plan a training step, and print the plan's hints."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from umem.cli import options, output
from umem.cli.output import plain
from umem.core.classes import TensorClass
from umem.core.errors import UmemError
from umem.core.lazy_names import loads_names
from umem.core.units import format_bytes
from umem.pages import plan as planning

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from rich.console import Console

    from umem.cli.simulate import print_streamed
    from umem.core.schedule import HintOp, ResidencyMode
    from umem.hardware import Hardware, with_durations
    from umem.policy import ResolvedPolicy
    from umem.predict.stream_prediction import predict_stream, stream_row, unit_choices
    from umem.trace import Trace, find_gaps

__all__ = ["app"]

_loads_names = loads_names(
    globals(),
    {
        "umem.cli.simulate": "print_streamed",
        "umem.core.schedule": "HintOp ResidencyMode",
        "umem.hardware": "with_durations",
        "umem.predict.stream_prediction": "predict_stream stream_row unit_choices",
        "umem.trace": "find_gaps",
    },
)

app = output.make_app()

_MOST_ROWS = 32
"""Idle intervals in a table; a class of a large model has thousands."""


@app.command(no_args_is_help=True)
@options.takes_workload()
@_loads_names
def plan(
    given: options.WorkloadOptions,
    hardware: options.HardwareName = options.DEFAULT_HARDWARE,
    policy: options.PolicyName = options.DEFAULT_POLICY,
    planner: Annotated[str, typer.Option(help="fault, lookahead or planned.")] = "planned",
    budget: options.Budget = None,
    explain: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Explain why tensors of this name or class stay on the device or leave it, or "
            "what a phase of this name evicts; * matches any text. Under a policy that streams "
            "state: what happens to each block's activations, and why.",
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Plan a training step: which hints are issued when, and where each tensor lives."""
    options.known_name("--planner", planner, planning.PLANNERS)
    if explain is not None and planner != "planned":
        raise UmemError("--explain: only the planner planned has reasons for each decision")
    (workload,) = options.find_workloads(options.TRAINING_MODES, given)
    machine = options.find_machine(hardware)
    resolved = options.find_policy(policy, machine, budget)
    if resolved.streams_state:
        _plan_streamed(workload, machine, resolved, explains=explain is not None, as_json=as_json)
        return

    with output.progress() as say:
        timed = with_durations(workload(say), machine)
        made = None
        began_s = time.perf_counter()
        say(f"Planning {timed.name} with {planner}")
        with output.interruptible():
            if planner == "planned":
                made = planning.explained_plan(timed, machine, resolved, progress=say)
                schedule = made.schedule
            else:
                schedule = planning.plan(timed, machine, resolved, planner)
        planning_s = time.perf_counter() - began_s

    data: dict[str, Any] = {
        "workload": timed.name,
        "hardware": machine.name,
        "rates": machine.rates,
        "policy": resolved.name,
        "device_budget_bytes": resolved.device_budget_bytes or machine.device_bytes,
        "planner": schedule.planner,
        "planning_s": planning_s,
        "hints": _totals(HintOp, schedule.hint_op, timed, schedule.hint_tensor),
        "residency": _totals(ResidencyMode, schedule.residency, timed, slice(None)),
        "reasons": None,
    }
    if made is not None:
        idle = find_gaps(timed).tensor
        data["reasons"] = _totals(planning.Reason, made.decisions.reason, timed, idle)
        if explain is not None:
            decisions = planning.explain(made, timed, explain)
            data["decisions"] = [
                asdict(it) | {"reason": it.reason.name.lower()} for it in decisions
            ]
    if as_json:
        output.print_json(data)
    else:
        console = output.make_console()
        _print(console, data)
        if "decisions" in data:
            _print_decisions(console, data["decisions"], timed.phase_names)


def _plan_streamed(
    workload: options.Workload,
    hardware: Hardware,
    policy: ResolvedPolicy,
    *,
    explains: bool,
    as_json: bool,
) -> None:
    """Plan a training whose state is streamed, as `umem simulate` does, and print the plan."""
    with output.progress() as say:
        trace = workload(say)
        with output.interruptible():
            made = predict_stream(trace, hardware, policy)
    choices = unit_choices(made, hardware) if explains else ()
    if as_json:
        output.print_json(stream_row(made) | {"activations": [asdict(it) for it in choices]})
        return
    console = output.make_console()
    print_streamed(console, made)
    if explains:
        console.print()
        output.print_choices(console, choices)


def _print_decisions(
    console: Console, decisions: Sequence[Mapping[str, Any]], phase_names: Sequence[str]
) -> None:
    """Print a row for each of the first idle intervals, and how many are spent as they are."""
    if not decisions:
        console.print("\nno tensor leaves for a phase of this name")
        return
    table = output.make_table("tensor", "idle after", "until", "why")
    for it in decisions[:_MOST_ROWS]:
        words = planning.WHY[planning.Reason[it["reason"].upper()]]
        if it["leaves"]:
            words += f" in {phase_names[it['short_in'] % len(phase_names)]}"
        uses = (phase_names[it[key] % len(phase_names)] for key in ("last_use", "next_use"))
        table.add_row(*map(plain, (it["tensor"], *uses, words)))
    console.print()
    output.print_table(console, table)
    if len(decisions) == 1:
        return
    if len(decisions) > _MOST_ROWS:
        console.print(f"and {len(decisions) - _MOST_ROWS:,} more: --json has all")
    table = output.make_table("in all", numbers=("intervals",))
    for name, count in Counter(it["reason"] for it in decisions).most_common():
        table.add_row(planning.WHY[planning.Reason[name.upper()]], f"{count:,}")
    console.print()
    output.print_table(console, table)


def _totals(
    kinds: type[IntEnum], kind: NDArray[Any], trace: Trace, tensors: NDArray[Any] | slice
) -> dict[str, dict[str, dict[str, int]]]:
    """Count and bytes of tensors by kind and class, without empty entries."""
    tensor_class, sizes = trace.tensor_class[tensors], trace.tensor_bytes[tensors]
    totals: dict[str, dict[str, dict[str, int]]] = {}
    for one in kinds:
        for member in TensorClass:
            which = (kind == one) & (tensor_class == member.number)
            if which.any():
                row = {"count": int(which.sum()), "bytes": int(sizes[which].sum())}
                totals.setdefault(one.name.lower(), {})[member.value] = row
    return totals


def _print(console: Console, data: dict[str, Any]) -> None:
    console.print(
        f"[bold]{plain(data['workload'])}[/bold] on {plain(data['hardware'])}, "
        f"policy {plain(data['policy'])}, {format_bytes(data['device_budget_bytes'])} of device "
        f"memory\nplanner {data['planner']}, made in {output.format_seconds(data['planning_s'])}\n"
        f"{options.rates_line(plain(data['hardware']), data['rates'])}"
    )
    tables = (("hint", "hints", data["hints"]), ("residency", "tensors", data["residency"]))
    for heading, counted, rows in tables:
        console.print()
        if not rows:
            console.print("no hints: nothing is moved ahead of need")
            continue
        table = output.make_table(heading, "class", numbers=(counted, "bytes"))
        for name, by_class in rows.items():
            for member, row in by_class.items():
                words = name.replace("_", " ")
                table.add_row(words, member, f"{row['count']:,}", format_bytes(row["bytes"]))
        output.print_table(console, table)
