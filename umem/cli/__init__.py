"""The command `umem`."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from umem._version import __version__
from umem.core.errors import UmemError

__all__ = ["COMMANDS", "app", "load_command", "main"]

COMMANDS = {
    "doctor": "Show what works on this machine, what does not, and why.",
    "demo": "Fine-tune a small Llama on the GPU, or predict a large one.",
    "run": "Run a Python program under umem, without changing it.",
    "simulate": "Predict a step: time, migrations, and unified memory's share.",
    "trace": "Record a training step as a file, convert a trace, or show one.",
    "plan": "Plan a training step: hints by phase, and where each tensor is.",
    "report": "Show what migrated in a recorded run, why, and at what cost.",
    "policy": "List, show and validate policies, and print their schema.",
    "hardware": "List and show hardware profiles.",
    "bench": "Run the benchmarks, which are in a checkout of umem.",
}
"""Name -> line of `umem --help`. The module `umem.cli.NAME` has the command, as its `app`."""


def load_command(name: str) -> Any:
    """Import a command, which a line of `umem --help` needs not."""
    return get_command(import_module(f"umem.cli.{name}").app)


class _LazyCommands(TyperGroup):
    """Imports a command's module when the command is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in COMMANDS:
            self.add_command(load_command(args[0]), args[0])
        return super().resolve_command(ctx, args)


# Plain text: importing rich for boxes around it would double the time of `umem --help`.
app = typer.Typer(
    name="umem",
    cls=_LazyCommands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"umem {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Unified memory for PyTorch: training within a budget of device memory."""


for _name, _help in COMMANDS.items():
    app.command(_name, help=_help)(lambda: None)


def main() -> None:
    """Run the command; a `UmemError` ends it with its message and status 2, and no traceback."""
    try:
        app(prog_name="umem")
    except UmemError as error:
        typer.echo(f"umem: {error}", err=True)
        sys.exit(2)
