"""The commands of `umem bench`, which are loaded, and torch with them, when one is called."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from typer.main import get_command

from umem.cli import lazy_app

__all__ = ["COMMANDS", "app"]

COMMANDS = {
    "alloc": "Time an allocation and its free through torch, on a GPU.",
    "step": "Time a step of LoRA and SFT of a Llama that fits, on a GPU.",
    "core": "Time the native core over host memory, without a GPU.",
    "all": "Run the three above, in about two minutes.",
    "training": "Train a Llama on a GPU in less than it needs, beside others.",
    "scale": "Fine-tune Llamas of 7B to 34B on 80 GB, beside others.",
    "small-cards": "Train within 16 to 76 GiB of a GPU; --predict: without one.",
    "generate": "Generate text within a budget on 80 GB, beside others.",
    "load": "Time a 7B from its files to its first token, on 16 GB.",
    "planning": "Time to record, plan and simulate a step, without a GPU.",
    "published": "Plan published traces beside their published times.",
    "bounds": "Compare planned steps with their lower bounds, without a GPU.",
    "predicted": "Predict every measured row of results, without a GPU.",
    "report": "Print the tables of a results file.",
}
"""Name -> line of `umem bench --help`."""


def _load(name: str) -> Any:
    commands: Any = get_command(import_module("umem_bench.cli").app)
    return commands.commands[name]


app = lazy_app(COMMANDS, _load)


@app.callback()
def _options() -> None:
    """Measure umem: allocator, trainings and text generation within a budget, planners."""
