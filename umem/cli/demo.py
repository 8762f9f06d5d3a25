"""`umem demo`: fine-tune a small Llama on the GPU, or predict a large one without."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from umem.cli.demo_program import Replay, explain, record_example, replay, run_example
from umem.cli.output import progress
from umem.cli.predictions import print_predictions
from umem.cli.workloads import DEFAULT_HARDWARE, find_policy, workload_of_model
from umem.core.classes import TensorClass
from umem.core.units import format_bytes
from umem.doctor import Report, Status, collect, diagnose
from umem.hardware import load_hardware
from umem.planning.prediction import predict
from umem.policy import load_policy, resolve

__all__ = ["demo"]

MODES = ("lora", "sft")

MODEL = "llama-2-7b"
PLANNERS = ("fault", "planned")

# Percentages in a policy refer to a device's memory: that of an 80 GiB card stands in for it.
DEVICE_BYTES = 80 << 30

# The least that makes a Llama of 76 million weights train on two CPU cores in seconds.
RECORDED = ("--mode", "sft", "--size", "small", "--batch", "1", "--seq", "256")


def demo() -> None:
    """Fine-tune a small Llama under umem on the GPU; without one, show what umem does.

    Without a GPU: the doctor's findings; LoRA and SFT of Llama-2-7B predicted for a GH200, with
    demand paging and as umem plans it, beside what NVIDIA published; and the native allocator, over
    host memory, under the allocations of a real SFT step recorded on the CPU.
    """
    import torch

    console = Console()
    if torch.cuda.is_available():
        _on_gpu(console)
    else:
        _without_gpu(console)


def _on_gpu(console: Console) -> None:
    for mode in MODES:
        console.rule(f"examples/finetune_llama.py --mode {mode}")
        status = run_example(["--mode", mode])
        if status:
            raise typer.Exit(status)


def _without_gpu(console: Console) -> None:
    console.rule("What this machine offers")
    _print_findings(console, diagnose(collect()))
    _predict(console)
    _replay(console)


def _predict(console: Console) -> None:
    hardware = load_hardware(DEFAULT_HARDWARE)
    console.rule(f"{MODEL} on one {hardware.name}, predicted")
    for mode in MODES:
        words = Table(box=None, pad_edge=False, show_header=False)
        words.add_column(ratio=1)
        words.add_column(ratio=3)
        for classes, sentence in explain(load_policy(mode)):
            words.add_row(", ".join(classes), sentence)
        console.print(f"[bold]policy {mode}[/bold]")
        console.print(words)
        policy = find_policy(mode, hardware, None)
        with progress() as say:
            trace = workload_of_model(MODEL, mode).make(say)
            reports = predict(trace, hardware, policy, PLANNERS, progress=say)
        console.print()
        print_predictions(console, reports, policy.device_budget_bytes or hardware.device_bytes)
        console.print()
    console.print(
        f"`umem simulate --model {MODEL} --verbose --plot FOLDER` shows more, and draws it."
    )


def _replay(console: Console) -> None:
    from umem.runtime.state import native_config

    console.rule("The native allocator under an SFT step")
    with progress() as say:
        say("Training a Llama of 76 million weights for two steps on the CPU")
        stream = record_example(RECORDED)
        say("Sending its allocations through the allocator")
        outcome = replay(stream, native_config(resolve(load_policy("sft"), DEVICE_BYTES)))
    console.print(
        f"{len(stream.block_bytes):,} allocations: a Llama of 76 million weights was built and "
        "trained for two\nsteps on the CPU; umem's native allocator served the same over host "
        "memory.",
        highlight=False,
    )
    _print_replay(console, outcome)


def _print_findings(console: Console, report: Report) -> None:
    checks = [check for section in report.sections for check in section.checks]
    for check in checks:
        if check.status in (Status.WARN, Status.FAIL):
            text = f"{check.status.upper()}  {check.name}: {check.value}"
            console.print(escape(text + (f"\n      {check.remedy}" if check.remedy else "")))
    good = sum(check.status is Status.OK for check in checks)
    console.print(f"{good} checks are good; `umem doctor` shows them all.")
    if not report.swap_works:
        console.print("umem.enable() needs an NVIDIA GPU; what follows does not.")


def _print_replay(console: Console, outcome: Replay) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("class")
    for heading in ("allocations", "allocated", "peak", "live at the end"):
        table.add_column(heading, justify="right", no_wrap=True)
    for member in TensorClass:
        traffic = outcome.by_class[member]
        table.add_row(
            member.value,
            f"{traffic.allocations:,}",
            *map(format_bytes, (traffic.allocated_bytes, traffic.peak_bytes, traffic.live_bytes)),
        )
    console.print(table)
    ratio = outcome.peak_reserved_bytes / outcome.peak_requested_bytes
    console.print(
        f"At the peak {format_bytes(outcome.peak_requested_bytes)} asked for, "
        f"{format_bytes(outcome.peak_allocated_bytes)} in blocks, "
        f"{format_bytes(outcome.peak_reserved_bytes)} reserved ({ratio:.2f}x).\n"
        f"{outcome.pair_ns:,.0f} ns per allocation and free, called from Python.",
        style="bold",
        highlight=False,
    )
