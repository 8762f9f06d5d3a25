"""`umem demo`: fine-tune a small Llama on the GPU, or show the allocator at work without one."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from umem.classes import TensorClass
from umem.cli.policy import show
from umem.demo import Replay, explain, record_example, replay, run_example
from umem.doctor import Report, Status, collect, diagnose
from umem.policy import load_policy, resolve
from umem.units import format_bytes

__all__ = ["demo"]

MODES = ("lora", "sft")

# Percentages in a policy refer to a device's memory: that of an 80 GiB card stands in for it.
DEVICE_BYTES = 80 << 30

# The least that makes a Llama of 76 million weights train on two CPU cores in seconds.
RECORDED_SIZE = ("--size", "small", "--batch", "1", "--seq", "256")


def demo() -> None:
    """Fine-tune a small Llama under umem on the GPU; without one, show what umem does.

    Without a GPU: the doctor's findings, a policy explained, and the native allocator, over
    host memory, under the allocations of real LoRA and SFT steps recorded on the CPU.
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

    console.rule("A policy, explained")
    show("sft")
    for mode in MODES:
        words = Table(box=None, pad_edge=False, show_header=False)
        words.add_column(ratio=1)
        words.add_column(ratio=3)
        for classes, sentence in explain(load_policy(mode)):
            words.add_row(", ".join(classes), sentence)
        console.print(f"\n[bold]{mode}[/bold] in words")
        console.print(words)

    from umem.allocator import native_config

    for mode in MODES:
        console.rule(f"The allocator under a {mode} fine-tuning step")
        with console.status("Training a Llama of 76 million weights for two steps on the CPU..."):
            stream = record_example(["--mode", mode, *RECORDED_SIZE])
        console.print(
            f"{len(stream.block_bytes):,} allocations: a Llama of 76 million weights was built and "
            "trained for two\nsteps on the CPU; umem's native allocator served the same over host "
            "memory.",
            highlight=False,
        )
        with console.status("Sending them through the allocator..."):
            outcome = replay(stream, native_config(resolve(load_policy(mode), DEVICE_BYTES)))
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
