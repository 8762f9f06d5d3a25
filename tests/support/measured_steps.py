"""One variant of the training benchmark in a process of its own, measured class by class."""

from __future__ import annotations

import multiprocessing
import statistics
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import torch
from managed_memory import PART_BYTES, move_known
from umem_bench.allocators import AllocatorName
from umem_bench.compile_planner import compile_planner
from umem_bench.training.measure import time_steps, warm_up
from umem_bench.training.migration import missing_records
from umem_bench.training.variants import Training, TrainingJob, make_training, place_allocator

import umem
from umem import MeasuredReport
from umem.core.classes import TensorClass
from umem.core.report import UM_CAUSES, Cause, Direction
from umem.pages import ManagerStatus

KEPT_LOSSES = 14
"""So many steps every process trains at least: under a plan, if there is one, in the last ones."""

LEAST_KNOWN_SHARE = 0.9
PROFILED_STEPS = 2
PROCESS_LIMIT_S = 120
"""The first process waits for the imports."""


@dataclass(frozen=True)
class Facts:
    """What a process found out; bytes, counts and shares are of its typical profiled step.

    Parameters
    ----------
    losses_hex
        Of the first :data:`KEPT_LOSSES` steps, to the last bit.
    step_s
        Median of the timed steps, seconds.
    peak_bytes
        The most that was allocated during the timed steps.
    state, reason
        What umem's manager said before them; empty without one.
    plan_running
        Whether each of them went as planned.
    predicted_bytes
        What the plan moves in a step, in whatever way.
    hinted_bytes, hinted_frozen_in_bytes
        What the hint engine says it moved as pages, both ways; of frozen weights, to the device.
    lost
        Why the figures of unified memory, which follow, cannot be believed; None where they can.
    is_lower_bound
        Whether records of demand paging are missing, so that more moved and faulted.
    moved_bytes, fault_bytes
        Unified-memory transfers; those that faults brought, with the driver's speculation.
    fault_batches, faults
        Batches that the driver served faults of the device in; faults in them.
    frozen_in_bytes, frozen_out_bytes
        Of frozen weights: to the device, to the host.
    """

    losses_hex: tuple[str, ...]
    step_s: float
    peak_bytes: int
    state: str = ""
    reason: str = ""
    plan_running: bool | None = None
    predicted_bytes: int = 0
    hinted_bytes: int = 0
    hinted_frozen_in_bytes: int = 0
    lost: str | None = None
    is_lower_bound: bool = False
    um_time_share: float = 0.0
    um_ops_share: float = 0.0
    um_bytes_share: float = 0.0
    moved_bytes: int = 0
    fault_bytes: int = 0
    fault_batches: int = 0
    faults: int = 0
    frozen_in_bytes: int = 0
    frozen_out_bytes: int = 0


def measured(job: TrainingJob) -> Facts:
    """Train as a job says, forked from a process that has the imports; the planner is compiled.

    Raises
    ------
    RuntimeError
        If the process fails, or does not end in time.
    """
    compile_planner()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["umem_bench.training.shared_imports"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_train, args=(job, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(PROCESS_LIMIT_S):
            raise RuntimeError(f"{job.variant}: no answer within {PROCESS_LIMIT_S} s")
        facts: Facts = receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"{job.variant} ended with status {process.exitcode}") from None
    finally:
        receiver.close()
        process.join(PROCESS_LIMIT_S / 4)
        process.kill()
        process.join()
    return facts


def _train(job: TrainingJob, answers: Connection) -> None:
    place_allocator(job)
    training = make_training(job)
    with training.around:
        answers.send(_measure(job, training))


def _measure(job: TrainingJob, training: Training) -> Facts:
    losses: list[torch.Tensor] = []
    warm_up(training, losses)
    steps = max(job.steps, KEPT_LOSSES - len(losses))
    allocator: AllocatorName = "torch" if training.manager is None else "umem"
    timed = time_steps(training, steps, losses, allocator)
    assert timed.allocated_bytes is not None
    facts = Facts(
        losses_hex=tuple(float(loss).hex() for loss in losses[:KEPT_LOSSES]),
        step_s=statistics.median(timed.steps_s),
        peak_bytes=timed.allocated_bytes,
    )
    if not isinstance(timed.before, ManagerStatus):
        return facts
    with umem.profile(steps=1 + PROFILED_STEPS, model=training.model) as profile:
        move_known()
        profile.step()
        for _ in range(PROFILED_STEPS):
            training.step()
            profile.step()
    known, *trained = profile.step_reports()
    report = min(trained, key=lambda it: it.step_s)
    predicted = training.manager.status().predicted
    predicted_bytes = predicted.moved_bytes() if predicted else 0
    is_paged = timed.before.planner == "fault"
    words, is_lower_bound = missing_records(report, predicted_bytes if is_paged else None)
    pages = (
        [it for it in report.hints.uses if it.op in ("prefetch", "evict")] if report.hints else []
    )
    frozen = TensorClass.FROZEN_WEIGHTS
    return replace(
        facts,
        state=str(timed.before.state),
        reason=timed.before.reason,
        plan_running=timed.plan_running,
        predicted_bytes=predicted_bytes,
        hinted_bytes=sum(it.moved_bytes for it in pages),
        hinted_frozen_in_bytes=sum(
            it.moved_bytes for it in pages if (it.op, it.tensor_class) == ("prefetch", frozen)
        ),
        lost=_missing_known_records(known) or (None if is_lower_bound else words or None),
        is_lower_bound=is_lower_bound,
        um_time_share=report.um_time_share,
        um_ops_share=report.um_ops_share,
        um_bytes_share=report.um_bytes_share,
        moved_bytes=_um_bytes(report),
        fault_bytes=_um_bytes(report, ("fault", "speculation")),
        fault_batches=report.fault_batches,
        faults=report.gpu_faults,
        frozen_in_bytes=_um_bytes(report, UM_CAUSES, "to_device", frozen),
        frozen_out_bytes=_um_bytes(report, UM_CAUSES, "to_host", frozen),
    )


def _um_bytes(
    report: MeasuredReport,
    causes: tuple[Cause, ...] = UM_CAUSES,
    direction: Direction | None = None,
    tensor_class: TensorClass | None = None,
) -> int:
    """Bytes of unified-memory transfers to the device and the host, or of some of them."""
    return sum(
        it.bytes
        for it in report.traffic
        if it.cause in causes
        and it.direction in ("to_device", "to_host")
        and direction in (None, it.direction)
        and tensor_class in (None, it.tensor_class)
    )


def _missing_known_records(report: MeasuredReport) -> str | None:
    """Why a profile that should show :func:`move_known` cannot be believed; None where it can.

    CUPTI loses records of unified memory without an error, and zeros would look like results.
    """
    to_device = [it for it in report.traffic if it.direction == "to_device"]
    hinted_bytes = sum(it.bytes for it in to_device if it.cause == "hint")
    faulted_bytes = sum(it.bytes for it in to_device if it.cause in ("fault", "speculation"))
    if min(hinted_bytes, faulted_bytes) >= LEAST_KNOWN_SHARE * PART_BYTES:
        return None
    return f"recorded: {hinted_bytes} bytes prefetched and {faulted_bytes} faulted, of {PART_BYTES}"
