"""What umem itself says of a training: its manager, what is resident, and one profiled step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from umem.bench.train.results import ManagerFigures, ProfiledStep, TransferTotal
from umem.bench.train.step import Training
from umem.comparison import moved_figures
from umem.report import UM_CAUSES
from umem.units import format_bytes

if TYPE_CHECKING:
    from umem.executor import ManagerStatus
    from umem.report import MeasuredReport

__all__ = ["loss_of_records", "manager_figures", "profile_step", "resident_bytes", "state_of"]

_RESIDENCY_STEPS = 2

_DIRECTIONS = ("to_device", "to_host")
_PAGE_HINTS = ("prefetch", "evict")

_LEAST_SHARE = 0.5
"""Of what is known to have moved. It is well below 1, for the hint engine counts pages too that
were where they should go, and a prediction is one."""


def state_of(manager: Any) -> str:
    """What umem's manager is at."""
    return str(manager.status().state)


def manager_figures(before: ManagerStatus, after: ManagerStatus, steps: int) -> ManagerFigures:
    """What a manager says after some timed steps, given what it said before them."""
    predicted = after.predicted
    return ManagerFigures(
        state=str(after.state),
        reason=after.reason,
        steps=after.steps,
        strays=after.strays,
        unplanned=after.unplanned,
        gave_up=after.gave_up,
        corrections=after.corrections,
        wait_s=(after.wait_s - before.wait_s) / steps,
        predicted_step_s=None if predicted is None else predicted.step_s,
        predicted_ideal_s=None if predicted is None else predicted.ideal_s,
        predicted_bound_s=None if predicted is None else predicted.lower_bound_s,
    )


def resident_bytes(training: Training) -> int:
    """The most that is meant to be on the device, looked at throughout two steps of their own."""
    from umem.executor import residency

    seen: list[int] = []

    def look(*_: object) -> None:
        seen.append(sum(residency().values()))

    def look_now_and_on_the_way_back(_layer: object, _args: object, output: object) -> None:
        look()
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(look)

    layers = training.model.layers
    undo = [layer.register_forward_hook(look_now_and_on_the_way_back) for layer in layers]
    for optimizer in training.optimizers:
        undo += [optimizer.register_step_pre_hook(look), optimizer.register_step_post_hook(look)]
        # Where a block's step follows its last gradient, its state is there at that moment only.
        undo += [
            weight.register_post_accumulate_grad_hook(look)
            for group in optimizer.param_groups
            for weight in group["params"]
        ]
    for _ in range(_RESIDENCY_STEPS):
        training.step()
    for handle in undo:
        handle.remove()
    return max(seen)


def profile_step(training: Training, name: str) -> tuple[ProfiledStep | None, tuple[str, ...]]:
    """One step under `umem.profile`; None, and why, where nothing was recorded, or too little."""
    import umem

    with umem.profile(steps=1, model=training.model, name=name, required=False) as profile:
        training.step()
        profile.step()
    report = profile.report()
    if not report.collected:
        return None, report.notes
    predicted_bytes = _predicted_bytes(training.manager)
    paged_bytes = None
    if predicted_bytes is not None and training.manager.status().planner == "fault":
        paged_bytes = sum(predicted_bytes.values())
    lost = loss_of_records(report, paged_bytes)
    if lost is not None:
        return None, (*report.notes, lost)
    totals: dict[tuple[str, str], TransferTotal] = {}
    for entry in report.traffic:
        if entry.cause not in UM_CAUSES:
            continue
        known = totals.get((entry.direction, entry.cause))
        totals[entry.direction, entry.cause] = TransferTotal(
            direction=entry.direction,
            cause=entry.cause,
            bytes=entry.bytes + (known.bytes if known else 0),
            count=entry.count + (known.count if known else 0),
            seconds=entry.seconds + (known.seconds if known else 0.0),
        )
    return ProfiledStep(
        step_s=report.step_s,
        um_time_share=report.um_time_share,
        um_ops_share=report.um_ops_share,
        um_bytes_share=report.um_bytes_share,
        fault_pages=report.fault_pages,
        gpu_faults=report.gpu_faults,
        cpu_faults=report.cpu_faults,
        fault_bytes=report.moved_bytes(cause="fault"),
        transfers=tuple(totals.values()),
        notes=report.notes,
        predicted_bytes=predicted_bytes,
    ), ()


def loss_of_records(report: MeasuredReport, paged_bytes: int | None) -> str | None:
    """Say why a step's unified-memory figures cannot be believed; None where they can.

    CUPTI loses records of unified memory without a word, and zeros would look as if measured.

    Parameters
    ----------
    report
        Of a step whose memory operations were recorded.
    paged_bytes
        What the step is predicted to move by demand paging, which no hint asks for; None for steps
        under other planners, whose transfers the hint engine counts.
    """
    recorded_bytes = sum(it.bytes for it in report.traffic if it.cause in UM_CAUSES)
    uses = report.hints.uses if report.hints is not None else ()
    hinted_bytes = sum(it.moved_bytes for it in uses if it.op in _PAGE_HINTS)
    for source, size_bytes in (
        ("by the hint engine's own count", hinted_bytes),
        ("as predicted of demand paging", paged_bytes or 0),
    ):
        if recorded_bytes < _LEAST_SHARE * size_bytes:
            return (
                "unified-memory figures are not known: CUPTI handed over records of "
                f"{format_bytes(recorded_bytes)}, and {format_bytes(size_bytes)} moved, {source}"
            )
    return None


def _predicted_bytes(manager: Any) -> dict[str, int] | None:
    predicted = None if manager is None else manager.status().predicted
    if predicted is None:
        return None
    moved = moved_figures(
        (it.direction, it.cause, it.tensor_class, it.bytes) for it in predicted.traffic
    )
    return {direction: moved[direction] for direction in _DIRECTIONS}
