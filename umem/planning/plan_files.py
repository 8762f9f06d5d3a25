"""Schedules as files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from umem._version import __version__
from umem.core.errors import PlanError
from umem.core.schedule import HintOp, ResidencyMode, Schedule
from umem.io.documents import (
    digits,
    digits_text,
    integers,
    read_document,
    refuse,
    require_format,
    require_keys,
    shown,
    text,
    write_document,
)
from umem.trace import MAX_TENSORS, Trace, trace_fingerprint

if TYPE_CHECKING:
    from umem.core.schedule import Schedule
    from umem.hardware import Hardware
    from umem.policy import ResolvedPolicy
    from umem.trace import Trace

__all__ = [
    "MAX_HINTS",
    "PLAN_FORMAT",
    "PLAN_KEYS",
    "load_schedule",
    "plan_key",
    "require_key",
    "save_schedule",
    "store_plan",
    "stored_plan",
]

PLAN_FORMAT = "umem-plan/2"

PLAN_KEYS = (
    "format",
    "key",
    "planner",
    "waits",
    "residency",
    "hint_phase",
    "hint_op",
    "hint_tensor",
)
"""Keys of the format, all required: the fields of :class:`Schedule`, and the key of
:func:`umem.planning.plan_key`."""

MAX_HINTS = 2**22

_KEY = re.compile(r"[0-9a-f]{64}")
_PLANNER = re.compile(r"[\w.:-]{1,64}")

_DTYPES = {
    "residency": np.uint8,
    "hint_phase": np.int32,
    "hint_op": np.uint8,
    "hint_tensor": np.int32,
}


def save_schedule(schedule: Schedule, path: str | os.PathLike[str], *, key: str) -> None:
    """Save a schedule, compressed.

    The file is replaced in one piece, missing folders are made, and equal schedules give equal
    bytes.

    Parameters
    ----------
    schedule
        A valid schedule.
    path
        Such as ``plan.json.gz``.
    key
        What it was planned for: :func:`umem.planning.plan_key`.

    Raises
    ------
    PlanError
        If the schedule contradicts itself or the file cannot be written; an old file is then as it
        was.
    """
    place = f"{os.fspath(path)}: not written"
    require_key(key, place)
    if not isinstance(schedule.planner, str) or not _PLANNER.fullmatch(schedule.planner):
        raise PlanError(f"{place}: planner: {shown(schedule.planner)}; {_PLANNER_FORM}")
    if not isinstance(schedule.waits, bool):
        raise PlanError(f"{place}: waits: {shown(schedule.waits)}; give true or false")
    _check_columns(schedule, place)
    _check_hints(schedule, place, len(schedule.residency), None)
    data = {
        "format": PLAN_FORMAT,
        "key": key,
        "planner": schedule.planner,
        "waits": schedule.waits,
        "residency": digits_text(schedule.residency),
        "hint_phase": schedule.hint_phase.tolist(),
        "hint_op": digits_text(schedule.hint_op),
        "hint_tensor": schedule.hint_tensor.tolist(),
    }
    write_document(data, path, PlanError)


def load_schedule(
    path: str | os.PathLike[str], trace: Trace, *, key: str | None = None
) -> Schedule:
    """Load a schedule from a file.

    Parameters
    ----------
    path
        A file of format ``umem-plan/2``, compressed with gzip or plain JSON. It may come from a
        stranger: it is read as data, within bounds of size and count.
    trace
        The trace that it is for: the schedule has to name its tensors and phases only.
    key
        If given, what the schedule has to be planned for: :func:`umem.planning.plan_key`. A trace
        alone does not tell whether a schedule fits the machine and the policy.

    Raises
    ------
    PlanError
        If the file cannot be read, holds no valid schedule, or one for another trace or key; the
        message names file, place and remedy.
    """
    document = read_document(path, PlanError)
    require_format(document, "a plan", (PLAN_FORMAT,))
    require_keys(document, "", document.data, PLAN_KEYS)
    place = document.place
    require_key(document.data["key"], place)
    if key is not None and document.data["key"] != key:
        raise PlanError(
            f"{place}: planned for another trace, machine, policy, planner or umem (key "
            f"{document.data['key'][:12]}, wanted {key[:12]}): plan again"
        )
    planner = text(document, "planner")
    if not _PLANNER.fullmatch(planner):
        refuse(document, "planner", f"{shown(planner)}; {_PLANNER_FORM}")
    waits = document.data["waits"]
    if not isinstance(waits, bool):
        refuse(document, "waits", f"{shown(waits)}; give true or false")
    schedule = Schedule(
        planner=planner,
        residency=digits(document, "residency", MAX_TENSORS),
        hint_phase=integers(document, "hint_phase", MAX_HINTS, np.int32),
        hint_op=digits(document, "hint_op", MAX_HINTS),
        hint_tensor=integers(document, "hint_tensor", MAX_HINTS, np.int32),
        waits=waits,
    )
    if len(schedule.residency) != trace.tensor_count:
        refuse(
            document,
            "residency",
            f"for a trace of {len(schedule.residency)} tensors, and this one has "
            f"{trace.tensor_count}: plan again",
        )
    _check_columns(schedule, place)
    _check_hints(schedule, place, trace.tensor_count, trace.phase_count)
    return schedule


def require_key(key: object, place: str) -> None:
    """Refuse what is no key of a plan: it names files.

    Raises
    ------
    PlanError
        If it is not the 64 hexadecimal digits of SHA-256.
    """
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise PlanError(
            f"{place}: key: {shown(key)}; give the 64 hexadecimal digits of umem.planning.plan_key"
        )


_PLANNER_FORM = "give a name of at most 64 letters, digits and _ . : -"


def _check_columns(schedule: Schedule, place: str) -> None:
    for key, dtype in _DTYPES.items():
        column = getattr(schedule, key)
        if not isinstance(column, np.ndarray) or column.ndim != 1 or column.dtype != dtype:
            raise PlanError(f"{place}: {key}: not a column; give an array of {np.dtype(dtype)}")
        most = MAX_TENSORS if key == "residency" else MAX_HINTS
        if len(column) > most:
            raise PlanError(f"{place}: {key}: {len(column)} entries; at most {most} can be kept")
        if key != "residency" and len(column) != len(schedule.hint_phase):
            raise PlanError(
                f"{place}: {key}: {len(column)} entries, and hint_phase has "
                f"{len(schedule.hint_phase)}; give one for each hint"
            )


def _check_hints(
    schedule: Schedule, place: str, tensor_count: int, phase_count: int | None
) -> None:
    """Check values; without `phase_count`, phases only for their order."""
    phase, tensor = schedule.hint_phase, schedule.hint_tensor
    most = np.iinfo(np.int32).max if phase_count is None else phase_count - 1
    falls = np.zeros(len(phase), dtype=np.bool_)
    falls[1:] = phase[1:] < phase[:-1]
    _refuse_where(
        schedule.residency > max(ResidencyMode),
        place,
        "residency",
        schedule.residency,
        _one_of(ResidencyMode),
    )
    _refuse_where(falls, place, "hint_phase", phase, "the phases of hints ascend: plan again")
    _refuse_where(
        (phase < 0) | (phase > most),
        place,
        "hint_phase",
        phase,
        f"the phases are 0 to {most}: plan again",
    )
    _refuse_where(
        schedule.hint_op > max(HintOp), place, "hint_op", schedule.hint_op, _one_of(HintOp)
    )
    _refuse_where(
        (tensor < 0) | (tensor >= tensor_count),
        place,
        "hint_tensor",
        tensor,
        f"the tensors are 0 to {tensor_count - 1}: plan again",
    )


def _one_of(kinds: type[ResidencyMode] | type[HintOp]) -> str:
    return "give one of " + ", ".join(f"{kind:d} ({kind.name.lower()})" for kind in kinds)


def _refuse_where(
    bad: npt.NDArray[np.bool_], place: str, key: str, column: npt.NDArray[np.integer], remedy: str
) -> None:
    if bad.any():
        at = int(bad.argmax())
        raise PlanError(f"{place}: {key}[{at}]: {column[at]}; {remedy}")


# Plans kept by what they depend on, so that one process plans and the others reuse.

_HARDWARE_WORDS = ("name", "description", "sources")
_POLICY_WORDS = ("name",)


def plan_key(
    trace: Trace,
    hardware: Hardware,
    policy: ResolvedPolicy,
    planner: str,
    *,
    window: int = 8,
) -> str:
    """Content address of a plan: what :func:`umem.planning.plan` makes its answer from.

    Parameters
    ----------
    trace
        Its columns of numbers count; its names, source and metadata do not.
    hardware
        Its numbers count; its name, description and sources do not.
    policy
        All but its name counts.
    planner
        Name of the planner.
    window
        As in :func:`umem.planning.plan`.

    Returns
    -------
    str
        64 hexadecimal digits of SHA-256, the same in every process and on every machine. umem's
        version counts too, for planners change with it.
    """
    dependencies = {
        "format": PLAN_FORMAT,
        "umem": __version__,
        "trace": trace_fingerprint(trace),
        "hardware": _fields(hardware, _HARDWARE_WORDS),
        "policy": _fields(policy, _POLICY_WORDS),
        "planner": planner,
        "window": window,
    }
    return hashlib.sha256(json.dumps(dependencies, sort_keys=True).encode()).hexdigest()


def stored_plan(folder: str | os.PathLike[str], key: str, trace: Trace) -> Schedule | None:
    """The plan of a key from a folder, or None if there is none yet.

    Parameters
    ----------
    folder
        Where :func:`store_plan` puts plans.
    key
        From :func:`plan_key`.
    trace
        The trace that the plan is for.

    Raises
    ------
    PlanError
        If there is a file for the key that cannot be read or holds no plan for it.
    """
    path = _path(folder, key)
    if not os.path.lexists(path):
        return None
    try:
        return load_schedule(path, trace, key=key)
    except PlanError as error:
        raise PlanError(f"{error}; delete the file to plan anew") from error


def store_plan(folder: str | os.PathLike[str], key: str, schedule: Schedule) -> Path:
    """Keep a plan in a folder, as ``<key>.json.gz``.

    Processes may do so at once: each replaces the file in one piece, and all of them write the
    same.

    Parameters
    ----------
    folder
        Made if it is missing.
    key
        From :func:`plan_key`.
    schedule
        The plan.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    PlanError
        If the schedule contradicts itself or the file cannot be written.
    """
    path = _path(folder, key)
    save_schedule(schedule, path, key=key)
    return path


def _path(folder: str | os.PathLike[str], key: str) -> Path:
    require_key(key, os.fspath(folder))
    return Path(folder, f"{key}.json.gz")


def _fields(record: Any, words: tuple[str, ...]) -> dict[str, Any]:
    """Fields of a dataclass in plain data, without those that are only words for people."""
    return {
        field.name: _plain(getattr(record, field.name))
        for field in dataclasses.fields(record)
        if field.name not in words
    }


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    # A profile may say 51000000000 or 51e9.
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
