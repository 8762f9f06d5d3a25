"""The options that say what is trained, on what machine and under which policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from umem.cli.output import Progress
from umem.core.errors import UmemError
from umem.core.units import format_bytes, parse_budget
from umem.io.problems import did_you_mean
from umem.policy import ResolvedPolicy, load_policy, resolve

if TYPE_CHECKING:
    from umem.hardware import Hardware
    from umem.trace import Trace

__all__ = [
    "DEFAULT_HARDWARE",
    "AccumulateOption",
    "BatchOption",
    "BudgetOption",
    "CheckpointOption",
    "HardwareOption",
    "ModelOption",
    "PolicyOption",
    "SeqOption",
    "TraceOption",
    "WindowOption",
    "Workload",
    "find_policy",
    "find_workloads",
    "known_name",
    "known_names",
    "recording",
    "workload_of_model",
]

DEFAULT_HARDWARE = "gh200-96"
BATCH, SEQ, ACCUMULATE = 2, 2048, 1

ModelOption = Annotated[
    str | None,
    typer.Option(help="A known model, such as llama-2-7b; no weights are downloaded or made."),
]
BatchOption = Annotated[
    int | None, typer.Option(min=1, help=f"Sequences in a batch of the model ({BATCH}).")
]
SeqOption = Annotated[int | None, typer.Option(min=1, help=f"Tokens in a sequence ({SEQ}).")]
AccumulateOption = Annotated[
    int | None, typer.Option(min=1, help=f"Batches in a step ({ACCUMULATE}).")
]
CheckpointOption = Annotated[
    bool | None,
    typer.Option("--checkpoint/--no-checkpoint", help="Recompute activations (no-checkpoint)."),
]
TraceOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A trace, from `umem trace`, and no model.")
]
HardwareOption = Annotated[
    str,
    typer.Option(help="A profile's name or file, see `umem hardware`; detect for this machine."),
]
PolicyOption = Annotated[
    str | None,
    typer.Option(help="A preset's name or a YAML file (the mode's preset; managed for a trace)."),
]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", help="Device memory to use, such as 64GiB or 80%; instead of the policy's."
    ),
]
WindowOption = Annotated[
    int, typer.Option(min=1, help="Phases that the planners lookahead and oracle look ahead.")
]


@dataclass(frozen=True)
class Workload:
    """A training step to be had, and the preset that goes with it."""

    preset: str
    make: Callable[[Progress], Trace]


def find_workloads(
    modes: Sequence[str],
    *,
    model: str | None,
    mode: str | None,
    batch: int | None,
    seq: int | None,
    accumulate: int | None,
    checkpoint: bool | None,
    trace: Path | None,
) -> tuple[Workload, ...]:
    """Workloads that the options name: one of a trace, and one for each mode of a model.

    Parameters
    ----------
    modes
        What ``--mode`` may say; the first is its default. ``both`` stands for LoRA and SFT.
    model, mode, batch, seq, accumulate, checkpoint, trace
        The options' values; None where they were not given.

    Raises
    ------
    UmemError
        If options contradict each other, or a name is unknown.
    """
    if trace is not None:
        given = {
            "--model": model,
            "--mode": mode,
            "--batch": batch,
            "--seq": seq,
            "--accumulate": accumulate,
            "--checkpoint": checkpoint,
        }
        for option, value in given.items():
            if value is not None:
                raise UmemError(f"{option}: a trace is what it is: give {option} or --trace")
        return (Workload("managed", partial(_load, trace)),)
    if model is None:
        raise UmemError("nothing to run: give --model, such as llama-2-7b, or --trace FILE")
    from umem.capture.offline import MODES

    chosen = known_name("--mode", modes[0] if mode is None else mode, modes)
    return tuple(
        workload_of_model(
            model, name, batch=batch, seq=seq, accumulate=accumulate, checkpoint=checkpoint
        )
        for name in (MODES if chosen == "both" else (chosen,))
    )


def workload_of_model(
    model: str,
    mode: str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    accumulate: int | None = None,
    checkpoint: bool | None = None,
) -> Workload:
    """One mode of a known model; None stands for the commands' defaults.

    Raises
    ------
    UmemError
        If there is no such model.
    """
    from umem.capture.offline import MODELS, model_trace

    name = known_name("--model", model, tuple(MODELS))

    def make(say: Progress) -> Trace:
        return model_trace(
            name,
            mode,
            batch=batch or BATCH,
            seq=seq or SEQ,
            accumulate=accumulate or ACCUMULATE,
            checkpoint=bool(checkpoint),
            progress=recording(f"{name}, {mode}", say),
        )

    return Workload(mode, make)


def find_policy(name: str, hardware: Hardware, budget: str | None) -> ResolvedPolicy:
    """Load a policy for a machine; `budget` takes the place of its device budget.

    Raises
    ------
    PolicyError
        If the policy cannot be used.
    UmemError
        If the budget cannot.
    """
    policy = resolve(load_policy(name), hardware.device_bytes)
    if budget is None:
        return policy
    try:
        budget_bytes = parse_budget(budget, hardware.device_bytes)
    except ValueError as error:
        raise UmemError(f"--budget: {error}; or a percentage, such as '80%'") from None
    if not 0 < budget_bytes <= hardware.device_bytes:
        raise UmemError(
            f"--budget: {budget} is not within the device memory of {hardware.name}, "
            f"{format_bytes(hardware.device_bytes)}: give a size above 0 and at most that"
        )
    return replace(policy, device_budget_bytes=budget_bytes)


def known_name(option: str, name: str, known: Sequence[str]) -> str:
    """The name, if it is known.

    Raises
    ------
    UmemError
        If it is not; the message has the nearest.
    """
    if name not in known:
        hint = did_you_mean(name, known) or "."
        raise UmemError(f"{option}: {name!r} is not known{hint} Known: {', '.join(known)}")
    return name


def known_names(option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Names with commas between, each once, in the order given.

    Raises
    ------
    UmemError
        If one is not known; the message has the nearest.
    """
    names = dict.fromkeys(name.strip() for name in text.split(","))
    return tuple(known_name(option, name, known) for name in names)


def recording(what: str, say: Progress) -> Callable[[str, float], None]:
    """Put the recorder's account of its progress into words."""

    def told(stage: str, share: float) -> None:
        say(f"Recording {what}: {stage}" + (f" {share:.0%}" if 0 < share < 1 else ""))

    return told


def _load(path: Path, say: Progress) -> Trace:
    from umem.trace import load_trace

    say(f"Reading {path}")
    return load_trace(path)
