"""What waits for what at a phase's begin, so that the budget holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from umem.executor._choice import Choice
from umem.schedule import HintOp, Home
from umem.trace import Trace

__all__ = ["HintRow", "HintRows", "Room", "make_room", "used_tensors"]

HintRow = tuple[HintOp, int]
"""A page hint: what to do, and the tensor's number in the trace."""

HintRows = Sequence[Sequence[HintRow]]
"""Page hints of each phase, in order."""


def used_tensors(trace: Trace, phase: int) -> list[int]:
    """Numbers of the tensors that a phase uses."""
    used = trace.access_tensor[trace.access_start[phase] : trace.access_start[phase + 1]]
    numbers: list[int] = used.tolist()
    return numbers


@dataclass(frozen=True)
class Room:
    """How each phase keeps the budget.

    Parameters
    ----------
    waits
        The eviction that it has to wait for: (phase of the eviction, its number there), or None.
    coming
        The prefetches to ask for when it begins.
    fetches
        The activations to copy back when it begins, by number in the trace.
    """

    waits: tuple[tuple[int, int] | None, ...]
    coming: tuple[tuple[HintRow, ...], ...]
    fetches: tuple[tuple[int, ...], ...]


class _Coming(NamedTuple):
    """A tensor that the plan asks for."""

    tensor: int
    row: HintRow | None = None
    """None for an activation that is copied back."""


def make_room(
    choice: Choice,
    budget_bytes: int,
    leaving: HintRows,
    coming: HintRows,
    released: Mapping[int, set[int]],
    fetched: Sequence[Sequence[int]],
) -> Room:
    """Find the evictions that phases have to wait for, and when there is room for what comes.

    A plan reckons with the link's speed; where it is slower, memory is still taken that the plan
    counts as free. So a step is gone through with what each phase holds, and with every eviction
    taking memory until somebody has waited for it. Where that is too much, the oldest are waited
    for: evictions are carried out in order. And what comes takes memory as soon as it is asked
    for, where a plan asks early and lets it come when there is room: so it is asked for in the
    first phase that has room, or that uses it.

    Parameters
    ----------
    choice
        The plan.
    budget_bytes
        What may be resident.
    leaving, coming
        Evictions and prefetches of each phase, by the plan.
    released
        Activations whose memory goes at a phase's begin.
    fetched
        Activations that the plan asks for at each phase's begin.
    """
    trace = choice.trace
    size = trace.tensor_bytes.tolist()
    on_device = choice.schedule.home != Home.MAP
    born, dying = _lives(trace)
    resident = set(np.flatnonzero(trace.persistent & on_device).tolist())
    held = sum(size[tensor] for tensor in resident)
    pending: deque[tuple[int, int, int]] = deque()  # bytes, and which eviction
    pending_bytes = 0
    waits: list[tuple[int, int] | None] = [None] * trace.phase_count
    asked: list[list[_Coming]] = [[] for _ in range(trace.phase_count)]
    waiting: list[_Coming] = []
    for phase in (*range(trace.phase_count), *range(trace.phase_count)):  # the second one settles
        gone = {tensor for _, tensor in leaving[phase]} | released.get(phase, set())
        comes = set(born[phase]) | set(used_tensors(trace, phase))
        for entry, (_, tensor) in enumerate(leaving[phase]):
            if tensor in resident:
                pending.append((size[tensor], phase, entry))
                pending_bytes += size[tensor]
        gone &= resident
        comes = {tensor for tensor in comes if on_device[tensor]} - (resident - gone)
        held += sum(size[tensor] for tensor in comes) - sum(size[tensor] for tensor in gone)
        resident = (resident - gone) | comes
        waiting += [_Coming(row[1], row) for row in coming[phase]]
        waiting += [_Coming(tensor) for tensor in fetched[phase]]
        late: list[_Coming] = []
        asked[phase] = []
        for it in waiting:
            more_bytes = 0 if it.tensor in resident else size[it.tensor]
            if more_bytes and held + more_bytes > budget_bytes:
                late.append(it)
                continue
            asked[phase].append(it)
            held += more_bytes
            resident.add(it.tensor)
        waiting = late
        last = None
        while pending and held + pending_bytes > budget_bytes:
            freed, *last_eviction = pending.popleft()
            pending_bytes -= freed
            last = (last_eviction[0], last_eviction[1])
        waits[phase] = last
        dead = resident & set(dying[phase])
        resident -= dead
        held -= sum(size[tensor] for tensor in dead)
    return Room(
        waits=tuple(waits),
        coming=tuple(tuple(it.row for it in row if it.row is not None) for row in asked),
        fetches=tuple(tuple(it.tensor for it in row if it.row is None) for row in asked),
    )


def _lives(trace: Trace) -> tuple[list[list[int]], list[list[int]]]:
    """Tensors that are born, and that die, with each phase."""
    born: list[list[int]] = [[] for _ in range(trace.phase_count)]
    dying: list[list[int]] = [[] for _ in range(trace.phase_count)]
    for tensor in np.flatnonzero(~trace.persistent).tolist():
        born[trace.first_phase[tensor]].append(tensor)
        dying[trace.last_phase[tensor]].append(tensor)
    return born, dying
