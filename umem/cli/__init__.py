"""The command `umem`."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup
from typer.main import get_command

from umem._version import __version__
from umem.core.errors import UmemError
from umem.core.install import install_command
from umem.io.problems import visible

__all__ = [
    "COMMANDS",
    "INTERRUPTED_STATUS",
    "QuickGroup",
    "app",
    "lazy_app",
    "load_command",
    "main",
    "run_app",
]

INTERRUPTED_STATUS = 130
"""Exit status after Ctrl-C, as a shell reports it: 128 + SIGINT."""

COMMANDS = {
    "doctor": "Show what works on this machine, what does not, and why.",
    "verify": "Measure umem on this GPU beside predictions, as a page to send.",
    "demo": "Fine-tune a small Llama on the GPU, or predict a large one.",
    "run": "Run a Python program under umem, without changing it.",
    "top": "Show a running training: memory by class, copies, steps.",
    "fit": "Predict whether a model fits a GPU, and its speed there.",
    "simulate": "Predict a step: time, migrations, and unified memory's share.",
    "tune": "List the Pareto-optimal ways to run a training, by prediction.",
    "trace": "Record a training step as a file, or show a trace.",
    "plan": "Plan a training step: hints by phase, and where each tensor is.",
    "report": "Show what migrated in a recorded run, why, and at what cost.",
    "policy": "List, show and validate policies, and print their schema.",
    "hardware": "List, show and measure hardware profiles.",
    "bench": "Run the benchmarks, from a checkout of umem.",
}
"""Name -> line of `umem --help`. The module `umem.cli.NAME` has the command, as its `app`."""


def load_command(name: str) -> Any:
    """Import a command, which a line of `umem --help` needs not."""
    return get_command(import_module(f"umem.cli.{name}").app)


class QuickGroup(TyperGroup):
    """A group whose option ``--help``, if it is not given, loads no pydantic to check its value."""

    def get_help_option(self, ctx: Any) -> Any:
        """Return the option, false unless it is given."""
        option: Any = super().get_help_option(ctx)
        if option is not None:
            option.default = False  # where it is None, its type is looked up
        return option


def lazy_app(commands: Mapping[str, str], load: Callable[[str], Any]) -> typer.Typer:
    """Make an application of commands that are loaded when they are called.

    `commands` has the name and the line of ``--help`` of each; `load` makes the command of a name.
    """

    class Commands(QuickGroup):
        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            if args and args[0] in commands:
                self.add_command(load(args[0]), args[0])
            return super().resolve_command(ctx, args)

        def make_context(self, *its: Any, **named: Any) -> Any:
            try:
                return super().make_context(*its, **named)
            except KeyboardInterrupt:
                _end_interrupted()

        def invoke(self, ctx: Any) -> Any:
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt:
                _end_interrupted()

    # Plain text: importing rich for boxes around it would double the time of `umem --help`.
    made = typer.Typer(
        cls=Commands,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    for name, words in commands.items():
        made.command(name, help=words)(lambda: None)
    return made


def _end_interrupted() -> NoReturn:
    typer.echo("umem: interrupted", err=True)
    raise typer.Exit(INTERRUPTED_STATUS) from None


app = lazy_app(COMMANDS, load_command)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"umem {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Unified memory for PyTorch: training within a budget of device memory."""
    # Libraries abort where they look for files beside it: torch's MKL does.
    os.getcwd()
    # Under another encoding than UTF-8, a letter that it lacks is printed as an escape. A program
    # that umem runs sees its standard output as Python made it.
    if context.invoked_subcommand != "run" and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def main() -> None:
    """Run the command ``umem``."""
    run_app(app, "umem")


def run_app(application: typer.Typer, name: str) -> None:
    """Run a command.

    A `UmemError`, a library that cannot be loaded, and a path or an output that the system refuses,
    end it with one message and status 2, without a traceback.
    """
    try:
        application(prog_name=name)
    except UmemError as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        if (error.name or "umem").partition(".")[0] == "umem":
            raise
        _fail(_cannot_load(error))
    except OSError as error:
        if error.errno is None:  # by the dynamic loader, as of a torch whose libraries are missing
            _fail(_cannot_load(error))
        if error.filename is None and not isinstance(error, FileNotFoundError):
            sys.stdout = None  # else Python writes the rest when it ends, and fails again
        _fail(_refusal(error))


def _fail(message: str) -> NoReturn:
    lines = map(visible, message.splitlines())
    typer.echo("umem: " + "\n".join(lines), err=True)
    sys.exit(2)


def _cannot_load(error: Exception) -> str:
    return (
        f"{error}: install umem with all that it needs, `{install_command('cuda13')}` (or cuda12); "
        "`umem doctor` shows what is there"
    )


def _refusal(error: OSError) -> str:
    """What the system refused, and the remedy."""
    reason = (error.strerror or str(error)).lower()
    if error.filename is not None:
        return f"{error.filename}: {reason}: check the path and its permissions"
    if isinstance(error, FileNotFoundError):  # by getcwd(), which names no file
        return "the current folder is gone: change to one that exists"
    return f"standard output cannot be written ({reason}): check where it goes"
