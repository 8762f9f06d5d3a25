"""Runs the training benchmark: one process after the other, within a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from umem import UmemError, UnsupportedError
from umem.core.units import format_bytes
from umem_bench.card import Card, MemorySampler
from umem_bench.compile_planner import compile_planner
from umem_bench.machine import header
from umem_bench.results import (
    BUDGETED,
    VARIANTS,
    Header,
    Method,
    ProcessResult,
    Record,
    Run,
    TrainingResult,
    TrainingSettings,
    Variant,
    WorkloadName,
    median,
)
from umem_bench.training.measure import measure
from umem_bench.training.tables import working_set_bytes
from umem_bench.training.variants import TrainingJob, plans_pages
from umem_bench.workers import Answers, Worker, WorkerError

__all__ = [
    "MANAGED_BYTES",
    "PROCESS_LIMIT_S",
    "Cell",
    "ask_worker",
    "cells",
    "continued",
    "require_gpu",
    "run_missing",
    "run_training",
    "why_no_time",
]

MANAGED_BYTES = 16 << 30
"""Managed memory of a process, at most: one process runs at a time."""

PROCESS_LIMIT_S = 240.0
"""For one variant with one budget: DeepSpeed compiles its optimizer when it is first used."""

LEAST_LIMIT_S = 20.0
"""For a process that was started, however little is left of the run's time."""

_PRELOADED = ("umem_bench.training.shared_imports",)

_Key = TypeVar("_Key", bound=Hashable)
_Result = TypeVar("_Result", bound=ProcessResult)


