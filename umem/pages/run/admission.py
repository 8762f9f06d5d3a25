"""Orders evictions, prefetches and copies at phase starts so that residency keeps the budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np

from umem.core.schedule import HintOp, ResidencyMode
from umem.pages.plan.plan_search import PlanCandidate
from umem.trace import Trace

__all__ = ["AdmissionPlan", "Eviction", "HintRow", "HintRows", "plan_admission", "used_tensors"]

HintRow = tuple[HintOp, int]
"""A page hint: what to do, and the tensor's number in the trace."""

HintRows = Sequence[Sequence[HintRow]]
"""Page hints of each phase, in order."""

_FREE_PASSES = 4
"""Passes over a step before prefetches that pass each other by in turns are held back."""


class Eviction(NamedTuple):
    """An eviction of a step, by phase and by position among the evictions of the phase."""

    phase: int
    number: int
    """Among the evictions of its phase."""


def used_tensors(trace: Trace, phase: int) -> list[int]:
    """Numbers of the tensors that a phase uses."""
    used = trace.access_tensor[trace.access_start[phase] : trace.access_start[phase + 1]]
    numbers: list[int] = used.tolist()
    return numbers


@dataclass(frozen=True)
class AdmissionPlan:
    """For each phase, the waits, prefetches and copies that keep the budget."""

    waits: tuple[Eviction | None, ...]
    """The eviction that must be finished before the phase allocates."""
    coming: tuple[tuple[HintRow, ...], ...]
    """The prefetches to submit at the start of the phase."""
    after: tuple[tuple[Eviction | None, ...], ...]
    """For each prefetch, the eviction that must be finished before it begins."""
    fetches: tuple[tuple[int, ...], ...]
    """The activations to copy back at the start of the phase, by number in the trace."""
    away_at_start: frozenset[int]
    """Tensors that live from step to step and are off the device when a step begins, without those
    that are mapped."""

    def submitted(self) -> set[tuple[int, int]]:
        """Phase and tensor of each prefetch and copy."""
        rows = enumerate(zip(self.coming, self.fetches, strict=True))
        return {
            (phase, tensor)
            for phase, (coming, fetches) in rows
            for tensor in (*(tensor for _, tensor in coming), *fetches)
        }


def plan_admission(
    candidate: PlanCandidate,
    budget_bytes: int,
    leaving: HintRows,
    coming: HintRows,
    released: Mapping[int, set[int]],
    fetched: Sequence[Sequence[int]],
) -> AdmissionPlan:
    """Find the evictions to wait for, and the phases in which prefetches and copies fit.

    The link may be slower than planned: evictions then still hold memory that the plan counts as
    free. So this walks through a step and counts each as holding memory until something has waited
    for it. What a phase allocates is resident as soon as it runs: if that is too much, the training
    thread waits for the oldest evictions, which finish in order. Prefetches are made to wait first,
    inside the engine. A prefetch holds memory from its submission on, so it is submitted in the
    first phase that has room, or that uses it.

    What a step finds depends on the step before, so the walk goes on until a step repeats the one
    before, as all later ones then do. Prefetches that pass each other by in turns, one taking the
    room of another in every second step, are submitted where they are used.

    `leaving`, `coming` and `fetched` are what the plan says of each phase; `released` has the
    activations whose device memory is freed at its start.
    """
    walk = _ResidencyWalk(candidate, budget_bytes)
    before: AdmissionPlan | None = None
    for number in count():
        steps = [
            walk.go_through(
                phase, leaving[phase], coming[phase], released.get(phase, set()), fetched[phase]
            )
            for phase in range(candidate.trace.phase_count)
        ]
        walk.end_step()
        found = AdmissionPlan(
            waits=tuple(step.wait for step in steps),
            coming=tuple(tuple(it.row for it in step.prefetches) for step in steps),
            after=tuple(tuple(it.after for it in step.prefetches) for step in steps),
            fetches=tuple(tuple(step.fetches) for step in steps),
            away_at_start=walk.away,
        )
        if found == before:
            break
        if before is not None and number >= _FREE_PASSES:
            submitted = found.submitted()
            changed = submitted ^ before.submitted()
            walk.late |= {tensor for _, tensor in changed or submitted}
        before = found
    return found


