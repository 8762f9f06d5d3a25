"""`umem fit`: whether a model fits a GPU, and how fast it runs there."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from umem.cli import options, output
from umem.cli.output import plain
from umem.core.errors import UmemError
from umem.core.garbage import no_garbage_collection
from umem.core.lazy_names import loads_names
from umem.core.units import format_bytes, parse_limit
from umem.io.files import write_file

if TYPE_CHECKING:
    from rich.console import Console

    from umem.fit import (
        ALL_LINEAR,
        MOMENTS,
        QUANTISED,
        TRAINING_PRECISIONS,
        Fit,
        ModelShape,
        Way,
        Workload,
        fit_inference,
        fit_training,
        generic_shape,
        load_shape,
    )
    from umem.fit.answer import CONTEXT_BYTES, PROCESS_BYTES
    from umem.hardware import Hardware, hardware_names, load_hardware
    from umem.hardware.host_memory import PINNED_SHARE
    from umem.hardware.load import MEASURE

__all__ = ["app"]

_loads_names = loads_names(
    globals(),
    {
        "umem.fit": "ALL_LINEAR MOMENTS QUANTISED TRAINING_PRECISIONS Workload "
        "fit_inference fit_training generic_shape load_shape",
        "umem.fit.answer": "CONTEXT_BYTES PROCESS_BYTES",
        "umem.hardware": "hardware_names load_hardware",
        "umem.hardware.host_memory": "PINNED_SHARE",
        "umem.hardware.load": "MEASURE",
    },
)

_AS_FAST = 0.97
"""Part of stock's step: a shorter one is worth umem where all fits."""

_CLASSES = {"optimizer_state": "optimizer state", "cache": "cache of keys and values"}

_WAYS = {"umem": "umem", "stock": "stock", "offload": "CPU offload"}

app = output.make_app()


