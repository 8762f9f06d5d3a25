"""What a saved recording has beside its records: hints, residency, and the ideal time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from umem.classes import TensorClass
from umem.documents import Document, digits, digits_text, integers, numbers, refuse, shown
from umem.report import HintReport, HintUse
from umem.telemetry._file_checks import refuse_outside, refuse_where, require_lengths
from umem.telemetry._hints import HINT_FIGURES, HINT_OPS, HINT_TOTALS
from umem.telemetry._recording import Recording
from umem.telemetry._residency import MAX_SAMPLES, Residency

__all__ = ["EXTRA_KEYS", "extra_columns", "read_extras"]

_CLASSES = tuple(TensorClass)
_MOST_REPORTS = 2**16
_MOST_USES = 2**21
_LONGEST_S = 1e9
_LARGEST = 2**53
_NO_ENGINE = -1
"""In the place of totals of a step that no engine drove."""

_TIMES = ("driver_s", "late_s")
_FIGURE_KEYS = tuple(f"hint_{name}" for name in HINT_FIGURES)
_TOTAL_KEYS = tuple(f"hint_{name}" for name in HINT_TOTALS)
_HINT_KEYS = ("hint_step", "hint_op", "hint_class", *_FIGURE_KEYS)
EXTRA_KEYS = (
    "ideal_s",
    *_TOTAL_KEYS,
    *_HINT_KEYS,
    "residency_ns",
    "resident_bytes",
)
"""Keys that the second format adds: an engine's totals by step, hints by step, operation and
class, and samples, each of which has as many bytes as there are classes."""


def extra_columns(recording: Recording) -> dict[str, Any]:
    """The values of :data:`EXTRA_KEYS`."""
    uses = [
        (step, use)
        for step, report in enumerate(recording.hints)
        if report is not None
        for use in report.uses
    ]
    residency = recording.residency
    return {
        "ideal_s": recording.ideal_s,
        **{
            key: [_NO_ENGINE if it is None else getattr(it, name) for it in recording.hints]
            for key, name in zip(_TOTAL_KEYS, HINT_TOTALS, strict=True)
        },
        "hint_step": [step for step, _ in uses],
        "hint_op": digits_text(np.array([HINT_OPS.index(use.op) for _, use in uses])),
        "hint_class": digits_text(np.array([use.tensor_class.number for _, use in uses])),
        **{
            key: [getattr(use, name) for _, use in uses]
            for key, name in zip(_FIGURE_KEYS, HINT_FIGURES, strict=True)
        },
        "residency_ns": [] if residency is None else residency.time_ns.tolist(),
        "resident_bytes": [] if residency is None else residency.resident_bytes.ravel().tolist(),
    }


def read_extras(document: Document, steps: int) -> dict[str, Any]:
    """Fields of a recording that :func:`extra_columns` wrote.

    Parameters
    ----------
    document
        With the keys of :data:`EXTRA_KEYS`.
    steps
        Marked steps of the recording.

    Raises
    ------
    UmemError
        If they contradict themselves or the steps.
    """
    return {
        "ideal_s": _ideal_s(document),
        "hints": _hints(document, steps),
        "residency": _residency(document),
    }


def _ideal_s(document: Document) -> float | None:
    value = document.data["ideal_s"]
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 < value <= _LONGEST_S:
        refuse(document, "ideal_s", f"{shown(value)} is no time above 0 in seconds, nor null")
    return float(value)


def _hints(document: Document, steps: int) -> tuple[HintReport | None, ...]:
    totals = {key: integers(document, key, _MOST_REPORTS, np.int64) for key in _TOTAL_KEYS}
    require_lengths(document, totals)
    first = totals[_TOTAL_KEYS[0]]
    for key, column in totals.items():
        refuse_outside(document, key, column, _NO_ENGINE, _LARGEST)
        differ = (column == _NO_ENGINE) != (first == _NO_ENGINE)
        refuse_where(document, key, differ, f"not of the steps that {_TOTAL_KEYS[0]} has")
    if len(first) not in (0, max(steps, 1)):
        refuse(
            document, _TOTAL_KEYS[0], f"{len(first)} entries for {steps} steps: copy the file again"
        )
    uses = _uses(document, first)
    rows = zip(*(column.tolist() for column in totals.values()), strict=True)
    return tuple(
        None if row[0] == _NO_ENGINE else HintReport(tuple(uses[step]), *row)
        for step, row in enumerate(rows)
    )


def _uses(document: Document, totals: npt.NDArray[np.int64]) -> list[list[HintUse]]:
    column: dict[str, npt.NDArray[Any]] = {
        "hint_step": integers(document, "hint_step", _MOST_USES, np.int64),
        "hint_op": digits(document, "hint_op", _MOST_USES, len(HINT_OPS) - 1),
        "hint_class": digits(document, "hint_class", _MOST_USES, len(_CLASSES) - 1),
    }
    for key, name in zip(_FIGURE_KEYS, HINT_FIGURES, strict=True):
        if name in _TIMES:
            column[key] = numbers(document, key, _MOST_USES)
        else:
            column[key] = integers(document, key, _MOST_USES, np.int64)
    require_lengths(document, column)
    refuse_outside(document, "hint_step", column["hint_step"], 0, len(totals) - 1)
    idle = totals[column["hint_step"]] == _NO_ENGINE
    refuse_where(document, "hint_step", idle, "a step without an engine")
    for key, name in zip(_FIGURE_KEYS, HINT_FIGURES, strict=True):
        largest = int(_LONGEST_S) if name in _TIMES else _LARGEST
        refuse_outside(document, key, column[key], 0, largest)
    uses: list[list[HintUse]] = [[] for _ in totals]
    rows = zip(*(column[key].tolist() for key in _HINT_KEYS), strict=True)
    for step, op, number, *figures in rows:
        use = HintUse(
            HINT_OPS[op], _CLASSES[number], **dict(zip(HINT_FIGURES, figures, strict=True))
        )
        uses[step].append(use)
    return uses


def _residency(document: Document) -> Residency | None:
    times = integers(document, "residency_ns", MAX_SAMPLES, np.int64)
    sizes = integers(document, "resident_bytes", MAX_SAMPLES * len(_CLASSES), np.int64)
    if len(sizes) != len(times) * len(_CLASSES):
        refuse(
            document,
            "resident_bytes",
            f"{len(sizes)} entries for {len(times)} samples of {len(_CLASSES)} classes: copy the "
            "file again",
        )
    for key, column in (("residency_ns", times), ("resident_bytes", sizes)):
        refuse_outside(document, key, column, 0, _LARGEST)
    late = np.diff(times, prepend=0) < 0
    refuse_where(document, "residency_ns", late, "before the sample in front of it")
    return Residency(times, sizes.reshape(-1, len(_CLASSES))) if len(times) else None
