"""Show umem on this machine: fine-tune a small Llama on the GPU, or predict a large one without.

    umem demo

With a GPU, `finetune_llama.py` runs in each mode. Without one, the demo prints what `umem doctor`
finds; says whether Llama-2-7B fits a GPU with 80 GB, and predicts a step of its training there; and
replays the allocations of a real SFT step, recorded on the CPU, on umem's native allocator.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import finetune_llama
import torch
from allocation_stream import AllocationStream, ReplayResult, record_training, replay
from rich.console import Console
from rich.table import Table

from umem.cli import app as umem_command
from umem.core.errors import UmemError, UnsupportedError
from umem.core.install import install_command
from umem.core.units import format_bytes
from umem.doctor import Report, Status, collect, diagnose
from umem.hardware import load_hardware
from umem.policy import load_policy, resolve
from umem.runtime.state import native_config

__all__ = ["main", "record_example", "run_example"]

MODES = ("lora", "sft")

_TRAINING = ("--precision", "fp32-autocast", "--batch", "4", "--checkpoint")
PREDICTIONS = (
    ("fit", "llama-2-7b", *_TRAINING, "--gpu", "h100-sxm"),
    (
        *("simulate", "--model", "llama-2-7b", "--mode", "sft", *_TRAINING),
        *("--policy", "sft", "--hardware", "h100-sxm"),
    ),
)
"""Commands for a training that does not fit a GPU with 80 GB."""

# Stands in for the machine that the policy of the replayed step is resolved for.
HARDWARE = "h200"

# 76 million weights, which train on two CPU cores in seconds.
RECORDED = ("--mode", "sft", "--size", "small", "--batch", "1", "--seq", "256")


def main() -> int:
    """Run the demo; return the exit status."""
    console = Console(highlight=False)
    if torch.cuda.is_available():
        return show_on_gpu(console)
    show_findings(console, diagnose(collect()))
    for words in PREDICTIONS:
        console.rule(f"umem {' '.join(words[:4])} ...")
        console.print(f"$ umem {' '.join(words)}", markup=False, soft_wrap=True)
        if status := umem_command(words, standalone_mode=False):
            return int(status)
    show_replay(console)
    return 0


def show_on_gpu(console: Console) -> int:
    """Fine-tune in each mode; return the exit status of the first run that fails, or 0."""
    for mode in MODES:
        console.rule(f"examples/finetune_llama.py --mode {mode}")
        status = run_example(["--mode", mode])
        if status:
            return status
    return 0


def show_findings(console: Console, report: Report) -> None:
    """Print the doctor's warnings and failures."""
    console.rule("umem doctor")
    checks = [check for section in report.sections for check in section.checks]
    for check in checks:
        if check.status in (Status.WARN, Status.FAIL):
            remedy = f"\n      {check.remedy}" if check.remedy else ""
            line = f"{check.status.upper()}  {check.name}: {check.value}{remedy}"
            console.print(line, markup=False)
    good = sum(check.status is Status.OK for check in checks)
    console.print(f"{good} checks are good; `umem doctor` shows them all.")
    if not report.swap_works:
        console.print("umem.enable() needs an NVIDIA GPU; the rest of the demo does not.")


def show_replay(console: Console) -> None:
    """Record an SFT step on the CPU and replay its allocations on the native allocator."""
    console.rule("The native allocator under an SFT step")
    with console.status("Training a Llama of 76 million weights for two steps on the CPU ..."):
        stream = record_example(RECORDED)
        result = replay(stream, native_config(resolve(load_policy("sft"), load_hardware(HARDWARE))))
    console.print(
        f"{len(stream.block_bytes):,} allocations: a Llama of 76 million weights was built and "
        "trained for two steps on the CPU; umem's native allocator served the same allocations "
        "from host memory."
    )
    print_replay(console, result)


def print_replay(console: Console, result: ReplayResult) -> None:
    """Print the allocator's statistics, by class and in all."""
    table = Table(box=None, pad_edge=False)
    table.add_column("class")
    for heading in ("allocations", "allocated", "peak", "live at the end"):
        table.add_column(heading, justify="right", no_wrap=True)
    for member, usage in result.by_class.items():
        sizes = (usage.allocated_bytes, usage.peak_bytes, usage.live_bytes)
        table.add_row(member.value, f"{usage.allocations:,}", *map(format_bytes, sizes))
    console.print(table)
    ratio = result.peak_reserved_bytes / result.peak_requested_bytes
    console.print(
        f"At the peak {format_bytes(result.peak_requested_bytes)} requested, "
        f"{format_bytes(result.peak_allocated_bytes)} in blocks, "
        f"{format_bytes(result.peak_reserved_bytes)} reserved ({ratio:.2f}x).\n"
        f"{result.pair_ns:,.0f} ns per allocation and free, called from Python.",
        style="bold",
    )


def run_example(arguments: Sequence[str]) -> int:
    """Run `finetune_llama.py` in its own process, its output passed on; return the exit status.

    Raises
    ------
    UnsupportedError
        A package that the example needs is missing.
    """
    require_packages()
    path = Path(__file__).with_name("finetune_llama.py")
    command = [sys.executable, str(path), *arguments]
    # In a group of its own: Ctrl-C is for the demo, which then ends this process.
    return subprocess.run(command, check=False, process_group=0).returncode


def record_example(arguments: Sequence[str], *, steps: int = 2) -> AllocationStream:
    """Train the model of `finetune_llama.py` on the CPU and record its allocations.

    Parameters
    ----------
    arguments : sequence of str
        The example's command line, for instance ``["--mode", "lora", "--size", "small"]``.
    steps : int
        Training steps to record.

    Raises
    ------
    UnsupportedError
        A package that the example needs is missing.
    """
    require_packages()
    options = finetune_llama.parse_arguments(arguments)
    text = finetune_llama.standard_library_text()
    source = finetune_llama.batches(text, options.batch, options.seq, options.seed)

    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = finetune_llama.build_model(options)
        return model, finetune_llama.build_optimizer(model, options.learning_rate)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        micro_batches = [next(source) for _ in range(options.grad_accumulation)]
        finetune_llama.train_step(model, optimizer, micro_batches)

    return record_training(build, step, steps=steps)


def require_packages() -> None:
    """Check that transformers and PEFT are installed.

    Raises
    ------
    UnsupportedError
        One is missing; the message has the command that installs it.
    """
    missing = [name for name in ("transformers", "peft") if importlib.util.find_spec(name) is None]
    if missing:
        raise UnsupportedError(
            f"the demo needs {' and '.join(missing)}: {install_command('examples')}"
        )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UmemError as error:
        print(f"umem demo: {error}", file=sys.stderr)
        sys.exit(2)