@app.command(no_args_is_help=True)
@_loads_names
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
    params: options.Params = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="PROFILE",
            help="A hardware profile's name or file, such as h100-sxm, or detect (default: a row "
            "for each profile).",
        ),
    ] = None,
    batch: options.Batch = None,
    seq: options.Seq = None,
    precision: options.Precision = None,
    checkpoint: options.Checkpoint = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            help="adamw; sgd, which is SGD with momentum; or adamw8bit of bitsandbytes (default: "
            "adamw)."
        ),
    ] = None,
    accumulate: options.Accumulate = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=4096,
            help="GPUs of one host that divide a training as FSDP does; each has its own batch "
            "(default: 1).",
        ),
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=1, max=8192, help="Rank of LoRA's adapters (default: 16).")
    ] = None,
    targets: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Matrices with LoRA's adapters, with commas between, or all-linear (default: "
            "those of attention).",
        ),
    ] = None,
    quantised: Annotated[
        str | None,
        typer.Option(
            "--quantised",
            metavar="FORMAT",
            help="How bitsandbytes keeps frozen weights: nf4 (QLoRA), nf4-double or int8 (default: "
            "as the configuration says).",
        ),
    ] = None,
    budget: options.Budget = None,
    host_ram: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Host memory to use, such as 64GiB (default: the machine's)."
        ),
    ] = None,
    host_update: Annotated[
        bool,
        typer.Option(
            "--host-update", help="Let the host's cores update blocks where that is faster."
        ),
    ] = False,
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
    if host_update and mode == "inference":
        raise UmemError("--host-update: inference trains nothing: leave it out")
    question = _question(
        model,
        params,
        mode,
        batch,
        seq,
        precision=precision,
        checkpoint=checkpoint,
        optimizer=optimizer,
        accumulate=accumulate,
        gpus=gpus,
        rank=rank,
        targets=targets,
        quantised=quantised,
    )
    if target is not None:
        if gpu is None:
            raise UmemError("--output: a policy is for one machine: give --gpu")
        output.check_can_write("--output", target, suffixes=[".yaml", ".yml"])
    host_bytes = _host_bytes(host_ram)
    names = hardware_names() if gpu is None else (gpu,)
    answers = []
    # Plans make many objects and hardly a cycle: looking for cycles takes a third of the time.
    with output.progress() as say, output.interruptible(), no_garbage_collection():
        for number, name in enumerate(names, 1):
            say(f"Planning for {name}, {number} of {len(names)}")
            machine = options.load_named("--gpu", load_hardware, name)
            answers.append(_answer(question, machine, budget, host_bytes, host_update))
    is_written = target is not None and answers[0].umem.time_s is not None
    if target is not None and is_written:
        write_file(target, _policy_text(question, answers[0], budget, host_update).encode())
    if as_json:
        rows = [_row(question, answer, budget, host_update) for answer in answers]
        output.print_json({"results": rows})
        return
    console = output.make_console()
    if gpu is None:
        _print_machines(console, question, answers)
    else:
        _print_one(console, question, answers[0], budget, target)
        if host_update and target is None:
            console.print("--output FILE writes the policy that lets the host update blocks")
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
    options.known_name("--mode", mode, ("sft", "lora", "inference"))
    if (model is None) == (params is None):
        raise UmemError("give either MODEL, such as llama-2-7b, or --params, such as 7b")
    shape = load_shape(model) if model is not None else generic_shape(params or "")
    given = {name: value for name, value in of_training.items() if value is not None}
    of_lora = {"rank", "targets"} & given.keys()
    if mode != "lora" and of_lora:
        raise UmemError(
            f"--{min(of_lora)}: adapters are of --mode lora: give it, or leave this out"
        )
    if mode == "sft" and "quantised" in given:
        raise UmemError("--quantised: weights that are trained are whole: give --mode lora")
    if "quantised" in given:
        quantised = options.known_name("--quantised", given.pop("quantised"), tuple(QUANTISED))
    elif mode != "sft" and shape.quantisation in QUANTISED:
        quantised = shape.quantisation
    else:
        quantised = ""
    if mode == "inference":
        for name in given:
            raise UmemError(f"--{name}: inference trains nothing and keeps nothing: leave it out")
        settings: dict[str, Any] = {"precision": "bf16", "checkpoint": False}
    else:
        settings = _training(given, shape)
    batch = batch or (1 if mode == "inference" else options.BATCH)
    return Workload(shape, mode, batch, seq or options.SEQ, quantised=quantised, **settings)


def _training(given: dict[str, Any], shape: ModelShape) -> dict[str, Any]:
    """Check the options of a training; they become those of a workload."""
    optimizer = options.known_name("--optimizer", given.get("optimizer", "adamw"), tuple(MOMENTS))
    precisions = [
        it for it in TRAINING_PRECISIONS if optimizer != "adamw8bit" or "master" not in it
    ]
    given["optimizer"] = optimizer
    given["precision"] = options.known_name(
        "--precision", given.get("precision", precisions[0]), precisions
    )
    given.setdefault("checkpoint", False)
    if "targets" in given:
        # How PEFT adapts experts, and what is beside them, changes from release to release.
        names = dict.fromkeys(
            it.name
            for layer in shape.layers
            for it in (layer.attention if shape.has_experts else layer.matrices)
        )
        known = (*names, *(() if shape.has_experts else (ALL_LINEAR,)))
        given["targets"] = options.known_names("--targets", given["targets"], known)
    return given


