"""What makes a trace valid, and the bounds within which umem works."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from umem.core.classes import TensorClass
from umem.core.errors import TraceError
from umem.trace.model import PhaseKind, Precision, Trace

__all__ = [
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
MAX_TOTAL_BYTES = 2**60
"""Of all tensors together: what sums of 64-bit integers hold with room to spare."""
MAX_PHASE_S = 1e6
MAX_NAME_LENGTH = 1024
MAX_METADATA = 256

# Names from a stranger's file reach terminals, and files in UTF-8.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")

_DTYPES = {
    "tensor_bytes": np.int64,
    "tensor_class": np.uint8,
    "persistent": np.bool_,
    "first_phase": np.int32,
    "last_phase": np.int32,
    "phase_kind": np.uint8,
    "phase_precision": np.uint8,
    "flops": np.float64,
    "memory_bytes": np.int64,
    "duration_s": np.float64,
    "access_start": np.int64,
    "access_tensor": np.int32,
    "access_mode": np.uint8,
}
_TENSOR_COLUMNS = ("tensor_bytes", "tensor_class", "persistent", "first_phase", "last_phase")
_PHASE_COLUMNS = ("phase_kind", "phase_precision", "flops", "memory_bytes", "duration_s")


def check_trace(trace: Trace, place: str) -> None:
    """Check that a trace is whole, within bounds, and does not contradict itself.

    Everything that :class:`Trace` promises is checked: lengths and types of the columns, sizes,
    classes, lifetimes, accesses, durations, names and metadata.

    Parameters
    ----------
    trace
        Of T tensors, P phases and A accesses; time and memory are of the order of T + P + A.
    place
        Where the trace comes from, such as the path of its file: what the error starts with.

    Raises
    ------
    TraceError
        At the first thing that is wrong: place, column, entry, and what is valid.

    Examples
    --------
    >>> check_trace(trace, "mine.json.gz")  # doctest: +SKIP
    Traceback (most recent call last):
    TraceError: mine.json.gz: tensor_bytes[3]: a tensor of 0 bytes; give a size from 1 to 2**50
    """
    _check_names(trace, place)
    _check_metadata(trace, place)
    _check_columns(trace, place)
    _check_tensors(trace, place)
    _check_phases(trace, place)
    _check_accesses(trace, place)


def _check_names(trace: Trace, place: str) -> None:
    for key in ("name", "source"):
        _require_text(place, key, (getattr(trace, key),), lambda _: "")
    if not trace.name:
        _refuse(place, "name", "empty; name the workload")
    for key, most in (("tensor_names", MAX_TENSORS), ("phase_names", MAX_PHASES)):
        names = getattr(trace, key)
        if not isinstance(names, tuple):
            _refuse(place, key, f"a {type(names).__name__}; give a tuple of text")
        if not 1 <= len(names) <= most:
            _refuse(place, key, f"{len(names)} entries; a trace has from 1 to {most}")
        _require_text(place, key, names, "[{}]".format)


def _require_text(
    place: str, key: str, values: Sequence[object], suffix: Callable[[int], str]
) -> None:
    """Refuse the first of `values` that is no text, too long, or hostile to a terminal."""
    # Three passes in C over a million names; the culprit is looked for only if there is one.
    if (
        all(issubclass(kind, str) for kind in set(map(type, values)))
        and max(map(len, values), default=0) <= MAX_NAME_LENGTH  # type: ignore[arg-type]
        and _UNPRINTABLE.search("".join(values)) is None  # type: ignore[arg-type]
    ):
        return
    for index, value in enumerate(values):
        where = key + suffix(index)
        if not isinstance(value, str):
            _refuse(place, where, f"a {type(value).__name__}; give text")
        if len(value) > MAX_NAME_LENGTH:
            _refuse(place, where, f"{len(value)} characters; give at most {MAX_NAME_LENGTH}")
        control = _UNPRINTABLE.search(value)
        if control:
            _refuse(place, where, f"holds the control character {control[0]!a}; remove it")


def _check_metadata(trace: Trace, place: str) -> None:
    if len(trace.metadata) > MAX_METADATA:
        _refuse(place, "metadata", f"{len(trace.metadata)} keys; give at most {MAX_METADATA}")
    _require_text(place, "metadata", tuple(trace.metadata), lambda _: "")
    for key, value in trace.metadata.items():
        where = f"metadata.{key}"
        if isinstance(value, str):
            _require_text(place, where, (value,), lambda _: "")
        elif isinstance(value, bool) or not isinstance(value, int | float):
            _refuse(place, where, f"a {type(value).__name__}; give text or a number")
        elif not math.isfinite(value):
            _refuse(place, where, f"{value}; give a finite number")
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            _refuse(place, where, "an integer of more than 64 bits; give a smaller one")


def _check_columns(trace: Trace, place: str) -> None:
    if not isinstance(trace.access_tensor, np.ndarray):
        _refuse(place, "access_tensor", "not an array; give a one-dimensional NumPy array")
    lengths = dict.fromkeys(_TENSOR_COLUMNS, trace.tensor_count)
    lengths |= dict.fromkeys(_PHASE_COLUMNS, trace.phase_count)
    lengths["access_start"] = trace.phase_count + 1
    lengths["access_tensor"] = lengths["access_mode"] = trace.access_tensor.size
    if trace.access_tensor.size > MAX_ACCESSES:
        _refuse(
            place, "access_tensor", f"{trace.access_tensor.size} accesses; at most {MAX_ACCESSES}"
        )
    for key, dtype in _DTYPES.items():
        column = getattr(trace, key)
        if column is None and key == "duration_s":
            continue
        if not isinstance(column, np.ndarray) or column.ndim != 1:
            _refuse(place, key, "not a column; give a one-dimensional NumPy array")
        if column.dtype != dtype:
            _refuse(place, key, f"of {column.dtype}; make it {np.dtype(dtype)}")
        if len(column) != lengths[key]:
            _refuse(place, key, f"{len(column)} entries; it takes {lengths[key]}")


def _check_tensors(trace: Trace, place: str) -> None:
    sizes, first, last = trace.tensor_bytes, trace.first_phase, trace.last_phase
    _refuse_where(
        (sizes <= 0) | (sizes > MAX_TENSOR_BYTES),
        place,
        "tensor_bytes",
        lambda t: f"a tensor of {sizes[t]} bytes; give a size from 1 to 2**50",
    )
    total_bytes = sum(sizes.tolist())  # in Python's integers, which do not overflow
    if total_bytes >= MAX_TOTAL_BYTES:
        _refuse(place, "tensor_bytes", f"{total_bytes} bytes in all; stay below 2**60")
    _require_enum(place, "tensor_class", trace.tensor_class, range(len(TensorClass)))
    final = trace.phase_count - 1
    _require_phase(place, "first_phase", first, final)
    _require_phase(place, "last_phase", last, final)
    _refuse_where(
        first > last,
        place,
        "first_phase",
        lambda t: f"{first[t]} comes after last_phase[{t}] = {last[t]}; exchange them",
    )
    _refuse_where(
        trace.persistent & ((first != 0) | (last != final)),
        place,
        "persistent",
        lambda t: (
            f"a persistent tensor lives through the phases 0 to {final}, and this one from "
            f"{first[t]} to {last[t]}; give it the whole step, or make it not persistent"
        ),
    )


def _require_phase(place: str, key: str, column: npt.NDArray[np.int32], final: int) -> None:
    _refuse_where(
        (column < 0) | (column > final),
        place,
        key,
        lambda t: f"{column[t]} is no phase; give one from 0 to {final}",
    )


def _check_phases(trace: Trace, place: str) -> None:
    _require_enum(place, "phase_kind", trace.phase_kind, list(PhaseKind))
    _require_enum(place, "phase_precision", trace.phase_precision, list(Precision))
    _refuse_where(
        ~(np.isfinite(trace.flops) & (trace.flops >= 0)),
        place,
        "flops",
        lambda p: f"{trace.flops[p]}; give a finite number, 0 where none were counted",
    )
    _refuse_where(
        (trace.memory_bytes < 0) | (trace.memory_bytes >= MAX_TOTAL_BYTES),
        place,
        "memory_bytes",
        lambda p: f"{trace.memory_bytes[p]}; give bytes from 0 to below 2**60",
    )
    durations = trace.duration_s
    if durations is not None:
        _refuse_where(
            ~((durations >= 0) & (durations < MAX_PHASE_S)),  # so that NaN is refused
            place,
            "duration_s",
            lambda p: f"{durations[p]}; give seconds from 0 to below {MAX_PHASE_S:.0f}",
        )


def _check_accesses(trace: Trace, place: str) -> None:
    start, tensor = trace.access_start, trace.access_tensor
    count = len(tensor)
    for at, bound in ((0, 0), (trace.phase_count, count)):
        if start[at] != bound:
            _refuse(place, f"access_start[{at}]", f"{start[at]}; it is {bound} by definition")
    _refuse_where(
        start[:-1] > start[1:],  # a difference of 64-bit integers could overflow
        place,
        "access_start",
        lambda p: f"{start[p]} is followed by {start[p + 1]}; the bounds never fall",
    )
    _refuse_where(
        (tensor < 0) | (tensor >= trace.tensor_count),
        place,
        "access_tensor",
        lambda a: (
            f"tensor {tensor[a]} is not among the tensors 0 to {trace.tensor_count - 1}; correct it"
        ),
    )
    # READ, WRITE, and both
    _require_enum(place, "access_mode", trace.access_mode, [1, 2, 3])
    phase = np.repeat(np.arange(trace.phase_count, dtype=np.int64), np.diff(start))
    first, last = trace.first_phase[tensor], trace.last_phase[tensor]
    _refuse_where(
        (phase < first) | (phase > last),
        place,
        "access_tensor",
        lambda a: (
            f"phase {phase[a]} uses tensor {tensor[a]}, which lives from phase {first[a]} to "
            f"{last[a]}; widen first_phase and last_phase"
        ),
    )
    pairs = phase * trace.tensor_count + tensor
    order = np.argsort(pairs, kind="stable")
    again = np.zeros(count, dtype=np.bool_)
    again[order[1:]] = np.diff(pairs[order]) == 0
    _refuse_where(
        again,
        place,
        "access_tensor",
        lambda a: f"phase {phase[a]} uses tensor {tensor[a]} twice; join the two",
    )


def _require_enum(
    place: str, key: str, column: npt.NDArray[np.uint8], valid: Sequence[int]
) -> None:
    _refuse_where(
        ~np.isin(column, valid),
        place,
        key,
        lambda index: (
            f"{column[index]}; give one of {', '.join(str(int(number)) for number in valid)}"
        ),
    )


def _refuse_where(
    bad: npt.NDArray[np.bool_], place: str, key: str, message: Callable[[Any], str]
) -> None:
    """Refuse the first entry of a column that is bad; `message` words it from its index."""
    if bad.any():
        index = int(bad.argmax())
        _refuse(place, f"{key}[{index}]", message(index))


def _refuse(place: str, where: str, message: str) -> NoReturn:
    raise TraceError(f"{place}: {where}: {message}")
