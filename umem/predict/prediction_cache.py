"""Predictions kept in the user's cache folder, as the search for a plan takes seconds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from umem import __version__
from umem.capture.offline.trace_cache import sources_digest
from umem.core.classes import TensorClass
from umem.core.report import MigrationReport, Traffic
from umem.io.cache import cached_file, keep_newest, private_folder
from umem.io.files import replace_file
from umem.predict.prediction import predict

if TYPE_CHECKING:
    from umem.hardware import Hardware
    from umem.policy import ResolvedPolicy
    from umem.trace import Trace

__all__ = ["predict_once"]

_MOST_PREDICTIONS = 256
"""Of a few kilobytes each."""

_PREDICTING = ("core", "hardware", "pages", "policy", "predict", "trace")


def predict_once(
    trace: Trace,
    hardware: Hardware,
    policy: ResolvedPolicy,
    planners: Sequence[str],
    *,
    runnable: bool = False,
    progress: Callable[[str], None] | None = None,
) -> tuple[MigrationReport, ...]:
    """Predict as :func:`umem.predict.prediction.predict`, or take what it said of the same before.

    Arguments and errors as there; the reports have no timeline.
    """
    folder = private_folder("predictions")
    asked = (__version__, sources_digest(_PREDICTING), repr(hardware), repr(policy), runnable)
    begun = hashlib.sha256(repr(asked).encode())
    for part in fields(trace):
        if part.name in ("metadata", "source"):  # no figure depends on them
            continue
        value = getattr(trace, part.name)
        begun.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
    found = []
    for planner in planners:
        digest = begun.copy()
        digest.update(planner.encode())
        name = f"{digest.hexdigest()}.json"
        report = _read(folder, name)
        if report is None:
            (report,) = predict(
                trace, hardware, policy, [planner], runnable=runnable, progress=progress
            )
            _write(folder, name, report)
        found.append(report)
    return tuple(found)


def _read(folder: Path | None, name: str) -> MigrationReport | None:
    path = folder and cached_file(folder, name)
    if not path:
        return None
    try:
        values: dict[str, Any] = json.loads(path.read_bytes())
        traffic = tuple(
            Traffic(**{**entry, "tensor_class": TensorClass(entry["tensor_class"])})
            for entry in values.pop("traffic")
        )
        return MigrationReport(traffic=traffic, **values)
    except (OSError, ValueError, KeyError, TypeError):  # damaged: it is made again, and replaced
        return None


def _write(folder: Path | None, name: str, report: MigrationReport) -> None:
    if folder is None:
        return
    values = asdict(report) | {"stall_s": dict(report.stall_s)}
    try:
        replace_file(folder / name, json.dumps(values, default=str).encode())
        (folder / name).chmod(0o600)
    except OSError:  # a full disk: the next process predicts again
        return
    keep_newest(folder, _MOST_PREDICTIONS)
