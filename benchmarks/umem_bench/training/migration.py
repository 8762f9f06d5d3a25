"""What moves in one profiled step."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from umem import TensorClass
from umem.core.units import format_bytes
from umem.pages import Manager
from umem_bench.results import Migration
from umem_bench.training.variants import Training

if TYPE_CHECKING:
    from umem import MeasuredReport

__all__ = ["missing_records", "profile_step"]

_HINT_PATIENCE_S = 5.0
_DIRECTIONS = ("to_device", "to_host")

_LEAST_HINTED_SHARE = 0.5
"""Least recorded share of what the hint engine has moved. The engine counts pages too that were
where they should go."""
_LEAST_PAGED_SHARE = 0.9
"""Least recorded share of the predicted traffic of demand paging."""


def profile_step(training: Training, name: str) -> tuple[Migration | None, tuple[str, ...]]:
    """One step under `umem.profile`, with all its requests carried out in it.

    The migration is None where nothing or too little was recorded; the notes say why.
    """
    import umem

    with umem.profile(steps=1, model=training.model, name=name, required=False) as profile:
        _wait_for_hints(training)
        training.step()
        _wait_for_hints(training)
        profile.step()
    (report,) = profile.step_reports()
    if not report.collected:
        return None, report.notes
    status = training.manager.status() if isinstance(training.manager, Manager) else None
    predicted = None if status is None else status.predicted
    predicted_bytes = None if predicted is None else _by_direction(predicted)
    predicted_shares = None if predicted is None else _shares(predicted)
    if status is not None and str(status.state) == "resident":
        predicted_shares = (0.0, 0.0, 0.0)  # all of it fits, so that nothing moves
    is_paged = status is not None and status.planner == "fault"
    paged_bytes = sum(predicted_bytes.values()) if predicted_bytes and is_paged else None
    words, is_lower_bound = missing_records(report, paged_bytes)
    notes = (*report.notes, words) if words else report.notes
    if words and not is_lower_bound:
        return None, notes
    shares = _shares(report) if report.has_copies else (None, None, None)
    migration = Migration(
        fault_batches=report.fault_batches,
        um_time_share=shares[0],
        um_ops_share=shares[1],
        um_bytes_share=shares[2],
        predicted_shares=predicted_shares,
        moved_bytes=_by_direction(report),
        predicted_bytes=predicted_bytes,
        is_lower_bound=is_lower_bound,
    )
    return migration, notes


def _wait_for_hints(training: Training) -> None:
    """Wait until every request of umem's manager is carried out."""
    if not isinstance(training.manager, Manager):
        return
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # hints wait for earlier launches
    end_s = time.monotonic() + _HINT_PATIENCE_S
    while training.manager.engine.statistics().open_requests and time.monotonic() < end_s:
        time.sleep(1e-3)


def missing_records(report: MeasuredReport, paged_bytes: int | None) -> tuple[str, bool]:
    """Why a step's figures are not known or too low, empty where not; whether they are too low.

    CUPTI loses records without an error, and where much faults at once only some of them.
    `paged_bytes` is the predicted traffic of demand paging; None under other planners.
    """
    recorded_bytes = sum(it.bytes for it in _unified_traffic(report))
    words = f"there are records of {format_bytes(recorded_bytes)}"
    hinted_bytes = sum(
        use.moved_bytes
        for use in (() if report.hints is None else report.hints.uses)
        if use.op in ("prefetch", "evict")
        # Frozen weights keep a copy on the host, so that leaving moves nothing.
        and (use.op, use.tensor_class) != ("evict", TensorClass.FROZEN_WEIGHTS)
    )
    if recorded_bytes < _LEAST_HINTED_SHARE * hinted_bytes:
        hinted = f"{format_bytes(hinted_bytes)} moved, by the hint engine's own count"
        return f"unified-memory figures are not known: {words}, and {hinted}", False
    if paged_bytes is not None and recorded_bytes < _LEAST_PAGED_SHARE * paged_bytes:
        paged = f"{format_bytes(paged_bytes)} are predicted of demand paging"
        return f"unified-memory figures are lower bounds: {words}, and {paged}", True
    return "", False


def _unified_traffic(report: Any) -> list[Any]:
    """The entries of a report's traffic that are unified-memory transfers."""
    from umem.core.report import UM_CAUSES

    return [it for it in report.traffic if it.cause in UM_CAUSES]


def _shares(report: Any) -> tuple[float, float, float]:
    """Of unified memory in all memory operations: of their time, number and bytes."""
    return report.um_time_share, report.um_ops_share, report.um_bytes_share


def _by_direction(report: Any) -> dict[str, int]:
    """Bytes of a report's unified-memory transfers."""
    entries = _unified_traffic(report)
    return {way: sum(it.bytes for it in entries if it.direction == way) for way in _DIRECTIONS}
