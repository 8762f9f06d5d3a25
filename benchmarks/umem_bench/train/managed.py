"""What umem itself says of a training: its manager, what is resident, and one profiled step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from umem.core.classes import TensorClass
from umem.core.report import UM_CAUSES
from umem.core.units import format_bytes
from umem.telemetry.comparison import moved_figures
from umem_bench.train.results import HintedStep, ManagerFigures, ProfiledStep, TransferTotal
from umem_bench.train.scratch import PART_BYTES, move_known
from umem_bench.train.step import Training

if TYPE_CHECKING:
    from umem.core.report import MeasuredReport
    from umem.executor import ManagerStatus

__all__ = [
    "ARRANGING_STEPS",
    "loss_of_hinted_records",
    "loss_of_known_records",
    "loss_of_paged_records",
    "manager_figures",
    "profile_step",
    "resident_bytes",
    "state_of",
    "under_one_plan",
]

_Found = TypeVar("_Found")

ARRANGING_STEPS = 2
"""They move what a plan wants elsewhere."""

_RESIDENCY_STEPS = 2
_HINT_PATIENCE_S = 5.0

_DIRECTIONS = ("to_device", "to_host")
_DIRECTION_OF_HINT = {"prefetch": "to_device", "evict": "to_host"}

_LEAST_SHARE = 0.5
"""Of what the hint engine has moved, which counts pages too that were where they should go."""
_LEAST_KNOWN_SHARE = 0.9
"""Of what is known to have moved, or what is predicted to."""

_NOT_KNOWN = "unified-memory figures are not known: there are records of"


def state_of(manager: Any) -> str:
    """What umem's manager is at."""
    return str(manager.status().state)


def under_one_plan(training: Training, look: Callable[[], _Found]) -> _Found:
    """What is seen in steps of one plan: looked at anew where umem planned anew meanwhile.

    It does so a few times at most.
    """
    while True:
        before = _corrections(training)
        found = look()
        if _corrections(training) == before:
            return found
        for _ in range(ARRANGING_STEPS):
            training.step()


def _corrections(training: Training) -> int:
    return 0 if training.manager is None else int(training.manager.status().corrections)


def manager_figures(before: ManagerStatus, after: ManagerStatus, steps: int) -> ManagerFigures:
    """What a manager says after some timed steps, given what it said before them."""
    predicted = after.predicted
    return ManagerFigures(
        state=str(after.state),
        reason=after.reason,
        steps=after.steps,
        diverged_steps=after.diverged_steps,
        unplanned=after.unplanned,
        wait_timeouts=after.wait_timeouts,
        corrections=after.corrections,
        wait_s=(after.wait_s - before.wait_s) / steps,
        predicted_step_s=None if predicted is None else predicted.step_s,
        predicted_ideal_s=None if predicted is None else predicted.ideal_s,
        predicted_bound_s=None if predicted is None else predicted.lower_bound_s,
    )


def resident_bytes(training: Training) -> int:
    """The most that is meant to be on the device in two steps of their own: an upper bound.

    What lives between two looks only is in no look. So the most that was allocated since the last
    one counts as if it had been there while the less of the two was away. Looks are at both ends of
    every layer's passes, at every gradient, around the optimizer's step, and on both sides of
    what umem does where a phase begins.
    """
    looks = _Looks(next(training.model.parameters()).device.index or 0)

    def look_now_and_on_the_way_back(_layer: object, _args: object, output: object) -> None:
        looks.look()
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(looks.look)

    layers = training.model.layers
    undo = [layer.register_forward_hook(look_now_and_on_the_way_back) for layer in layers]
    # Not the optimizer's own: umem leaves a step whole where such a hook comes after its parts.
    undo.append(register_optimizer_step_pre_hook(looks.look))
    undo.append(register_optimizer_step_post_hook(looks.look))
    for optimizer in training.optimizers:
        # Where a block's step follows its last gradient, its state is there at that moment only.
        undo += [
            weight.register_post_accumulate_grad_hook(looks.look)
            for group in optimizer.param_groups
            for weight in group["params"]
        ]
    training.manager.watch(looks.look)
    for _ in range(_RESIDENCY_STEPS):
        training.step()
    looks.look()
    training.manager.watch(None)
    for handle in undo:
        handle.remove()
    return looks.most_bytes


