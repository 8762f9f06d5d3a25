"""The last lines of `umem run`: steps, their speed beside the prediction, copies, and the card."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator

from umem.core.errors import UmemError
from umem.core.units import format_bytes
from umem.cuda.bindings import device_pci_address, nvml_process_bytes
from umem.hardware.capabilities import detect
from umem.runtime.copies import copy_counts
from umem.runtime.managed_runs import ManagedRun, managed_runs
from umem.runtime.state import is_enabled, runtime

__all__ = ["end_lines"]

_LEAST_WAIT = 0.02
"""Share of a step: less is not worth a line."""


def end_lines() -> list[str]:
    """Lines about what umem managed in this process; none if it managed nothing."""
    runs = managed_runs()
    if not runs:
        return []
    most = max(runs, key=lambda run: run.count)
    return [_counts(most, len(runs) - 1), _speed(most), *_waited(most), _copied(), *_cards()]


def _counts(run: ManagedRun, others: int) -> str:
    words = f"{run.count:,} {run.unit}s of {run.model}, {run.planned:,} of them under a plan"
    if late := run.late():
        words += f"; {late:,} uses were early and waited"
    if others:
        words += f"; {others} more managed beside it"
    return words


def _speed(run: ManagedRun) -> str:
    if run.measured_s is None:
        return "no speed: too few steps since the last plan"
    words = f"{1 / run.measured_s:.3g} {run.unit}s/s, {run.measured_s:.3g} s each"
    if run.predicted_s is not None:
        words += f"; {run.predicted_s:.3g} s predicted"
    return words


def _waited(run: ManagedRun) -> Iterator[str]:
    if run.measured_s and run.waited_s and run.waited_s > _LEAST_WAIT * run.measured_s:
        yield (
            f"{run.waited_s:.3g} s of each {run.unit} went to memory that had to be made free or "
            "put together first: a larger budget needs less of that"
        )


def _copied() -> str:
    by_class: dict[str, dict[str, int]] = defaultdict(lambda: {"to_device": 0, "to_host": 0})
    for (direction, tensor_class), size_bytes in copy_counts.copied_bytes().items():
        by_class[tensor_class.value.replace("_", " ")][direction] += size_bytes
    if not by_class:
        return "nothing was copied"
    parts = (
        f"{name} {format_bytes(sizes['to_device'])} and {format_bytes(sizes['to_host'])}"
        for name, sizes in by_class.items()
    )
    return f"copied to the device and to the host: {', '.join(parts)}"


def _cards() -> Iterator[str]:
    """What this process has on each card; not under managed memory, whose pages stay there.

    Where NVML does not tell processes apart: what the card shows more than before.
    """
    if not is_enabled():
        return
    state = runtime()
    for number, before in enumerate(state.capabilities):
        kinds = state.allocator.kind_stats(number)
        try:
            free_bytes = detect(number).free_bytes
        except UmemError:  # the driver refuses all after an illegal access
            return
        if (
            not kinds["device"]["reserved_bytes"]
            or kinds["managed"]["reserved_bytes"]
            or before.integrated
            or before.free_bytes is None
            or free_bytes is None
        ):
            continue
        own_bytes = nvml_process_bytes(device_pci_address(number)).get(os.getpid())
        held, used, budget = map(
            format_bytes,
            (
                kinds["device"]["reserved_bytes"],
                before.free_bytes - free_bytes if own_bytes is None else own_bytes,
                state.device_budgets[number] or before.total_bytes,
            ),
        )
        whose, rest = (
            (f"GPU {number} has {used} more in use than before", ", libraries, and other processes")
            if own_bytes is None
            else (f"this process has {used} of GPU {number} in use", " and libraries")
        )
        yield (
            f"NVML: {whose}: umem {held}, of a budget of {budget}; the rest is CUDA's context{rest}"
        )
