"""Show umem on this machine: fine-tune a small Llama on the GPU, or predict a large one without.

    umem demo

With a GPU, `finetune_llama.py` runs in each mode. Without one, the demo prints what `umem doctor`
finds, says whether Llama-2-7B fits a GPU with 80 GB, and predicts a step of its training there.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from umem.cli import app as umem_command
from umem.core.errors import UmemError, UnsupportedError
from umem.core.install import install_command
from umem.doctor import Report, Status, collect, diagnose

__all__ = ["main", "run_example"]

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
