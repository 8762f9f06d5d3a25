"""What several readers need of a trace's accesses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from umem.trace._model import Access, Trace

__all__ = ["first_and_last_use", "phase_of_access", "with_accesses", "written_tensors"]


def phase_of_access(trace: Trace) -> npt.NDArray[np.int64]:
    """Phase of each access, int64[A]."""
    return np.repeat(np.arange(trace.phase_count), np.diff(trace.access_start))


def with_accesses(
    trace: Trace,
    phase: npt.NDArray[np.int64],
    tensor: npt.NDArray[np.int32],
    mode: npt.NDArray[np.uint8],
) -> Trace:
    """The trace with these accesses in place of its own: the phase, tensor and mode of each.

    They come in any order; those of one phase stay in theirs.
    """
    order = np.argsort(phase, kind="stable")
    return replace(
        trace,
        access_start=np.searchsorted(phase[order], np.arange(trace.phase_count + 1)),
        access_tensor=tensor[order],
        access_mode=mode[order],
    )


def first_and_last_use(trace: Trace) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """First and last phase that use each tensor, int64[T] each; P and -1 where none does."""
    phase = phase_of_access(trace)
    first = np.full(trace.tensor_count, trace.phase_count, np.int64)
    last = np.full(trace.tensor_count, -1, np.int64)
    np.minimum.at(first, trace.access_tensor, phase)
    np.maximum.at(last, trace.access_tensor, phase)
    return first, last


def written_tensors(trace: Trace) -> npt.NDArray[np.bool_]:
    """Which tensors any phase writes, bool[T]."""
    written = np.zeros(trace.tensor_count, np.bool_)
    written[trace.access_tensor[(trace.access_mode & Access.WRITE) > 0]] = True
    return written
