"""Predicted against measured: one step, figure by figure."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

from umem.core.classes import TensorClass
from umem.core.errors import UmemError
from umem.core.report import UM_CAUSES, Cause, Direction, MeasuredReport, MigrationReport
from umem.core.units import format_bytes, time_unit
from umem.io.documents import (
    Document,
    items,
    read_document,
    refuse,
    require_format,
    require_keys,
    shown,
    texts,
    write_document,
)

__all__ = [
    "COMPARISON_FORMAT",
    "FIGURES",
    "NAMES",
    "REPORTED",
    "SIDES",
    "Comparison",
    "Difference",
    "StepFigures",
    "compare",
    "comparison_row",
    "comparison_table",
    "difference_words",
    "figures_of",
    "load_comparisons",
    "moved_figures",
    "read_predictions",
    "save_comparisons",
]

Unit = Literal["s", "bytes", "share", "count"]

_WAYS: tuple[Direction, ...] = ("to_device", "to_host")
_FAULT_CAUSES: tuple[Cause, ...] = ("fault", "speculation")
_SHARES = ("um_time_share", "um_ops_share", "um_bytes_share")
_REPORTED: dict[str, Unit] = {
    "step_s": "s",
    "exposed_stall_s": "s",
    **dict.fromkeys(_SHARES, "share"),
    "fault_batches": "count",
}

FIGURES: Mapping[str, Unit] = MappingProxyType(
    {
        **_REPORTED,
        "fault_bytes": "bytes",
        **{
            name: "bytes"
            for way in _WAYS
            for name in (way, *(f"{way}.{it.value}" for it in TensorClass))
        },
        **{f"hinted_{way}": "bytes" for way in _WAYS},
    }
)
"""Names and units of what is compared. Bytes are those of unified-memory transfers, by direction,
in all and by class; ``fault_bytes`` are those that faults brought, with the neighbours that the
driver brought unasked; ``hinted_...`` are those that somebody asked for. Host memory used in place,
and explicit copies, are not among them: no profiler shows them as such transfers."""

REPORTED = tuple(_REPORTED)
"""Those that are fields of a report, and keys of its row."""

NAMES = ("workload", "hardware", "policy", "planner")
"""Whose step it is; texts."""

SIDES = ("predicted", "measured")

Entries = Iterable[tuple[Direction, Cause, TensorClass, int]]


@dataclass(frozen=True)
class StepFigures:
    """What is compared of one side.

    Parameters
    ----------
    workload, hardware, policy, planner : str
    values : mapping of str to float or None
        By the names of :data:`FIGURES`; None: not known.
    """

    workload: str
    hardware: str
    policy: str
    planner: str
    values: Mapping[str, float | None]


@dataclass(frozen=True)
class Difference:
    """One figure, predicted and measured.

    Parameters
    ----------
    name : str
        Of :data:`FIGURES`.
    predicted, measured : float or None
        None where it is not known.
    """

    name: str
    predicted: float | None
    measured: float | None

    @property
    def unit(self) -> Unit:
        """What the values are in."""
        return FIGURES[self.name]

    @property
    def absolute(self) -> float | None:
        """Measured less predicted."""
        if self.predicted is None or self.measured is None:
            return None
        return self.measured - self.predicted

    @property
    def relative(self) -> float | None:
        """That difference over what was predicted; None where nothing was, but something came."""
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
        """Every figure, in order; classes of which neither side moved a byte are left out."""
        every = map(self.__getitem__, FIGURES)
        return tuple(it for it in every if "." not in it.name or it.predicted or it.measured)


def compare(predicted: MigrationReport, measured: MeasuredReport) -> Comparison:
    """Set a prediction against a measurement.

    Whether they are of the same workload, machine and policy is the caller's to know: the names of
    both are kept.
    """
    return Comparison(figures_of(predicted), figures_of(measured))


def figures_of(report: MigrationReport | MeasuredReport) -> StepFigures:
    """What is compared of a report.

    What was not recorded is None. Where the hint engine's own counts stand in, only what was hinted
    is known.
    """
    names = {name: getattr(report, name) for name in NAMES}
    reported = {name: getattr(report, name) for name in _REPORTED}
    moved = moved_figures(
        (it.direction, it.cause, it.tensor_class, it.bytes) for it in report.traffic
    )
    values = {**reported, **moved}
    if isinstance(report, MeasuredReport) and not report.has_copies:
        values |= dict.fromkeys(_SHARES)
    if isinstance(report, MeasuredReport) and not report.collected:
        known = ["step_s", "exposed_stall_s"]
        if report.source == "hints":
            known += [f"hinted_{way}" for way in _WAYS]
        values = {name: values[name] if name in known else None for name in FIGURES}
    return StepFigures(**names, values=values)


def moved_figures(entries: Entries) -> dict[str, int]:
    """The figures of bytes, of traffic by direction, cause and class."""
    moved = {name: 0 for name in FIGURES if name not in _REPORTED}
    for way, cause, tensor_class, size in entries:
        if way not in _WAYS or cause not in UM_CAUSES:
            continue
        moved[way] += size
        moved[f"{way}.{tensor_class.value}"] += size
        if cause in _FAULT_CAUSES:
            moved["fault_bytes"] += size
        if cause == "hint":
            moved[f"hinted_{way}"] += size
    return moved


def comparison_row(comparison: Comparison) -> dict[str, Any]:
    """Put a comparison into plain values, for JSON.

    Returns
    -------
    dict
        ``predicted`` and ``measured`` with their names, and ``figures``, from name to unit, both
        values, and their absolute and relative difference.
    """
    return {
        **{
            side: {name: getattr(getattr(comparison, side), name) for name in NAMES}
            for side in SIDES
        },
        "figures": {
            it.name: {
                "unit": it.unit,
                "predicted": it.predicted,
                "measured": it.measured,
                "absolute": it.absolute,
                "relative": it.relative,
            }
            for it in comparison.differences()
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


# Comparisons as files, and predictions to compare with, from what `umem simulate` printed.

COMPARISON_FORMAT = "umem-comparison/1"

_MOST_ROWS = 2**16
_LARGEST = 2**62
_GIVE = "give what `umem simulate --json` printed"


def save_comparisons(comparisons: Iterable[Comparison], path: str | os.PathLike[str]) -> None:
    """Save comparisons, compressed; the file is replaced in one piece.

    Raises
    ------
    UmemError
        If the file cannot be written.
    """
    rows = list(comparisons)
    data: dict[str, Any] = {"format": COMPARISON_FORMAT}
    for side in SIDES:
        figures: list[StepFigures] = [getattr(row, side) for row in rows]
        data |= {f"{side}_{name}": [getattr(it, name) for it in figures] for name in NAMES}
        data |= {f"{side}_{name}": [it.values[name] for it in figures] for name in FIGURES}
    write_document(data, path, UmemError)


def load_comparisons(path: str | os.PathLike[str]) -> tuple[Comparison, ...]:
    """Load comparisons from a file of format ``umem-comparison/1``.

    Raises
    ------
    UmemError
        If the file cannot be read or holds no valid comparisons; the message names file, place and
        remedy.
    """
    document = read_document(path, UmemError)
    require_format(document, "a comparison of umem", (COMPARISON_FORMAT,))
    keys = [f"{side}_{name}" for side in SIDES for name in (*NAMES, *FIGURES)]
    require_keys(document, "", document.data, ["format", *keys])
    count = len(items(document, keys[0], _MOST_ROWS))
    for key in keys:
        if len(items(document, key, _MOST_ROWS)) != count:
            refuse(document, key, f"not {count} entries, as {keys[0]} has: copy the file again")
    sides = [_loaded(document, side, count) for side in SIDES]
    return tuple(map(Comparison, *sides))


def _loaded(document: Document, side: str, count: int) -> list[StepFigures]:
    names = {name: texts(document, f"{side}_{name}", _MOST_ROWS) for name in NAMES}
    return [
        StepFigures(
            **{name: column[row] for name, column in names.items()},
            values={
                name: _number(document, f"{key}[{row}]", name, document.data[key][row])
                for name in FIGURES
                for key in [f"{side}_{name}"]
            },
        )
        for row in range(count)
    ]


def read_predictions(path: str | os.PathLike[str]) -> tuple[StepFigures, ...]:
    """Read what ``umem simulate --json`` printed. The file may come from a stranger.

    Raises
    ------
    UmemError
        If the file cannot be read or holds no predictions; the message names file, place and
        remedy.
    """
    document = read_document(path, UmemError)
    if "results" not in document.data:
        refuse(document, "results", f"missing: {_GIVE}")
    rows = items(document, "results", _MOST_ROWS)
    if not rows:
        refuse(document, "results", f"empty: {_GIVE}")
    return tuple(_prediction(document, f"results[{row}]", found) for row, found in enumerate(rows))


def _prediction(document: Document, where: str, row: object) -> StepFigures:
    wanted = (*NAMES, *REPORTED, "bytes")
    if not isinstance(row, dict):
        refuse(document, where, f"{shown(row)} is not a prediction: {_GIVE}")
    for name in wanted:
        if row.get(name) is None:
            refuse(document, f"{where}.{name}", f"missing, so this is not a prediction: {_GIVE}")
        if name in NAMES and not isinstance(row[name], str):
            refuse(document, f"{where}.{name}", f"{shown(row[name])} is not text")
    reported = {name: _number(document, f"{where}.{name}", name, row[name]) for name in REPORTED}
    moved = moved_figures(_entries(document, f"{where}.bytes", row["bytes"]))
    return StepFigures(
        **{name: row[name] for name in NAMES},
        values={**reported, **moved},
    )


def _entries(
    document: Document, where: str, moved: Any
) -> Iterator[tuple[Direction, Cause, TensorClass, int]]:
    require_keys(document, where, moved, (), get_args(Direction))
    for way, by_cause in moved.items():
        require_keys(document, f"{where}.{way}", by_cause, (), get_args(Cause))
        for cause, by_class in by_cause.items():
            place = f"{where}.{way}.{cause}"
            require_keys(document, place, by_class, (), [it.value for it in TensorClass])
            for name, size in by_class.items():
                if type(size) is not int or not 0 <= size <= _LARGEST:
                    refuse(document, f"{place}.{name}", f"{shown(size)} is no number of bytes")
                yield way, cause, TensorClass(name), size


def _number(document: Document, where: str, name: str, value: Any) -> float | None:
    if value is None and name != "step_s":
        return None
    whole = FIGURES[name] in ("count", "bytes")
    fits = type(value) is int or (type(value) is float and not whole)
    if not fits or not abs(value) <= _LARGEST:
        refuse(document, where, f"{shown(value)} is not a {'whole ' if whole else ''}number")
    return float(value) if not whole else int(value)