class _Looks:
    """The most that can have been meant to be on a device, from one look to the next."""

    def __init__(self, device: int) -> None:
        self.most_bytes = 0
        self._device = device
        _, self._away_bytes = self._peak_and_away()

    def look(self, *_: object) -> None:
        """See what has been there since the last look. Arguments are those of hooks."""
        peak_bytes, away_bytes = self._peak_and_away()
        there_bytes = peak_bytes - min(away_bytes, self._away_bytes)
        self.most_bytes = max(self.most_bytes, there_bytes)
        self._away_bytes = away_bytes

    def _peak_and_away(self) -> tuple[int, int]:
        """The most that was allocated since the last call, and what is away of what is there now.

        The peak that torch shows is not reset: umem's manager goes by it.
        """
        from umem.executor import residency
        from umem.runtime.state import runtime

        allocator = runtime().allocator
        peak_bytes = allocator.take_peak_bytes(self._device)
        allocated_bytes = allocator.take_peak_bytes(self._device)  # nothing came between
        return peak_bytes, allocated_bytes - sum(residency(self._device).values())


def profile_step(
    training: Training, name: str
) -> tuple[ProfiledStep | None, HintedStep | None, tuple[str, ...]]:
    """One step under `umem.profile`, and what the hint engine says of it.

    With all that is asked for in it: what the next step needs first comes when this one is over.

    Returns
    -------
    tuple
        The step as it was recorded; None where nothing was, or too little. What hints moved in it,
        which needs no records; None where they move nothing. Why something is missing.
    """
    import umem

    with umem.profile(steps=2, model=training.model, name=name, required=False) as profile:
        move_known()
        _wait_for_hints(training)
        profile.step()
        training.step()
        _wait_for_hints(training)
        profile.step()
    known, report = profile.step_reports()
    manager = training.manager
    predicted_bytes = _predicted_bytes(manager, "")
    is_paged = manager is not None and manager.status().planner == "fault"
    hinted = None
    if predicted_bytes is not None and not is_paged and report.hints is not None:
        hinted = HintedStep(
            moved_bytes=_hinted_bytes(report), predicted_bytes=_predicted_bytes(manager, "hinted_")
        )
    if not report.collected:
        return None, hinted, report.notes
    paged_bytes = sum(predicted_bytes.values()) if predicted_bytes and is_paged else None
    lost = loss_of_known_records(known) or loss_of_hinted_records(report)
    if lost is not None:
        return None, hinted, (*report.notes, lost)
    less = loss_of_paged_records(report, paged_bytes)
    return (
        ProfiledStep(
            step_s=report.step_s,
            um_time_share=report.um_time_share if report.has_copies else None,
            um_ops_share=report.um_ops_share if report.has_copies else None,
            um_bytes_share=report.um_bytes_share if report.has_copies else None,
            fault_batches=report.fault_batches,
            gpu_faults=report.gpu_faults,
            cpu_faults=report.cpu_faults,
            fault_bytes=report.moved_bytes(cause="fault") + report.moved_bytes(cause="speculation"),
            transfers=_transfers(report),
            notes=report.notes,
            predicted_bytes=predicted_bytes,
            is_lower_bound=less is not None,
        ),
        hinted,
        () if less is None else (less,),
    )


def _wait_for_hints(training: Training) -> None:
    """Wait until nothing that umem's manager has asked for is under way."""
    if training.manager is None:
        return
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # hints wait for what was launched before them
    end_s = time.monotonic() + _HINT_PATIENCE_S
    while training.manager.engine.statistics().open_requests and time.monotonic() < end_s:
        time.sleep(1e-3)


