"""`umem hardware`: list, show and measure hardware profiles."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from umem.cli import options, output
from umem.cli.output import plain
from umem.core.errors import HardwareError, UmemError
from umem.core.lazy_names import loads_names

if TYPE_CHECKING:
    from umem.hardware import Hardware, explain_hardware, figures, hardware_names, load_hardware
    from umem.hardware.capabilities import detect
    from umem.hardware.model import quantity_of

__all__ = ["app"]

_loads_names = loads_names(
    globals(),
    {
        "umem.hardware": "explain_hardware figures hardware_names load_hardware",
        "umem.hardware.capabilities": "detect",
        "umem.hardware.model": "quantity_of",
    },
)

app = output.make_app(help="List, show and measure hardware profiles.", no_args_is_help=True)


@app.command("list")
@_loads_names
def list_profiles(as_json: options.Json = False) -> None:
    """List the profiles."""
    profiles = [load_hardware(name) for name in hardware_names()]
    if as_json:
        output.print_json(
            [{"name": p.name, "description": p.description, "rates": p.rates} for p in profiles]
        )
        return
    table = output.make_table("profile", numbers=("memory", "bf16"))
    table.add_column("rates")
    table.add_column("for")
    columns = ("device_bytes", "flops_per_s.bf16")
    for profile in profiles:
        values = {row.field: row.value for row in explain_hardware(profile)}
        shown = (values[column] for column in columns)
        table.add_row(profile.name, *shown, profile.rates, plain(profile.description))
    output.print_table(output.make_console(), table)


@app.command()
@_loads_names
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
    loaded = options.load_named("NAME", load_hardware, hardware)
    if as_json:
        output.print_json(_as_json(loaded))
        return
    table = output.make_table("figure", numbers=("value",), narrow=True)
    table.columns[0].no_wrap = True
    table.add_column("is")
    table.add_column("source", overflow="fold")
    for row in explain_hardware(loaded):
        text, mark = "", ""
        if row.source is not None:
            text, mark = plain(row.source.text), row.source.mark
        mark = f"[yellow]{mark}[/yellow]" if mark == "assumed" else mark
        table.add_row(row.field, row.value, mark, text)
    console = output.make_console()
    console.print(f"[bold]{plain(loaded.name)}[/bold]  {plain(loaded.description)}")
    console.print(options.rates_line(plain(loaded.name), loaded.rates), style="dim")
    output.print_table(console, table)


@app.command()
@_loads_names
def measure(
    device: Annotated[int, typer.Option(min=0, help="The GPU, by its ordinal.")] = 0,
    short: Annotated[
        bool, typer.Option("--short", help="Measure for seconds, not two minutes; less accurate.")
    ] = False,
    target: Annotated[
        Path | None,
        typer.Option(
            "--output",
            readable=False,
            metavar="FILE",
            help="Write the profile to this YAML file, which detect does not read (default: the "
            "file that detect reads).",
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Measure this machine, and write its profile.

    Takes about two minutes, in which nothing else should use the GPU. Afterwards
    umem fit, predictions and trainings on this machine use these figures.
    """
    if target is not None:
        if target.suffix not in (".yaml", ".yml"):
            raise UmemError(f"--output: {target} is no name of a profile: end it in .yaml")
        output.check_can_write("--output", target)
    try:
        machine = detect(device)
    except UmemError as error:
        raise HardwareError(f"there is no GPU {device} to measure: {error}") from error
    from umem.hardware import measure as measuring  # it imports torch

    found = {}
    with output.progress() as say:
        for one in measuring.measure(machine, say, short=short):
            found[one.figure] = one
            if not as_json:
                shown = quantity_of(one.figure).format(float(f"{one.value:.3g}"))
                typer.echo(f"{one.figure:32}{shown:>16}  {one.how}")
    text = measuring.profile_text(machine, found)
    path = measuring.save_profile(text, target, machine.device_name)
    if as_json:
        rows = {name: {"value": one.value, "how": one.how} for name, one in found.items()}
        output.print_json({"device": machine.device_name, "figures": rows, "file": str(path)})
    else:
        output.print_written([path])


def _as_json(hardware: Hardware) -> dict[str, Any]:
    """Every figure in bytes, seconds and their quotients, with its source."""
    data: dict[str, Any] = {
        "name": hardware.name,
        "description": hardware.description,
        "rates": hardware.rates,
    }
    for field, value in figures(hardware).items():
        source = hardware.sources.get(field)
        data[field] = {"value": value}
        if source is not None:
            data[field]["assumption" if source.assumption else "source"] = source.text
            data[field]["is"] = source.mark
    return data
