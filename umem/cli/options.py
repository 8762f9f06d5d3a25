"""Options that several commands share: the workload, the machine, the policy, the output."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from umem.cli.output import Progress, check_can_write, interruptible
from umem.core.errors import UmemError
from umem.core.units import format_bytes, parse_budget
from umem.io.problems import did_you_mean
from umem.policy import ResolvedPolicy, load_policy, resolve

if TYPE_CHECKING:
    from umem.hardware import Hardware
    from umem.trace import Trace

__all__ = [
    "DEFAULT_HARDWARE",
    "DEFAULT_POLICY",
    "Accumulate",
    "Batch",
    "Budget",
    "Checkpoint",
    "HardwareName",
    "Json",
    "Mode",
    "Model",
    "Params",
    "Plot",
    "PlotFormat",
    "PolicyName",
    "Precision",
    "Script",
    "Seq",
    "TraceFile",
    "Window",
    "Workload",
    "budget_bytes",
    "check_plot",
    "find_policy",
    "find_workloads",
    "known_name",
    "known_names",
    "recording_progress",
]

DEFAULT_POLICY = "managed"
"""Predictions and plans are of pages that migrate; the other presets manage none."""
DEFAULT_HARDWARE = "gh200-96"
BATCH, SEQ, ACCUMULATE = 2, 2048, 1
TRAINING_MODES = ("sft", "lora")
"""How a model is trained; the first is the default."""

Model = Annotated[
    str | None,
    typer.Option(help="A known model, such as llama-2-7b; no weights are downloaded or made."),
]
Params = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="A Llama of about this size instead, such as 7b."),
]
Script = Annotated[
    str | None,
    typer.Argument(
        metavar="SCRIPT.py:FUNCTION",
        show_default=False,
        help="The function of a script that makes the training step, instead of a model.",
    ),
]
Mode = Annotated[
    str | None, typer.Option(help="How the model is trained: lora or sft (default: sft).")
]
Batch = Annotated[
    int | None, typer.Option(min=1, help=f"Sequences in a batch of the model (default: {BATCH}).")
]
Seq = Annotated[int | None, typer.Option(min=1, help=f"Tokens in a sequence (default: {SEQ}).")]
Accumulate = Annotated[
    int | None, typer.Option(min=1, help=f"Batches in a step (default: {ACCUMULATE}).")
]
Checkpoint = Annotated[
    bool | None,
    typer.Option(
        "--checkpoint/--no-checkpoint",
        "--checkpointing/--no-checkpointing",
        help="Recompute activations (default: no).",
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(
        "--precision",
        "--dtype",
        help="Of weights and AdamW: bf16-master (float32 state and weights beside bfloat16 ones), "
        "bf16, or fp32-autocast (default: bf16-master).",
    ),
]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        readable=False, metavar="FILE", help="A trace, from `umem trace`, instead of a model."
    ),
]
HardwareName = Annotated[
    str,
    typer.Option(
        help="A profile's name (see `umem hardware list`) or file; detect for this machine."
    ),
]
PolicyName = Annotated[
    str,
    typer.Option(help="A preset's name or a YAML file."),
]
Budget = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", help="Device memory to use, such as 64GiB or 80% (default: the policy's)."
    ),
]
Window = Annotated[
    int, typer.Option(min=1, help="Phases that the planners lookahead and oracle look ahead.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
Plot = Annotated[
    Path | None,
    typer.Option(readable=False, metavar="FOLDER", help="Draw pictures into this folder."),
]
PlotFormat = Annotated[str, typer.Option(help="png or svg.")]


Workload = Callable[[Progress], "Trace"]
"""Makes the trace of a training step."""


def find_workloads(
    modes: Sequence[str],
    *,
    script: str | None = None,
    trace: Path | None = None,
    model: str | None = None,
    params: str | None = None,
    mode: str | None = None,
    batch: int | None = None,
    seq: int | None = None,
    accumulate: int | None = None,
    checkpoint: bool | None = None,
    precision: str | None = None,
) -> tuple[Workload, ...]:
    """Find the workloads that the options name: a script, a trace, or a model in some modes.

    `modes` are the values that ``--mode`` may have; the first is its default, and ``both`` stands
    for LoRA and SFT. The others are the options' values, None if not given. Raises ``UmemError`` if
    they contradict each other, or a name is unknown.
    """
    sources = {"a script": script, "--trace": trace, "--model": model, "--params": params}
    given = [name for name, value in sources.items() if value is not None]
    if not given:
        raise UmemError(
            "nothing to run: give --model, such as llama-2-7b, --params, such as 7b, --trace FILE, "
            "or a script and its function, such as train.py:make_step"
        )
    if len(given) > 1:
        raise UmemError(f"{' and '.join(given)}: give one of them")
    if script is not None or trace is not None:
        of_models = {
            "--mode": mode,
            "--batch": batch,
            "--seq": seq,
            "--accumulate": accumulate,
            "--checkpoint": checkpoint,
            "--precision": precision,
        }
        for option, value in of_models.items():
            if value is not None:
                (source,) = given
                what = "a trace" if script is None else source
                raise UmemError(f"{option}: {what} has no such option: give {option} or {source}")
        if trace is not None:
            return (partial(_load, trace),)
        return (partial(_record_script, str(script)),)
    # Not at the top: it takes longer than reading a trace.
    from umem.capture.offline import MODELS, MODES, PRECISIONS, llama_of_size, model_trace
    from umem.capture.offline.trace_cache import cache_trace, cached_trace

    chosen = known_name("--mode", modes[0] if mode is None else mode, modes)
    name = llama_of_size(params)[0] if params else known_name("--model", model or "", MODELS)
    arguments: dict[str, Any] = {
        "model": name,
        "batch": batch or BATCH,
        "seq": seq or SEQ,
        "accumulate": accumulate or ACCUMULATE,
        "checkpoint": bool(checkpoint),
        "precision": known_name("--precision", precision or PRECISIONS[0], PRECISIONS),
    }

    def record(of_mode: str, say: Progress) -> Trace:
        these = {**arguments, "mode": of_mode}
        found = cached_trace(these)
        if found is not None:
            return found
        with interruptible():
            made = model_trace(**these, progress=recording_progress(f"{name}, {of_mode}", say))
        cache_trace(made, these)
        return made

    wanted = MODES if chosen == "both" else (chosen,)
    return tuple(partial(record, of_mode) for of_mode in wanted)


def _load(path: Path, say: Progress) -> Trace:
    from umem.trace import load_trace

    say(f"Reading {path}")
    return load_trace(path)


def _record_script(script: str, say: Progress) -> Trace:
    from umem.capture.offline import script_trace

    # What the script prints is no part of the answer.
    with redirect_stdout(sys.stderr), interruptible():
        return script_trace(script, progress=recording_progress(script, say))


def find_policy(name: str, hardware: Hardware, budget: str | None) -> ResolvedPolicy:
    """Load a policy for a machine; `budget` replaces its device budget.

    Raises ``PolicyError`` if the policy cannot be used, and ``UmemError`` if the budget cannot.
    """
    policy = resolve(load_policy(name), hardware)
    if budget is None:
        return policy
    return replace(
        policy, device_budget_bytes=budget_bytes(budget, hardware), budget_reason="--budget"
    )


def budget_bytes(budget: str, hardware: Hardware) -> int:
    """Read a device budget, a size or a share; ``UmemError`` if the device has no such budget."""
    try:
        found = parse_budget(budget, hardware.device_bytes)
    except ValueError as error:
        raise UmemError(f"--budget: {error}; or a percentage, such as '80%'") from None
    if not 0 < found <= hardware.device_bytes:
        raise UmemError(
            f"--budget: {budget} is not within the device memory of {hardware.name}, "
            f"{format_bytes(hardware.device_bytes)}: give a size above 0 and at most that"
        )
    return found


def known_name(option: str, name: str, known: Sequence[str]) -> str:
    """Return the name, if it is known; else ``UmemError`` with the nearest known name."""
    if name not in known:
        hint = did_you_mean(name, known) or "."
        raise UmemError(f"{option}: {name!r} is not known{hint} Known: {', '.join(known)}")
    return name


def known_names(option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Split names at commas, each once and in order; errors as :func:`known_name`."""
    names = dict.fromkeys(name.strip() for name in text.split(","))
    return tuple(known_name(option, name, known) for name in names)


def recording_progress(workload: str, say: Progress) -> Callable[[str, float], None]:
    """Put a recorder's stage, and the share of it that is done, into a message."""

    def report(stage: str, share: float) -> None:
        say(f"Recording {workload}: {stage}" + (f" {share:.0%}" if 0 < share < 1 else ""))

    return report


def check_plot(folder: Path | None, kind: str) -> None:
    """Check the options of pictures before the work that they show.

    Raises ``UmemError`` if the format is unknown, matplotlib is missing, or the folder cannot be
    made.
    """
    from umem.telemetry import FORMATS, require_matplotlib

    known_name("--plot-format", kind, FORMATS)
    if folder is not None:
        require_matplotlib()
        check_can_write("--plot", folder, folder=True)
