"""Moves the optimizer's step of a trace into the backward pass, parameter by parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from umem.core.classes import TensorClass
from umem.core.errors import TraceError
from umem.trace.model import OPTIMIZER, Access, Trace, ranges
from umem.trace.uses import first_and_last_use, phase_of_access

__all__ = ["is_optimizer_phase", "with_step_in_backward"]

_Numbers = npt.NDArray[np.int64]


def is_optimizer_phase(name: str) -> bool:
    """Whether a phase of this name is part of an optimizer's step."""
    return name.split(" ", 1)[0].rstrip(":") == OPTIMIZER


@dataclass
class _Part:
    """Consecutive phases of the optimizer that update from the same gradients."""

    phases: list[int] = field(default_factory=list)
    gradients: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)
    """Weights and state that the part writes; phases before the step use the old weights."""
    complete: int = -1
    """Last phase before the optimizer's that writes a gradient of the part or uses its weights; -1
    if the step does not write one of the gradients."""


def with_step_in_backward(
    trace: Trace, order: Sequence[str] | None = None
) -> tuple[Trace, _Numbers]:
    """Move the parts of the optimizer's step behind the phases that complete their gradients.

    A part is a run of phases that update from the same gradients, which it frees. It stays where it
    is if the step does not write its gradients, or completes them only when the optimizer begins,
    as with clipping.

    `order` names the first phases of the parts to move, in the order in which their gradients are
    complete. By default all parts move, and keep their order.

    Returns
    -------
    Trace
        The same tensors, by the same numbers, and the same phases in another order.
    int64[P]
        Earlier index of each phase.

    Raises
    ------
    TraceError
        If the trace has no phases of an optimizer.
    """
    parts = _find_parts(trace)
    ranks = {name: rank for rank, name in enumerate(order or ())}
    moved: list[int] = []
    places: dict[int, tuple[int, int, int]] = {}
    for index, part in enumerate(parts):
        rank = index if order is None else ranks.get(trace.phase_names[part.phases[0]])
        if part.complete >= 0 and rank is not None:
            moved += part.phases
            for number, phase in enumerate(part.phases):
                places[phase] = part.complete, 1 + rank, number

    def place(phase: int) -> tuple[int, int, int]:
        return places.get(phase, (phase, 0, 0))

    phases = np.array(sorted(range(trace.phase_count), key=place), np.int64)
    return (_with_lives(trace, phases, parts, moved) if moved else trace), phases


def _with_lives(
    trace: Trace, phases: _Numbers, parts: Sequence[_Part], moved: Sequence[int]
) -> Trace:
    """The trace with its phases in another order, and the lifetimes that follow from it."""
    number = np.argsort(phases)
    reordered = _reordered(trace, phases)
    first, last = number[trace.first_phase], number[trace.last_phase]

    # Tensors that live when the optimizer's step begins live to its end, but for gradients that a
    # part in the backward pass frees.
    own = ~trace.persistent & (trace.first_phase >= parts[0].phases[0])
    last[~own & (trace.last_phase >= parts[0].phases[0])] = trace.phase_count - 1
    _, last_use = first_and_last_use(reordered)
    taken = trace.access_tensor[np.isin(phase_of_access(trace), moved)]
    gradients = taken[trace.tensor_class[taken] == TensorClass.GRADIENTS.number]
    last[gradients] = last_use[gradients]

    # A temporary tensor of the whole optimizer's step shrinks to the largest part's share of it.
    part_of = np.full(trace.phase_count, -1, np.int64)
    for index, part in enumerate(parts):
        part_of[part.phases] = index
    whole = own & (part_of[trace.first_phase] != part_of[trace.last_phase])
    steps = number[np.flatnonzero(part_of >= 0)]
    first[whole], last[whole] = steps.min(), steps.max()
    size = trace.tensor_bytes.copy()
    size[whole] = np.maximum(1, np.ceil(size[whole] * _largest_share(trace, parts)))

    first[trace.persistent], last[trace.persistent] = 0, trace.phase_count - 1
    return replace(
        reordered,
        first_phase=first.astype(np.int32),
        last_phase=last.astype(np.int32),
        tensor_bytes=size,
    )


def _reordered(trace: Trace, phases: _Numbers) -> Trace:
    start = trace.access_start
    accesses = np.concatenate([np.arange(start[phase], start[phase + 1]) for phase in phases])
    return replace(
        trace,
        phase_names=tuple(trace.phase_names[phase] for phase in phases),
        phase_kind=trace.phase_kind[phases],
        phase_precision=trace.phase_precision[phases],
        flops=trace.flops[phases],
        memory_bytes=trace.memory_bytes[phases],
        duration_s=None if trace.duration_s is None else trace.duration_s[phases],
        access_start=ranges(np.diff(start)[phases]),
        access_tensor=trace.access_tensor[accesses],
        access_mode=trace.access_mode[accesses],
    )


def _find_parts(trace: Trace) -> list[_Part]:
    own = [phase for phase, name in enumerate(trace.phase_names) if is_optimizer_phase(name)]
    if not own:
        raise TraceError(
            f"trace {trace.name!r} has no phases of an optimizer, whose names begin with "
            f"{OPTIMIZER!r}: there is no step to do in the backward pass"
        )
    phase_of, is_write = phase_of_access(trace), (trace.access_mode & Access.WRITE) > 0
    is_before = phase_of < own[0]
    made_at = _last_phase_of(trace, is_before & is_write)
    made_at[trace.persistent] = -1  # kept from step to step
    used_at = _last_phase_of(trace, is_before)
    # A tensor that the optimizer makes of a gradient, such as a cast, is of class gradients too.
    is_gradient = (trace.tensor_class == TensorClass.GRADIENTS.number) & (
        trace.first_phase < own[0]
    )
    parts: list[_Part] = []
    for phase in own:
        accesses = slice(*trace.access_start[phase : phase + 2])
        used = trace.access_tensor[accesses]
        gradients = set(used[is_gradient[used]].tolist())
        if not parts or gradients - parts[-1].gradients:
            parts.append(_Part())
        parts[-1].phases.append(phase)
        parts[-1].gradients |= gradients
        parts[-1].written |= set(used[is_write[accesses]].tolist())
    for part in parts:
        made = made_at[list(part.gradients)]
        if made.size and made.min() >= 0:
            part.complete = int(max(made.max(), used_at[list(part.written)].max(initial=-1)))
    return parts


def _last_phase_of(trace: Trace, accesses: npt.NDArray[np.bool_]) -> _Numbers:
    """The last phase with one of these accesses to each tensor, -1 for none."""
    last = np.full(trace.tensor_count, -1, np.int64)
    np.maximum.at(last, trace.access_tensor[accesses], phase_of_access(trace)[accesses])
    return last


def _largest_share(trace: Trace, parts: Sequence[_Part]) -> float:
    """Share of the largest part in the bytes that the optimizer's step touches."""
    touched = [int(trace.memory_bytes[part.phases].sum()) for part in parts]
    return max(touched) / sum(touched) if any(touched) else 1.0
