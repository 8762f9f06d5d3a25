"""`umem fit`: whether a model fits a GPU, and how fast it runs there."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from umem.cli import options, output
from umem.cli.output import plain
from umem.core.errors import UmemError
from umem.core.garbage import no_garbage_collection
from umem.core.units import format_bytes, parse_limit
from umem.fit import (
    MOMENTS,
    TRAINING_PRECISIONS,
    Fit,
    Way,
    Workload,
    fit_inference,
    fit_training,
    generic_shape,
    load_shape,
)
from umem.hardware import Hardware, hardware_names, load_hardware
from umem.io.files import write_file

__all__ = ["app"]

_MODES = ("sft", "lora", "inference")

_SHORT_NAMES = {"a100-40": "a100-40-pcie", "h100-80": "h100-pcie", "h200-141": "h200-pcie"}

_CLASSES = {"optimizer_state": "optimizer state", "cache": "cache of keys and values"}

_WAYS = {"umem": "umem", "stock": "stock", "offload": "CPU offload"}

app = output.make_app()


@app.command(no_args_is_help=True)
def fit(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            show_default=False,
            help="A known model, such as llama-2-7b or Qwen/Qwen3-8B, or the path of a "
            "config.json. Nothing is downloaded.",
        ),
    ] = None,
    mode: Annotated[
        str,
        typer.Option(help="sft: every parameter is trained; lora: adapters; inference."),
    ] = "sft",
    params: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="A Llama of about this size instead, such as 7b."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="PROFILE",
            help="A hardware profile's name or file, such as h100-80, or detect (default: a row "
            "for each profile).",
        ),
    ] = None,
    batch: options.Batch = None,
    seq: options.Seq = None,
    precision: options.Precision = None,
    checkpoint: options.Checkpoint = None,
    optimizer: Annotated[
        str | None,
        typer.Option(help="adamw, or sgd, which is SGD with momentum (default: adamw)."),
    ] = None,
    budget: options.Budget = None,
    host_ram: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Host memory to use, such as 64GiB (default: the machine's)."
        ),
    ] = None,
    target: Annotated[
        Path | None,
        typer.Option(
            "--output",
            readable=False,
            metavar="FILE",
            help="Write the policy to run it with, a YAML file; needs --gpu.",
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Tell whether a model fits a GPU, and how fast it trains or generates.

    The answer comes from the model's configuration, the roofline of a hardware profile and
    umem's planner. It is a prediction, takes a second or two, and needs no GPU.
    """
    question = _question(
        model,
        params,
        mode,
        batch,
        seq,
        precision=precision,
        checkpoint=checkpoint,
        optimizer=optimizer,
    )
    if target is not None:
        if gpu is None:
            raise UmemError("--output: a policy is for one machine: give --gpu")
        output.check_can_write("--output", target, suffixes=[".yaml", ".yml"])
    host_bytes = _host_bytes(host_ram)
    names = hardware_names() if gpu is None else (_SHORT_NAMES.get(gpu, gpu),)
    answers = []
    # Plans make many objects and hardly a cycle: looking for cycles takes a third of the time.
    with output.progress() as say, output.interruptible(), no_garbage_collection():
        for number, name in enumerate(names, 1):
            say(f"Planning for {name}, {number} of {len(names)}")
            machine = options.load_named("--gpu", load_hardware, name)
            answers.append(_answer(question, machine, budget, host_bytes))
    is_written = target is not None and answers[0].umem.time_s is not None
    if target is not None and is_written:
        write_file(target, _policy_text(question, answers[0], budget).encode())
    if as_json:
        output.print_json({"results": [_row(question, answer, budget) for answer in answers]})
        return
    console = output.make_console()
    if gpu is None:
        _print_machines(console, question, answers)
    else:
        _print_one(console, question, answers[0], budget, target)
        if target is not None and is_written:
            output.print_written([target])
        elif target is not None:
            console.print(f"{plain(str(target))} is not written: umem has no plan to run")


# The question.


