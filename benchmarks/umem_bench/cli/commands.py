"""`umem bench`: allocators, trainings and planners, each beside its alternatives."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from umem.capture.offline import MODELS, MODES
from umem_bench import planning as planning_times
from umem_bench import planning_report, planning_results, published_report
from umem_bench import published as published_traces
from umem_bench import report as tables
from umem_bench.cli.tables import Check, Markdown, hold, named, print_tables, progress
from umem_bench.cli.training import training
from umem_bench.jobs import SIZES
from umem_bench.results import ALLOCATORS, AllocatorName, BenchmarkName, Run, read_run, write_run
from umem_bench.runner import Plan, run, worker_managed_limit_bytes

__all__ = ["app"]

ROUNDS = 5
QUICK_ROUNDS = 3

app = typer.Typer(
    help="Measure umem: allocator, trainings within a budget, planners.", no_args_is_help=True
)


_Policy = Annotated[str, typer.Option(help="umem's policy: a preset's name or a YAML file.")]
_Allocators = Annotated[str, typer.Option(help="Those to compare, with commas between.")]
_Sizes = Annotated[
    str, typer.Option("--size", help=f"Sizes of the Llama: {', '.join(SIZES)}, or both.")
]
_Rounds = Annotated[
    int | None,
    typer.Option(
        min=1,
        help=f"Figures are medians of so many rounds (default: {ROUNDS}; {QUICK_ROUNDS} quick).",
    ),
]
_Quick = Annotated[bool, typer.Option("--quick", help="Fewer and shorter rounds.")]
_Output = Annotated[Path | None, typer.Option(help="Write the results to this file, as JSON.")]
_ALL_ALLOCATORS = ",".join(ALLOCATORS)
_ALL_SIZES = ",".join(SIZES)


@app.command()
def alloc(
    policy: _Policy = "sft",
    allocators: _Allocators = _ALL_ALLOCATORS,
    rounds: _Rounds = None,
    quick: _Quick = False,
    output: _Output = None,
    check: Check = False,
) -> None:
    """One allocation and its free through torch, by size, in 1 and 8 threads. Needs a GPU."""
    plan = _plan(("alloc",), policy, allocators, _ALL_SIZES, rounds, quick)
    _measure(plan, output, check)


@app.command()
def step(
    policy: _Policy = "sft",
    allocators: _Allocators = _ALL_ALLOCATORS,
    size: _Sizes = _ALL_SIZES,
    rounds: _Rounds = None,
    quick: _Quick = False,
    output: _Output = None,
    check: Check = False,
) -> None:
    """A training step, LoRA and SFT, of a Llama that fits on the device. Needs a GPU."""
    plan = _plan(("step",), policy, allocators, size, rounds, quick)
    _measure(plan, output, check)


@app.command()
def core(
    policy: _Policy = "sft",
    rounds: _Rounds = None,
    quick: _Quick = False,
    output: _Output = None,
) -> None:
    """The native core alone, over host memory: absolute figures, no GPU needed."""
    plan = _plan(("core",), policy, "umem", _ALL_SIZES, rounds, quick)
    _measure(plan, output, check=False)


@app.command("all")
def everything(
    policy: _Policy = "sft",
    allocators: _Allocators = _ALL_ALLOCATORS,
    size: _Sizes = _ALL_SIZES,
    rounds: _Rounds = None,
    quick: _Quick = False,
    output: _Output = None,
    check: Check = False,
) -> None:
    """All three: core, alloc and step. Needs a GPU, and about two minutes."""
    plan = _plan(("core", "alloc", "step"), policy, allocators, size, rounds, quick)
    _measure(plan, output, check)


@app.command()
def published(
    folder: Annotated[Path, typer.Argument(help="Traces that came with published times.")],
    output: _Output = None,
    as_markdown: Markdown = False,
) -> None:
    """Published traces: what umem's planners make of them, beside the published times. No GPU."""
    comparison = published_traces.compare(folder, progress())
    if output:
        published_traces.write_comparison(comparison, output)
    grids = published_report.grids(comparison)
    print_tables(published_report.heading(comparison), grids, as_markdown=as_markdown)


@app.command()
def planning(
    models: Annotated[str, typer.Option(help="Models to plan, with commas between.")] = ",".join(
        planning_times.DEFAULT_MODELS
    ),
    modes: Annotated[str, typer.Option(help="lora, sft, or both with a comma between.")] = "sft",
    rounds: _Rounds = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Fewer rounds, no compilation, networks up to 64 layers."),
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the results to this file, as JSON.")
    ] = None,
    read: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="Measure nothing: show these results."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    as_markdown: Markdown = False,
    check: Check = False,
) -> None:
    """Time to record, plan and simulate a step, on models up to 70B: no GPU needed."""
    if read:
        results = planning_results.read_planning(read)
    else:
        layers = planning_times.GROWTH_LAYERS
        results = planning_times.run_planning(
            named(models, MODELS),
            named(modes, MODES),
            rounds=rounds or (QUICK_ROUNDS if quick else ROUNDS),
            growth_layers=[count for count in layers if count <= 64] if quick else layers,
            first_use=not quick,
            on_progress=progress(),
        )
    if output:
        planning_results.write_planning(results, output)
    if as_json:
        print(results.model_dump_json(indent=2))
    else:
        grids = planning_report.grids(results)
        print_tables(planning_report.heading(results), grids, as_markdown=as_markdown)
    if check:
        hold(planning_report.checks(results))


app.command()(training)


@app.command()
def report(
    file: Annotated[Path, typer.Argument(help="Results, as --output wrote them.")],
    as_markdown: Markdown = False,
    check: Check = False,
) -> None:
    """Print the tables of a results file."""
    results = read_run(file)
    _show(results, as_markdown=as_markdown)
    if check:
        _check_targets(results)


def _plan(
    benchmarks: tuple[BenchmarkName, ...],
    policy: str,
    allocators: str,
    sizes: str,
    rounds: int | None,
    quick: bool,
) -> Plan:
    names = named(allocators, ALLOCATORS)
    chosen: tuple[AllocatorName, ...] = tuple(name for name in ALLOCATORS if name in names)
    return Plan(
        benchmarks=benchmarks,
        allocators=chosen,
        sizes=named(sizes, tuple(SIZES)),
        policy=policy,
        rounds=rounds or (QUICK_ROUNDS if quick else ROUNDS),
        quick=quick,
        worker_managed_limit_bytes=worker_managed_limit_bytes(chosen),
    )


def _measure(plan: Plan, output: Path | None, check: bool) -> None:
    results = run(plan, progress())
    if output:
        write_run(results, output)
    _show(results, as_markdown=False)
    if check:
        _check_targets(results)
    elif any(measurement.error for measurement in results.measurements):
        raise typer.Exit(1)


def _show(results: Run, *, as_markdown: bool) -> None:
    print_tables(tables.heading(results), tables.grids(results), as_markdown=as_markdown)


def _check_targets(results: Run) -> None:
    """Print every target and whether it holds; exit 1 unless all do, and there are some."""
    outcomes = list(tables.checks(results))
    if not outcomes:
        print("FAIL  nothing to check: the run has neither alloc nor step")
    hold(outcomes)
    if not outcomes:
        raise typer.Exit(1)
