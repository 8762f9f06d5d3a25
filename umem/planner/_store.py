"""Plans kept by what they depend on, so that one process plans and the others reuse."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from umem._version import __version__
from umem.errors import PlanError
from umem.planner._file import PLAN_FORMAT, load_schedule, require_key, save_schedule
from umem.trace._fingerprint import trace_fingerprint

if TYPE_CHECKING:
    from umem.hardware import Hardware
    from umem.policy import ResolvedPolicy
    from umem.schedule import Schedule
    from umem.trace import Trace

__all__ = ["plan_key", "store_plan", "stored_plan"]

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
    """Content address of a plan: what :func:`umem.planner.plan` makes its answer from.

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
        As in :func:`umem.planner.plan`.

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
