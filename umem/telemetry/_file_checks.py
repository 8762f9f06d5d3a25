"""Checks on the columns of a saved recording."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from umem.documents import Document, refuse, shown

__all__ = ["refuse_outside", "refuse_where", "require_lengths"]


def require_lengths(document: Document, columns: dict[str, Any]) -> None:
    """Refuse columns of different lengths."""
    first, *others = columns
    for key in others:
        if len(columns[key]) != len(columns[first]):
            refuse(
                document,
                key,
                f"{len(columns[key])} entries, and {first} has {len(columns[first])}: copy the "
                "file again",
            )


def refuse_outside(
    document: Document, key: str, column: npt.NDArray[Any], low: int, high: int
) -> None:
    """Refuse a column with a value outside of a range."""
    bad = (column < low) | (column > high)
    refuse_where(document, key, bad, f"not from {low} to {high}")


def refuse_where(document: Document, key: str, bad: npt.NDArray[np.bool_], why: str) -> None:
    """Refuse a column at the first place that is bad."""
    if bad.any():
        at = int(bad.argmax())
        refuse(document, f"{key}[{at}]", f"{shown(document.data[key][at])} is {why}")
