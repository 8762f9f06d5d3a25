"""`umem top`: what a running training has where, what it copies, and how its steps go."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from umem.cli import output
from umem.cli.options import Json
from umem.cli.output import format_seconds, plain
from umem.core.classes import TensorClass
from umem.core.errors import UmemError, UnsupportedError
from umem.core.lazy_names import loads_names
from umem.core.units import format_bytes
from umem.runtime.live_socket import BusyError, ask, live_processes

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

__all__ = ["app", "view"]

_loads_names = loads_names(
    globals(),
    {
        "rich.console": "Group",
        "rich.live": "Live",
        "rich.progress_bar": "ProgressBar",
        "rich.table": "Table",
        "rich.text": "Text",
    },
)

Figures = Mapping[str, Any]

_ONCE_S = 0.5
"""Time between the two looks of ``--once``, whose difference is the link's rate."""

_EITHER = ("managed", "system")
"""Kinds of memory whose pages are on either side."""

app = output.make_app()


@app.command()
@_loads_names
def top(
    pid: Annotated[
        int | None, typer.Argument(metavar="[PID]", help="The process; the only one if left out.")
    ] = None,
    interval: Annotated[
        float, typer.Option(min=0.25, max=60.0, help="Seconds between updates.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show the figures once, and end.")] = False,
    as_json: Json = False,
) -> None:
    """Show the budget, memory by class, the link and the steps of a running training.

    The training must be under umem, and yours. Ctrl-C ends the view, and not the training.
    """
    number = _only_process() if pid is None else pid
    figures = ask(number)
    if as_json:
        output.print_json(figures)
        return
    console = output.make_console()
    if once:
        time.sleep(_ONCE_S)
        console.print(view(ask(number), figures, _ONCE_S))
        return
    _follow(console, number, figures, interval)


def _only_process() -> int:
    found = live_processes()
    if len(found) == 1:
        return found[0]
    if not found:
        raise UnsupportedError("no process of yours is under umem: start one with `umem run`")
    numbers = ", ".join(map(str, found))
    raise UmemError(f"{len(found)} processes of yours are under umem: name one of {numbers}")


def _follow(console: Console, number: int, figures: Figures, interval_s: float) -> None:
    before, looked_s = figures, time.monotonic()
    with Live(view(figures, None, 0.0), console=console, auto_refresh=False) as screen:
        while True:
            try:
                time.sleep(interval_s)
                now = ask(number)
            except KeyboardInterrupt:
                return
            except BusyError:
                continue
            except UnsupportedError:
                break
            now_s = time.monotonic()
            screen.update(view(now, before, now_s - looked_s), refresh=True)
            before, looked_s = now, now_s
    if not console.is_terminal:  # there the view has ended its line
        console.line()
    console.print(f"process {number} has ended")


@_loads_names
def view(figures: Figures, before: Figures | None, seconds: float) -> Group:
    """The figures of a process, and rates since an earlier look."""
    program = plain(" ".join(figures["program"]))
    parts: list[Any] = [
        Text.from_markup(
            f"[bold]{figures['pid']}[/bold]  {program}  umem {figures['umem']}, "
            f"policy {plain(figures['policy'] or 'none')}, {format_seconds(figures['uptime_s'])}"
        )
    ]
    if figures["not_in_use"] is not None:
        reason = plain(figures["not_in_use"])
        parts.append(f"umem is not in use, torch's own allocator stays: {reason}")
        return Group(*parts)
    for device in figures["devices"]:
        parts += [_device(device), _classes(device)]
    if figures["copied"]:
        parts.append(_copies(figures, before, seconds))
    parts.append(_runs(figures["runs"]))
    return Group(*parts)


def _device(device: Figures) -> Table:
    kinds = device["kinds"]
    on_device = kinds["device"]["reserved_bytes"]
    budget_bytes = device["budget_bytes"] or device["total_bytes"]
    words = f"{format_bytes(on_device)} of {format_bytes(budget_bytes)}"
    texts = {"pinned": "page-locked on the host", **{kind: kind for kind in _EITHER}}
    for kind, text in texts.items():
        if kinds.get(kind, {}).get("reserved_bytes"):
            words += f", {format_bytes(kinds[kind]['reserved_bytes'])} {text}"
    spilled_bytes = sum(kind["spilled_bytes"] for kind in kinds.values())
    if spilled_bytes:
        words += f" ({format_bytes(spilled_bytes)} of it for want of budget, and slow)"
    table = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=budget_bytes, completed=min(on_device, budget_bytes), width=24)
    table.add_row(f"GPU {device['number']} {plain(device['name'])}", bar, words)
    return table


def _classes(device: Figures) -> Table:
    table = output.make_table("class", numbers=("device", "host", "either"))
    for name in TensorClass:
        kinds = device["classes"].get(name.value)
        if kinds:
            either = sum(kinds.get(kind, 0) for kind in _EITHER)
            sizes = (kinds.get("device", 0), kinds.get("pinned", 0), either)
            table.add_row(name.value.replace("_", " "), *map(format_bytes, sizes))
    return table


def _copies(figures: Figures, before: Figures | None, seconds: float) -> Table:
    earlier = {
        (it["direction"], it["class"]): it["bytes"] for it in (before or {}).get("copied", ())
    }
    totals: dict[str, dict[str, int]] = defaultdict(dict)
    for it in figures["copied"]:
        totals[it["direction"]][it["class"]] = it["bytes"]
    table = output.make_table("copied", numbers=("in all", "now", "of the link"))
    link = figures["link_bytes_per_s"]
    for direction, by_class in totals.items():
        words = direction.replace("_", " ")
        known = before is not None and seconds > 0
        moved = sum(size - earlier.get((direction, name), 0) for name, size in by_class.items())
        rate = moved / seconds if known else 0.0
        share = f"{100 * rate / link[direction]:.0f} %" if known and link.get(direction) else "-"
        per_second = f"{rate / 1e9:.1f} GB/s" if known else "-"
        table.add_row(words, format_bytes(sum(by_class.values())), per_second, share)
        for name, size_bytes in by_class.items():
            table.add_row(f"  {name.replace('_', ' ')}", format_bytes(size_bytes), "", "")
    return table


def _runs(runs: list[Figures]) -> Table | str:
    if not runs:
        return "nothing is managed yet: umem looks at the first steps, or nothing has to move"
    numbers = ("done", "under a plan", "measured", "predicted", "late")
    table = output.make_table("steps of", numbers=numbers)
    for run in runs:
        times = (run["measured_s"], run["predicted_s"])
        table.add_row(
            plain(run["model"]) + (", calls" if run["unit"] == "call" else ""),
            f"{run['count']:,}",
            f"{run['planned']:,}",
            *("-" if it is None else format_seconds(it) for it in times),
            "-" if run["late"] is None else f"{run['late']:,}",
        )
    return table
