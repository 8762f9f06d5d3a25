"""`umem tune`: which ways to run a training are worth choosing between, on any machine."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from umem.cli import options, output
from umem.cli.output import plain
from umem.core.errors import PlanError, UmemError
from umem.core.lazy_names import loads_names
from umem.io.files import write_file

if TYPE_CHECKING:
    from rich.console import Console

    from umem.policy import load_policy
    from umem.predict.tuning import PLAIN, Point, TunedWorkload, candidates, front, tune

__all__ = ["app"]

_loads_names = loads_names(
    globals(),
    {
        "umem.policy": "load_policy",
        "umem.predict.tuning": "PLAIN TunedWorkload candidates front tune",
    },
)

app = output.make_app()


@app.command("tune", no_args_is_help=True)
@options.takes_workload()
@_loads_names
def tune_training(
    given: options.WorkloadOptions,
    batch: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBERS",
            help=f"Sequences in a batch; several with commas between (default: {options.BATCH}).",
        ),
    ] = None,
    accumulate: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBERS",
            help=f"Batches in a step; several with commas between (default: {options.ACCUMULATE}).",
        ),
    ] = None,
    checkpoint: Annotated[
        bool | None,
        typer.Option("--checkpoint/--no-checkpoint", help="Recompute activations (default: both)."),
    ] = None,
    hardware: options.HardwareName = options.DEFAULT_HARDWARE,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Presets or YAML files to build on, with commas between; plain leaves everything "
            "on the device (default: plain, managed, and sft or lora by --mode).",
        ),
    ] = None,
    budget: Annotated[
        str,
        typer.Option(
            metavar="SIZES", help="Device memory to try, such as 64GiB or 80%, with commas between."
        ),
    ] = "100%,80%,60%,40%",
    limit: Annotated[
        float,
        typer.Option(min=0.0, metavar="SECONDS", help="End the search after this time."),
    ] = 30.0,
    tolerance: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            metavar="SHARE",
            help="Leave out a point that is faster than one with as little memory by at most "
            "this share.",
        ),
    ] = 0.01,
    target: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            readable=False,
            metavar="FOLDER",
            help="Write the policy of each point into this folder.",
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """List the Pareto-optimal ways to run a training, by prediction.

    Tries policies, budgets, checkpointing, batches, and where the optimizer's step runs. Shows what
    is best in tokens per second, device memory and host memory.
    """
    machine = options.find_machine(hardware)
    budgets = tuple(dict.fromkeys(options.budget_bytes(it, machine) for it in _names(budget)))
    sizes = _numbers("--batch", batch), _numbers("--accumulate", accumulate)
    workloads = _workloads(given, *sizes, checkpoint)
    mode = given.mode or options.TRAINING_MODES[0]
    names = f"{PLAIN},{mode},managed" if policy is None else policy
    bases = tuple(dict.fromkeys(map(options.absolute_policy, _names(names))))
    for name in bases:
        if name != PLAIN:
            options.load_named("--policy", load_policy, name)  # its file as it was given
    tried = candidates(workloads, machine, bases, budgets)
    if target is not None:
        output.check_can_write("--output", target, folder=True)

    points: list[Point] = []
    errors: list[PlanError] = []
    ends_s = time.monotonic() + limit
    with output.progress() as say, output.interruptible():
        until = takewhile(lambda _: time.monotonic() < ends_s, tried)
        for found in tune(until, machine, say):
            if isinstance(found, PlanError):
                errors.append(found)
            else:
                points.append(found)
    count = len(points) + len(errors)
    if not count:
        raise UmemError(f"--limit: {limit:g} s leave no time for a candidate: give such as 30")
    if not points:
        some = f"{count} of " if count < len(tried) else ""
        raise UmemError(
            f"none of {some}{len(tried)} candidates fits; the last one tried: {errors[-1]}"
        )

    rows = [
        _row(number, point, [*_words(given), "--hardware", hardware], target)
        for number, point in enumerate(front(points, tolerance), 1)
    ]
    data: dict[str, Any] = {
        "hardware": machine.name,
        "rates": machine.rates,
        "figures": "predicted, not measured",
        "candidates": len(tried),
        "predicted": count,
        "fit": len(points),
        "tolerance": tolerance,
        "stopped": "limit" if count < len(tried) else None,
        "points": rows,
    }
    if target is not None:
        target.mkdir(parents=True, exist_ok=True)
        for row in rows:
            write_file(row["file"], row["policy"].encode())
    if as_json:
        output.print_json(data)
    else:
        _print(output.make_console(), data, target)


# The question.


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _numbers(option: str, text: str | None) -> tuple[int | None, ...]:
    """Whole numbers above 0; None for an option that is not given."""
    if text is None:
        return (None,)
    found = []
    for word in _names(text):
        if not (word.isascii() and word.isdigit() and int(word) > 0):
            raise UmemError(f"{option}: {word!r} is no whole number above 0: give such as 1,2,4")
        found.append(int(word))
    return tuple(dict.fromkeys(found))


def _workloads(
    given: options.WorkloadOptions,
    batches: Sequence[int | None],
    accumulates: Sequence[int | None],
    checkpoint: bool | None,
) -> list[TunedWorkload]:
    """The training in each of its forms; a trace and a script have one."""
    is_model = given.script is None and given.trace is None
    tries_both = is_model and checkpoint is None
    found = []
    for batch, accumulate, recomputes in product(
        batches, accumulates, (False, True) if tries_both else (checkpoint,)
    ):
        (made,) = options.find_workloads(
            options.TRAINING_MODES,
            replace(given, batch=batch, accumulate=accumulate, checkpoint=recomputes),
        )
        form: dict[str, int | bool] = {}
        if is_model:
            form = {
                "batch": batch or options.BATCH,
                "accumulate": accumulate or options.ACCUMULATE,
                "checkpoint": bool(recomputes),
            }
        found.append(TunedWorkload(form, made))
    return found


def _words(given: options.WorkloadOptions) -> list[str]:
    """The words of ``umem simulate`` that all points have in common."""
    values = asdict(given)
    script = values.pop("script")
    if script is None and given.trace is None:
        values["mode"] = given.mode or options.TRAINING_MODES[0]
    options_given = ((f"--{name}", str(it)) for name, it in values.items() if it is not None)
    return [*([] if script is None else [script]), *(word for it in options_given for word in it)]


# The answer.


def _row(number: int, point: Point, common: Sequence[str], target: Path | None) -> dict[str, Any]:
    """A point as plain values, for JSON: seconds and bytes."""
    candidate = point.candidate
    form = candidate.workload.options
    file = f"tuned-{number}.yaml" if target is None else str(target / f"tuned-{number}.yaml")
    words = ["umem", "simulate", *common]
    for name, value in form.items():
        if name == "checkpoint":
            words.append("--checkpoint" if value else "--no-checkpoint")
        else:
            words += [f"--{name}", str(value)]
    words += ["--policy", file]
    words += {"backward": ["--step-in-backward"], "deferred": []}.get(
        candidate.step, ["--planner", "planned"]
    )
    return {
        **form,
        "base": candidate.policy.get("extends", PLAIN),
        "step": candidate.step,
        "device_budget_bytes": candidate.policy["device_budget"],
        "step_s": point.step_s,
        "tokens_per_s": point.tokens_per_s,
        "device_bytes": point.device_bytes,
        "host_bytes": point.host_bytes,
        "policy": candidate.policy_text(),
        "file": None if target is None else file,
        "command": shlex.join(words),
    }


def _print(console: Console, data: dict[str, Any], target: Path | None) -> None:
    """Print the points as a table."""
    end = "; the time limit left out the others: --limit" if data["stopped"] else ""
    console.print(
        f"On {plain(data['hardware'])}: {data['predicted']} of {data['candidates']} candidates "
        f"predicted, {data['fit']} fit{end}"
    )
    rows = data["points"]
    if not rows:
        return
    form = ("batch", "sum", "again") if "batch" in rows[0] else ()
    numbers = (*form, "step", "tokens/s", "device", "host")
    table = output.make_table("", "policy", "update", numbers=numbers, narrow=True)
    for number, row in enumerate(rows, 1):
        cells = [
            str(row[name]) if name != "checkpoint" else "yes" if row[name] else "no"
            for name in ("batch", "accumulate", "checkpoint")[: len(form)]
        ]
        speed = row["tokens_per_s"]
        table.add_row(
            str(number),
            plain(Path(row["base"]).name),
            row["step"],
            *cells,
            output.format_seconds(row["step_s"]),
            "" if speed is None else f"{speed:,.0f}",
            output.format_size(row["device_bytes"]),
            output.format_size(row["host_bytes"]),
        )
    output.print_table(console, table)
    if form:
        console.print(
            "sum: batches in a step; again: activations are recomputed (checkpoints)", style="dim"
        )
    console.print(
        f"{options.rates_line(plain(data['hardware']), data['rates'])}\n"
        "Predicted, not measured. Each is faster than every one that uses no more of either "
        f"memory, by more than {data['tolerance']:.1%}.",
        style="dim",
    )
    if target is not None:
        output.print_written([Path(row["file"]) for row in rows])
    else:
        console.print("--output FOLDER writes the policies, --json shows them.", style="dim")