def _transfers(report: MeasuredReport) -> tuple[TransferTotal, ...]:
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
    return tuple(totals.values())


def loss_of_known_records(report: MeasuredReport) -> str | None:
    """Say so if records of transfers are missing that are known to have happened; else None.

    Where a step is to move nothing, nothing can be held against its zeros: so a block of its own
    is moved before it. None too where nothing is recorded, which a profile says for itself.

    Parameters
    ----------
    report
        Of a step of the profile that is nothing but :func:`move_known`.
    """
    if not report.collected:
        return None
    to_device = [
        it for it in report.traffic if it.direction == "to_device" and it.cause in UM_CAUSES
    ]
    hinted_bytes = sum(it.bytes for it in to_device if it.cause == "hint")
    faulted_bytes = sum(it.bytes for it in to_device) - hinted_bytes
    if min(hinted_bytes, faulted_bytes) >= _LEAST_KNOWN_SHARE * PART_BYTES:
        return None
    return (
        f"{_NOT_KNOWN} {format_bytes(hinted_bytes)} where {format_bytes(PART_BYTES)} were "
        f"prefetched, and of {format_bytes(faulted_bytes)} where as much faulted in, before the "
        "step"
    )


def loss_of_hinted_records(report: MeasuredReport) -> str | None:
    """Say so if there are few records of what hints moved in a step; else None.

    CUPTI loses records of unified memory without a word, and zeros would look as if measured.
    """
    recorded_bytes = _recorded_bytes(report)
    hinted_bytes = sum(_hinted_bytes(report).values())
    if recorded_bytes >= _LEAST_SHARE * hinted_bytes:
        return None
    return (
        f"{_NOT_KNOWN} {format_bytes(recorded_bytes)}, and {format_bytes(hinted_bytes)} moved, by "
        "the hint engine's own count"
    )


def loss_of_paged_records(report: MeasuredReport, paged_bytes: int | None) -> str | None:
    """Say so if there are fewer records of demand paging than it is predicted to take; else None.

    Where much faults at once, CUPTI alone loses some records: then the figures are lower bounds.

    Parameters
    ----------
    report
        Of the step.
    paged_bytes
        What it is predicted to move; None for steps under other planners.
    """
    recorded_bytes = _recorded_bytes(report)
    if paged_bytes is None or recorded_bytes >= _LEAST_KNOWN_SHARE * paged_bytes:
        return None
    return (
        f"unified-memory figures are lower bounds: there are records of "
        f"{format_bytes(recorded_bytes)}, and {format_bytes(paged_bytes)} are predicted of demand "
        "paging"
    )


def _recorded_bytes(report: MeasuredReport) -> int:
    return sum(it.bytes for it in report.traffic if it.cause in UM_CAUSES)


def _hinted_bytes(report: MeasuredReport) -> dict[str, int]:
    """What the hint engine says it moved as pages, by direction."""
    moved = dict.fromkeys(_DIRECTIONS, 0)
    for use in () if report.hints is None else report.hints.uses:
        # Frozen weights keep a copy on the host, so that leaving moves nothing.
        is_dropped = use.op == "evict" and use.tensor_class is TensorClass.FROZEN_WEIGHTS
        if use.op in _DIRECTION_OF_HINT and not is_dropped:
            moved[_DIRECTION_OF_HINT[use.op]] += use.moved_bytes
    return moved


def _predicted_bytes(manager: Any, kind: str) -> dict[str, int] | None:
    """Unified-memory transfers of the plan by direction: all of them, or with a kind's name."""
    predicted = None if manager is None else manager.status().predicted
    if predicted is None:
        return None
    moved = moved_figures(
        (it.direction, it.cause, it.tensor_class, it.bytes) for it in predicted.traffic
    )
    return {direction: moved[f"{kind}{direction}"] for direction in _DIRECTIONS}
