"""`umem policy`: list, show and validate policies, and print their schema."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from umem.cli import options, output
from umem.cli.output import plain
from umem.core.classes import TensorClass
from umem.core.errors import UmemError
from umem.core.lazy_names import loads_names
from umem.core.units import format_bytes
from umem.io.problems import summary

if TYPE_CHECKING:
    from rich.table import Table

    from umem.hardware import Hardware, detect_hardware, load_hardware
    from umem.hardware.capabilities import detect
    from umem.policy import (
        ClassRule,
        Policy,
        ResolvedPolicy,
        class_rule,
        find_problems,
        load_policy,
        policy_schema,
        preset_names,
        resolve,
    )

__all__ = ["app"]

_loads_names = loads_names(
    globals(),
    {
        "rich.table": "Table",
        "umem.hardware": "detect_hardware load_hardware",
        "umem.hardware.capabilities": "detect",
        "umem.policy": "class_rule find_problems load_policy policy_schema preset_names resolve",
    },
)

app = output.make_app(
    help="List, show and validate policies, and print their schema.", no_args_is_help=True
)


@app.command("list")
@_loads_names
def list_presets(as_json: options.Json = False) -> None:
    """List the presets."""
    presets = [load_policy(name) for name in preset_names()]
    if as_json:
        output.print_json([{"name": p.name, "description": p.description} for p in presets])
        return
    table = output.make_table("preset", "for")
    for preset in presets:
        table.add_row(preset.name, plain(preset.description))
    output.print_table(output.make_console(), table)


@app.command()
@_loads_names
def show(
    policy: Annotated[str, typer.Argument(metavar="NAME", help="A preset's name, or a file.")],
    hardware: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="The machine to show it for: a profile's name (see `umem hardware list`) or file; "
            "detect for this machine.",
        ),
    ] = "detect",
    as_json: options.Json = False,
) -> None:
    """Show a policy on a machine, and why the machine chose it.

    UMEM_MANAGED_LIMIT, UMEM_DEVICE_BUDGET and UMEM_PLANNER are applied. On a machine without a GPU,
    and without --hardware, the policy is shown as it is written.
    """
    loaded = options.load_named("NAME", load_policy, policy)
    machine, free_bytes = _machine(hardware)
    resolved = None if machine is None else resolve(loaded, machine, free_bytes=free_bytes)
    if as_json:
        data: dict[str, Any] = {"policy": loaded.model_dump(mode="json")}
        data["hardware"] = None if machine is None else machine.name
        data["rates"] = None if machine is None else machine.rates
        data["resolved"] = None if resolved is None else _as_json(resolved)
        output.print_json(data)
        return
    console = output.make_console()
    console.print(f"[bold]{plain(loaded.name)}[/bold]  {plain(loaded.description)}")
    rules = tuple(class_rule(loaded, member) for member in TensorClass)
    rules = resolved.rules if resolved else rules
    bounds = _bounds_table(loaded, resolved, machine, {rule.kind for rule in rules})
    output.print_table(console, bounds)
    console.print()
    output.print_table(console, _rules_table(rules))
    if resolved is not None and any(resolved.reasons):
        console.print()
        output.print_table(console, _reasons_table(resolved))
    elif resolved is None and any(rule.kind == "auto" for rule in rules):
        console.print(
            "\nNo GPU is visible here, so that kind auto is not decided: give --hardware, such as "
            "h200."
        )


@app.command()
@_loads_names
def validate(
    files: Annotated[
        list[Path], typer.Argument(readable=False, metavar="FILE...", help="Policy files.")
    ],
    as_json: options.Json = False,
) -> None:
    """Check policy files, and print their problems.

    Exits with 2 if there are any.
    """
    found = {file: find_problems(file) for file in files}
    if as_json:
        rows = [
            {"file": str(file), "valid": not problems, "problems": [asdict(it) for it in problems]}
            for file, problems in found.items()
        ]
        output.print_json(rows)
    else:
        for file, problems in found.items():
            if not problems:
                typer.echo(f"{file}: valid")
            else:
                typer.echo(summary(problems), err=True)
    if any(found.values()):
        raise typer.Exit(2)


@app.command()
@_loads_names
def schema() -> None:
    """Print the JSON schema of a policy file, for editors."""
    output.print_json(policy_schema())


def _machine(name: str) -> tuple[Hardware | None, int | None]:
    """The machine of this name, and its free device memory, both None where unknown."""
    if name != "detect":
        return options.load_named("--hardware", load_hardware, name), None
    try:
        return detect_hardware(), detect().free_bytes
    except UmemError:
        return None, None


def _as_json(resolved: ResolvedPolicy) -> dict[str, Any]:
    rules = {
        member.value: rule.model_dump(mode="json") | {"reason": reason}
        for member, rule, reason in zip(TensorClass, resolved.rules, resolved.reasons, strict=True)
    }
    found = asdict(resolved) | {"rules": rules}
    del found["reasons"]
    return found


def _bounds_table(
    policy: Policy, resolved: ResolvedPolicy | None, machine: Hardware | None, kinds: set[str]
) -> Table:
    limit = policy.limits.managed_bytes
    planner = policy.planner
    of_free = "what is free on the card, less a reserve"
    budget = policy.device_budget or (of_free if kinds & {"auto", "device"} else "none")
    if isinstance(budget, int):
        budget = format_bytes(budget)
    if resolved is not None:
        limit, planner = resolved.managed_limit_bytes, resolved.planner
        size = resolved.device_budget_bytes
        reason = resolved.budget_reason
        budget = reason if size is None else f"{format_bytes(size)} ({reason})"
    table = Table(box=None, show_header=False, pad_edge=False)
    if machine is not None:
        device = format_bytes(machine.device_bytes)
        table.add_row("machine", f"{plain(machine.name)}, {device} of device memory")
        table.add_row("its rates", machine.rates)
    if policy.extends is not None:
        table.add_row("extends", plain(policy.extends))
    table.add_row("device budget", budget)
    if "managed" in kinds:
        cap = "umem's default" if limit is None else format_bytes(limit)
        table.add_row("limit on managed memory", cap)
    if "system" in kinds:
        headroom = format_bytes(policy.limits.system_headroom_bytes)
        table.add_row("free beside kind system", headroom)
    table.add_row("planner", planner)
    for what, key in (
        ("blocks run twice", policy.recompute),
        ("host updates", policy.host_update),
        ("losses in slices", policy.slice_losses),
    ):
        where = "where a whole one has no room" if what == "losses in slices" else "where faster"
        table.add_row(what, where if key == "auto" else "never")
    table.add_row("shared with", ", ".join(policy.share) or "none")
    return table


def _rules_table(rules: Sequence[ClassRule]) -> Table:
    access = ("device\naccess", "read\nmostly", "min\nsize", "device\nshare")
    table = output.make_table("class", "kind", "placement", *access, "mechanism", "eviction")
    for member, rule in zip(TensorClass, rules, strict=True):
        mapped = "mapped" if rule.accessed_by_device else "-"
        read_mostly = "yes" if rule.read_mostly else "-"
        size = format_bytes(rule.min_bytes) if rule.min_bytes else "-"
        share = f"{100 * rule.fraction:g}%" if rule.fraction < 1.0 else "-"
        cells = (rule.kind, rule.placement, mapped, read_mostly, size, share)
        table.add_row(member.value, *cells, rule.mechanism, rule.eviction)
    return table


def _reasons_table(resolved: ResolvedPolicy) -> Table:
    """A row for each reason, with the classes that it is for."""
    classes: dict[str, list[str]] = {}
    for member, reason in zip(TensorClass, resolved.reasons, strict=True):
        if reason:
            classes.setdefault(reason, []).append(member.value)
    table = output.make_table("class", "why, on this machine")
    for reason, names in classes.items():
        table.add_row("\n".join(names), plain(reason))
    return table
