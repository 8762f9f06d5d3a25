"""`umem trace`: record a training step as a file, convert one, or show what is in it."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from umem.cli.output import Progress, check_can_write, format_seconds, print_json, progress
from umem.cli.workloads import (
    DEFAULT_HARDWARE,
    AccumulateOption,
    BatchOption,
    CheckpointOption,
    HardwareOption,
    ModelOption,
    SeqOption,
    find_workloads,
    recording,
)
from umem.core.classes import TensorClass
from umem.core.errors import UmemError
from umem.core.units import format_bytes
from umem.hardware import Hardware, load_hardware, with_durations

if TYPE_CHECKING:
    from umem.trace import Trace

__all__ = ["trace"]


def trace(
    script: Annotated[
        str | None,
        typer.Argument(
            metavar="SCRIPT.py:FUNCTION", help="A function of a script that makes the step."
        ),
    ] = None,
    model: ModelOption = None,
    mode: Annotated[
        str | None, typer.Option(help="How the model is trained: lora or sft (sft).")
    ] = None,
    batch: BatchOption = None,
    seq: SeqOption = None,
    accumulate: AccumulateOption = None,
    checkpoint: CheckpointOption = None,
    imported: Annotated[
        Path | None,
        typer.Option("--import", metavar="FILE", help="Convert this trace; with --output."),
    ] = None,
    shown: Annotated[
        Path | None, typer.Option("--show", metavar="FILE", help="Show what is in this trace.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the trace, as .npz."),
    ] = None,
    hardware: HardwareOption = DEFAULT_HARDWARE,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON for a program to read.")
    ] = False,
) -> None:
    """Record one training step, of a script or of a known model, and show what it needs.

    FUNCTION takes no arguments and returns another that runs one step. Nothing is computed: tensors
    have sizes and no contents, so that a model larger than this machine can be recorded.
    """
    _check_sources(script, model, imported, shown, output)
    options = (mode, batch, seq, accumulate, checkpoint)
    if model is None and any(value is not None for value in options):
        raise UmemError("--mode, --batch, --seq, --accumulate and --checkpoint belong to --model")
    file = imported or shown
    machine = load_hardware(hardware)
    if output is not None:
        check_can_write("--output", output)

    from umem.capture.offline import script_trace
    from umem.trace import save_trace

    with progress() as say:
        if script is not None:
            # Standard output is for the summary alone.
            with redirect_stdout(sys.stderr):
                made = script_trace(script, progress=recording(script, say))
        else:
            (workload,) = find_workloads(
                ("sft", "lora"),
                model=model,
                mode=mode,
                batch=batch,
                seq=seq,
                accumulate=accumulate,
                checkpoint=checkpoint,
                trace=file,
            )
            made = workload.make(say)
        summary = _summarise(made, machine, say)
        if output is not None:
            save_trace(made, output)
    if as_json:
        print_json(_as_json(made, summary))
        return
    console = Console()
    _print(console, made, summary)
    if output is not None:
        console.print(f"\nwrote {output}", highlight=False, markup=False, soft_wrap=True)


def _check_sources(
    script: str | None,
    model: str | None,
    imported: Path | None,
    shown: Path | None,
    output: Path | None,
) -> None:
    sources = {"a script": script, "--model": model, "--import": imported, "--show": shown}
    given = [name for name, value in sources.items() if value is not None]
    if not given:
        raise UmemError("nothing to trace: give script.py:function, --model, --import or --show")
    if len(given) > 1:
        raise UmemError(f"{' and '.join(given)}: give one of them")
    if imported is not None and output is None:
        raise UmemError("--import writes a trace: give --output FILE, or --show to look at it")
    if shown is not None and output is not None:
        raise UmemError("--show writes nothing: leave --output out, or give --import")


@dataclass(frozen=True)
class _Summary:
    hardware: str
    step_s: float
    peak_phase: int
    peak_bytes: dict[TensorClass, int]
    """What is live in that phase, by class."""


def _summarise(trace: Trace, hardware: Hardware, say: Progress) -> _Summary:
    from umem.trace import require_durations

    say(f"Timing {trace.name} on {hardware.name}")
    # Bytes come alive in one phase and die after another.
    change = np.zeros((trace.phase_count + 1, len(TensorClass)), np.int64)
    np.add.at(change, (trace.first_phase, trace.tensor_class), trace.tensor_bytes)
    np.subtract.at(change, (trace.last_phase + 1, trace.tensor_class), trace.tensor_bytes)
    live_bytes = np.cumsum(change, axis=0)
    peak = int(np.argmax(live_bytes.sum(axis=1)))
    return _Summary(
        hardware=hardware.name,
        step_s=float(require_durations(with_durations(trace, hardware)).sum()),
        peak_phase=peak,
        peak_bytes={member: int(live_bytes[peak, member.number]) for member in TensorClass},
    )


def _kinds(trace: Trace) -> dict[str, int]:
    from umem.trace import PhaseKind

    return {kind.name.lower(): int((trace.phase_kind == kind).sum()) for kind in PhaseKind}


def _class_bytes(trace: Trace, member: TensorClass, *, persistent: bool) -> int:
    which = (trace.tensor_class == member.number) & (trace.persistent == persistent)
    return int(trace.tensor_bytes[which].sum())


def _as_json(trace: Trace, summary: _Summary) -> dict[str, Any]:
    return {
        "name": trace.name,
        "source": trace.source,
        "metadata": dict(trace.metadata),
        "phases": _kinds(trace),
        "tensors": trace.tensor_count,
        "flops": float(trace.flops.sum()),
        "memory_bytes": int(trace.memory_bytes.sum()),
        "hardware": summary.hardware,
        "step_s": summary.step_s,
        "own_durations": trace.duration_s is not None,
        "peak_live_bytes": sum(summary.peak_bytes.values()),
        "peak_phase": trace.phase_names[summary.peak_phase],
        "classes": {
            member.value: {
                "tensors": int((trace.tensor_class == member.number).sum()),
                "persistent_bytes": _class_bytes(trace, member, persistent=True),
                "transient_bytes": _class_bytes(trace, member, persistent=False),
                "bytes_at_peak": summary.peak_bytes[member],
            }
            for member in TensorClass
        },
    }


def _print(console: Console, trace: Trace, summary: _Summary) -> None:
    data = _as_json(trace, summary)
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in data["phases"].items() if count)
    console.print(f"[bold]{escape(trace.name)}[/bold]  {escape(trace.source)}", highlight=False)
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    for key, value in trace.metadata.items():
        facts.add_row(escape(key), escape(str(value)))
    facts.add_row("phases", f"{trace.phase_count:,}: {kinds}")
    facts.add_row("operations", f"{data['flops'] / 1e12:,.4g} TFLOP")
    facts.add_row("memory traffic", format_bytes(data["memory_bytes"]))
    how = (
        "by the trace itself" if data["own_durations"] else f"by the roofline of {summary.hardware}"
    )
    facts.add_row("all resident", f"{format_seconds(summary.step_s)}, {how}")
    facts.add_row(
        "peak", f"{format_bytes(data['peak_live_bytes'])} live, in {escape(data['peak_phase'])}"
    )
    console.print(facts, highlight=False)
    console.print()
    table = Table(box=None, pad_edge=False)
    table.add_column("class")
    for heading in ("tensors", "from step to step", "within the step", "at the peak"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, row in data["classes"].items():
        sizes = (row["persistent_bytes"], row["transient_bytes"], row["bytes_at_peak"])
        table.add_row(name, f"{row['tensors']:,}", *map(format_bytes, sizes))
    console.print(table)
