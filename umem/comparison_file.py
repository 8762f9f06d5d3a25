"""Comparisons as files, and predictions to compare with, from what `umem simulate` printed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any, get_args

from umem.classes import TensorClass
from umem.comparison import (
    FIGURES,
    NAMES,
    REPORTED,
    SIDES,
    Comparison,
    StepFigures,
    moved_figures,
)
from umem.documents import (
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
from umem.errors import UmemError
from umem.report import Cause, Direction

__all__ = ["COMPARISON_FORMAT", "load_comparisons", "read_predictions", "save_comparisons"]

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
