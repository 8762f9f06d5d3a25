"""What became of hints: a request's outcome and times, and an engine's counts.

Callers find all of it in :mod:`umem.hints`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from umem.classes import TensorClass
from umem.schedule import HintOp

__all__ = [
    "OUTCOMES",
    "HintCounts",
    "HintFailure",
    "HintStatistics",
    "HintTimes",
    "OpName",
    "Outcome",
    "statistics_from_native",
    "times_from_native",
]

_ADVISE = len(HintOp)
"""The native number of advice, which moves nothing and so is no `HintOp`."""

OpName = Literal["prefetch", "evict", "discard", "copy_in", "copy_out", "advise"]
_OP_NAMES: dict[int, OpName] = {
    HintOp.PREFETCH: "prefetch",
    HintOp.EVICT: "evict",
    HintOp.DISCARD: "discard",
    HintOp.COPY_IN: "copy_in",
    HintOp.COPY_OUT: "copy_out",
    _ADVISE: "advise",
}
_CLASSES = tuple(TensorClass)


class Outcome(StrEnum):
    """What became of a request; the worst part of its range speaks for the whole."""

    OPEN = "open"
    """Queued, waiting or under way."""
    DONE = "done"
    SUPERSEDED = "superseded"
    """A newer request made it pointless before it was issued."""
    FORGOTTEN = "forgotten"
    """Its range was freed."""
    DROPPED = "dropped"
    """The engine ended, or the event to wait for could not be had."""
    FAILED = "failed"
    """The driver refused; :attr:`HintStatistics.failures` says why."""


OUTCOMES = tuple(Outcome)
"""By native number."""


@dataclass(frozen=True)
class HintTimes:
    """One request's history. Times are those of `time.monotonic_ns`; None: not yet."""

    op: OpName
    tensor_class: TensorClass
    address: int
    size_bytes: int
    moved_bytes: int
    outcome: Outcome
    asked_ns: int
    ready_ns: int | None
    """The event that it waited for was over."""
    issued_ns: int | None
    """Its first driver call began."""
    done_ns: int | None
    needed_ns: int | None
    """The phase that needs it began."""


@dataclass(frozen=True)
class HintCounts:
    """What requests of one operation on one tensor class came to."""

    requests: Mapping[Outcome, int]
    asked_bytes: int
    moved_bytes: int
    wasted_bytes: int
    """Superseded, forgotten, dropped or failed."""
    calls: int
    """Chunks issued; one may serve several requests."""
    event_wait_s: float
    """From asked to ready."""
    queued_s: float
    """From ready to issued: behind others, or for room."""
    driver_s: float
    """In driver calls. Calls of one direction that are under way together share its link and the
    time, so that ``moved_bytes / driver_s`` is the link's rate however many workers there are. A
    call that serves several requests is shared out by bytes."""
    late: int
    """Requests that were done after the phase that needs them began."""
    late_s: float
    early: int
    """Requests that were done before it began."""
    early_s: float
    missed: int
    """Requests that were needed but never wholly done."""


@dataclass(frozen=True)
class HintFailure:
    """A driver call that failed, and how often it did so in the same way."""

    call: str
    error: int
    text: str
    count: int


@dataclass(frozen=True)
class HintStatistics:
    """What an engine has done so far, and what it is at now."""

    counts: Mapping[tuple[OpName, TensorClass], HintCounts]
    """Only pairs that were asked for."""
    failures: tuple[HintFailure, ...]
    refused: int
    """Requests without a ticket."""
    open_requests: int
    peak_open_requests: int
    queued_bytes: int
    in_flight_bytes: tuple[int, int]
    """To the device, to the host."""
    room_waits: int
    """Requests that found the device full."""
    resident_bytes: Mapping[int, int]
    """By device, as far as the engine was told or moved it."""
    over_budget_bytes: int
    """Brought to a full device, because no request asked for before could make room."""


def times_from_native(found: dict[str, Any]) -> HintTimes:
    """Name the parts of one native record."""
    values = {
        **found,
        "op": _OP_NAMES[found["op"]],
        "tensor_class": _CLASSES[found["tensor_class"]],
        "outcome": Outcome(found["outcome"]),
    }
    for name in ("ready_ns", "issued_ns", "done_ns", "needed_ns"):
        values[name] = found[name] or None
    return HintTimes(**values)


def statistics_from_native(found: dict[str, Any]) -> HintStatistics:
    """Name the parts of a native snapshot."""
    values = {
        **found,
        "counts": {
            (_OP_NAMES[op], _CLASSES[number]): _counts(of)
            for (op, number), of in found["counts"].items()
        },
        "failures": tuple(HintFailure(*failure) for failure in found["failures"]),
    }
    return HintStatistics(**values)


def _counts(found: dict[str, Any]) -> HintCounts:
    requests = {Outcome(name): count for name, count in found["requests"].items()}
    return HintCounts(**{**found, "requests": requests})
