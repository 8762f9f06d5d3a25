"""Options that several commands share: the workload, the machine, the policy, the output."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from umem.cli.output import Progress, check_can_write, interruptible
from umem.core.errors import HardwareError, PolicyError, UmemError
from umem.core.units import format_bytes, parse_budget
from umem.io.problems import did_you_mean

if TYPE_CHECKING:
    from umem.hardware import Hardware
    from umem.policy import ResolvedPolicy
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
    "Plot",
    "PolicyName",
    "Precision",
    "Seq",
    "Workload",
    "WorkloadOptions",
    "absolute_policy",
    "budget_bytes",
    "check_plot",
    "check_source",
    "find_machine",
    "find_policy",
    "find_workloads",
    "known_name",
    "known_names",
    "load_named",
    "rates_line",
    "takes_workload",
]

_T = TypeVar("_T")

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
    int | None,
    typer.Option(min=1, max=4096, help=f"Sequences in a batch of the model (default: {BATCH})."),
]
Seq = Annotated[
    int | None, typer.Option(min=1, max=2**24, help=f"Tokens in a sequence (default: {SEQ}).")
]
Accumulate = Annotated[
    int | None, typer.Option(min=1, max=1024, help=f"Batches in a step (default: {ACCUMULATE}).")
]
Checkpoint = Annotated[
    bool | None,
    typer.Option(help="Recompute activations (default: no)."),
]
Precision = Annotated[
    str | None,
    typer.Option(
        help="Types of weights and state: bf16-master (float32 state and weights beside bfloat16 "
        "ones), bf16, or fp32-autocast (default: bf16-master).",
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
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
Plot = Annotated[
    Path | None,
    typer.Option(readable=False, metavar="FOLDER", help="Write plots into this folder."),
]


Workload = Callable[[Progress], "Trace"]
"""Makes the trace of a training step."""


@dataclass(frozen=True)
class WorkloadOptions:
    """Options that name a training step, in the order of ``--help``; None if not given."""

    script: Script = None
    model: Model = None
    params: Params = None
    mode: Mode = None
    batch: Batch = None
    seq: Seq = None
    accumulate: Accumulate = None
    checkpoint: Checkpoint = None
    precision: Precision = None
    trace: TraceFile = None


def takes_workload(*, without: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command :class:`WorkloadOptions` as its first argument.

    A parameter of the command's own replaces the option of its name, and `without` names one that
    the command lacks. The command gets None in the place of both.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        _, *rest = inspect.signature(command, eval_str=True).parameters.values()
        own = {parameter.name: parameter for parameter in rest}
        shared = dict(inspect.signature(WorkloadOptions, eval_str=True).parameters)
        shared.pop(without, None)

        @wraps(command)
        def called(**values: Any) -> None:
            given = {name: values.pop(name) for name in shared if name not in own}
            command(WorkloadOptions(**given), **values)

        called.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [it.replace(kind=it.KEYWORD_ONLY) for it in (shared | own).values()]
        )
        return called

    return decorate


def check_source(given: WorkloadOptions, files: Mapping[str, Path | None], nothing: str) -> None:
    """Raise ``UmemError`` unless one source of a workload is given, and what belongs to it.

    `files` are traces by their option; `nothing` is the message without a source.
    """
    sources = {"a script": given.script, "--model": given.model, "--params": given.params, **files}
    named = [name for name, value in sources.items() if value is not None]
    if not named:
        raise UmemError(nothing)
    if len(named) > 1:
        raise UmemError(f"{' and '.join(named)}: give one of them")
    (source,) = named
    if given.model is None and given.params is None:
        what = "a trace" if given.script is None else source
        for name in ("mode", "batch", "seq", "accumulate", "checkpoint", "precision"):
            if getattr(given, name) is not None:
                option = f"--{name}"
                raise UmemError(f"{option}: {what} has no such option: give {option} or {source}")


def find_workloads(modes: Sequence[str], given: WorkloadOptions) -> tuple[Workload, ...]:
    """Find the workloads that the options name: a script, a trace, or a model in some modes.

    `modes` are the values that ``--mode`` may have; the first is its default, and ``both`` stands
    for LoRA and SFT. Raises ``UmemError`` if options contradict each other, or a name is unknown.
    """
    check_source(
        given,
        {"--trace": given.trace},
        "nothing to run: give --model, such as llama-2-7b, --params, such as 7b, --trace FILE, or "
        "a script and its function, such as train.py:make_step",
    )
    if given.trace is not None:
        return (partial(_load, given.trace),)
    if given.script is not None:
        return (partial(_record_script, given.script),)
    # Not at the top: it takes longer than reading a trace.
    from umem.capture.offline import (
        MODES,
        PRECISIONS,
        find_model,
        llama_of_size,
        model_names,
        model_trace,
    )
    from umem.capture.offline.trace_cache import cache_trace, cached_trace

    chosen = known_name("--mode", modes[0] if given.mode is None else given.mode, modes)
    if given.params:
        name = llama_of_size(given.params)[0]
    else:
        wanted = given.model or ""
        name = find_model(wanted) or known_name("--model", wanted, model_names())
    arguments: dict[str, Any] = {
        "model": name,
        "batch": given.batch or BATCH,
        "seq": given.seq or SEQ,
        "accumulate": given.accumulate or ACCUMULATE,
        "checkpoint": bool(given.checkpoint),
        "precision": known_name("--precision", given.precision or PRECISIONS[0], PRECISIONS),
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

    of_modes = MODES if chosen == "both" else (chosen,)
    return tuple(partial(record, of_mode) for of_mode in of_modes)


def _load(path: Path, say: Progress) -> Trace:
    from umem.trace import load_trace

    say(f"Reading {path}")
    return load_trace(path)


def _record_script(script: str, say: Progress) -> Trace:
    from umem.capture.offline import script_trace

    # What the script prints is no part of the answer.
    with redirect_stdout(sys.stderr), interruptible():
        return script_trace(script, progress=recording_progress(script, say))


def find_machine(name: str) -> Hardware:
    """Load the machine of a prediction; ``UmemError`` if its rates are unknown."""
    from umem.hardware.load import MEASURE, load_hardware

    machine = load_named("--hardware", load_hardware, name)
    if machine.rates == "unknown":
        raise UmemError(
            f"{machine.name} has no profile, so that nothing can be predicted for it: `{MEASURE}` "
            "measures its rates in two minutes; or give the profile of another machine"
        )
    return machine


def rates_line(hardware: str, rates: str) -> str:
    """The line that says what a prediction for a machine rests on."""
    return f"Rates of {hardware}: {rates}."


def load_named(option: str, load: Callable[[str], _T], name: str) -> _T:
    """Load what an option names. The error of an unknown name begins with the option."""
    try:
        return load(name)
    except (HardwareError, PolicyError) as error:
        place, _, words = str(error).partition(": ")
        if place in ("hardware profile", "policy"):
            raise type(error)(f"{option}: {words}") from None
        raise


def find_policy(name: str, hardware: Hardware, budget: str | None) -> ResolvedPolicy:
    """Load a policy for a machine; `budget` replaces its device budget.

    Raises ``PolicyError`` if the policy cannot be used, and ``UmemError`` if the budget cannot.
    """
    from umem.policy import load_policy, resolve

    policy = resolve(load_named("--policy", load_policy, name), hardware)
    if budget is None:
        return policy
    return replace(
        policy, device_budget_bytes=budget_bytes(budget, hardware), budget_reason="--budget"
    )


def absolute_policy(name: str) -> str:
    """A policy's name, or its file's whole path, for files and processes in other folders."""
    is_file = name.endswith((".yaml", ".yml")) or "/" in name
    return str(Path(name).resolve()) if is_file else name


def budget_bytes(budget: str, hardware: Hardware) -> int:
    """Read a device budget, a size or a share; ``UmemError`` if the device has no such budget."""
    try:
        found = parse_budget(budget, hardware.device_bytes)
    except ValueError as error:
        or_share = "" if "%" in budget else "; or a percentage, such as '80%'"
        raise UmemError(f"--budget: {error}{or_share}") from None
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


def check_plot(folder: Path | None) -> None:
    """Check the option of pictures before the work that they show.

    Raises ``UmemError`` if matplotlib is missing, or the folder cannot be made.
    """
    if folder is not None:
        from umem.telemetry import require_matplotlib

        require_matplotlib()
        check_can_write("--plot", folder, folder=True)
