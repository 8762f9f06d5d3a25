"""`umem bench`: allocators, trainings, generation and planners, each beside its alternatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from inspect import Signature, signature
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from umem.cli.output import check_can_write
from umem.core.units import parse_limit
from umem_bench import allocators, bounds, planning, predicted, published
from umem_bench.commands import COMMANDS
from umem_bench.generate import run as generations
from umem_bench.generate import tables as generate_tables
from umem_bench.generate.measure import SHORT_TOKENS
from umem_bench.load import run as loads
from umem_bench.load import tables as load_tables
from umem_bench.machine import header, managed_limit_bytes
from umem_bench.native_core import run_core
from umem_bench.results import (
    METHODS,
    VARIANTS,
    GenerateSettings,
    LoadSettings,
    Measurement,
    ProcessResult,
    Run,
    ScaleSettings,
    TrainingSettings,
    read_results,
    write_results,
)
from umem_bench.rows import require_gpu
from umem_bench.scale import run as scales
from umem_bench.scale import small_cards as small_cards_suite
from umem_bench.scale import small_predictions
from umem_bench.scale import tables as scale_tables
from umem_bench.tables import Check, print_tables
from umem_bench.training import run as trainings
from umem_bench.training import tables as training_tables
from umem_bench.training.variants import USUAL_WORKLOADS, WORKLOADS

__all__ = ["app"]

_QUICK_ROUNDS = 3
_SHOWN_BY: dict[str, Any] = {
    "allocators": allocators,
    "training": training_tables,
    "scale": scale_tables,
    "generate": generate_tables,
    "load": load_tables,
    "planning": planning,
    "published": published,
    "bounds": bounds,
    "predicted": predicted,
    "small-cards": small_predictions,
}
_Name = TypeVar("_Name", bound=str)
_RunsOfOptions = Callable[..., Callable[..., Run]]

app = typer.Typer(pretty_exceptions_enable=False)


def _can_write(path: Path | None) -> Path | None:
    """Refuse an output before the work."""
    if path is not None:
        check_can_write("--output", path)
    return path


_Policy = Annotated[str, typer.Option(help="umem's: a preset or a YAML file.")]
_Rounds = Annotated[int, typer.Option(min=1, help="Figures are medians of so many rounds.")]
_Quick = Annotated[bool, typer.Option("--quick", help="Fewer and shorter rounds.")]
_Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", callback=_can_write, help="Write the results to this file."),
]
_Minutes = Annotated[
    float, typer.Option(min=0.1, help="Leave out rows that do not fit into this time.")
]
_Host = Annotated[
    str, typer.Option(help="Host memory that a row may take. Default: available less 16 GiB.")
]
_Continued = Annotated[
    Path | None, typer.Option("--continue", metavar="FILE", help="Run what these results lack.")
]
_Again = Annotated[
    bool, typer.Option("--again", help="With --continue: measure these rows once more.")
]
_Check = Annotated[
    bool, typer.Option("--check", help="Hold the figures against limits; exit 1 if one is missed.")
]


def _add_allocator_command(name: str, benchmarks: Sequence[str], default_rounds: int = 5) -> None:
    @app.command(name, help=COMMANDS[name])
    def command(
        policy: _Policy = "sft",
        only: Annotated[
            str, typer.Option("--allocators", help="Those to compare, with commas between.")
        ] = ",".join(allocators.ALLOCATORS),
        sizes: Annotated[
            str, typer.Option("--size", help="Of the Llama in `step`: small, large or both.")
        ] = ",".join(allocators.SHAPES),
        rounds: _Rounds = default_rounds,
        quick: _Quick = False,
        output: _Output = None,
        check: _Check = False,
    ) -> None:
        names = _named(only, allocators.ALLOCATORS)
        chosen = _named(sizes, tuple(allocators.SHAPES))
        rounds = min(rounds, _QUICK_ROUNDS) if quick else rounds
        if benchmarks != ["core"]:
            require_gpu("an allocator")
        limit_bytes = allocators.worker_limit_bytes(names)
        settings = {"policy": policy, "rounds": rounds, "worker_managed_limit_bytes": limit_bytes}
        jobs = [
            allocators.AllocatorJob(
                allocator=it, policy=policy, limit_bytes=limit_bytes, rounds=rounds, quick=quick
            )
            for it in names
        ]
        found: list[Measurement] = []
        if "core" in benchmarks:
            found += run_core(policy, rounds=rounds, quick=quick)
        if "alloc" in benchmarks:
            found += allocators.run_alloc(jobs, _say)
        if "step" in benchmarks:
            found += allocators.run_step(jobs, chosen, _say)
        _finish(Run(header("allocators", settings), tuple(found)), output, check)
        if any(it.error for it in found):
            raise typer.Exit(1)


_add_allocator_command("alloc", ["alloc"])
_add_allocator_command("step", ["step"], default_rounds=20)


@app.command(help=COMMANDS["core"])
def core(
    policy: _Policy = "sft",
    rounds: _Rounds = 5,
    quick: _Quick = False,
    output: _Output = None,
    check: _Check = False,
) -> None:
    rounds = min(rounds, _QUICK_ROUNDS) if quick else rounds
    found = run_core(policy, rounds=rounds, quick=quick)
    settings = {"policy": policy, "rounds": rounds}
    _finish(Run(header("allocators", settings), tuple(found)), output, check)


_add_allocator_command("all", ["core", "alloc", "step"])


@app.command(help=COMMANDS["training"])
def training(
    workloads: Annotated[
        str,
        typer.Option(
            help="long (one long sequence, checkpoints), activations (none), short (little to "
            "compute), trainer (the Trainer of transformers), pair-lora, pair-sft (in 16 GiB "
            "of managed memory)."
        ),
    ] = ",".join(USUAL_WORKLOADS),
    methods: Annotated[str, typer.Option(help="sft, lora, or both. Default: the workload's.")] = "",
    variants: Annotated[
        str, typer.Option(help="Those to compare; stock is always one. Default: the workload's.")
    ] = "",
    budgets: Annotated[
        str, typer.Option(help="In percent of stock's peak. Default: the workload's.")
    ] = "",
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences of a step.")] = None,
    tokens: Annotated[int | None, typer.Option("--seq", min=2, help="Of a sequence.")] = None,
    checkpoint: Annotated[
        bool | None, typer.Option(help="Compute layers again in the backward pass.")
    ] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="torch's deterministic algorithms.")
    ] = False,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each variant.")] = 5,
    seconds_limit: Annotated[
        float, typer.Option(min=1, help="Leave out what does not fit into this time.")
    ] = 280,
    output: _Output = None,
    continued: _Continued = None,
    check: _Check = False,
) -> None:
    output = output or continued
    own: dict[str, Any] = {}
    if methods:
        own["methods"] = _named(methods, METHODS)
    if variants:
        own["variants"] = _named(variants, VARIANTS)
    if budgets:
        own["budgets_percent"] = _percents(budgets)
    asked = {"batch": batch, "tokens": tokens, "checkpoint": checkpoint}
    shape = {name: value for name, value in asked.items() if value is not None}
    settings = TrainingSettings(
        workloads=tuple(
            it.model_copy(update={**own, "model": it.model.model_copy(update=shape)})
            for it in map(WORKLOADS.__getitem__, _named(workloads, tuple(WORKLOADS)))
        ),
        steps=steps,
        deterministic=deterministic,
        managed_limit_bytes=managed_limit_bytes(trainings.MANAGED_BYTES),
    )
    run = trainings.run_training(
        settings,
        _say,
        lambda so_far: write_results(so_far, output) if output else None,
        seconds_limit=seconds_limit,
        earlier=read_results(continued) if continued else None,
    )
    _finish(run, output, check)
    if any(it.state == "failed" for it in run.trainings):
        raise typer.Exit(1)


def _rows_command(
    parse: Callable[[str], Sequence[Any]], example: str, usual: str = "all but tiny"
) -> Callable[[_RunsOfOptions], _RunsOfOptions]:
    """Add a command that measures rows, such as the `example`, and saves what it has after each.

    Without any that are named it measures the `usual` ones.

    The decorated function takes the options that other such commands lack, and returns what runs
    the rows.
    """

    def add(own_command: _RunsOfOptions) -> _RunsOfOptions:
        def command(
            rows: str = typer.Option("", help=f"Such as {example}; default: {usual}."),
            minutes: _Minutes = 9,
            host: _Host = "",
            output: _Output = None,
            continued: _Continued = None,
            again: _Again = False,
            check: _Check = False,
            **own: Any,
        ) -> None:
            output = output or continued
            run_rows = own_command(**own)
            try:
                chosen = parse(rows)
            except ValueError as error:
                raise typer.BadParameter(str(error)) from error
            run = run_rows(
                chosen,
                _say,
                lambda so_far: write_results(so_far, output) if output else None,
                seconds_limit=60 * minutes,
                earlier=read_results(continued) if continued else None,
                again=again,
                host_limit_bytes=_bytes(host),
            )
            _finish(run, output, check)
            if any(isinstance(it, ProcessResult) and it.state == "failed" for it in run.results):
                raise typer.Exit(1)

        first, *shared, _ = signature(command, eval_str=True).parameters.values()
        own_options = signature(own_command, eval_str=True).parameters.values()
        # typer reads a command's options from its signature.
        command.__signature__ = Signature([first, *own_options, *shared])  # type: ignore[attr-defined]
        name = own_command.__name__.replace("_", "-")
        app.command(name, help=COMMANDS[name])(command)
        return own_command

    return add


@_rows_command(scales.parse_rows, "llama-2-7b-fp32:umem,tiny")
def scale(
    policy: Annotated[
        str, typer.Option(help="umem's: a preset or a YAML file. LoRA has lora.")
    ] = "sft",
    budget: Annotated[
        str,
        typer.Option(
            help="umem's, such as 60GiB. Default: the case's, or what is free less 3 GiB."
        ),
    ] = "",
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences of a batch.")] = None,
    accumulate: Annotated[int, typer.Option(min=1, help="Batches of a step.")] = 1,
    clip: Annotated[bool, typer.Option(help="Clip the gradients' norm.")] = True,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="torch's deterministic algorithms.")
    ] = False,
    steps: Annotated[int, typer.Option(min=2, help="Timed steps of each row.")] = 8,
) -> Callable[..., Run]:
    change = {} if batch is None else {"batch": batch}
    settings = ScaleSettings(
        cases={name: it.model_copy(update=change) for name, it in scales.CASES.items()},
        policy=policy,
        budget_bytes=_bytes(budget),
        budgets_bytes=scales.BUDGETS_BYTES,
        steps=steps,
        accumulate=accumulate,
        clip=clip,
        deterministic=deterministic,
    )
    return partial(scales.run_scale, settings)


@_rows_command(small_cards_suite.parse_rows, "llama-3-8b-24gib-8k:umem", "all, most telling first")
def small_cards(
    policy: _Policy = "sft",
    steps: Annotated[int, typer.Option(min=2, help="Timed steps of each row.")] = 3,
    predict: Annotated[
        str,
        typer.Option(metavar="PROFILES", help="Measure nothing: predict for these, as h200,l40s."),
    ] = "",
) -> Callable[..., Run]:
    if predict:
        return partial(_predictions_of_cards, predict.split(","))
    settings = small_cards_suite.small_cards_settings(policy, steps)
    gpu = header("scale", settings).machine.gpu
    predicted_s = small_predictions.committed_predictions(policy, gpu)
    return partial(scales.run_scale, settings, predicted_s=predicted_s)


def _predictions_of_cards(
    profiles: Sequence[str], *words: Any, earlier: Run | None, **_: object
) -> Run:
    """Predict rows, for which neither time nor memory has to suffice."""
    return small_predictions.predict_small_cards(profiles, *words, earlier=earlier)


@_rows_command(generations.parse_rows, "llama-2-7b:umem,tiny")
def generate(
    tokens: Annotated[
        int, typer.Option(min=SHORT_TOKENS + 1, help="New ones of a timed generation.")
    ] = 32,
    rounds: _Rounds = 3,
) -> Callable[..., Run]:
    settings = GenerateSettings(
        cases=generations.CASES,
        budgets_bytes=generations.BUDGETS_BYTES,
        tokens=tokens,
        rounds=rounds,
    )
    return partial(generations.run_generate, settings)


@_rows_command(loads.parse_rows, "llama-2-7b:umem,tiny")
def load(
    cold: Annotated[
        bool, typer.Option("--cold", help="Drop the files from the page cache before each round.")
    ] = False,
    folder: Annotated[
        Path | None, typer.Option(help="Where the files are written. Default: TMPDIR.")
    ] = None,
    rounds: _Rounds = 3,
) -> Callable[..., Run]:
    settings = LoadSettings(
        cases=loads.CASES, budgets_bytes=loads.BUDGETS_BYTES, rounds=rounds, cold=cold
    )
    return partial(loads.run_load, settings, folder=folder)


@app.command("planning", help=COMMANDS["planning"])
def plans(
    models: Annotated[str, typer.Option(help="Models to plan.")] = ",".join(planning.MODELS),
    modes: Annotated[str, typer.Option(help="lora, sft, or both.")] = "sft",
    rounds: _Rounds = 5,
    quick: Annotated[bool, typer.Option("--quick", help="3 rounds, no compilation.")] = False,
    output: _Output = None,
    check: _Check = False,
) -> None:
    from umem.capture.offline import MODES, model_names

    rounds = min(rounds, _QUICK_ROUNDS) if quick else rounds
    found = planning.run_planning(
        _named(models, model_names()),
        _named(modes, MODES),
        rounds=rounds,
        first_plans=not quick,
        on_progress=_say,
    )
    run = Run(header("planning", planning.SETTINGS | {"rounds": rounds}), tuple(found))
    _finish(run, output, check)


@app.command("published", help=COMMANDS["published"])
def published_traces(
    folder: Annotated[Path, typer.Argument(help="Traces that came with published times.")],
    output: _Output = None,
) -> None:
    found = published.compare(folder, _say)
    _finish(Run(header("published", published.SETTINGS), tuple(found)), output, check=False)


@app.command("bounds", help=COMMANDS["bounds"])
def against_bounds(
    folder: Annotated[Path, typer.Argument(help="Traces that came with published times.")],
    models: Annotated[str, typer.Option(help="Llama models, too; none for none.")] = ",".join(
        bounds.MODELS
    ),
    output: _Output = None,
    check: _Check = False,
) -> None:
    names = () if models == "none" else tuple(models.split(","))
    found = bounds.run_bounds(folder, names, _say)
    _finish(Run(header("bounds", bounds.SETTINGS), tuple(found)), output, check)


@app.command("predicted", help=COMMANDS["predicted"])
def predictions(
    folder: Annotated[
        Path, typer.Argument(help="Results, as --output wrote them.", show_default=False)
    ] = Path(predicted.__file__).parents[1] / "results",
    output: _Output = None,
    check: _Check = False,
) -> None:
    found = predicted.run_predicted(folder, _say)
    settings = {"usual_percent": predicted.USUAL_PERCENT}
    _finish(Run(header("predicted", settings), tuple(found)), output, check)


@app.command(help=COMMANDS["report"])
def report(
    file: Annotated[Path, typer.Argument(help="Results, as --output wrote them.")],
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print tables for a document.")
    ] = False,
    tables: Annotated[
        str,
        typer.Option(help="Only tables whose title has one of these texts (a;b)."),
    ] = "",
    check: _Check = False,
) -> None:
    run = read_results(file)
    _finish(run, None, check, as_markdown=as_markdown, only=tables)


def _finish(
    run: Run, output: Path | None, check: bool, *, as_markdown: bool = False, only: str = ""
) -> None:
    """Write and print results, and hold them against limits if asked to."""
    if output is not None:
        write_results(run, output)
    shown = _SHOWN_BY[run.header.benchmark]
    words = only.split(";")
    chosen = [it for it in shown.tables(run) if any(word in it.title for word in words)]
    print_tables(shown.heading(run), chosen, as_markdown=as_markdown)
    if check:
        if not hasattr(shown, "checks"):
            raise typer.BadParameter(f"--check: {run.header.benchmark} has no limits")
        found: list[Check] = list(shown.checks(run))
        for it in found:
            print(f"{'pass' if it.passed else 'FAIL'}  {it.subject}: {it.detail}")
        if not found or not all(it.passed for it in found):
            raise typer.Exit(1)


def _say(words: str) -> None:
    """Print a line of progress to standard error."""
    Console(stderr=True, style="dim", markup=False, highlight=False, soft_wrap=True).print(words)


def _named(value: str, known: Sequence[_Name]) -> tuple[_Name, ...]:
    """A list such as "torch,umem", every name known, in the order of `known`."""
    names = [name.strip() for name in value.split(",")]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}")
    return tuple(name for name in known if name in names)


def _bytes(value: str) -> int | None:
    """A size such as "60GiB"; None for an empty text."""
    try:
        return parse_limit(value) if value else None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _percents(value: str) -> tuple[float, ...]:
    """A list of budgets such as "100,60,30"."""
    percents = []
    for text in value.split(","):
        try:
            percents.append(float(text))
        except ValueError:
            percents.append(0.0)
        if not 0 < percents[-1] <= 100:
            raise typer.BadParameter(
                f"{text.strip()!r} is no budget: give percentages above 0 and at most 100"
            )
    return tuple(percents)
