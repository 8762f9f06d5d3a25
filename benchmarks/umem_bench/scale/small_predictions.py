"""Predicts the trainings of :mod:`umem_bench.scale.small_cards` on machines that nobody has here.

A card with less memory than the largest budget trains each model once, within its own memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from umem import PlanError, load_hardware, load_policy
from umem.core.units import format_bytes
from umem.fit import training_step
from umem.hardware import Hardware
from umem.hardware.cards import CARDS
from umem.policy import resolve
from umem.predict.stream_prediction import PredictedStep, StreamPrediction
from umem.streaming.plan import (
    TrainingPlan,
    largest_slot_bytes,
    least_slack_bytes,
    plan_training,
    plan_with_host_updates,
    plan_with_recomputation,
)
from umem_bench.machine import header
from umem_bench.predicted import training_workload
from umem_bench.results import Measurement, Run, ScaleCase, read_results
from umem_bench.scale.run import Row
from umem_bench.scale.small_cards import CASES, Case
from umem_bench.tables import NOTHING, Table, provenance, seconds

__all__ = [
    "PREDICTED",
    "WAYS",
    "committed_predictions",
    "heading",
    "predict_case",
    "predict_small_cards",
    "tables",
]

PREDICTED = Path(__file__).parents[2] / "results" / "predicted-small-cards.jsonl"
"""Committed predictions."""


class _Way(NamedTuple):
    """What a policy allows."""

    slices_loss: bool = False
    updates_on_host: bool = False


WAYS: Mapping[str, _Way] = {
    "neither": _Way(),
    "slices": _Way(slices_loss=True),
    "slices, host": _Way(slices_loss=True, updates_on_host=True),
}
"""What ``slice_losses: auto`` and ``host_update: auto`` of a policy allow."""

_FASTER = 1.1
"""How much faster a part of the machine is made, to see what a step owes to it."""


def predict_small_cards(
    profiles: Sequence[str],
    rows: Sequence[Row],
    on_progress: Callable[[str], None],
    on_results: Callable[[Run], None] = lambda _: None,
    *,
    earlier: Run | None = None,
) -> Run:
    """Predict the cases of rows on each machine, beside earlier predictions of others.

    Machines are names or files of hardware profiles.

    Raises
    ------
    HardwareError
        For an unknown profile, or one without the rates that a prediction needs.
    """
    machines = [load_hardware(it) for it in profiles]
    run = Run(header("small-cards", {}), earlier.results if earlier else ())
    for hardware in machines:
        for name, case in _cases(hardware, {case for case, _ in rows}).items():
            on_progress(f"{hardware.name}, {name}")
            found = (predict_case(name, case, hardware, way) for way in WAYS)
            others = (it for it in run.results if not _is_of(it, hardware.name, name))
            run = replace(run, results=(*others, *found))
            on_results(run)
    return run


def _is_of(result: object, machine: str, case: str) -> bool:
    """Whether a result predicts a case on a machine."""
    return isinstance(result, Measurement) and (result.benchmark, result.case) == (machine, case)


def _cases(hardware: Hardware, names: Collection[ScaleCase]) -> dict[ScaleCase, Case]:
    chosen = {name: case for name, case in CASES.items() if name in names}
    own_bytes = resolve(load_policy("sft"), hardware, {}).device_budget_bytes
    assert own_bytes is not None
    if own_bytes >= max(it.budget_bytes for it in CASES.values()):
        return chosen
    return {
        re.sub(r"-\d+gib", "", name): case._replace(budget_bytes=own_bytes)
        for name, case in chosen.items()
    }


def predict_case(name: ScaleCase, case: Case, hardware: Hardware, way: str) -> Measurement:
    """The prediction of a training; an error where it does not fit.

    ``computation``, ``link`` and ``host`` are shares of the step: by how much it becomes shorter
    where that part of the machine is a little faster, relative to how much faster. They do not add
    up to 1 where something waits that none of them makes shorter.
    """
    told: dict[str, Any] = {"benchmark": hardware.name, "case": name, "subject": way}
    slack_bytes = least_slack_bytes(case.budget_bytes)
    workload = replace(
        training_workload(case.shape, case.method, case.accumulate),
        slices_loss=WAYS[way].slices_loss,
    )
    step = training_step(workload, hardware, largest_slot_bytes(case.budget_bytes))
    plan = partial(
        plan_with_host_updates if WAYS[way].updates_on_host else plan_training,
        weights=step.weights,
        budget_bytes=case.budget_bytes - slack_bytes,
        hardware=hardware,
        other_s=step.other_s,
        step_peak_bytes=step.step_peak_bytes,
        batches=step.batches,
        holds_gradients=True,
    )
    try:
        training = plan_with_recomputation(
            step.units, step.freed_bytes, hardware, plan, step.checkpointed_bytes
        )
    except PlanError as error:
        return Measurement(**told, error=str(error))
    made = StreamPrediction(
        name, hardware.name, case.method, case.budget_bytes, False, step, training
    )
    step_s = training.step_s
    figures = {
        "step_s": step_s,
        "floor_s": step.passes_s,
        "tokens_per_s": case.step_tokens / step_s,
        "budget_bytes": float(case.budget_bytes),
        "host_bytes": float(made.host_bytes),
    }
    return Measurement(**told, figures=figures | _shares(made, hardware))


def _shares(made: StreamPrediction, hardware: Hardware) -> dict[str, float]:
    """What each part of the machine has of the step: the same plan with that part faster."""
    step, training = made.step, made.training
    links = [
        it
        for it in vars(hardware)
        if it.startswith(("copy_", "mapped_")) and it.endswith("bytes_per_s")
    ]
    machines = {
        "link": replace(hardware, **{it: _FASTER * getattr(hardware, it) for it in links}),
        "host": replace(
            hardware, host_update_bytes_per_s=_FASTER * hardware.host_update_bytes_per_s
        ),
    }
    again_s = {part: _again_s(step, training, it) for part, it in machines.items()}
    faster = tuple(
        replace(
            it,
            forward_s=it.forward_s / _FASTER,
            backward_s=it.backward_s / _FASTER,
            update_s=it.update_s / _FASTER,
        )
        for it in training.units
    )
    again_s["computation"] = _again_s(step, replace(training, units=faster), hardware)
    step_s = _again_s(step, training, hardware)
    whole_s = step_s * (1.0 - 1.0 / _FASTER)
    return {part: max(0.0, (step_s - it) / whole_s) for part, it in again_s.items()}


def _again_s(step: PredictedStep, training: TrainingPlan, hardware: Hardware) -> float:
    return training.predict_again(
        training.units, hardware, other_s=step.other_s, batches=step.batches
    ).step_s


def committed_predictions(policy: str, gpu: str | None) -> dict[Row, float]:
    """Seconds of a step of umem and of the floor that :data:`PREDICTED` has under a policy.

    Empty for a card that it does not have, and outside of a checkout.
    """
    allowed = load_policy(policy)
    way = _Way(allowed.slice_losses == "auto", allowed.host_update == "auto")
    found: dict[Row, float] = {}
    for it in read_results(PREDICTED).results if PREDICTED.exists() else ():
        assert isinstance(it, Measurement)
        card = CARDS.get(it.benchmark)
        is_this = card is not None and re.fullmatch(card.device_name, gpu or "")
        if is_this and WAYS[it.subject] == way and it.error is None:
            found[it.case, "umem"] = it.figures["step_s"]
            found[it.case, "floor"] = it.figures["floor_s"]
    return found


# ---- tables ----


def heading(run: Run) -> str:
    """One line that says what made the predictions."""
    return provenance(run.header, "predicted, not measured, by umem's planner and each profile")


def tables(run: Run) -> Iterator[Table]:
    """Cases of each profile; then what does not fit."""
    rows: dict[str, dict[str, dict[str, Measurement]]] = {}
    for it in run.results:
        if isinstance(it, Measurement):
            rows.setdefault(it.benchmark, {}).setdefault(it.case, {})[it.subject] = it
    columns = (
        *("case", "floor, tokens/s"),
        *(f"{it}: tokens/s" for it in WAYS),
        *("step", "bound by", f"{list(WAYS)[-1]}: bound by", "page-locked"),
    )
    for profile, cases in rows.items():
        fitting = [it for ways in cases.values() for it in _known(ways)]
        budgets = {int(it.figures["budget_bytes"]) for it in fitting}
        within = f", within {format_bytes(*budgets)}" if len(budgets) == 1 else ""
        shown = [_row(it, ways) for it, ways in cases.items() if _known(ways)]
        yield Table(f"{profile}{within}: predicted", columns, shown)
    refused = [
        (f"{profile}, {case}, {way}", it.error)
        for profile, cases in rows.items()
        for case, ways in cases.items()
        for way, it in ways.items()
        if it.error is not None
    ]
    if refused:
        yield Table("Without a plan, by prediction", ("case", "why"), refused)


def _known(ways: Mapping[str, Measurement]) -> list[Measurement]:
    """Those that fit."""
    return [it for it in ways.values() if it.error is None]


def _row(case: str, ways: Mapping[str, Measurement]) -> tuple[str, ...]:
    known = _known(ways)
    first, last = known[0].figures, known[-1].figures
    floor = first["tokens_per_s"] * first["step_s"] / first["floor_s"]
    return (
        case,
        f"{floor:,.0f}",
        *(_speed(ways.get(it)) for it in WAYS),
        seconds(first["step_s"]),
        _bound(first),
        _bound(last),
        format_bytes(int(first["host_bytes"])),
    )


def _speed(it: Measurement | None) -> str:
    if it is None or it.error is not None:
        return NOTHING
    share = it.figures["floor_s"] / it.figures["step_s"]
    return f"{it.figures['tokens_per_s']:,.0f} ({100 * share:.0f} %)"


def _bound(figures: Mapping[str, float]) -> str:
    """The parts of the machine that a step owes most to."""
    parts = sorted(("computation", "link", "host"), key=lambda it: -figures[it])
    return ", ".join(f"{it} {100 * figures[it]:.0f} %" for it in parts if figures[it] >= 0.05)
