"""One variant in a worker: steps, losses and memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from umem_bench.allocators import AllocatorName, peaks, reset_peaks
from umem_bench.card import Card
from umem_bench.results import BUDGETED
from umem_bench.timing import no_garbage_collection
from umem_bench.training.migration import profile_step
from umem_bench.training.status import (
    NO_MANAGER,
    Status,
    find_manager,
    has_followed,
    is_settled,
    predicted_step_s,
    status_notes,
    why_off,
)
from umem_bench.training.variants import (
    Training,
    TrainingJob,
    make_training,
    place_allocator,
    why_not,
)

__all__ = [
    "ARRANGING_STEPS",
    "KEPT_LOSSES",
    "Timed",
    "card_figures",
    "measure",
    "outside_figures",
    "time_steps",
    "warm_up",
]

KEPT_LOSSES = 24
"""Enough for a plan to run in the last of these steps."""

ARRANGING_STEPS = 2
"""Steps that move memory to where a new plan wants it."""

_WARM_STEPS = 3
"""Kernels are loaded, the optimizer's state is made, and caches fill."""

_MAX_WARM_STEPS = 40
_PLAN_PATIENCE_S = 90.0
"""umem's manager has so long, and so many steps, to decide: a large model's steps take 5 s."""


@dataclass(frozen=True)
class Timed:
    """Timed steps; `before` and `after` are what umem says of the training around them."""

    steps_s: tuple[float, ...]
    wall_s: float
    """All steps together, from an idle GPU to an idle GPU, so that no deferred work is missing."""
    before: Status | None
    after: Status | None
    allocated_bytes: int | None
    """Peak."""

    @property
    def plan_running(self) -> bool | None:
        """Whether every step followed umem's plan; None without a manager."""
        if self.before is None or self.after is None:
            return None
        return has_followed(self.before, self.after)


def measure(job: TrainingJob) -> Iterator[dict[str, Any]]:
    """Train as a job says; yields the measured fields of one result, then those of a profile."""
    reason = why_not(job)
    if reason:
        yield reason
        return
    place_allocator(job)
    base = card_figures(job.card, "base_bytes")
    training = make_training(job)
    with training.around:
        found = base | _measure(job, training)
        yield found
        yield _profile(job, training, found["notes"])


def card_figures(card: Card | None, name: str) -> dict[str, int]:
    """What is in use on the card now that this process has its context."""
    if card is None:
        return {}
    torch.cuda.synchronize()
    return {name: card.used_bytes()}


def outside_figures(card: Card | None, variant: str) -> dict[str, int]:
    """What is in use on the card beside the memory that torch's own allocator has reserved.

    Nothing for a variant with another allocator, whose count has host memory too.
    """
    if variant.startswith(("umem", "rmm")):
        return {}
    used = card_figures(card, "outside_bytes")
    return {name: size - torch.cuda.memory_reserved() for name, size in used.items()}


def _measure(job: TrainingJob, training: Training) -> dict[str, Any]:
    losses: list[torch.Tensor] = []
    notes: tuple[str, ...] = ()
    if job.variant in BUDGETED and training.manager is None:
        losses.append(training.step())
        training.manager = find_manager()
        notes = () if training.manager else (NO_MANAGER,)
    manager = training.manager
    warm_up(training, losses)
    if manager is not None and (reason := why_off(manager.status())):
        return {"state": "off", "reason": reason}
    allocator: AllocatorName = "umem" if job.variant.startswith("umem") else "torch"
    if job.variant == "rmm-pool":
        allocator = "rmm-pool"
    counted = allocator if job.device == "cuda" else None
    timed = time_steps(training, job.steps, losses, counted)
    found: dict[str, Any] = {}
    if timed.after is not None:
        found["predicted_step_s"] = predicted_step_s(timed.after)
    found |= outside_figures(job.card, job.variant)
    if job.variant == "stock":  # others train for longer before they are timed
        losses += [training.step() for _ in range(KEPT_LOSSES - len(losses))]
    return found | {
        "state": "measured",
        "parameters": sum(weight.numel() for weight in training.model.parameters()),
        "plan_running": timed.plan_running,
        "steps_s": timed.steps_s,
        "losses_hex": tuple(float(loss).hex() for loss in losses[:KEPT_LOSSES]),
        "peak_allocated_bytes": timed.allocated_bytes,
        "notes": notes if timed.after is None else status_notes(timed.after),
    }


def _profile(job: TrainingJob, training: Training, notes: tuple[str, ...]) -> dict[str, Any]:
    """What one more step migrates, for umem's variants and RMM's."""
    if not job.variant.startswith(("umem", "rmm-")):
        return {}
    name = f"{job.method} {job.variant}"
    migration, missing = profile_step(training, name)
    return {"migration": migration, "notes": (*notes, *missing)}


def warm_up(training: Training, losses: list[torch.Tensor]) -> None:
    """Train until later steps take as long."""
    losses += [training.step() for _ in range(_WARM_STEPS)]
    manager = training.manager
    if manager is not None:
        end_s = time.monotonic() + _PLAN_PATIENCE_S
        while (
            not is_settled(manager.status())
            and len(losses) < _MAX_WARM_STEPS
            and time.monotonic() < end_s
        ):
            losses.append(training.step())
            float(losses[-1])  # the plan starts between steps: this loop must not run ahead
            if str(getattr(manager.status(), "state", "")) == "planning":
                manager.wait_for_search(_PLAN_PATIENCE_S)
        if not why_off(manager.status()):
            losses += [training.step() for _ in range(ARRANGING_STEPS)]
    float(losses[-1])


def time_steps(
    training: Training, steps: int, losses: list[torch.Tensor], allocator: AllocatorName | None
) -> Timed:
    """Time steps by CUDA events, without a wait between them; their losses are appended.

    `allocator` is the one whose peaks are read; None on the CPU, where the wall clock counts.
    """
    before = None if training.manager is None else training.manager.status()
    if allocator is not None:
        reset_peaks(allocator)
        torch.cuda.synchronize()
    marks: list[Any] = [_mark(allocator)]
    began_s = time.perf_counter()
    with no_garbage_collection():
        for _ in range(steps):
            losses.append(training.step())
            marks.append(_mark(allocator))
    if allocator is not None:
        torch.cuda.synchronize()
    wall_s = time.perf_counter() - began_s
    took = [a.elapsed_time(b) / 1e3 if allocator else b - a for a, b in pairwise(marks)]
    allocated = None if allocator is None else peaks(allocator).get("peak_allocated_bytes")
    return Timed(
        tuple(took),
        wall_s,
        before,
        None if training.manager is None else training.manager.status(),
        None if allocated is None else int(allocated),
    )


def _mark(allocator: AllocatorName | None) -> Any:
    """This moment: a recorded CUDA event, or seconds on the CPU."""
    if allocator is None:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
