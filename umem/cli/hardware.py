"""`umem hardware`: list and show hardware profiles."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from umem.core.errors import HardwareError

__all__ = ["app"]

app = typer.Typer(help="List and show hardware profiles.", no_args_is_help=True)

_Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]


@app.command("list")
def list_profiles(as_json: _Json = False) -> None:
    """List the profiles."""
    from umem.hardware import explain_hardware, hardware_names, load_hardware

    with _plain_errors():
        profiles = [load_hardware(name) for name in hardware_names()]
    if as_json:
        _print_json([{"name": p.name, "description": p.description} for p in profiles])
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("profile", no_wrap=True)
    for heading in ("memory", "to device", "to host"):
        table.add_column(heading, no_wrap=True, justify="right")
    table.add_column("for")
    for profile in profiles:
        values = {row.field: row.value for row in explain_hardware(profile)}
        table.add_row(
            profile.name,
            values["device_bytes"],
            values["to_device_bytes_per_s"],
            values["to_host_bytes_per_s"],
            escape(profile.description),
        )
    Console().print(table)


@app.command()
def show(
    hardware: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="A profile's name, or a file; detect for this machine."
        ),
    ],
    as_json: _Json = False,
) -> None:
    """Show every figure of a profile, and where it comes from."""
    from umem.hardware import explain_hardware, load_hardware

    with _plain_errors():
        loaded = load_hardware(hardware)
    if as_json:
        _print_json(_as_json(loaded))
        return
    console = Console()
    console.print(f"[bold]{escape(loaded.name)}[/bold]  {escape(loaded.description)}")
    table = Table(box=None, pad_edge=False)
    table.add_column("figure", no_wrap=True)
    table.add_column("value", no_wrap=True, justify="right")
    table.add_column("source", overflow="fold")
    for row in explain_hardware(loaded):
        text = "" if row.source is None else escape(row.source.text)
        if row.source is not None and row.source.assumption:
            text = f"[yellow]assumed:[/yellow] {text}"
        table.add_row(row.field, row.value, text)
    console.print(table)


@contextmanager
def _plain_errors() -> Iterator[None]:
    try:
        yield
    except HardwareError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None


def _print_json(data: Any) -> None:
    typer.echo(json.dumps(data, indent=2))


def _as_json(hardware: Any) -> dict[str, Any]:
    """Every figure in bytes, seconds and their quotients, with its source."""
    from umem.hardware import figures

    data: dict[str, Any] = {"name": hardware.name, "description": hardware.description}
    for field, value in figures(hardware).items():
        source = hardware.sources.get(field)
        data[field] = {"value": value}
        if source is not None:
            data[field]["assumption" if source.assumption else "source"] = source.text
    return data
