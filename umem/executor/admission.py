"""What waits for what at a phase's begin, so that the budget holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from umem.core.schedule import HintOp, Home
from umem.executor.plan_search import Choice
from umem.trace import Trace

__all__ = ["AdmissionPlan", "Eviction", "HintRow", "HintRows", "plan_admission", "used_tensors"]

HintRow = tuple[HintOp, int]
"""A page hint: what to do, and the tensor's number in the trace."""

HintRows = Sequence[Sequence[HintRow]]
"""Page hints of each phase, in order."""


class Eviction(NamedTuple):
    """Which eviction of a step."""

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
    """How each phase keeps the budget.

    Parameters
    ----------
    waits
        The eviction that has to be over before the phase makes anything, or None.
    coming
        The prefetches to ask for when it begins.
    after
        For each of them the eviction that has to be over before it begins, or None.
    fetches
        The activations to copy back when it begins, by number in the trace.
    """

    waits: tuple[Eviction | None, ...]
    coming: tuple[tuple[HintRow, ...], ...]
    after: tuple[tuple[Eviction | None, ...], ...]
    fetches: tuple[tuple[int, ...], ...]


def plan_admission(
    choice: Choice,
    budget_bytes: int,
    leaving: HintRows,
    coming: HintRows,
    released: Mapping[int, set[int]],
    fetched: Sequence[Sequence[int]],
) -> AdmissionPlan:
    """Find the evictions that have to be waited for, and when there is room for what comes.

    A plan reckons with the link's speed; where it is slower, memory is still taken that the plan
    counts as free. So a step is gone through with what each phase holds, and with every eviction
    taking memory until somebody has waited for it. What a phase makes itself is there as soon as it
    runs: where that is too much, the training thread waits for the oldest evictions, which are
    carried out in order. Prefetches wait for them in the engine, where they hold up nobody, and
    rather than that the training thread has to.

    What comes takes memory as soon as it is asked for, where a plan asks early and lets it come
    when there is room: so it is asked for in the first phase that has room, or that uses it.

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
    phases = range(choice.trace.phase_count)
    walk = _Walk(choice, budget_bytes)
    for _ in range(2):  # the second one settles
        steps = [
            walk.go_through(
                phase, leaving[phase], coming[phase], released.get(phase, set()), fetched[phase]
            )
            for phase in phases
        ]
        walk.end_step()
    return AdmissionPlan(
        waits=tuple(step.wait for step in steps),
        coming=tuple(tuple(it.row for it in step.prefetches) for step in steps),
        after=tuple(tuple(it.after for it in step.prefetches) for step in steps),
        fetches=tuple(tuple(step.fetches) for step in steps),
    )


@dataclass
class _Prefetch:
    """A prefetch that was asked for."""

    row: HintRow
    more_bytes: int
    """What it adds to what is there."""
    evictions: int
    """How many evictions were asked for before it, which are those that it can come after."""
    behind: int = 0
    """How many of them it comes after."""
    after: Eviction | None = None
    """The last of these, if it may be pending."""
    is_settled: bool = False
    """It is of a step that was gone through before, and stays where it is."""


@dataclass
class _Boundary:
    """What is done when a phase begins."""

    wait: Eviction | None
    prefetches: list[_Prefetch]
    fetches: list[int]


class _Pending:
    """Evictions that may not be over yet, numbered as they are asked for. They end in order.

    When so many of them are over, what is there beyond what is there in the end are the bytes of
    the others, less those of the prefetches that begin after them.
    """

    def __init__(self) -> None:
        self._evictions: list[Eviction] = []
        self._beyond: list[int] = []
        self.over = 0
        """How many are known to be over."""

    @property
    def count(self) -> int:
        """How many there have been."""
        return self.over + len(self._evictions)

    def add(self, eviction: Eviction, size_bytes: int) -> None:
        """Note an eviction that is asked for."""
        self._evictions.append(eviction)
        self._beyond.append(size_bytes)

    def least_over(self, free_bytes: int) -> int:
        """How many have to be over for what is there beyond the end to fit from then on."""
        beyond, count = 0, len(self._beyond)
        while count and beyond <= free_bytes:
            beyond += self._beyond[count - 1]
            count -= beyond <= free_bytes
        return self.over + count

    def put_behind(self, prefetch: _Prefetch, behind: int) -> None:
        """Let a prefetch come after so many evictions."""
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
        """Note that somebody waits until so many are over. The last of them, if it was pending."""
        count = max(0, over - self.over)
        last = self._evictions[count - 1] if count else None
        del self._evictions[:count], self._beyond[:count]
        self.over += count
        return last


class _Walk:
    """Goes through a plan's step, phase by phase, with what is on the device."""

    def __init__(self, choice: Choice, budget_bytes: int) -> None:
        trace = choice.trace
        self._trace = trace
        self._waits_for_pages = choice.schedule.waits
        self._budget_bytes = budget_bytes
        self._size = trace.tensor_bytes.tolist()
        self._on_device = choice.schedule.home != Home.MAP
        self._born, self._dying = _lives(trace)
        self._resident = set(np.flatnonzero(trace.persistent & self._on_device).tolist())
        self._held = sum(self._size[tensor] for tensor in self._resident)
        """Bytes, when all evictions are over and all prefetches have come."""
        self._pending = _Pending()
        self._waiting: list[tuple[int, HintRow | None]] = []
        """What the plan has asked for: tensors, with the prefetch or, for a copy, None."""
        self._unused: dict[int, _Prefetch] = {}
        """Prefetches that bring something, by tensor, until a phase uses it; in order."""

    def end_step(self) -> None:
        """Go on from here with the first phase."""
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
        """Find what to do when the next phase begins, and take note of what it does itself."""
        used = used_tensors(self._trace, phase)
        for number, (_, tensor) in enumerate(leaving):
            if tensor in self._resident:
                self._pending.add(Eviction(phase, number), self._size[tensor])
        self._lose((released | {tensor for _, tensor in leaving}) & self._resident)
        comes = {tensor for tensor in (*self._born[phase], *used) if self._on_device[tensor]}
        self._gain(comes - self._resident)
        self._waiting += [(row[1], row) for row in coming]
        self._waiting += [(tensor, None) for tensor in fetched]
        prefetches, fetches = self._ask()
        needed = [self._unused.pop(tensor) for tensor in used if tensor in self._unused]
        wait = self._pending.wait(self._make_way())
        self._place(prefetches)
        if self._waits_for_pages:  # and so for what makes room for them
            self._pending.wait(max((prefetch.behind for prefetch in needed), default=0))
        self._lose(self._resident & set(self._dying[phase]))
        return _Boundary(wait, prefetches, fetches)

    def _gain(self, tensors: set[int]) -> None:
        self._held += sum(self._size[tensor] for tensor in tensors)
        self._resident |= tensors

    def _lose(self, tensors: set[int]) -> None:
        self._held -= sum(self._size[tensor] for tensor in tensors)
        self._resident -= tensors

    def _ask(self) -> tuple[list[_Prefetch], list[int]]:
        """What waits and has room now: prefetches, which hold nothing yet, and copies."""
        room_bytes = max(0, self._budget_bytes - self._held)
        prefetches, fetches, late = [], [], []
        for tensor, row in self._waiting:
            more_bytes = 0 if tensor in self._resident else self._size[tensor]
            if more_bytes > room_bytes:
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
        """How many evictions the thread waits for, when as many prefetches as can be come later."""
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
        """Let each prefetch come when there is room for it."""
        for prefetch in prefetches:
            if prefetch.more_bytes == 0:  # it is there, or the phase that asks for it uses it
                continue
            self._unused[prefetch.row[1]] = prefetch
            self._held += prefetch.more_bytes
            over = self._pending.least_over(self._budget_bytes - self._held)
            self._pending.put_behind(prefetch, over)


def _lives(trace: Trace) -> tuple[list[list[int]], list[list[int]]]:
    """Tensors that are born, and that die, with each phase."""
    born: list[list[int]] = [[] for _ in range(trace.phase_count)]
    dying: list[list[int]] = [[] for _ in range(trace.phase_count)]
    for tensor in np.flatnonzero(~trace.persistent).tolist():
        born[trace.first_phase[tensor]].append(tensor)
        dying[trace.last_phase[tensor]].append(tensor)
    return born, dying