@dataclass
class _Prefetch:
    """A prefetch that was submitted."""

    row: HintRow
    more_bytes: int
    """Bytes that it adds to the resident ones."""
    evictions: int
    """How many evictions were submitted before it: those that it can wait for."""
    behind: int = 0
    """How many of them it waits for."""
    after: Eviction | None = None
    """The last of these, if it may still be pending."""
    is_settled: bool = False
    """It belongs to an earlier pass over the step, and is not changed any more."""


@dataclass
class _Boundary:
    """The work at the start of a phase."""

    wait: Eviction | None
    prefetches: list[_Prefetch]
    fetches: list[int]


class _Pending:
    """Evictions that may not have finished, in the order of submission. They finish in order.

    After some of them have finished, the bytes above the final residency are those of the others,
    less those of the prefetches that wait for them.
    """

    def __init__(self) -> None:
        self._evictions: list[Eviction] = []
        self._beyond: list[int] = []
        self.over = 0
        """How many are known to have finished."""

    @property
    def count(self) -> int:
        """How many evictions were submitted."""
        return self.over + len(self._evictions)

    def add(self, eviction: Eviction, size_bytes: int) -> None:
        """Add an eviction that is submitted."""
        self._evictions.append(eviction)
        self._beyond.append(size_bytes)

    def least_over(self, free_bytes: int) -> int:
        """How many must finish so that the bytes above the final residency fit from then on."""
        beyond, count = 0, len(self._beyond)
        while count and beyond <= free_bytes:
            beyond += self._beyond[count - 1]
            count -= beyond <= free_bytes
        return self.over + count

    def put_behind(self, prefetch: _Prefetch, behind: int) -> None:
        """Make a prefetch wait for the first `behind` evictions."""
        for number, more_bytes in (
            (prefetch.behind, prefetch.more_bytes),
            (behind, -prefetch.more_bytes),
        ):
            if number > self.over:
                self._beyond[number - self.over - 1] += more_bytes
        prefetch.behind = behind
        if behind > self.over:
            prefetch.after = self._evictions[behind - self.over - 1]

    def wait(self, over: int) -> Eviction | None:
        """Record a wait for the first `over` evictions; return the last of them if pending."""
        count = max(0, over - self.over)
        last = self._evictions[count - 1] if count else None
        del self._evictions[:count], self._beyond[:count]
        self.over += count
        return last


