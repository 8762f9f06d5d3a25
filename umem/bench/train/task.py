"""What a training worker measures: steps, memory, and the bandwidth of memory used in place."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from umem.bench._allocators import peaks, reset_peaks
from umem.bench._timing import no_garbage_collection
from umem.bench.results import AllocatorName
from umem.bench.train.jobs import TrainingAnswer, TrainingJob
from umem.bench.train.managed import manager_figures, profile_step, resident_bytes, state_of
from umem.bench.train.results import Variant
from umem.bench.train.step import Training, make_training, place_allocator, require_package
from umem.cuda import _bindings
from umem.errors import HardwareError, UmemError

if TYPE_CHECKING:
    from umem.executor import ManagerStatus

__all__ = ["measure"]

WARM_STEPS = 3
"""Kernels are loaded, the optimizer's state is made, and caches fill."""

MAX_WARM_STEPS = 40
PLAN_PATIENCE_S = 30.0
"""umem's manager has so long, and so many steps, to decide."""

ARRANGING_STEPS = 2
"""They move what a plan wants elsewhere."""

CORRECTED_STEPS = 9
"""For the plan to be corrected by measured bandwidths, on which demand paging does not depend."""

KEPT_LOSSES = 8

MAPPED_BYTES = 256 << 20
MAPPED_PASSES = 5

FOLLOWED = ("running", "resident")
_UNDECIDED = ("warming up", "recording")
"""States of umem's manager."""


def measure(job: TrainingJob) -> TrainingAnswer:
    """Train as a job says, and measure; the allocator is put in place here.

    Raises
    ------
    NotInstalledError
        If what the variant needs cannot be imported.
    UnsupportedError
        Where the variant does not work on this machine.
    """
    require_package(job.variant)
    place_allocator(job)
    mapped_bytes_per_s = None
    if job.variant == "umem-optimizer-host":
        mapped_bytes_per_s = _mapped_bytes_per_s()
    training = make_training(job)
    manager = training.manager
    losses: list[torch.Tensor] = []
    with training.around:
        warm_steps = _warm_up(training, losses)
        before = None if manager is None else manager.status()
        if before is not None and state_of(manager) == "off":
            return TrainingAnswer(
                state="off",
                reason=before.reason or "umem's manager gave no reason",
                warm_steps=warm_steps,
                manager=manager_figures(before, before, job.steps),
            )
        on_gpu = job.device == "cuda"
        allocator = _allocator_of(job.variant)
        if on_gpu:
            reset_peaks(allocator)
        steps_s, sm_clock_mhz = _time_steps(training, job.steps, losses, on_gpu)
        reserved_bytes, allocated_bytes = peaks(allocator) if on_gpu else (None, None)
        figures, resident, notes = None, None, _notes(job.variant, before)
        if before is not None:
            figures = manager_figures(before, manager.status(), job.steps)
            resident = resident_bytes(training)
        profile = None
        if allocator != "torch":
            profile, missing = profile_step(training, f"{job.method} {job.variant}")
            notes += missing
        if before is not None and manager.status().corrections != before.corrections:
            notes += ("planned again, from measured bandwidths, after the warm-up",)
    return TrainingAnswer(
        state="measured",
        parameters=sum(weight.numel() for weight in training.model.parameters()),
        warm_steps=warm_steps,
        plan_running=None if before is None else str(before.state) in FOLLOWED,
        manager=figures,
        steps_s=tuple(steps_s),
        sm_clock_mhz=sm_clock_mhz,
        losses_hex=tuple(float(loss).hex() for loss in losses[:KEPT_LOSSES]),
        peak_allocated_bytes=allocated_bytes,
        peak_reserved_bytes=reserved_bytes,
        resident_bytes=resident,
        optimizer_state_bytes=_state_bytes(training.optimizers),
        mapped_bytes_per_s=mapped_bytes_per_s,
        profile=profile,
        notes=notes,
        device_flops_per_s=_device_flops_per_s() if on_gpu and job.variant == "stock" else None,
    )


