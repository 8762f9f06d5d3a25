"""`umem bench training`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from umem.cli.output import check_can_write
from umem_bench.cli.tables import Check, Markdown, hold, named, print_tables, progress
from umem_bench.train.order import WORKLOADS
from umem_bench.train.report import grids, heading
from umem_bench.train.results import (
    METHODS,
    VARIANTS,
    TrainingModel,
    TrainingRun,
    TrainingSettings,
    read_training,
    write_training,
)
from umem_bench.train.runner import managed_limit_bytes, run_training
from umem_bench.train.targets import checks

__all__ = ["training"]

_MOST_PERCENT = 100.0
_MODEL = TrainingModel()
_NAMES = tuple(WORKLOADS)
_BY_WORKLOAD = "By default the workload's own."


def training(
    workloads: Annotated[
        list[str] | None,
        typer.Option(
            "--workload",
            help="long (one long sequence, checkpoints) or activations (a shorter one, none); "
            "repeat it for both, which is the default.",
        ),
    ] = None,
    methods: Annotated[
        str, typer.Option(help="sft, lora, or both with a comma between.")
    ] = ",".join(METHODS),
    variants: Annotated[
        str | None,
        typer.Option(
            help="Those to compare, with commas between; stock is always one of them. "
            + _BY_WORKLOAD
        ),
    ] = None,
    budgets: Annotated[
        str | None,
        typer.Option(
            help=f"Device budgets in percent of stock's peak, with commas between. {_BY_WORKLOAD}"
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help=f"Sequences of a step. {_BY_WORKLOAD}")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--seq", min=2, help=f"Tokens of a sequence. {_BY_WORKLOAD}")
    ] = None,
    checkpoint: Annotated[
        bool | None,
        typer.Option(
            "--checkpoint/--no-checkpoint",
            help=f"Compute layers again in the backward pass. {_BY_WORKLOAD}",
        ),
    ] = None,
    loss_chunk: Annotated[
        int, typer.Option(min=1, help="Tokens of a sequence whose logits are there at once.")
    ] = _MODEL.loss_chunk_tokens,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="torch's deterministic algorithms.")
    ] = False,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each variant.")] = 5,
    seconds_limit: Annotated[
        float, typer.Option(min=1, help="Leave out what does not fit into this time.")
    ] = 280,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write results to this file as they come, as JSON."),
    ] = None,
    continued: Annotated[
        Path | None,
        typer.Option(
            "--continue",
            metavar="FILE",
            help="Go on with these results: run what they lack, and write it there or to --output.",
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the picture, .png or .svg.")
    ] = None,
    read: Annotated[
        Path | None,
        typer.Option("--show", metavar="FILE", help="Measure nothing: show these results."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    as_markdown: Markdown = False,
    check: Check = False,
) -> None:
    """Train a Llama with less device memory than it needs, umem beside others. Needs a GPU."""
    if continued is not None and read is not None:
        raise typer.BadParameter("--continue measures, and --show does not: give one of them")
    earlier = None if continued is None else read_training(continued)
    output = output or continued
    for option, path in (("--output", output), ("--plot", plot)):
        if path is not None:
            check_can_write(option, path)
    if plot is not None:
        from umem.telemetry import require_matplotlib, save
        from umem_bench.train.picture import training_figure

        require_matplotlib()
    if read:
        results = read_training(read)
    else:
        own: dict[str, object] = {"methods": named(methods, METHODS)}
        if variants is not None:
            own["variants"] = named(variants, VARIANTS)
        if budgets is not None:
            own["budgets_percent"] = _percents(budgets)
        asked = {"batch": batch, "tokens": tokens, "checkpoint": checkpoint}
        model = {name: value for name, value in asked.items() if value is not None}
        model["loss_chunk_tokens"] = loss_chunk
        settings = TrainingSettings(
            workloads=tuple(
                workload.model_copy(
                    update={**own, "model": workload.model.model_copy(update=model)}
                )
                for workload in map(
                    WORKLOADS.__getitem__,
                    named(",".join(workloads or _NAMES), _NAMES),
                )
            ),
            steps=steps,
            deterministic=deterministic,
            managed_limit_bytes=managed_limit_bytes(),
            seconds_limit=seconds_limit,
        )

        def keep(so_far: TrainingRun) -> None:
            if output is not None:
                write_training(so_far, output)

        results = run_training(settings, progress(), keep, earlier=earlier)
    if output is not None:
        write_training(results, output)
    # Tables come first: they are there even where the picture cannot be drawn.
    if as_json:
        print(results.model_dump_json(indent=2))
    else:
        print_tables(heading(results), grids(results), as_markdown=as_markdown)
    if plot is not None:
        save(training_figure(results), plot)
    if check:
        hold(checks(results))
    if not read and any(outcome.state == "failed" for outcome in results.outcomes):
        raise typer.Exit(1)


def _percents(value: str) -> tuple[float, ...]:
    """A list such as "100,60,30", the largest first."""
    percents = set()
    for text in value.split(","):
        try:
            percent = float(text)
        except ValueError:
            percent = 0.0
        if not 0 < percent <= _MOST_PERCENT:
            raise typer.BadParameter(
                f"{text.strip()!r} is no budget: give percentages above 0 and at most 100"
            )
        percents.add(percent)
    return tuple(sorted(percents, reverse=True))
