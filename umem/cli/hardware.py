"""`umem hardware`: list and show hardware profiles."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from umem.cli import options, output
from umem.cli.output import plain
from umem.hardware import Hardware, explain_hardware, figures, hardware_names, load_hardware

__all__ = ["app"]

app = output.make_app(help="List and show hardware profiles.", no_args_is_help=True)


@app.command("list")
def list_profiles(as_json: options.Json = False) -> None:
    """List the profiles."""
    profiles = [load_hardware(name) for name in hardware_names()]
    if as_json:
        output.print_json([{"name": p.name, "description": p.description} for p in profiles])
        return
    table = output.make_table("profile", numbers=("memory", "to device", "to host"))
    table.add_column("for")
    columns = ("device_bytes", "to_device_bytes_per_s", "to_host_bytes_per_s")
    for profile in profiles:
        values = {row.field: row.value for row in explain_hardware(profile)}
        shown = (values[column] for column in columns)
        table.add_row(profile.name, *shown, plain(profile.description))
    output.print_table(output.make_console(), table)


@app.command()
def show(
    hardware: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="A profile's name, or a file; detect for this machine."
        ),
    ],
    as_json: options.Json = False,
) -> None:
    """Show every figure of a profile and its source."""
    loaded = load_hardware(hardware)
    if as_json:
        output.print_json(_as_json(loaded))
        return
    table = output.make_table("figure", numbers=("value",))
    table.add_column("source", overflow="fold")
    for row in explain_hardware(loaded):
        text = "" if row.source is None else plain(row.source.text)
        if row.source is not None and row.source.assumption:
            text = f"[yellow]assumed:[/yellow] {text}"
        table.add_row(row.field, row.value, text)
    console = output.make_console()
    console.print(f"[bold]{plain(loaded.name)}[/bold]  {plain(loaded.description)}")
    output.print_table(console, table)


def _as_json(hardware: Hardware) -> dict[str, Any]:
    """Every figure in bytes, seconds and their quotients, with its source."""
    data: dict[str, Any] = {"name": hardware.name, "description": hardware.description}
    for field, value in figures(hardware).items():
        source = hardware.sources.get(field)
        data[field] = {"value": value}
        if source is not None:
            data[field]["assumption" if source.assumption else "source"] = source.text
    return data