def _question(
    model: str | None,
    params: str | None,
    mode: str,
    batch: int | None,
    seq: int | None,
    **of_training: Any,
) -> Workload:
    """Check the options of the workload; ``UmemError`` if they contradict each other."""
    options.known_name("--mode", mode, _MODES)
    if (model is None) == (params is None):
        raise UmemError("give either MODEL, such as llama-2-7b, or --params, such as 7b")
    shape = load_shape(model) if model is not None else generic_shape(params or "")
    if mode == "inference":
        for name, value in of_training.items():
            if value is not None:
                raise UmemError(f"--{name}: inference is in bf16 and keeps nothing: leave it out")
        return Workload(shape, mode, batch or 1, seq or options.SEQ, "bf16", checkpoint=False)
    chosen = {
        name: options.known_name(f"--{name}", of_training[name] or known[0], known)
        for name, known in (("precision", TRAINING_PRECISIONS), ("optimizer", tuple(MOMENTS)))
    }
    return Workload(
        shape,
        mode,
        batch or options.BATCH,
        seq or options.SEQ,
        checkpoint=bool(of_training["checkpoint"]),
        **chosen,
    )


def _host_bytes(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return parse_limit(text)
    except ValueError as error:
        raise UmemError(f"--host-ram: {error}") from None


def _answer(
    question: Workload, machine: Hardware, budget: str | None, host_bytes: int | None
) -> Fit:
    policy = options.find_policy(question.mode, machine, budget)
    answer = fit_inference if question.mode == "inference" else fit_training
    return answer(question, machine, policy, host_bytes=host_bytes)


# The answer.


def _row(question: Workload, answer: Fit, budget: str | None) -> dict[str, Any]:
    """Put an answer into plain values, for JSON: seconds and bytes."""
    return {
        "model": question.shape.name,
        "parameters": question.shape.parameters,
        "mode": question.mode,
        "batch": question.batch,
        "seq": question.seq,
        "precision": question.precision,
        "checkpoint": question.checkpoint,
        "optimizer": question.optimizer,
        "hardware": answer.hardware,
        "device_budget_bytes": answer.budget_bytes,
        "host_limit_bytes": answer.host_limit_bytes,
        "classes": {
            name: {
                "bytes": place.size_bytes,
                "device_bytes": place.device_bytes,
                "host_bytes": place.host_bytes,
            }
            for name, place in answer.classes.items()
        },
        "ways": {
            way.name: {
                "fits": way.time_s is not None,
                "token_s" if question.mode == "inference" else "step_s": way.time_s,
                "tokens_per_s": way.tokens_per_s,
                "device_bytes": way.device_bytes,
                "host_bytes": way.host_bytes,
                "why_not": way.why_not or None,
            }
            for way in answer.ways
        },
        "largest_batch": answer.largest_batch,
        "largest_stock_batch": answer.largest_stock_batch,
        "policy": _policy_text(question, answer, budget),
        "rests_on": f"roofline of {answer.hardware}: predicted, not measured",
    }


def _heading(question: Workload) -> str:
    words = [question.mode]
    if question.mode != "inference":
        words.append(question.precision)
        words += [question.optimizer] if question.optimizer != "adamw" else []
        words += ["checkpoints"] if question.checkpoint else []
    return (
        f"[bold]{plain(question.shape.name)}[/bold], {', '.join(words)}: "
        f"{question.shape.parameters / 1e9:.3g} B parameters\n"
        f"{question.batch:,} x {question.seq:,} tokens"
    )


def _policy_text(question: Workload, answer: Fit, budget: str | None) -> str:
    """The policy to run it with, as YAML."""
    about = f"{question.shape.name} on {answer.hardware}, by umem fit"
    text = f"extends: {question.mode}\ndescription: {json.dumps(about)}\n"
    return text + (f"device_budget: {json.dumps(budget)}\n" if budget else "")


def _print_one(
    console: Console, question: Workload, answer: Fit, budget: str | None, target: Path | None
) -> None:
    """Print the answer for one machine."""
    console.print(
        f"{_heading(question)} on {plain(answer.hardware)}: {_size(answer.budget_bytes)} of "
        f"device memory, {_size(answer.host_limit_bytes)} of host memory\n"
    )
    is_planned = answer.umem.time_s is not None
    where = ("device", "host") if is_planned else ()
    table = output.make_table("class", numbers=("size", *where))
    for name, place in answer.classes.items():
        sizes = (place.size_bytes, place.device_bytes, place.host_bytes)
        table.add_row(
            _CLASSES.get(name, name), *map(format_bytes, sizes if is_planned else sizes[:1])
        )
    output.print_table(console, table)
    console.print()
    unit = "a token" if question.mode == "inference" else "step"
    table = output.make_table("way", numbers=(unit, "tokens/s", "peak: device", "host"))
    for way in answer.ways:
        table.add_row(_WAYS[way.name], *_time(way), _size(way.device_bytes), _size(way.host_bytes))
    output.print_table(console, table)
    for way in answer.ways:
        if way.why_not:
            console.print(f"{_WAYS[way.name]} does not fit: {plain(way.why_not)}")
    console.print()
    console.print(
        f"largest batch: {answer.largest_batch or 'none'} with umem, "
        f"{answer.largest_stock_batch or 'none'} with stock"
    )
    if answer.umem.host_bytes is not None:
        is_short = answer.umem.host_bytes > answer.host_limit_bytes
        console.print(
            f"host memory: needs {format_bytes(answer.umem.host_bytes)}; "
            f"{'only ' if is_short else ''}{format_bytes(answer.host_limit_bytes)} available"
        )
    console.print(_advice(question, answer, budget, target), soft_wrap=True)
    console.print(_basis(question, f"the roofline of {answer.hardware}"), style="dim")


def _advice(question: Workload, answer: Fit, budget: str | None, target: Path | None) -> str:
    """What to do; `target` is the policy's file."""
    if answer.umem.time_s is None:
        if answer.largest_batch:
            return f"try: --batch {answer.largest_batch}"
        remedies = {
            "sft": "--checkpoint, --precision bf16, --mode lora",
            "lora": "--checkpoint, a shorter --seq",
            "inference": "a shorter --seq",
        }
        return f"try: {remedies[question.mode]}, a larger --gpu or more host memory"
    script = "generate.py" if question.mode == "inference" else "train.py"
    limit = f"UMEM_DEVICE_BUDGET={budget} " if budget and target is None else ""
    policy = question.mode if target is None else shlex.quote(str(target))
    words = f"run: {plain(limit)}umem run --policy {plain(policy)} {script}"
    if answer.ways[1].time_s is not None:
        words += "\nall of it fits the device: plain torch is enough"
    return words


def _basis(question: Workload, rooflines: str) -> str:
    """What an answer rests on."""
    words = f"Predicted by {rooflines} and umem's planner, not measured."
    if question.mode != "inference":
        words += "\nCPU offload, assumed: state and gradients copied once a step, without overlap."
    return words


def _print_machines(console: Console, question: Workload, answers: list[Fit]) -> None:
    """Print a row for each machine."""
    unit = "token" if question.mode == "inference" else "step"
    console.print(_heading(question) + "\n")
    speeds = [f"{way.name}:\ntokens/s" for way in answers[0].ways[1:]]
    numbers = (
        f"umem:\n{unit}",
        "tokens/s",
        *speeds,
        "umem:\ndevice",
        "host",
        "largest\nbatch",
    )
    table = output.make_table("profile", numbers=numbers, narrow=True)
    for answer in answers:
        umem, *others = answer.ways
        table.add_row(
            plain(answer.hardware),
            *_time(umem, "too large"),
            *(_time(way, "")[1] or "too large" for way in others),
            _size(umem.device_bytes),
            _size(umem.host_bytes),
            f"{answer.largest_batch:,}" if answer.largest_batch else "none",
        )
    output.print_table(console, table)
    console.print("\n--gpu PROFILE shows where everything is, and what to run.")
    console.print(_basis(question, "each profile's roofline"), style="dim")


def _time(way: Way, instead: str = "does not fit") -> tuple[str, str]:
    if way.time_s is None or way.tokens_per_s is None:
        return instead, ""
    speed = way.tokens_per_s
    return output.format_seconds(way.time_s), f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"


def _size(size_bytes: int | None) -> str:
    """A size in three digits; empty if there is none."""
    return "" if size_bytes is None else output.format_size(size_bytes)
