"""`umem trace`: record a training step as a file, or show a trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from umem.cli import options, output
from umem.cli.output import plain
from umem.core.classes import TensorClass
from umem.core.errors import UmemError
from umem.core.lazy_names import loads_names
from umem.core.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from umem.hardware import Hardware, with_durations
    from umem.trace import PhaseKind, Trace, require_durations, save_trace

__all__ = ["app"]

_loads_names = loads_names(
    globals(),
    {
        "rich.table": "Table",
        "umem.hardware": "with_durations",
        "umem.trace": "PhaseKind require_durations save_trace",
    },
)

app = output.make_app()


@app.command(no_args_is_help=True)
@options.takes_workload(without="trace")
@_loads_names
def trace(
    given: options.WorkloadOptions,
    shown: Annotated[
        Path | None,
        typer.Option("--show", readable=False, metavar="FILE", help="Show what is in this trace."),
    ] = None,
    target: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", readable=False, metavar="FILE", help="Write the trace, as .npz."
        ),
    ] = None,
    hardware: options.HardwareName = options.DEFAULT_HARDWARE,
    as_json: options.Json = False,
) -> None:
    """Record one training step, of a script or of a known model, and show what it needs.

    FUNCTION takes no arguments and returns a function that runs one step. Nothing is computed:
    tensors have sizes and no data, so that a model larger than this machine can be recorded.
    """
    options.check_source(
        given,
        {"--show": shown},
        "nothing to trace: give script.py:function, --model, --params or --show",
    )
    if shown is not None and target is not None:
        raise UmemError("--show writes nothing: leave --output out")
    machine = options.find_machine(hardware)
    if target is not None:
        output.check_can_write("--output", target, suffixes=[".npz"])

    with output.progress() as say:
        source = replace(given, trace=shown)
        (workload,) = options.find_workloads(options.TRAINING_MODES, source)
        made = workload(say)
        say(f"Timing {made.name} on {machine.name}")
        summary = _summarise(made, machine)
        if target is not None:
            save_trace(made, target)
    if as_json:
        output.print_json(summary)
        return
    _print(output.make_console(), summary)
    if target is not None:
        typer.echo()
        output.print_written([target])


def _summarise(trace: Trace, hardware: Hardware) -> dict[str, Any]:
    # live_bytes[p, c] are the bytes of class c in phase p: allocated so far, less those freed.
    import numpy as np

    change = np.zeros((trace.phase_count + 1, len(TensorClass)), np.int64)
    np.add.at(change, (trace.first_phase, trace.tensor_class), trace.tensor_bytes)
    np.subtract.at(change, (trace.last_phase + 1, trace.tensor_class), trace.tensor_bytes)
    live_bytes = np.cumsum(change, axis=0)
    peak = int(np.argmax(live_bytes.sum(axis=1)))
    classes = {}
    for member in TensorClass:
        which = trace.tensor_class == member.number
        sizes, persistent = trace.tensor_bytes[which], trace.persistent[which]
        classes[member.value] = {
            "tensors": len(sizes),
            "persistent_bytes": int(sizes[persistent].sum()),
            "transient_bytes": int(sizes[~persistent].sum()),
            "bytes_at_peak": int(live_bytes[peak, member.number]),
        }
    return {
        "name": trace.name,
        "source": trace.source,
        "metadata": dict(trace.metadata),
        "phases": {kind.name.lower(): int((trace.phase_kind == kind).sum()) for kind in PhaseKind},
        "tensors": trace.tensor_count,
        "flops": float(trace.flops.sum()),
        "memory_bytes": int(trace.memory_bytes.sum()),
        "hardware": hardware.name,
        "rates": hardware.rates,
        "step_s": float(require_durations(with_durations(trace, hardware)).sum()),
        "own_durations": trace.duration_s is not None,
        "peak_live_bytes": int(live_bytes[peak].sum()),
        "peak_phase": trace.phase_names[peak],
        "classes": classes,
    }


def _print(console: Console, summary: dict[str, Any]) -> None:
    console.print(f"[bold]{plain(summary['name'])}[/bold]  {plain(summary['source'])}")
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    for key, value in summary["metadata"].items():
        facts.add_row(plain(key), plain(str(value)))
    phases = summary["phases"]
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in phases.items() if count)
    facts.add_row("phases", f"{sum(phases.values()):,}: {kinds}")
    facts.add_row("operations", f"{summary['flops'] / 1e12:,.4g} TFLOP")
    facts.add_row("memory traffic", format_bytes(summary["memory_bytes"]))
    roofline = f"the roofline of {summary['hardware']}, with {summary['rates']} rates"
    timed_by = "the trace itself" if summary["own_durations"] else roofline
    facts.add_row("all resident", f"{output.format_seconds(summary['step_s'])}, by {timed_by}")
    peak = f"{format_bytes(summary['peak_live_bytes'])} live, in {plain(summary['peak_phase'])}"
    facts.add_row("peak", peak)
    output.print_table(console, facts)
    console.print()
    numbers = ("tensors", "from step to step", "within the step", "at the peak")
    table = output.make_table("class", numbers=numbers)
    for name, row in summary["classes"].items():
        sizes = (row["persistent_bytes"], row["transient_bytes"], row["bytes_at_peak"])
        table.add_row(name, f"{row['tensors']:,}", *map(format_bytes, sizes))
    output.print_table(console, table)
