"""What umem says of a training, alike for pages that move by a plan and for streamed state."""

from __future__ import annotations

from typing import Any

from umem.core.units import format_bytes
from umem.pages import ManagerStatus
from umem.streaming import StreamedStatus

__all__ = [
    "NO_MANAGER",
    "Status",
    "find_manager",
    "has_followed",
    "is_settled",
    "predicted_step_s",
    "status_notes",
    "why_off",
]

Status = ManagerStatus | StreamedStatus

_DECIDING = ("warming up", "recording", "planning")


NO_MANAGER = "no manager of umem runs in this training"


def find_manager() -> Any:
    """What umem manages by itself from the training's first step on; None if it does not."""
    from umem.managing import managers
    from umem.streaming import streamed_trainings

    return next(iter((*managers(), *streamed_trainings())), None)


def is_settled(status: Status) -> bool:
    """Whether later steps run as the next one does."""
    if isinstance(status, StreamedStatus):
        return status.is_settled
    return str(status.state) not in _DECIDING


def why_off(status: Status) -> str:
    """Why umem does not manage the training; empty if it does."""
    if isinstance(status, StreamedStatus) or str(status.state) != "off":
        return ""
    return status.reason or "off"


def has_followed(before: Status, after: Status) -> bool:
    """Whether every step between two looks has followed a plan."""
    if isinstance(before, StreamedStatus) or isinstance(after, StreamedStatus):
        looks = [it.tuning for it in (before, after) if isinstance(it, StreamedStatus)]
        seen = {None if it is None else (str(it.state), it.plans) for it in looks}
        return len(seen) == 1 and all(it is not None and it[0] == "planned" for it in seen)
    return (
        str(before.state) in ("running", "resident")
        and after.state == before.state
        and after.diverged_steps == before.diverged_steps
    )


def predicted_step_s(status: Status) -> float | None:
    """Seconds of a step under the plan."""
    if isinstance(status, StreamedStatus):
        return None if status.tuning is None else status.tuning.predicted_s
    return None if status.predicted is None else status.predicted.step_s


def status_notes(status: Status) -> tuple[str, ...]:
    """What a status says against its steps."""
    notes: list[str] = []
    if isinstance(status, StreamedStatus):
        tuning = status.tuning
        if tuning is not None and str(tuning.state) in ("no plan fits", "off"):
            notes.append(f"umem's plan for streamed state is {tuning.state}")
        if tuning is not None and tuning.spilled_bytes:
            notes.append(f"{format_bytes(tuning.spilled_bytes)} beyond the budget is on the host")
        if status.counts.in_line:
            notes.append(f"{status.counts.in_line} steps ran whole, on state in host memory")
        return tuple(notes)
    if status.reason:
        notes.append(f"umem's manager is {status.state}: {status.reason}")
    if status.diverged_steps + status.unplanned + status.wait_timeouts:
        notes.append(
            f"of {status.steps} planned steps: {status.diverged_steps} diverged, "
            f"{status.unplanned} had no plan of their own, {status.wait_timeouts} waits timed out"
        )
    return tuple(notes)