class _ResidencyWalk:
    """Walks through a planned step phase by phase and tracks what is resident."""

    def __init__(self, candidate: PlanCandidate, budget_bytes: int) -> None:
        trace = candidate.trace
        self._trace = trace
        self.late: set[int] = set()
        """Tensors that are asked for in the phase that uses them, and not before."""
        self._waits_for_pages = candidate.schedule.waits
        self._budget_bytes = budget_bytes
        self._size = trace.tensor_bytes.tolist()
        self._on_device = candidate.schedule.residency != ResidencyMode.MAP
        self._born, self._dying = _lives(trace)
        self._resident = set(np.flatnonzero(trace.persistent & self._on_device).tolist())
        self._held = sum(self._size[tensor] for tensor in self._resident)
        """Resident bytes once all evictions and prefetches have finished."""
        self._pending = _Pending()
        self._waiting: list[tuple[int, HintRow | None]] = []
        """Tensors that the plan wants back: with their prefetch, or None for a copy."""
        self._unused: dict[int, _Prefetch] = {}
        """Prefetches that add bytes, by tensor, until a phase uses the tensor; in order."""

    @property
    def away(self) -> frozenset[int]:
        """Tensors that live from step to step, migrate, and are not resident now."""
        migrating = np.flatnonzero(self._trace.persistent & self._on_device).tolist()
        return frozenset(migrating) - self._resident

    def end_step(self) -> None:
        """Continue with the first phase of the next step."""
        for prefetch in self._unused.values():
            prefetch.is_settled = True

    def go_through(
        self,
        phase: int,
        leaving: Sequence[HintRow],
        coming: Sequence[HintRow],
        released: set[int],
        fetched: Sequence[int],
    ) -> _Boundary:
        """Find the work at the start of a phase, and account for what the phase does."""
        used = used_tensors(self._trace, phase)
        for number, (_, tensor) in enumerate(leaving):
            if tensor in self._resident:
                self._pending.add(Eviction(phase, number), self._size[tensor])
        self._lose((released | {tensor for _, tensor in leaving}) & self._resident)
        uses = {tensor for tensor in (*self._born[phase], *used) if self._on_device[tensor]}
        self._held += sum(self._size[tensor] for tensor in uses - self._resident)
        self._resident |= uses
        self._waiting += [(row[1], row) for row in coming]
        self._waiting += [(tensor, None) for tensor in fetched]
        prefetches, fetches = self._ask()
        needed = [self._unused.pop(tensor) for tensor in used if tensor in self._unused]
        if not self._waits_for_pages:  # they come by page fault, whatever they were to wait for
            for prefetch in needed:
                self._pending.put_behind(prefetch, 0)
        wait = self._pending.wait(self._make_way())
        self._place(prefetches)
        if self._waits_for_pages:  # and thereby for the evictions that make room for them
            self._pending.wait(max((prefetch.behind for prefetch in needed), default=0))
        self._lose(self._resident & set(self._dying[phase]))
        return _Boundary(wait, prefetches, fetches)

    def _lose(self, tensors: set[int]) -> None:
        self._held -= sum(self._size[tensor] for tensor in tensors)
        self._resident -= tensors

    def _ask(self) -> tuple[list[_Prefetch], list[int]]:
        """Prefetches and copies that fit now; the prefetches hold no memory yet."""
        room_bytes = max(0, self._budget_bytes - self._held)
        prefetches, fetches, late = [], [], []
        for tensor, row in self._waiting:
            more_bytes = 0 if tensor in self._resident else self._size[tensor]
            if more_bytes > room_bytes or (more_bytes and tensor in self.late):
                late.append((tensor, row))
                continue
            room_bytes -= more_bytes
            self._resident.add(tensor)
            if row is None:
                fetches.append(tensor)
                self._held += more_bytes
            else:
                prefetches.append(_Prefetch(row, more_bytes, self._pending.count))
        self._waiting = late
        return prefetches, fetches

    def _make_way(self) -> int:
        """How many evictions the thread waits for after delaying prefetches where possible."""
        free_bytes = self._budget_bytes - self._held
        over = self._pending.least_over(free_bytes)
        for prefetch in reversed(self._unused.values()):
            if over <= self._pending.over:
                break
            behind = min(over, prefetch.evictions)
            if behind > prefetch.behind and not prefetch.is_settled:
                self._pending.put_behind(prefetch, behind)
                over = self._pending.least_over(free_bytes)
        return over

    def _place(self, prefetches: Sequence[_Prefetch]) -> None:
        """Make each prefetch wait for the evictions that make room for it."""
        for prefetch in prefetches:
            if prefetch.more_bytes == 0:  # resident already, or used by the phase that submits it
                continue
            self._unused[prefetch.row[1]] = prefetch
            self._held += prefetch.more_bytes
            over = self._pending.least_over(self._budget_bytes - self._held)
            self._pending.put_behind(prefetch, over)


def _lives(trace: Trace) -> tuple[list[list[int]], list[list[int]]]:
    """The tensors whose lifetime begins, and those whose lifetime ends, in each phase."""
    born: list[list[int]] = [[] for _ in range(trace.phase_count)]
    dying: list[list[int]] = [[] for _ in range(trace.phase_count)]
    for tensor in np.flatnonzero(~trace.persistent).tolist():
        born[trace.first_phase[tensor]].append(tensor)
        dying[trace.last_phase[tensor]].append(tensor)
    return born, dying