def _allocator_of(variant: Variant) -> AllocatorName:
    if variant == "rmm-managed":
        return "rmm-pool"
    return "umem" if variant.startswith("umem-") else "torch"


def _notes(variant: Variant, status: ManagerStatus | None) -> tuple[str, ...]:
    if variant == "bnb-paged-adamw":
        return ("its state is managed memory of its own, which torch does not count",)
    if variant == "umem-backward-step" and status is not None and not status.step_in_backward:
        return ("the optimizer's step stayed behind the backward pass",)
    return ()


def _warm_up(training: Training, losses: list[torch.Tensor]) -> int:
    """Train until times are those of later steps; the number of steps."""
    losses += [training.step() for _ in range(WARM_STEPS)]
    if training.manager is not None:
        end_s = time.monotonic() + PLAN_PATIENCE_S
        while (
            state_of(training.manager) in _UNDECIDED
            and len(losses) < MAX_WARM_STEPS
            and time.monotonic() < end_s
        ):
            losses.append(training.step())
            float(losses[-1])  # the plan starts between steps: this loop must not run ahead
        if state_of(training.manager) == "running":
            pages_on_demand = training.manager.status().planner == "fault"
            more = ARRANGING_STEPS + (0 if pages_on_demand else CORRECTED_STEPS)
            losses += [training.step() for _ in range(more)]
    float(losses[-1])
    return len(losses)


def _time_steps(
    training: Training, steps: int, losses: list[torch.Tensor], on_gpu: bool
) -> tuple[list[float], float | None]:
    """Times of steps one after the other, by the device's clock, and its median SM clock, MHz.

    Nobody waits between steps.
    """
    with no_garbage_collection():
        if not on_gpu:
            marks_s = [time.perf_counter()]
            for _ in range(steps):
                losses.append(training.step())
                marks_s.append(time.perf_counter())
            return [after - before for before, after in pairwise(marks_s)], None
        read_clock = _clock_reader()
        clocks_mhz = []
        torch.cuda.synchronize()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        marks[0].record()
        for mark in marks[1:]:
            losses.append(training.step())
            mark.record()
            clocks_mhz.append(read_clock())  # after the mark, while the device is busy
        torch.cuda.synchronize()
    known_mhz = [it for it in clocks_mhz if it is not None]
    return (
        [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)],
        statistics.median(known_mhz) if known_mhz else None,
    )


def _clock_reader() -> Callable[[], int | None]:
    """What reads the SM clock, MHz. NVML starts here, so that it does not between steps."""
    try:
        address = _bindings.device_pci_address(torch.cuda.current_device())
    except UmemError:
        return lambda: None
    read = partial(_bindings.nvml_sm_clock_mhz, address)
    read()
    return read


def _state_bytes(optimizers: Sequence[torch.optim.Optimizer]) -> int | None:
    """Bytes of what torch's own optimizers keep for each parameter; None for the others."""
    if not all(isinstance(it, torch.optim.AdamW) for it in optimizers):
        return None
    return sum(
        value.nbytes
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim()  # not the number of steps
    )


def _device_flops_per_s() -> float | None:
    """What the hardware's profile says of matrix products in bfloat16."""
    from umem.hardware import Hardware

    try:
        return Hardware.detect().flops_per_s.get("bf16")
    except HardwareError:
        return None


def _mapped_bytes_per_s() -> float:
    """Bandwidth of reading and writing host memory in place, both counted."""
    import umem

    with umem.tensor_class("optimizer_state"):
        block = torch.zeros(MAPPED_BYTES // 4, device="cuda")
    block.add_(1)
    times_s = []
    for _ in range(MAPPED_PASSES):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        block.add_(1)
        after.record()
        after.synchronize()
        times_s.append(before.elapsed_time(after) / 1e3)
    bandwidth = 2 * block.nbytes / statistics.median(times_s)
    del block
    torch.cuda.empty_cache()
    return bandwidth
