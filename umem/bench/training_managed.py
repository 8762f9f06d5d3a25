"""What umem itself says of a training: its manager, what is resident, and one profiled step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from umem.bench.training_results import ManagerFigures, ProfiledStep, TransferTotal
from umem.bench.training_step import Training
from umem.comparison import moved_figures
from umem.report import UM_CAUSES

if TYPE_CHECKING:
    from umem.executor import ManagerStatus

__all__ = ["manager_figures", "profile_step", "resident_bytes", "state_of"]

_RESIDENCY_STEPS = 2

_DIRECTIONS = ("to_device", "to_host")


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
    undo += [
        training.optimizer.register_step_pre_hook(look),
        training.optimizer.register_step_post_hook(look),
    ]
    for _ in range(_RESIDENCY_STEPS):
        training.step()
    for handle in undo:
        handle.remove()
    return max(seen)


def profile_step(training: Training, name: str) -> tuple[ProfiledStep | None, tuple[str, ...]]:
    """One step under `umem.profile`; None, and why, where nothing can be recorded."""
    import umem

    with umem.profile(steps=1, model=training.model, name=name, required=False) as profile:
        training.step()
        profile.step()
    report = profile.report()
    if not report.collected:
        return None, report.notes
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
        predicted_bytes=_predicted_bytes(training.manager),
    ), ()


def _predicted_bytes(manager: Any) -> dict[str, int] | None:
    predicted = None if manager is None else manager.status().predicted
    if predicted is None:
        return None
    moved = moved_figures(
        (it.direction, it.cause, it.tensor_class, it.bytes) for it in predicted.traffic
    )
    return {direction: moved[direction] for direction in _DIRECTIONS}
