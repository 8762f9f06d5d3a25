"""The file of a profile: the reports of a recorded run, as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from pydantic import Field

from umem.core.arguments import check_argument
from umem.core.classes import TensorClass
from umem.core.errors import UmemError
from umem.core.report import MeasuredReport
from umem.io.columns import Checker, Items, Model, is_archive, read_json
from umem.io.files import begins_with, write_file
from umem.telemetry.records import Residency
from umem.telemetry.reports import MeasuredRun, TensorTraffic

__all__ = ["load_run", "save_run"]

PROFILE_FORMAT = "umem-profile/5"

_NSYS_SUFFIXES = (".nsys-rep", ".qdrep", ".qdstrm", ".sqlite")
"""Of recordings of Nsight Systems, and of its exports."""

_LARGEST = 2**53
"""Of bytes, seconds and others: exact as a number of any program, and no sum of them overflows."""


class _Residency(Model):
    time_ns: Items[int]
    resident_bytes: Items[list[int]]


class _Profile(Model):
    """A profile: fields of :class:`umem.telemetry.MeasuredRun`."""

    format: str
    steps: Items[MeasuredReport] = Field(min_length=1)
    step_start_s: Items[float]
    duration_s: float
    dropped: int
    tensors: Items[TensorTraffic]
    residency: _Residency | None


def save_run(run: MeasuredRun, path: str | os.PathLike[str]) -> None:
    """Save a run's reports in one piece; equal runs give equal bytes.

    Raises UmemError if the file cannot be written, would be too large, or could not be loaded
    again; an old file is then as it was.
    """
    data = {"format": PROFILE_FORMAT, **asdict(run)}
    text = json.dumps(data, default=np.ndarray.tolist, separators=(",", ":")).encode()
    check = Checker(f"{os.fspath(path)}: not written", UmemError)
    _run(check.validate(_Profile, text), check)
    write_file(path, text)


def load_run(path: str | os.PathLike[str]) -> MeasuredRun:
    """Load a file of :func:`save_run`, as data of a stranger, within bounds of size and count.

    Raises UmemError if it cannot be read or is no valid profile; names file, place and remedy.
    """
    check_argument("path", path, (str, os.PathLike), "give the path of a profile")
    check = Checker(os.fspath(path), UmemError)
    if is_archive(path):
        check.refuse(
            "",
            f"an .npz file, so a trace or a profile of an older umem; this one reads "
            f"{PROFILE_FORMAT}: record the run again, or see `umem trace --show`",
        )
    if begins_with(path, b"SQLite format 3\0") or os.fspath(path).endswith(_NSYS_SUFFIXES):
        check.refuse(
            "",
            "a recording of Nsight Systems, which knows no tensors: record the run by "
            "`umem.profile()` and its `save`, or look at this one with `nsys stats`",
        )
    noun, known = "a profile of umem", (PROFILE_FORMAT,)
    return _run(read_json(path, _Profile, noun=noun, error=UmemError, readable=known), check)


def _run(profile: _Profile, check: Checker) -> MeasuredRun:
    """The run of a profile that does not contradict itself."""
    for key, value in profile.model_dump().items():
        if not all(0 <= number <= _LARGEST for number in _numbers(value)):
            check.refuse(key, f"not all numbers are from 0 to {_LARGEST}")
    if len(profile.step_start_s) not in (0 if len(profile.steps) == 1 else -1, len(profile.steps)):
        check.refuse("step_start_s", f"{len(profile.step_start_s)} for {len(profile.steps)} steps")
    samples = profile.residency
    return MeasuredRun(
        tuple(profile.steps),
        tuple(profile.step_start_s),
        profile.duration_s,
        profile.dropped,
        tuple(profile.tensors),
        None if samples is None else _residency(samples, check),
    )


def _residency(samples: _Residency, check: Checker) -> Residency:
    shape = len(samples.time_ns), len(TensorClass)
    if not shape[0] or [len(row) for row in samples.resident_bytes] != [shape[1]] * shape[0]:
        check.refuse("residency", f"not {len(TensorClass)} sizes for each of one or more times")
    return Residency(
        np.array(samples.time_ns, np.int64), np.array(samples.resident_bytes, np.int64)
    )


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, Mapping):
        value = value.values()
    if isinstance(value, int | float):
        yield value
    elif value is not None and not isinstance(value, str):
        for item in value:
            yield from _numbers(item)