class _HasHeader(Protocol):
    """A :class:`Run`, or what else has a header and results."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def header(self) -> Header: ...


_Run = TypeVar("_Run", bound=_HasHeader)

Cell = tuple[WorkloadName, Method, Variant, float | None]
"""Workload, method, variant, and budget in percent: what one process measures."""


def cells(settings: TrainingSettings) -> list[Cell]:
    """All that a run measures, in the order in which it goes.

    Stock comes first, for budgets are shares of its peak, and once more at the end, where asked
    for: the difference is the machine's drift. Adapters have next to no optimizer state that could
    be held on the host.
    """
    found: list[Cell] = []
    for workload in settings.workloads:
        for method in workload.methods:
            for variant in VARIANTS:
                if variant not in ("stock", *workload.variants):
                    continue
                if (variant, method) == ("umem-optimizer-host", "lora"):
                    continue
                budgets = workload.budgets_percent if variant in BUDGETED else (None,)
                found += [(workload.name, method, variant, percent) for percent in budgets]
    return sorted(found, key=lambda cell: cell[2] == "stock-again")


def run_training(
    settings: TrainingSettings,
    on_progress: Callable[[str], None],
    on_results: Callable[[Run], None] = lambda _: None,
    *,
    seconds_limit: float = 280.0,
    device: Literal["cuda", "cpu"] = "cuda",
    earlier: Run | None = None,
) -> Run:
    """Train with every variant and budget, each in a process of its own, never two at a time.

    A variant that fails, is not installed or does not fit the time leaves a result that says why.

    Processes that would not end within `seconds_limit` are left out. After each process
    `on_progress` gets a line and `on_results` the results so far. With `earlier` results of the
    same settings and machine, what they lack is run. On the CPU only the stock variant is
    measured, and without its memory.

    Raises
    ------
    UnsupportedError
        Where torch sees no GPU to train on.
    UmemError
        If the earlier results are of other settings, another machine or other versions.
    """
    if device == "cuda":
        require_gpu()
    begun = continued(earlier, Run(header("training", settings), ()))
    card = None if device == "cpu" else Card.find()
    end_s = time.monotonic() + seconds_limit

    def measure_one(
        cell: Cell, known: list[TrainingResult], tried: TrainingResult | None
    ) -> TrainingResult:
        result = _measure_cell(cell, settings, known, tried, end_s, card)
        on_progress(_line(result))
        return result

    earlier_results = {_cell_of(it): it for it in begun.trainings}
    return run_missing(begun, cells(settings), earlier_results, measure_one, on_results)


def run_missing(
    begun: _Run,
    wanted: Sequence[_Key],
    earlier: dict[_Key, _Result],
    measure_one: Callable[[_Key, list[_Result], _Result | None], _Result],
    on_results: Callable[[_Run], None],
    *,
    again: bool = False,
) -> _Run:
    """Measure one by one what earlier results lack, have left out or gave no answer to.

    `measure_one` gets the results so far and the earlier one, too; `on_results` gets the run with
    all results after each one. With `again` everything wanted is measured; an earlier result stays
    until there is another one.
    """
    known = dict(earlier)
    missing = [
        it
        for it in wanted
        if again or it not in known or known[it].state == "left out" or known[it].timed_out
    ]
    # A variant that gave no answer is tried once more in a later call, and not again in this one.
    spent = {it: known.pop(it) for it in missing if it in known}
    for key in missing:
        result = measure_one(key, list(known.values()), spent.get(key))
        known[key] = spent.get(key, result) if result.state == "left out" else result
        on_results(replace(begun, results=tuple((spent | known).values())))
    return replace(begun, results=tuple(known.values()))


def ask_worker(
    answers: Answers,
    job: Record,
    card: Card | None,
    left_s: float,
    *,
    parts: int = 1,
    process_limit_s: float = PROCESS_LIMIT_S,
) -> dict[str, Any]:
    """What a job's process answers within its time limit, or why it does not.

    Its duration and the peaks of memory are added: those until its first answer. A measured result
    can have further `parts`, such as a profile, which takes memory of its own.
    """
    card = card and card.between_processes()
    worker = Worker(answers, job.model_copy(update={"card": card}), _PRELOADED)
    began_s = time.monotonic()  # the server process has imported what its workers share
    limit_s = min(process_limit_s, max(LEAST_LIMIT_S, left_s))
    told: dict[str, Any] = {}
    with MemorySampler(card) as sampler:
        try:
            with worker:
                told = worker.ask(limit_s)
                told |= sampler.figures()
                if told["state"] == "measured":
                    for _ in range(parts - 1):
                        told |= worker.ask(limit_s)
        except WorkerError as error:
            told |= {"state": "failed", "reason": str(error), "timed_out": error.timed_out}
    return sampler.figures() | told | {"process_s": time.monotonic() - began_s}


def _measure_cell(
    cell: Cell,
    settings: TrainingSettings,
    known: list[TrainingResult],
    tried: TrainingResult | None,
    end_s: float,
    card: Card | None,
) -> TrainingResult:
    """Measure one cell in a process of its own, unless there is a reason not to."""
    workload, method, variant, percent = cell
    told: dict[str, Any] = {
        "workload": workload,
        "method": method,
        "variant": variant,
        "budget_percent": percent,
    }
    left_s = end_s - time.monotonic()
    reason = why_no_time(variant, known, tried, left_s) or (card.why_not_idle() if card else "")
    if percent is not None:
        stock = (it for it in known if _cell_of(it) == (workload, method, "stock", None))
        stock_bytes = next((working_set_bytes(it) for it in stock), None)
        if stock_bytes is None:
            reason = "budgets are shares of the stock variant's peak, which was not measured"
        else:
            told["budget_bytes"] = int(percent / 100 * stock_bytes)
    if reason:
        return TrainingResult(**told, state="left out", reason=reason)
    if plans_pages(variant):
        compile_planner()
        left_s = end_s - time.monotonic()
    job = TrainingJob(
        model=settings.workload(workload).model,
        trainer_batches=settings.workload(workload).trainer_batches,
        method=method,
        variant=variant,
        budget_bytes=told.get("budget_bytes"),
        steps=settings.steps,
        deterministic=settings.deterministic,
        managed_limit_bytes=settings.managed_limit_bytes,
        device="cuda" if card else "cpu",
        card=card,
    )
    return TrainingResult(**told | ask_worker(measure, job, card, left_s, parts=2))


def why_no_time(
    variant: str, known: Sequence[ProcessResult], tried: ProcessResult | None, left_s: float
) -> str:
    """Why a process is not started; empty where it is.

    It needs the time that its variant's longest one took, or an earlier one of its own, with or
    without an answer; for a new variant that of any other.
    """
    if Worker.stuck:
        return Worker.stuck
    silent = next((it for it in known if it.timed_out and it.variant == variant), None)
    if silent is not None:
        return f"this variant gave no answer before: {silent.reason}"
    own = [it.process_s for it in known if it.variant == variant]
    own = [it for it in (*own, tried.process_s if tried else 0.0) if it]
    needed_s = max(own or (it.process_s for it in known), default=0.0)
    if left_s >= needed_s or not needed_s:
        return ""
    return (
        f"{max(0.0, left_s):.0f} s were left, and such a process takes {needed_s:.0f} s or more: "
        "give a longer limit, or go on with --continue"
    )


def _cell_of(result: TrainingResult) -> Cell:
    return result.workload, result.method, result.variant, result.budget_percent


def _line(result: TrainingResult) -> str:
    at = "" if result.budget_percent is None else f" at {result.budget_percent:g} %"
    of = f" of {format_bytes(result.budget_bytes)}" if result.budget_bytes else ""
    words = f"{result.workload}, {result.method}, {result.variant}{at}"
    step_s = median(result.steps_s)
    if step_s is None:
        return f"{words}: {result.state}: {result.reason}"
    lost = "; its plan was not running" if result.plan_running is False else ""
    return f"{words}{of}: {step_s * 1e3:.4g} ms a step, {result.process_s:.1f} s{lost}"


def require_gpu(what: str = "training") -> None:
    """Raise `UnsupportedError` where torch sees no GPU to measure something on."""
    import torch

    if torch.version.cuda is None or torch.cuda.device_count() == 0:
        raise UnsupportedError(
            f"{what} is measured on an NVIDIA GPU, and torch sees none: `umem doctor` says what "
            "is missing, and `umem simulate` predicts steps without one"
        )


def find_card(cases: Collection[str], what: str) -> Card | None:
    """The GPU to measure on; None without one, where the only case is ``tiny``.

    Raises `UnsupportedError` where torch sees no GPU and a case needs one.
    """
    import torch

    if torch.cuda.device_count() > 0:
        return Card.find()
    if set(cases) != {"tiny"}:
        require_gpu(what)
    return None


def continued(earlier: _Run | None, begun: _Run, *, same_commit: bool = True) -> _Run:
    """The run that goes on: the earlier one, if there is any.

    Raises `UmemError` where that is not of the same settings, machine or versions.
    """
    if earlier is None:
        return begun
    groups = ("umem", *(("commit",) if same_commit else ()), "machine", "packages", "settings")
    pairs = [(name, getattr(earlier.header, name), getattr(begun.header, name)) for name in groups]
    words = [f"{name} {was}, and now {it}" for name, was, it in pairs if was != it]
    if words:
        raise UmemError(
            f"the earlier results cannot be continued: they have {'; '.join(words)}: give the same "
            "options on the same machine, or begin a new file"
        )
    return earlier
