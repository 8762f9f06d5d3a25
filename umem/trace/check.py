"""Checks that make a trace valid, and the bounds within which umem works."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from umem.core.classes import TensorClass
from umem.core.errors import TraceError
from umem.io.columns import Checker
from umem.trace.model import PhaseKind, Precision, Trace

__all__ = [
    "DTYPES",
    "MAX_ACCESSES",
    "MAX_METADATA",
    "MAX_NAME_LENGTH",
    "MAX_PHASES",
    "MAX_PHASE_S",
    "MAX_TENSORS",
    "MAX_TENSOR_BYTES",
    "check_trace",
]

MAX_TENSORS = 2**20
MAX_PHASES = 2**20
MAX_ACCESSES = 2**22
MAX_TENSOR_BYTES = 2**50
MAX_TOTAL_BYTES = 2**60 - 1
"""Of all tensors together: sums of 64-bit integers hold it with room to spare."""
MAX_PHASE_S = 1e6
MAX_NAME_LENGTH = 1024
MAX_METADATA = 256

# Names from a stranger's file reach terminals, and files in UTF-8.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")

_TENSOR_DTYPES: dict[str, Any] = {
    "tensor_bytes": np.int64,
    "tensor_class": np.uint8,
    "persistent": np.bool_,
    "first_phase": np.int32,
    "last_phase": np.int32,
}
_PHASE_DTYPES: dict[str, Any] = {
    "phase_kind": np.uint8,
    "phase_precision": np.uint8,
    "flops": np.float64,
    "memory_bytes": np.int64,
    "duration_s": np.float64,
}
_ACCESS_DTYPES: dict[str, Any] = {"access_tensor": np.int32, "access_mode": np.uint8}
DTYPES: Mapping[str, Any] = {
    **_TENSOR_DTYPES,
    **_PHASE_DTYPES,
    "access_start": np.int64,
    **_ACCESS_DTYPES,
}
"""Types of a trace's columns; ``duration_s`` may be missing."""


def check_trace(trace: Trace, place: str) -> None:
    """Check that a trace is whole, within bounds, and does not contradict itself.

    Everything that :class:`Trace` promises is checked: lengths and types of the columns, sizes,
    classes, lifetimes, accesses, durations, names and metadata. Time and memory are of the order of
    the numbers of tensors, phases and accesses.

    Raises TraceError at the first thing that is wrong: `place`, such as the path of a file, column,
    entry, and the valid values.

    Examples
    --------
    >>> check_trace(trace, "mine.npz")  # doctest: +SKIP
    Traceback (most recent call last):
    TraceError: mine.npz: tensor_bytes[3]: 0 is not from 1 to 1125899906842624
    """
    check = Checker(place, TraceError)
    _check_texts(trace, check)
    _check_columns(trace, check)
    _check_tensors(trace, check)
    _check_phases(trace, check)
    _check_accesses(trace, check)


def _check_texts(trace: Trace, check: Checker) -> None:
    _require_texts("name", (trace.name,), check)
    _require_texts("source", (trace.source,), check)
    if not trace.name:
        check.refuse("name", "empty; name the workload")
    for key, most in (("tensor_names", MAX_TENSORS), ("phase_names", MAX_PHASES)):
        names = getattr(trace, key)
        if not isinstance(names, tuple):
            check.refuse(key, f"a {type(names).__name__}; give a tuple of text")
        if not 1 <= len(names) <= most:
            check.refuse(key, f"{len(names)} entries; a trace has from 1 to {most}")
        _require_texts(key, names, check)
    if len(trace.metadata) > MAX_METADATA:
        check.refuse("metadata", f"{len(trace.metadata)} keys; give at most {MAX_METADATA}")
    _require_texts("metadata", tuple(trace.metadata), check)
    for key, value in trace.metadata.items():
        where = f"metadata.{key}"
        if isinstance(value, str):
            _require_texts(where, (value,), check)
        elif isinstance(value, bool) or not isinstance(value, int | float):
            check.refuse(where, f"a {type(value).__name__}; give text or a number")
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            check.refuse(where, "an integer of more than 64 bits; give a smaller one")
        elif not math.isfinite(value):
            check.refuse(where, f"{value}; give a finite number")


