"""Durations of phases, from what they compute and move."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from umem.core.errors import HardwareError
from umem.hardware.model import PRECISIONS, Hardware
from umem.trace import Trace

__all__ = ["with_durations"]


def with_durations(trace: Trace, hardware: Hardware, *, force: bool = False) -> Trace:
    """Give the phases of a trace the durations that a machine's roofline says.

    A phase takes as long as its arithmetic at the sustained throughput of its precision, or as its
    traffic at the bandwidth of device memory, or as a launch, whichever is longest.

    Parameters
    ----------
    trace
        Durations that it has are kept.
    hardware
        The machine.
    force
        Replace durations that the trace has.

    Returns
    -------
    Trace
        With ``duration_s``; the trace itself where nothing changes.

    Raises
    ------
    HardwareError
        If a phase computes in a precision that the machine has no throughput for.
    """
    if trace.duration_s is not None and not force:
        return trace
    flops_per_s = np.array([hardware.flops_per_s.get(name, np.nan) for name in PRECISIONS])
    computes = trace.flops > 0
    used = np.unique(trace.phase_precision[computes])
    missing = used[np.isnan(flops_per_s[used])]
    if len(missing):
        name = PRECISIONS[missing[0]]
        raise HardwareError(
            f"{hardware.name} has no throughput for {name}, in which the trace {trace.name!r} "
            f"computes: add flops_per_s.{name} to the profile, or choose another one"
        )
    compute_s = np.zeros(trace.phase_count)
    compute_s[computes] = trace.flops[computes] / flops_per_s[trace.phase_precision[computes]]
    memory_s = trace.memory_bytes / hardware.memory_bytes_per_s
    duration_s = np.maximum(np.maximum(compute_s, memory_s), hardware.launch_s)
    return replace(trace, duration_s=duration_s)