def _host_bytes(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return parse_limit(text)
    except ValueError as error:
        raise UmemError(f"--host-ram: {error}") from None


def _answer(
    question: Workload,
    machine: Hardware,
    budget: str | None,
    host_bytes: int | None,
    host_update: bool,
) -> Fit:
    policy = options.find_policy(question.mode, machine, budget)
    policy = replace(policy, updates_on_host=host_update and not machine.one_pool)
    if machine.one_pool:
        host_bytes = 0
    answer = fit_inference if question.mode == "inference" else fit_training
    return answer(question, machine, policy, host_bytes=host_bytes)


# The answer.


def _row(question: Workload, answer: Fit, budget: str | None, host_update: bool) -> dict[str, Any]:
    """Put an answer into plain values, for JSON: seconds and bytes."""
    is_timed = answer.rates != "unknown"
    return {
        "model": question.shape.name,
        "parameters": question.shape.parameters,
        "mode": question.mode,
        "batch": question.batch,
        "seq": question.seq,
        "precision": question.precision,
        "checkpoint": question.checkpoint,
        "optimizer": question.optimizer,
        "accumulate": question.accumulate,
        "gpus": question.gpus,
        "quantised": question.quantised or None,
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
                "token_s" if question.mode == "inference" else "step_s": way.time_s
                if is_timed
                else None,
                "tokens_per_s": way.tokens_per_s if is_timed else None,
                "device_bytes": way.device_bytes,
                "host_bytes": way.host_bytes,
                "why_not": way.why_not or None,
            }
            for way in answer.ways
        },
        "activations": [asdict(it) for it in answer.choices],
        "slices_loss": answer.slices_loss,
        "launch_s": answer.launch_s if is_timed else None,
        "largest_batch": answer.largest_batch,
        "largest_stock_batch": answer.largest_stock_batch,
        "host_updates": answer.host_updates,
        "policy": _policy_text(question, answer, budget, host_update),
        "rates": answer.rates,
        "rests_on": f"roofline of {answer.hardware}: predicted, not measured",
    }


def _heading(question: Workload) -> str:
    words = [question.mode]
    if question.mode != "inference":
        words.append(question.precision)
        words += [question.optimizer] if question.optimizer != "adamw" else []
        words += ["checkpoints"] if question.checkpoint else []
    words += [question.quantised] if question.quantised else []
    batches = f"{question.accumulate:,} batches of " if question.accumulate > 1 else ""
    each = f" on each of {question.gpus:,} GPUs" if question.gpus > 1 else ""
    return (
        f"[bold]{plain(question.shape.name)}[/bold], {', '.join(words)}: "
        f"{question.shape.parameters / 1e9:.3g} B parameters\n"
        f"{batches}{question.batch:,} x {question.seq:,} tokens{each}"
    )


def _policy_text(question: Workload, answer: Fit, budget: str | None, host_update: bool) -> str:
    """The policy to run it with, as YAML."""
    about = f"{question.shape.name} on {answer.hardware}, by umem fit"
    text = f"extends: {question.mode}\ndescription: {json.dumps(about)}\n"
    text += "host_update: auto\n" if host_update else ""
    return text + (f"device_budget: {json.dumps(budget)}\n" if budget else "")


