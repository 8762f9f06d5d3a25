"""Plans as files, and folders of plans in which each is found by everything that it depends on."""

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
from pydantic import BaseModel, Field

from umem._version import __version__
from umem.core.arguments import check_argument
from umem.core.errors import PlanError
from umem.core.schedule import HintOp, ResidencyMode, Schedule
from umem.io.columns import Checker, Header, read_columns, write_columns
from umem.trace import MAX_TENSORS, trace_fingerprint

if TYPE_CHECKING:
    from umem.hardware import Hardware
    from umem.policy import ResolvedPolicy
    from umem.trace import Trace

__all__ = [
    "PLAN_COLUMNS",
    "PLAN_FORMAT",
    "PlanHeader",
    "load_schedule",
    "plan_key",
    "save_schedule",
    "store_plan",
    "stored_plan",
]

PLAN_FORMAT = "umem-plan/3"
PLAN_COLUMNS = {
    "residency": np.uint8,
    "hint_phase": np.int32,
    "hint_op": np.uint8,
    "hint_tensor": np.int32,
}
MAX_HINTS = 2**22

_KEY = "^[0-9a-f]{64}$"


class PlanHeader(Header):
    """Header of a plan's file. Its columns are those of :class:`Schedule`."""

    format: str = PLAN_FORMAT
    key: str = Field(pattern=_KEY)
    planner: str = Field(pattern=r"^[\w.:-]{1,64}$")
    waits: bool


def save_schedule(schedule: Schedule, path: str | os.PathLike[str], *, key: str) -> None:
    """Save a schedule for the problem of a :func:`umem.pages.plan.plan_key`, compressed.

    The file, such as ``plan.npz``, is replaced in one piece, missing folders are made, and equal
    schedules give equal bytes.

    Raises PlanError if the schedule contradicts itself or the file cannot be written; an old file
    is then as it was.
    """
    check = Checker(f"{os.fspath(path)}: not written", PlanError)
    check.require_column("residency", schedule.residency, np.uint8)
    if len(schedule.residency) > MAX_TENSORS:
        check.refuse("residency", f"{len(schedule.residency)} entries; at most {MAX_TENSORS} fit")
    _check(schedule, check, len(schedule.residency), np.iinfo(np.int32).max)
    columns = {name: getattr(schedule, name) for name in PLAN_COLUMNS}
    header = {"key": key, "planner": schedule.planner, "waits": schedule.waits}
    write_columns(path, PlanHeader, header, columns, error=PlanError)


def load_schedule(path: str | os.PathLike[str], trace: Trace, *, key: str) -> Schedule:
    """Load a schedule from a file that :func:`save_schedule` wrote.

    It may come from a stranger: it is read as data, within bounds of size and count. It has to name
    tensors and phases of `trace` only, and to be for the problem of `key`, which is the
    :func:`plan_key` of the trace, the machine and the policy that it will run with.

    Raises PlanError if the file cannot be read, holds no valid schedule, or one for another trace
    or key; the message names file, place and remedy.
    """
    check_argument("path", path, (str, os.PathLike), "give the path of a plan's file")
    check = Checker(os.fspath(path), PlanError, remedy=": plan again")
    header, columns = read_columns(path, PlanHeader, PLAN_COLUMNS, noun="a plan", error=PlanError)
    if key != header.key:
        check.refuse(
            "key",
            "planned for another trace, machine, policy, planner or umem (key "
            f"{header.key[:12]}, wanted {key:.12})",
        )
    schedule = Schedule(planner=header.planner, waits=header.waits, **columns)
    _check(schedule, check, trace.tensor_count, trace.phase_count - 1)
    return schedule


def _check(schedule: Schedule, check: Checker, tensor_count: int, last_phase: int) -> None:
    phase = schedule.hint_phase
    check.require_column("hint_phase", phase, np.int32)
    if len(phase) > MAX_HINTS:
        check.refuse("hint_phase", f"{len(phase)} entries; at most {MAX_HINTS} fit")
    for name, dtype in PLAN_COLUMNS.items():
        length = tensor_count if name == "residency" else len(phase)
        check.require_column(name, getattr(schedule, name), dtype, length)
    check.require_range("residency", schedule.residency, 0, max(ResidencyMode))
    check.require_range("hint_phase", phase, 0, last_phase)
    check.refuse_where(
        np.diff(phase, prepend=0) < 0,
        "hint_phase",
        lambda hint: f"{phase[hint]} follows {phase[hint - 1]}; phases of hints never fall",
    )
    check.require_range("hint_op", schedule.hint_op, 0, max(HintOp))
    check.require_range("hint_tensor", schedule.hint_tensor, 0, tensor_count - 1)


# Folders of plans: one process plans, and the others find the plan.


def plan_key(
    trace: Trace, hardware: Hardware, policy: ResolvedPolicy, planner: str, *, window: int = 8
) -> str:
    """Content address of a plan: a hash of everything that :func:`umem.pages.plan.plan` reads.

    Of the trace, columns of numbers count, but not names, source and metadata; of the hardware all
    but name, description and sources; of the policy all but its name and reasons. umem's version
    counts too, for planners change with it.

    Returns
    -------
    str
        64 hexadecimal digits of SHA-256, the same in every process and on every machine.
    """
    dependencies = {
        "format": PLAN_FORMAT,
        "umem": __version__,
        "trace": trace_fingerprint(trace),
        "hardware": _fields(hardware, ("name", "description", "sources")),
        "policy": _fields(policy, ("name", "budget_reason", "reasons")),
        "planner": planner,
        "window": window,
    }
    return hashlib.sha256(json.dumps(dependencies, sort_keys=True).encode()).hexdigest()


def stored_plan(folder: str | os.PathLike[str], key: str, trace: Trace) -> Schedule | None:
    """Find the plan that :func:`store_plan` put into a folder; None if there is none yet.

    Raises PlanError if there is a file for the key that cannot be read or holds no plan for it.
    """
    path = _path(folder, key)
    if not os.path.lexists(path):
        return None
    try:
        return load_schedule(path, trace, key=key)
    except PlanError as error:
        raise PlanError(f"{error}; delete the file to plan anew") from error


def store_plan(folder: str | os.PathLike[str], key: str, schedule: Schedule) -> Path:
    """Keep a plan in a folder, as ``<key>.npz``.

    The folder is made if it is missing. Processes may do so at once: each replaces the file in one
    piece, and all of them write the same. Returns the file's path.

    Raises PlanError if the schedule contradicts itself or the file cannot be written.
    """
    path = _path(folder, key)
    save_schedule(schedule, path, key=key)
    return path


def _path(folder: str | os.PathLike[str], key: str) -> Path:
    if not re.fullmatch(_KEY[1:-1], key):
        raise PlanError(
            f"{folder}: key: {key!a:.80}; give the 64 hexadecimal digits of "
            "umem.pages.plan.plan_key"
        )
    return Path(folder, f"{key}.npz")


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