def _require_texts(key: str, values: Sequence[Any], check: Checker) -> None:
    """Refuse the first value that is no text, too long, or hostile to a terminal."""
    # Three passes in C over a million names; the culprit is looked for only if there is one.
    if (
        all(issubclass(kind, str) for kind in set(map(type, values)))
        and max(map(len, values), default=0) <= MAX_NAME_LENGTH
        and _UNPRINTABLE.search("".join(values)) is None
    ):
        return
    for index, value in enumerate(values):
        where = key if len(values) == 1 else f"{key}[{index}]"
        if not isinstance(value, str):
            check.refuse(where, f"a {type(value).__name__}; give text")
        if len(value) > MAX_NAME_LENGTH:
            check.refuse(where, f"{len(value)} characters; give at most {MAX_NAME_LENGTH}")
        if control := _UNPRINTABLE.search(value):
            check.refuse(where, f"holds the control character {control[0]!a}; remove it")


def _check_columns(trace: Trace, check: Checker) -> None:
    check.require_column("access_tensor", trace.access_tensor, np.int32)
    access_count = len(trace.access_tensor)
    if access_count > MAX_ACCESSES:
        check.refuse("access_tensor", f"{access_count} accesses; at most {MAX_ACCESSES}")
    lengths = dict.fromkeys(_TENSOR_DTYPES, trace.tensor_count)
    lengths |= dict.fromkeys(_PHASE_DTYPES, trace.phase_count)
    lengths |= dict.fromkeys(_ACCESS_DTYPES, access_count)
    lengths["access_start"] = trace.phase_count + 1
    for key, dtype in DTYPES.items():
        column = getattr(trace, key)
        if column is not None or key != "duration_s":
            check.require_column(key, column, dtype, lengths[key])


def _check_tensors(trace: Trace, check: Checker) -> None:
    sizes, first, last = trace.tensor_bytes, trace.first_phase, trace.last_phase
    final = trace.phase_count - 1
    check.require_range("tensor_bytes", sizes, 1, MAX_TENSOR_BYTES)
    total_bytes = sum(sizes.tolist())  # in Python's integers, which do not overflow
    if total_bytes > MAX_TOTAL_BYTES:
        check.refuse("tensor_bytes", f"{total_bytes} bytes in all; stay below 2**60")
    check.require_range("tensor_class", trace.tensor_class, 0, len(TensorClass) - 1)
    check.require_range("first_phase", first, 0, final)
    check.require_range("last_phase", last, 0, final)
    check.refuse_where(
        first > last,
        "first_phase",
        lambda t: f"{first[t]} comes after last_phase[{t}] = {last[t]}; exchange them",
    )
    check.refuse_where(
        trace.persistent & ((first != 0) | (last != final)),
        "persistent",
        lambda t: (
            f"a persistent tensor lives through the phases 0 to {final}, and this one from "
            f"{first[t]} to {last[t]}; give it the whole step, or make it not persistent"
        ),
    )


def _check_phases(trace: Trace, check: Checker) -> None:
    check.require_range("phase_kind", trace.phase_kind, 0, max(PhaseKind))
    check.require_range("phase_precision", trace.phase_precision, 0, max(Precision))
    check.require_range("flops", trace.flops, 0, sys.float_info.max)
    check.require_range("memory_bytes", trace.memory_bytes, 0, MAX_TOTAL_BYTES)
    if trace.duration_s is not None:
        check.require_range("duration_s", trace.duration_s, 0, MAX_PHASE_S)


def _check_accesses(trace: Trace, check: Checker) -> None:
    start, tensor = trace.access_start, trace.access_tensor
    for at, bound in ((0, 0), (trace.phase_count, len(tensor))):
        if start[at] != bound:
            check.refuse(f"access_start[{at}]", f"{start[at]}; it is {bound} by definition")
    check.refuse_where(
        start[:-1] > start[1:],  # a difference of 64-bit integers could overflow
        "access_start",
        lambda p: f"{start[p]} is followed by {start[p + 1]}; the bounds never fall",
    )
    check.require_range("access_tensor", tensor, 0, trace.tensor_count - 1)
    check.require_range("access_mode", trace.access_mode, 1, 3)
    phase = np.repeat(np.arange(trace.phase_count, dtype=np.int64), np.diff(start))
    first, last = trace.first_phase[tensor], trace.last_phase[tensor]
    check.refuse_where(
        (phase < first) | (phase > last),
        "access_tensor",
        lambda a: (
            f"phase {phase[a]} uses tensor {tensor[a]}, which lives from phase {first[a]} to "
            f"{last[a]}; widen first_phase and last_phase"
        ),
    )
    pairs = phase * trace.tensor_count + tensor
    order = np.argsort(pairs, kind="stable")
    again = np.zeros(len(tensor), dtype=np.bool_)
    again[order[1:]] = np.diff(pairs[order]) == 0
    check.refuse_where(
        again,
        "access_tensor",
        lambda a: f"phase {phase[a]} uses tensor {tensor[a]} twice; join the two",
    )