def _print_one(
    console: Console, question: Workload, answer: Fit, budget: str | None, target: Path | None
) -> None:
    """Print the answer for one machine."""
    there = f"{_size(answer.budget_bytes)} of "
    there += (
        "the memory that host and device share"
        if answer.one_pool
        else f"device memory, {_size(answer.host_limit_bytes)} of host memory"
    )
    console.print(f"{_heading(question)} on {plain(answer.hardware)}: {there}\n")
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
        times = _time(way, is_timed=answer.rates != "unknown")
        table.add_row(_WAYS[way.name], *times, _size(way.device_bytes), _size(way.host_bytes))
    output.print_table(console, table)
    for way in answer.ways:
        if way.why_not:
            console.print(f"{_WAYS[way.name]} does not fit: {plain(way.why_not)}")
    if answer.slices_loss:
        console.print(
            "umem computes the loss in slices of rows, as it would take too much otherwise"
        )
    if answer.host_updates:
        console.print(f"the host's cores update {answer.host_updates} blocks")
    if answer.rates != "unknown" and answer.waits_for_processor:
        console.print(
            "the processor is the limit: launching all kernels takes "
            f"{output.format_seconds(answer.launch_s)}, for which the GPU waits "
            f"{output.format_seconds(answer.waits_s)}"
        )
    console.print()
    if answer.rates != "unknown" and any(it.choice != "kept" for it in answer.choices):
        output.print_choices(console, answer.choices)
        console.print()
    console.print(
        f"largest batch: {answer.largest_batch or 'none'} with umem, "
        f"{answer.largest_stock_batch or 'none'} with stock"
    )
    beside = (
        f"a process without tensors: {format_bytes(CONTEXT_BYTES)} of device memory, "
        f"{format_bytes(PROCESS_BYTES)} of host memory"
    )
    if answer.one_pool:
        console.print(f"nothing is moved within one memory: umem's way is stock's\n{beside}")
    elif answer.umem.host_bytes is not None:
        needed_bytes = answer.umem.host_bytes * question.gpus
        console.print(
            f"host memory: needs {format_bytes(needed_bytes)}; "
            f"{format_bytes(answer.host_limit_bytes)} available, of which umem locks "
            f"{100 * PINNED_SHARE:.0f} %\n{beside}"
        )
    console.print(_advice(question, answer, budget, target), soft_wrap=True)
    if answer.rates == "unknown":
        console.print(
            f"No seconds: no profile has the rates of {plain(answer.hardware)}.\n"
            f"To measure them, in two minutes: {MEASURE}"
        )
        return
    console.print(
        _basis(
            question,
            f"the roofline of {answer.hardware}, with {answer.rates} rates,",
            has_offload=len(answer.ways) > 2,
        ),
        style="dim",
    )


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
        more = "a larger --gpu" if answer.one_pool else "a larger --gpu or more host memory"
        return f"try: {remedies[question.mode]}, {more}"
    script = "generate.py" if question.mode == "inference" else "train.py"
    limit = f"UMEM_DEVICE_BUDGET={budget} " if budget and target is None else ""
    policy = question.mode if target is None else shlex.quote(str(target))
    words = f"run: {plain(limit)}umem run --policy {plain(policy)} {script}"
    stock_s, umem_s = answer.ways[1].time_s, answer.umem.time_s
    if stock_s is not None and umem_s is not None and umem_s > _AS_FAST * stock_s:
        words += "\nall of it fits the device: plain torch is enough"
    elif stock_s is not None:
        words += "\nall of it fits the device: umem leaves checkpoints out where there is room"
    return words


def _basis(question: Workload, rooflines: str, *, has_offload: bool) -> str:
    """What an answer rests on."""
    words = f"Predicted by {rooflines} and umem's planner, not measured."
    if has_offload:
        words += "\nCPU offload, assumed: state and gradients copied once a step, without overlap."
    if question.gpus > 1:
        words += "\nNot counted: what GPUs send each other, so that steps take longer."
    if question.shape.quantisation and not question.quantised:
        words += (
            f"\nNot counted: quantization_config ({plain(question.shape.quantisation)}); weights "
            "are taken in full."
        )
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
            *_time(umem, instead="too large"),
            *(_time(way)[1] or "too large" for way in others),
            *[""] * (len(speeds) - len(others)),
            _size(umem.device_bytes),
            _size(umem.host_bytes),
            f"{answer.largest_batch:,}" if answer.largest_batch else "none",
        )
    output.print_table(console, table)
    console.print("\n--gpu PROFILE shows where everything is, and what to run.")
    counts = Counter(answer.rates for answer in answers)
    of_rates = ", ".join(f"{counts[it]} {it}" for it in ("measured", "published", "assumed"))
    console.print(f"Rates: {of_rates}; umem hardware list says which.", style="dim")
    basis = _basis(question, "each profile's roofline", has_offload=len(speeds) > 1)
    console.print(basis, style="dim")


def _time(way: Way, *, instead: str = "does not fit", is_timed: bool = True) -> tuple[str, str]:
    if way.time_s is None or way.tokens_per_s is None:
        return instead, ""
    if not is_timed:
        return "fits", ""
    speed = way.tokens_per_s
    return output.format_seconds(way.time_s), f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"


def _size(size_bytes: int | None) -> str:
    """A size in three digits; empty if there is none."""
    return "" if size_bytes is None else output.format_size(size_bytes)
