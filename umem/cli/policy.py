"""`umem policy`: list, show and validate policies, and print their schema."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from umem.cli import options, output
from umem.core.classes import TensorClass
from umem.core.errors import UmemError
from umem.core.units import format_bytes, parse_bytes
from umem.policy import (
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

app = output.make_app(
    help="List, show and validate policies, and print their schema.", no_args_is_help=True
)


@app.command("list")
def list_presets(as_json: options.Json = False) -> None:
    """List the presets."""
    presets = [load_policy(name) for name in preset_names()]
    if as_json:
        output.print_json([{"name": p.name, "description": p.description} for p in presets])
        return
    table = output.make_table("preset", "for")
    for preset in presets:
        table.add_row(preset.name, escape(preset.description))
    Console().print(table)


@app.command()
def show(
    policy: Annotated[str, typer.Argument(metavar="NAME", help="A preset's name, or a file.")],
    as_json: options.Json = False,
    device_memory: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="Show the limits in bytes for a device with this much memory, such as 80GiB, with "
            "UMEM_MANAGED_LIMIT, UMEM_DEVICE_BUDGET and UMEM_PLANNER applied.",
        ),
    ] = None,
) -> None:
    """Show a policy, with everything that it inherits: its limits, and each class's rule."""
    loaded = load_policy(policy)
    total_bytes = None if device_memory is None else _parse_device_memory(device_memory)
    resolved = None if total_bytes is None else resolve(loaded, total_bytes)
    if as_json:
        output.print_json(_as_json(resolved) if resolved else loaded.model_dump(mode="json"))
        return
    console = Console()
    console.print(f"[bold]{escape(loaded.name)}[/bold]  {escape(loaded.description)}")
    console.print(_bounds_table(loaded, resolved, total_bytes), "", _rules_table(loaded), sep="\n")


@app.command()
def validate(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Policy files.")],
    as_json: options.Json = False,
) -> None:
    """Check policy files, and print each problem; exit status 2 if any."""
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
            for problem in problems:
                typer.echo(str(problem), err=True)
    if any(found.values()):
        raise typer.Exit(2)


@app.command()
def schema() -> None:
    """Print the JSON schema of a policy file, for editors."""
    output.print_json(policy_schema())


def _parse_device_memory(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise UmemError(f"--device-memory: {error}") from None


def _as_json(resolved: ResolvedPolicy) -> dict[str, Any]:
    rules = {
        member.value: rule.model_dump(mode="json")
        for member, rule in zip(TensorClass, resolved.rules, strict=True)
    }
    return asdict(resolved) | {"rules": rules}


def _bounds_table(policy: Policy, resolved: ResolvedPolicy | None, total: int | None) -> Table:
    budget = policy.device_budget
    limit = policy.limits.managed_bytes
    if resolved is not None:
        budget, limit = resolved.device_budget_bytes, resolved.managed_limit_bytes
    table = Table(box=None, show_header=False, pad_edge=False)
    if total is not None:
        table.add_row("device memory", format_bytes(total))
    if policy.extends is not None:
        table.add_row("extends", escape(policy.extends))
    table.add_row("device budget", _size(budget) if not isinstance(budget, str) else budget)
    table.add_row("limit on managed memory", "umem's own" if limit is None else _size(limit))
    table.add_row("headroom of kind system", format_bytes(policy.limits.system_headroom_bytes))
    planner = policy.planner if resolved is None else resolved.planner
    table.add_row("planner", planner)
    table.add_row("freed blocks", "kept for reuse" if policy.caching else "returned at once")
    table.add_row("shared with", ", ".join(policy.share) or "none")
    return table


def _rules_table(policy: Policy) -> Table:
    access = ("device\naccess", "read\nmostly", "min\nsize")
    table = output.make_table("class", "kind", "placement", *access, "mechanism", "eviction")
    for member in TensorClass:
        rule = class_rule(policy, member)
        mapped = "mapped" if rule.accessed_by_device else "-"
        read_mostly = "yes" if rule.read_mostly else "-"
        size = format_bytes(rule.min_bytes) if rule.min_bytes else "-"
        cells = (rule.kind, rule.placement, mapped, read_mostly, size)
        table.add_row(member.value, *cells, rule.mechanism, rule.eviction)
    return table


def _size(size_bytes: int | None) -> str:
    return "none" if size_bytes is None else format_bytes(size_bytes)
