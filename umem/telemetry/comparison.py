"""Predicted against measured: one step, figure by figure."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from umem.core.classes import TensorClass
from umem.core.errors import UmemError
from umem.core.report import UM_CAUSES, Cause, Direction, MeasuredReport, MigrationReport
from umem.core.units import format_bytes, time_unit
from umem.io.columns import Items, Model, read_json

__all__ = [
    "FIGURES",
    "Comparison",
    "Difference",
    "StepFigures",
    "compare",
    "comparison_row",
    "comparison_table",
    "difference_words",
    "figures_of",
    "moved_figures",
    "read_predictions",
]

Unit = Literal["s", "bytes", "share", "count"]

_DIRECTIONS: tuple[Direction, ...] = ("to_device", "to_host")
_SHARES = ("um_time_share", "um_ops_share", "um_bytes_share")
_NAMES = ("workload", "hardware", "policy", "planner")
_REPORTED: dict[str, Unit] = {
    "step_s": "s",
    "exposed_stall_s": "s",
    **dict.fromkeys(_SHARES, "share"),
    "fault_batches": "count",
}
"""Figures that are fields of a report, and keys of its row."""

FIGURES: Mapping[str, Unit] = MappingProxyType(
    {
        **_REPORTED,
        "fault_bytes": "bytes",
        **{
            name: "bytes"
            for way in _DIRECTIONS
            for name in (way, *(f"{way}.{it.value}" for it in TensorClass))
        },
        **{f"hinted_{way}": "bytes" for way in _DIRECTIONS},
    }
)
"""Names and units of the figures that are compared. Bytes are those of unified-memory transfers, by
direction, in all and by class. ``fault_bytes`` are those of faults, with the neighbours that the
driver brought unasked; ``hinted_...`` are those that somebody asked for. Host memory used in place
and explicit copies are left out: no profiler shows them as such transfers."""

Entries = Iterable[tuple[Direction, Cause, TensorClass, int]]


@dataclass(frozen=True)
class StepFigures:
    """Figures of one side, by the names of :data:`FIGURES`; None where a figure is not known."""

    workload: str
    hardware: str
    policy: str
    planner: str
    values: Mapping[str, float | None]


@dataclass(frozen=True)
class Difference:
    """One figure of :data:`FIGURES`, predicted and measured; None where it is not known."""

    name: str
    predicted: float | None
    measured: float | None

    @property
    def unit(self) -> Unit:
        """Unit of the values."""
        return FIGURES[self.name]

    @property
    def absolute(self) -> float | None:
        """Measured less predicted."""
        if self.predicted is None or self.measured is None:
            return None
        return self.measured - self.predicted

    @property
    def relative(self) -> float | None:
        """That difference over the prediction; None for a prediction of 0 that was not met."""
        absolute = self.absolute
        if absolute is None or not self.predicted:
            return 0.0 if absolute == 0 else None
        return absolute / self.predicted


@dataclass(frozen=True)
class Comparison:
    """One step, predicted and measured."""

    predicted: StepFigures
    measured: StepFigures

    def __getitem__(self, name: str) -> Difference:
        """One figure, by its name in :data:`FIGURES`."""
        return Difference(name, self.predicted.values[name], self.measured.values[name])

    def differences(self) -> tuple[Difference, ...]:
        """Every figure, in order, but for classes of which neither side moved a byte."""
        every = map(self.__getitem__, FIGURES)
        return tuple(it for it in every if "." not in it.name or it.predicted or it.measured)


def compare(predicted: MigrationReport, measured: MeasuredReport) -> Comparison:
    """Set a prediction against a measurement.

    They may be of different workloads, machines or policies: the names of both are kept.
    """
    return Comparison(figures_of(predicted), figures_of(measured))


def figures_of(report: MigrationReport | MeasuredReport) -> StepFigures:
    """Figures of a report. Those that were not recorded are None.

    Where only the hint engine counted, the hinted bytes are known, and no others.
    """
    values: dict[str, float | None] = {name: getattr(report, name) for name in _REPORTED}
    values |= moved_figures(
        (it.direction, it.cause, it.tensor_class, it.bytes) for it in report.traffic
    )
    if not report.has_copies:
        values |= dict.fromkeys(_SHARES)
    if isinstance(report, MeasuredReport) and not report.collected:
        known = ["step_s", "exposed_stall_s"]
        if report.source == "hints":
            known += [f"hinted_{way}" for way in _DIRECTIONS]
        values = {name: values[name] if name in known else None for name in FIGURES}
    return StepFigures(**_names(report), values=values)


def _names(record: Any) -> dict[str, str]:
    return {name: getattr(record, name) for name in _NAMES}


def moved_figures(entries: Entries) -> dict[str, int]:
    """The figures of bytes, of traffic by direction, cause and class."""
    moved = {name: 0 for name in FIGURES if name not in _REPORTED}
    for way, cause, tensor_class, size in entries:
        if way not in _DIRECTIONS or cause not in UM_CAUSES:
            continue
        moved[way] += size
        moved[f"{way}.{tensor_class.value}"] += size
        if cause in ("fault", "speculation"):
            moved["fault_bytes"] += size
        if cause == "hint":
            moved[f"hinted_{way}"] += size
    return moved


def comparison_row(comparison: Comparison) -> dict[str, Any]:
    """Put a comparison into plain values, for JSON.

    ``predicted`` and ``measured`` have their names, and ``figures`` goes from name to unit, both
    values, and their absolute and relative difference.
    """
    keys = ("unit", "predicted", "measured", "absolute", "relative")
    return {
        "predicted": _names(comparison.predicted),
        "measured": _names(comparison.measured),
        "figures": {
            it.name: {key: getattr(it, key) for key in keys} for it in comparison.differences()
        },
    }


def comparison_table(comparisons: Iterable[Comparison]) -> str:
    """Write comparisons as tables of Markdown, one for each."""
    return "\n\n".join(map(_table, comparisons))


def _table(comparison: Comparison) -> str:
    predicted, measured = comparison.predicted, comparison.measured
    title = (
        f"{measured.workload} on {measured.hardware}, policy {measured.policy}, against "
        f"{predicted.workload} on {predicted.hardware}, policy {predicted.policy}, planner "
        f"{predicted.planner}"
    )
    # Names come from files, and must stay names.
    title = "".join(mark if mark.isprintable() and mark not in "*|`<[" else "?" for mark in title)
    lines = [
        f"**{title}**",
        "",
        "| figure | predicted | measured | difference | relative |",
        "| --- | ---: | ---: | ---: | ---: |",
        *(f"| {' | '.join(difference_words(it))} |" for it in comparison.differences()),
    ]
    return "\n".join(lines)


def difference_words(difference: Difference) -> tuple[str, str, str, str, str]:
    """Write a difference for people: name, predicted, measured, and both differences."""
    absolute, relative, unit = difference.absolute, difference.relative, difference.unit
    sign = "" if not absolute else "+" if absolute > 0 else "-"
    return (
        difference.name.removesuffix("_s").replace("um_", "UM_").replace("_", " "),
        _words(difference.predicted, unit),
        _words(difference.measured, unit),
        "" if absolute is None else sign + _words(abs(absolute), unit),
        "" if relative is None else f"{100 * relative:+.1f} %",
    )


def _words(value: float | None, unit: Unit) -> str:
    if value is None:
        return "unknown"
    if unit == "bytes":
        return format_bytes(int(value))
    if unit == "share":
        return f"{100 * value:.2f} %"
    if unit == "count":
        return f"{value:,.0f}"
    factor, time = time_unit(abs(value))
    return f"{value * factor:,.4g} {time}" if value else "0 s"


# Predictions, from the output of `umem simulate --json`.

_LARGEST = 2**62
_Bytes = Annotated[int, Field(ge=0, le=_LARGEST)]
_Number = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST)]


class _Prediction(Model):
    model_config = ConfigDict(extra="ignore")

    workload: str
    hardware: str
    policy: str
    planner: str
    step_s: _Number
    exposed_stall_s: _Number
    um_time_share: _Number
    um_ops_share: _Number
    um_bytes_share: _Number
    fault_batches: _Bytes
    bytes: dict[Direction, dict[Cause, dict[TensorClass, _Bytes]]]


class _Predictions(Model):
    model_config = ConfigDict(extra="ignore")

    results: Items[_Prediction] = Field(min_length=1, max_length=2**16)


def read_predictions(path: str | os.PathLike[str]) -> tuple[StepFigures, ...]:
    """Read predictions from the output of ``umem simulate --json``, which may be a stranger's.

    Raises UmemError if the file cannot be read or holds no predictions; the message names file,
    place and remedy.
    """
    remedy = ": give the output of `umem simulate --json`"
    found = read_json(path, _Predictions, noun="predictions", error=UmemError, remedy=remedy)
    return tuple(
        StepFigures(
            **_names(row),
            values={name: getattr(row, name) for name in _REPORTED}
            | moved_figures(
                (way, cause, tensor_class, size)
                for way, by_cause in row.bytes.items()
                for cause, by_class in by_cause.items()
                for tensor_class, size in by_class.items()
            ),
        )
        for row in found.results
    )
