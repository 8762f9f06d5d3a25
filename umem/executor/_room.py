"""Which evictions have to be over before a phase begins, so that the budget holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from umem.executor._choice import Choice
from umem.schedule import HintOp, Home
from umem.trace import Trace

__all__ = ["HintRow", "HintRows", "room_waits", "used_tensors"]

HintRow = tuple[HintOp, int]
"""A page hint: what to do, and the tensor's number in the trace."""

HintRows = Sequence[Sequence[HintRow]]
"""Page hints of each phase, in order."""


def used_tensors(trace: Trace, phase: int) -> list[int]:
    """Numbers of the tensors that a phase uses."""
    used = trace.access_tensor[trace.access_start[phase] : trace.access_start[phase + 1]]
    numbers: list[int] = used.tolist()
    return numbers


def room_waits(
    choice: Choice,
    budget_bytes: int,
    leaving: HintRows,
    coming: HintRows,
    released: Mapping[int, set[int]],
    fetched: Mapping[int, set[int]],
) -> list[tuple[int, int] | None]:
    """Find the eviction that each phase has to wait for.

    A plan reckons with the link's speed; where it is slower, memory is still taken that the plan
    counts as free. So a step is gone through with what each phase holds, and with every eviction
    taking memory until somebody has waited for it. Where that is too much, the oldest are waited
    for: evictions are carried out in order.

    Parameters
    ----------
    choice
        The plan.
    budget_bytes
        What may be resident.
    leaving, coming
        Evictions and prefetches of each phase.
    released, fetched
        Activations whose memory goes, and is taken again, at a phase's begin.

    Returns
    -------
    list
        For each phase (phase of the eviction, its number there), or None.
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
    for phase in (*range(trace.phase_count), *range(trace.phase_count)):  # the second one settles
        gone = {tensor for _, tensor in leaving[phase]} | released.get(phase, set())
        comes = set(born[phase]) | {tensor for _, tensor in coming[phase]}
        comes |= fetched.get(phase, set()) | set(used_tensors(trace, phase))
        for entry, (_, tensor) in enumerate(leaving[phase]):
            if tensor in resident:
                pending.append((size[tensor], phase, entry))
                pending_bytes += size[tensor]
        gone &= resident
        comes = {tensor for tensor in comes if on_device[tensor]} - (resident - gone)
        held += sum(size[tensor] for tensor in comes) - sum(size[tensor] for tensor in gone)
        resident = (resident - gone) | comes
        last = None
        while pending and held + pending_bytes > budget_bytes:
            freed, *last_eviction = pending.popleft()
            pending_bytes -= freed
            last = (last_eviction[0], last_eviction[1])
        waits[phase] = last
        dead = resident & set(dying[phase])
        resident -= dead
        held -= sum(size[tensor] for tensor in dead)
    return waits


def _lives(trace: Trace) -> tuple[list[list[int]], list[list[int]]]:
    """Tensors that are born, and that die, with each phase."""
    born: list[list[int]] = [[] for _ in range(trace.phase_count)]
    dying: list[list[int]] = [[] for _ in range(trace.phase_count)]
    for tensor in np.flatnonzero(~trace.persistent).tolist():
        born[trace.first_phase[tensor]].append(tensor)
        dying[trace.last_phase[tensor]].append(tensor)
    return born, dying
