"""What a training worker measures: steps, memory, and the bandwidth of memory used in place."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from umem.core.classes import TensorClass
from umem.core.errors import HardwareError, UmemError
from umem.cuda import bindings as _bindings
from umem_bench._allocators import peaks, reset_peaks
from umem_bench._timing import no_garbage_collection
from umem_bench.results import AllocatorName
from umem_bench.train.jobs import TrainingAnswer, TrainingJob
from umem_bench.train.managed import (
    ARRANGING_STEPS,
    manager_figures,
    profile_step,
    resident_bytes,
    state_of,
    under_one_plan,
)
from umem_bench.train.results import Variant
from umem_bench.train.step import (
    Training,
    incomparable,
    make_training,
    place_allocator,
    require_package,
)

if TYPE_CHECKING:
    from umem.executor import ManagerStatus

__all__ = ["Timed", "measure", "time_steps", "timed_as_planned", "warm_up"]

WARM_STEPS = 3
"""Kernels are loaded, the optimizer's state is made, and caches fill."""

MAX_WARM_STEPS = 40
PLAN_PATIENCE_S = 30.0
"""umem's manager has so long, and so many steps, to decide."""

KEPT_LOSSES = 24
"""A plan runs in the last of them."""

MAPPED_BYTES = 256 << 20
MAPPED_PASSES = 5

FOLLOWED = ("running", "resident")
_UNDECIDED = ("warming up", "recording")
"""States of umem's manager."""


@dataclass(frozen=True)
class Timed:
    """What was measured of the timed steps; None where nobody tells.

    Parameters
    ----------
    steps_s
        Times, seconds.
    sm_clock_mhz
        Median.
    before, after
        What umem's manager said before and after them.
    warm_steps
        Steps before them.
    reserved_bytes, allocated_bytes
        Peaks.
    """

    steps_s: tuple[float, ...]
    sm_clock_mhz: float | None
    before: ManagerStatus | None
    after: ManagerStatus | None
    warm_steps: int
    reserved_bytes: int | None
    allocated_bytes: int | None

    @property
    def is_corrected(self) -> bool:
        """Whether umem planned anew meanwhile."""
        if self.before is None or self.after is None:
            return False
        return self.after.corrections != self.before.corrections

    @property
    def plan_running(self) -> bool | None:
        """Whether each of them went as planned."""
        if self.before is None or self.after is None:
            return None
        return (
            str(self.before.state) in FOLLOWED
            and self.after.state == self.before.state
            and self.after.diverged_steps == self.before.diverged_steps
        )


def measure(job: TrainingJob) -> TrainingAnswer:
    """Train as a job says, and measure; the allocator is put in place here.

    Raises
    ------
    NotInstalledError
        If what the variant needs cannot be imported.
    UnsupportedError
        Where the variant does not work on this machine.
    """
    reason = incomparable(job)
    if reason is not None:
        return TrainingAnswer(state="not comparable", reason=reason)
    require_package(job.variant)
    place_allocator(job)
    mapped_bytes_per_s = None
    if job.variant == "umem-optimizer-host":
        mapped_bytes_per_s = _mapped_bytes_per_s()
    training = make_training(job)
    manager = training.manager
    losses: list[torch.Tensor] = []
    with training.around:
        warm_up(training, losses)
        if manager is not None and state_of(manager) == "off":
            status = manager.status()
            return TrainingAnswer(
                state="off",
                reason=status.reason or "umem's manager gave no reason",
                warm_steps=len(losses),
                manager=manager_figures(status, status, job.steps),
            )
        on_gpu = job.device == "cuda"
        allocator = _allocator_of(job.variant)
        timed = timed_as_planned(training, job.steps, losses, allocator if on_gpu else None)
        notes = _notes(job.variant, timed)
        profile, hinted, figures, resident = None, None, None, None
        if allocator != "torch":
            name = f"{job.method} {job.variant}"
            profile, hinted, missing = under_one_plan(
                training, lambda: profile_step(training, name)
            )
            notes += missing
        if timed.before is not None and timed.after is not None:
            figures = manager_figures(timed.before, timed.after, job.steps)
            resident = under_one_plan(training, lambda: resident_bytes(training))
            if manager.status().corrections != timed.after.corrections:
                notes += ("planned again, from measured bandwidths, after the timed steps",)
        if job.variant == "stock":  # others train for longer before they are timed
            losses += [training.step() for _ in range(KEPT_LOSSES - len(losses))]
    return TrainingAnswer(
        state="measured",
        parameters=sum(weight.numel() for weight in training.model.parameters()),
        warm_steps=timed.warm_steps,
        plan_running=timed.plan_running,
        manager=figures,
        steps_s=timed.steps_s,
        sm_clock_mhz=timed.sm_clock_mhz,
        losses_hex=tuple(float(loss).hex() for loss in losses[:KEPT_LOSSES]),
        peak_allocated_bytes=timed.allocated_bytes,
        peak_reserved_bytes=timed.reserved_bytes,
        resident_bytes=resident,
        optimizer_state_bytes=_state_bytes(training.optimizers),
        host_state_bytes=_host_state_bytes() if job.variant == "umem-optimizer-host" else None,
        unseen_bytes=_unseen_bytes(training.optimizers),
        mapped_bytes_per_s=mapped_bytes_per_s,
        profile=profile,
        hinted=hinted,
        notes=notes,
        device_flops_per_s=_device_flops_per_s() if on_gpu and job.variant == "stock" else None,
    )


