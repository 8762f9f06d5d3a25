"""`umem policy`: list, show and validate policies, and print their schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from umem.core.classes import TensorClass
from umem.core.errors import PolicyError
from umem.core.units import format_bytes, parse_bytes
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

app = typer.Typer(
    help="List, show and validate policies, and print their schema.", no_args_is_help=True
)

_Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]


@app.command("list")
def list_presets(as_json: _Json = False) -> None:
    """List the presets."""
    with _plain_errors():
        presets = [load_policy(name) for name in preset_names()]
    if as_json:
        _print_json([{"name": p.name, "description": p.description} for p in presets])
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("preset", no_wrap=True)
    table.add_column("for")
    for preset in presets:
        table.add_row(preset.name, escape(preset.description))
    Console().print(table)


@app.command()
def show(
    policy: Annotated[str, typer.Argument(metavar="NAME", help="A preset's name, or a file.")],
    as_json: _Json = False,
    device_memory: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="Show the policy in the numbers of a device with this much memory, such as 80GiB, "
            "and with UMEM_MANAGED_LIMIT, UMEM_DEVICE_BUDGET and UMEM_PLANNER applied.",
        ),
    ] = None,
) -> None:
    """Show a policy with everything that it inherits, as a table by class."""
    with _plain_errors():
        loaded = load_policy(policy)
        total_bytes = _device_memory(device_memory)
        resolved = None if total_bytes is None else resolve(loaded, total_bytes)
    if as_json:
        _print_json(loaded.model_dump(mode="json") if resolved is None else _as_json(resolved))
        return
    console = Console()
    console.print(f"[bold]{escape(loaded.name)}[/bold]  {escape(loaded.description)}")
    console.print(_bounds_table(loaded, resolved, total_bytes))
    console.print()
    console.print(_rules_table(loaded))


@app.command()
def validate(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Policy files.")],
    as_json: _Json = False,
) -> None:
    """Check policy files; exit status 2 and a line for each problem where there are any."""
    with _plain_errors():
        found = {file: find_problems(file) for file in files}
    if as_json:
        _print_json(
            [
                {
                    "file": str(file),
                    "valid": not problems,
                    "problems": [asdict(problem) for problem in problems],
                }
                for file, problems in found.items()
            ]
        )
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
    _print_json(policy_schema())


@contextmanager
def _plain_errors() -> Iterator[None]:
    try:
        yield
    except PolicyError as error:
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(2)


def _device_memory(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return parse_bytes(text)
    except ValueError as error:
        _fail(f"--device-memory: {error}")


def _print_json(data: Any) -> None:
    typer.echo(json.dumps(data, indent=2))


def _as_json(resolved: ResolvedPolicy) -> dict[str, Any]:
    rules = {
        member.value: rule.model_dump(mode="json")
        for member, rule in zip(TensorClass, resolved.rules, strict=True)
    }
    return {
        "name": resolved.name,
        "managed_limit_bytes": resolved.managed_limit_bytes,
        "device_budget_bytes": resolved.device_budget_bytes,
        "system_headroom_bytes": resolved.system_headroom_bytes,
        "planner": resolved.planner,
        "caching": resolved.caching,
        "rules": rules,
        "share": list(resolved.share),
    }


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
    # Two-line headings and no frame keep the table within 80 columns.
    table = Table(box=None, pad_edge=False)
    for heading in (
        "class",
        "kind",
        "placement",
        "device\naccess",
        "read\nmostly",
        "min\nsize",
        "mechanism",
        "eviction",
    ):
        table.add_column(heading, no_wrap=True, vertical="bottom")
    for member in TensorClass:
        table.add_row(member.value, *_cells(class_rule(policy, member)))
    return table


def _cells(rule: ClassRule) -> list[str]:
    return [
        rule.kind,
        rule.placement,
        "mapped" if rule.accessed_by_device else "-",
        "yes" if rule.read_mostly else "-",
        format_bytes(rule.min_bytes) if rule.min_bytes else "-",
        rule.mechanism,
        rule.eviction,
    ]


def _size(size_bytes: int | None) -> str:
    return "none" if size_bytes is None else format_bytes(size_bytes)
