"""The command `umem`."""

from __future__ import annotations

import sys

import typer

from umem._version import __version__
from umem.cli.bench import register as register_bench
from umem.cli.demo import demo
from umem.cli.doctor import doctor
from umem.cli.hardware import app as hardware_app
from umem.cli.plan import plan
from umem.cli.policy import app as policy_app
from umem.cli.report import report
from umem.cli.run import register as register_run
from umem.cli.simulate import simulate
from umem.cli.trace import trace
from umem.core.errors import UmemError

__all__ = ["app", "main"]

app = typer.Typer(
    name="umem",
    help="Unified memory for PyTorch: a class-aware allocator over RMM, placed by policy.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"umem {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Unified memory for PyTorch: a class-aware allocator over RMM, placed by policy."""


app.command("doctor")(doctor)
app.command("demo")(demo)
register_run(app)
app.command("simulate", no_args_is_help=True)(simulate)
app.command("trace", no_args_is_help=True)(trace)
app.command("plan", no_args_is_help=True)(plan)
app.command("report", no_args_is_help=True)(report)
app.add_typer(policy_app, name="policy")
app.add_typer(hardware_app, name="hardware")
register_bench(app)


def main() -> None:
    """Run the command; an error that umem explains ends it with status 2 and no traceback."""
    try:
        app()
    except UmemError as error:
        typer.echo(f"umem: {error}", err=True)
        sys.exit(2)