def _allocator_of(variant: Variant) -> AllocatorName:
    if variant == "rmm-pool":
        return "rmm-pool"
    return "umem" if variant.startswith("umem-") else "torch"


def _notes(variant: Variant, timed: Timed) -> tuple[str, ...]:
    notes: tuple[str, ...] = ()
    if variant == "bnb-paged-adamw":
        notes += (
            "its state is managed memory of its own, which torch does not count; each step "
            "prefetches it, so that it counts as on the device",
        )
    status = timed.after
    if variant == "umem-backward-step" and status is not None and not status.step_in_backward:
        notes += ("the optimizer's step stayed behind the backward pass",)
    if timed.is_corrected:
        notes += ("planned again, from measured bandwidths, in the timed steps",)
    return notes


def warm_up(training: Training, losses: list[torch.Tensor]) -> None:
    """Train until times are those of later steps.

    Under every planner a plan runs for as many steps as it can take to be corrected: corrections
    are looked for under all of them.
    """
    from umem.executor import SETTLING_STEPS

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
            # The last correction comes before the step after these, which arranges anew.
            more = SETTLING_STEPS + ARRANGING_STEPS
            losses += [training.step() for _ in range(more)]
    float(losses[-1])


def timed_as_planned(
    training: Training, steps: int, losses: list[torch.Tensor], allocator: AllocatorName | None
) -> Timed:
    """Time steps between two answers of umem's manager; anew, once, if it planned anew meanwhile.

    Parameters
    ----------
    training, steps, losses
        As those of :func:`time_steps`.
    allocator
        Whose peaks are taken; None on the CPU.
    """
    timed = _timed(training, steps, losses, allocator)
    if timed.is_corrected:
        losses += [training.step() for _ in range(ARRANGING_STEPS)]
        timed = _timed(training, steps, losses, allocator)
    return timed


def _timed(
    training: Training, steps: int, losses: list[torch.Tensor], allocator: AllocatorName | None
) -> Timed:
    manager, warm_steps = training.manager, len(losses)
    before = None if manager is None else manager.status()
    if allocator is not None:
        reset_peaks(allocator)
    steps_s, sm_clock_mhz = time_steps(training, steps, losses, on_gpu=allocator is not None)
    reserved_bytes, allocated_bytes = (None, None) if allocator is None else peaks(allocator)
    return Timed(
        steps_s=tuple(steps_s),
        sm_clock_mhz=sm_clock_mhz,
        before=before,
        after=None if manager is None else manager.status(),
        warm_steps=warm_steps,
        reserved_bytes=reserved_bytes,
        allocated_bytes=allocated_bytes,
    )


def time_steps(
    training: Training, steps: int, losses: list[torch.Tensor], *, on_gpu: bool
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


def _host_state_bytes() -> int:
    """What umem has allocated for the optimizer's state: more than the state, by whole blocks."""
    import umem

    return umem.memory_by_class()[TensorClass.OPTIMIZER_STATE].allocated_bytes


def _unseen_bytes(optimizers: Sequence[Any]) -> int | None:
    """Managed memory of bitsandbytes' paged optimizers, None without one.

    Each step prefetches it to the device, where it stays as long as there is room.
    """
    for optimizer in optimizers:
        if getattr(optimizer, "is_paged", False):
            paged = optimizer.page_mng.paged_tensors  # of all of them
            return sum(tensor.nbytes for tensor in paged)
    return None


def _device_flops_per_s() -> float | None:
    """What the hardware's profile says of matrix products in bfloat16."""
    from umem.hardware import load_hardware

    try:
        return load_hardware("detect").flops_per_s.get("bf16")
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
