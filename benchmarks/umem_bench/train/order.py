"""What a training benchmark consists of, and in which order it goes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from umem_bench.train.results import (
    METHODS,
    PLANNERS,
    VARIANTS,
    Method,
    Outcome,
    TrainingModel,
    TrainingSettings,
    Variant,
    Workload,
    WorkloadName,
)

__all__ = ["WORKLOADS", "Cell", "Configuration", "cell_of", "configurations"]

WORKLOADS: dict[WorkloadName, Workload] = {
    "long": Workload(
        name="long",
        model=TrainingModel(),
        methods=METHODS,
        variants=VARIANTS,
        budgets_percent=(100.0, 60.0, 30.0),
    ),
    "activations": Workload(
        name="activations",
        model=TrainingModel(tokens=4096, checkpoint=False),
        methods=METHODS,
        variants=("stock", "umem-planned", "umem-fault", "save-on-cpu", "stock-again"),
        budgets_percent=(60.0, 30.0),
    ),
}
"""By default."""

Cell = tuple[WorkloadName, Method, Variant, float | None]
"""Workload, method, variant, and budget in percent."""

_ALTERNATIVES: tuple[Variant, ...] = (
    "save-on-cpu",
    "bnb-paged-adamw",
    "torchao-offload",
    # By now its optimizer is compiled.
    "deepspeed-offload",
    "backward-step",
)


def _alternatives(method: Method) -> Iterator[Cell]:
    for variant in _ALTERNATIVES:
        yield "long", method, variant, None


def _activations() -> Iterator[Cell]:
    for method in METHODS:
        yield "activations", method, "stock", None
        for percent in (60.0, 30.0):
            yield "activations", method, "umem-planned", percent
        yield "activations", method, "save-on-cpu", None
        for percent in (60.0, 30.0):
            yield "activations", method, "umem-fault", percent


_FIRST: tuple[Cell, ...] = (
    ("long", "sft", "stock", None),
    ("long", "sft", "umem-planned", 60.0),
    ("long", "sft", "umem-backward-step", 60.0),
    ("long", "sft", "umem-fault", 60.0),
    ("long", "sft", "umem-planned", 30.0),
    ("long", "sft", "umem-backward-step", 30.0),
    ("long", "sft", "umem-optimizer-host", None),
    *_alternatives("sft"),
    ("long", "lora", "stock", None),
    ("long", "lora", "umem-planned", 60.0),
    ("long", "lora", "umem-fault", 60.0),
    ("long", "lora", "umem-backward-step", 60.0),
    *_alternatives("lora"),
    ("long", "sft", "umem-lookahead", 60.0),
    ("long", "sft", "umem-fault", 30.0),
    ("long", "sft", "umem-planned", 100.0),
    ("long", "sft", "umem-backward-step", 100.0),
    ("long", "sft", "umem-fault", 100.0),
    ("long", "sft", "umem-lookahead", 100.0),
    ("long", "sft", "umem-lookahead", 30.0),
    ("long", "sft", "rmm-pool", None),
    ("long", "lora", "umem-planned", 30.0),
    ("long", "lora", "umem-backward-step", 30.0),
    ("long", "lora", "umem-fault", 30.0),
    ("long", "lora", "umem-lookahead", 60.0),
    ("long", "lora", "umem-lookahead", 30.0),
    ("long", "lora", "umem-planned", 100.0),
    ("long", "lora", "umem-backward-step", 100.0),
    ("long", "lora", "umem-fault", 100.0),
    ("long", "lora", "umem-lookahead", 100.0),
    ("long", "lora", "rmm-pool", None),
    *_activations(),
)
"""What targets are about comes first, for what comes last is left out when time is short."""


@dataclass(frozen=True)
class Configuration:
    """One process of a run."""

    workload: WorkloadName
    method: Method
    variant: Variant
    percent: float | None

    @property
    def key(self) -> Cell:
        """What tells it from the others, and its outcome from theirs."""
        return self.workload, self.method, self.variant, self.percent

    def __str__(self) -> str:
        words = f"{self.workload}, {self.method}, {self.variant}"
        return words if self.percent is None else f"{words} at {self.percent:g} %"


def cell_of(outcome: Outcome) -> Cell:
    """Which configuration an outcome is of."""
    return outcome.workload, outcome.method, outcome.variant, outcome.budget_percent


def configurations(settings: TrainingSettings) -> list[Configuration]:
    """All that a run consists of, in the order in which it goes.

    Budgets are shares of the stock variant's peak, so that this variant always is part of it, and
    goes before the others; once more, it goes after them. Not even 100 % is room enough for every
    planner: umem's blocks are rounded up, which stock's peak knows nothing of. Adapters have next
    to no optimizer state to be held on the host.
    """
    rank = {cell: number for number, cell in enumerate(_FIRST)}

    def place(it: Configuration) -> int:
        if it.variant == "stock-again":
            return len(rank) + 1
        return rank.get(it.key, len(rank))

    found = [it for workload in settings.workloads for it in _of_workload(workload)]
    return sorted(found, key=place)


def _of_workload(workload: Workload) -> Iterator[Configuration]:
    for variant in VARIANTS:
        if variant != "stock" and variant not in workload.variants:
            continue
        for percent in _budgets(workload, variant):
            for method in workload.methods:
                if variant != "umem-optimizer-host" or method == "sft":
                    yield Configuration(workload.name, method, variant, percent)


def _budgets(workload: Workload, variant: Variant) -> tuple[float | None, ...]:
    return workload.budgets_percent if variant in PLANNERS else (None,)
