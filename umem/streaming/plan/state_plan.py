"""Plans streamed optimizer state and copied activations under a budget of device memory.

The state of a *unit*, such as a block of the model, is either resident or streamed. Streamed state
has its home in page-locked host memory. For its update it is copied into one of a few staging
buffers, the slots, and back. Activations of early units are copied out where they leave no room. A
plan needs the units' sizes and durations and the machine's figures only, so that it is made in
milliseconds, before the training's first step, and without a GPU.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import Any

import numpy as np

from umem.core.errors import PlanError
from umem.core.units import format_bytes
from umem.hardware import Hardware
from umem.streaming.plan.step_memory import ByteCounts, MemoryByMoment
from umem.streaming.plan.step_timing import (
    StreamTiming,
    StreamUnit,
    TemporarySlot,
    simulate_stream,
)

__all__ = [
    "NoShorterStepError",
    "StreamPlan",
    "StreamProblem",
    "home_bytes",
    "least_slack_bytes",
    "least_state_bytes",
    "most_copied_gradients",
    "plan_stream",
    "simulate_plan",
]

_SLACK_SHARE, _LEAST_SLACK_BYTES = 0.03, 256 << 20

_SLOTS = (2, 3, 4, 6, 8)
"""Numbers of slots to try. With one, nothing is copied in while anything is copied out; three keep
both directions and the update busy; more only hold what is fetched ahead."""

_FEW_SLOTS = (2, 4)
"""The same for deferred steps with temporary slots, which hold what is fetched ahead."""

_SLOT_STEP = 0.9
"""Sizes of a slot to try: each at most this share of the next larger one. Units that are larger
than a slot stay on the device."""

_COPIED_COUNTS = 6
"""Numbers of copied units to try, from the fewest that fit to the most that make room."""

_FETCH_AHEAD = (1, 4)
"""Blocks by which activations come back early, for which room is left beside the state."""

_EARLY_COUNTS = 3
"""Numbers of temporary slots to try, besides the most: those that are made before the step, and
each time half as many. Where fewer are made, they are freed later."""

_DEFERRED_EARLY_COUNTS = 2
"""The same for deferred steps, which have all of them before the step."""

_MOST_TASKS = 40_000
"""Tasks to simulate in all, so that plans for thousands of units take less than a second."""

_FEWEST_SHARE = 16
"""The fewest units that give the same time are found to this part of their number."""

_LEAST_GAIN = 0.01
"""Part of the step that has to be gained where another unit's gradients leave than have to, which
take page-locked memory, and where there are temporary slots, which take time of the processor."""

_EQUAL = 1e-9
"""Relative difference of two equal times: their sums are rounded."""


def least_slack_bytes(budget_bytes: int) -> int:
    """Bytes of a budget that plans leave free, as they count live tensors.

    They are for cached memory that fits no request, the rounding of segments and the workspaces of
    libraries. A training leaves more when its memory runs short.
    """
    return max(_LEAST_SLACK_BYTES, int(_SLACK_SHARE * budget_bytes))


@dataclass(frozen=True)
class StreamPlan:
    """What stays on the device, and the slots for the rest."""

    resident: frozenset[int]
    """Units whose state stays on the device, by their number in forward order."""
    slots: int
    """Number of staging buffers; 0 if all units are resident, or the state of the others is updated
    in host memory."""
    slot_bytes: int
    """Size of each: that of the largest piece of a streamed unit."""
    stages_operands: bool
    """Whether slots have room for the weights and gradients at home, too, that an update uses;
    otherwise it uses them on the host."""
    left_before: Mapping[int, int]
    """For each unit whose activations are copied out after its forward pass, the unit before whose
    forward pass the program waits until they have left, so that their memory is free; the number of
    units for the backward pass."""
    fetch_ahead: int
    """Blocks before its backward pass at which a block's activations are fetched."""
    copied_gradients: frozenset[int]
    """Units whose gradients are copied out in the backward pass."""
    final_gradients: frozenset[int]
    """Those of them whose gradients are in the last batch only."""
    adds_at_home: bool
    """Whether later batches are added to those at home, which takes least memory and longest."""
    returning_gradients: Mapping[int, int]
    """For those of them that come back for the step, the unit in whose backward pass of the last
    batch they begin to, or from which on they stay. Whatever else the program does with the others
    uses them on the host."""
    temporary: tuple[TemporarySlot, ...]
    """Further slots, for the pieces after those that have the others first."""
    peak_bytes: int
    """Device memory at the fullest moment, of everything but weights."""
    predicted: StreamTiming
    hosts: frozenset[int] = frozenset()
    """Units that the host updates."""
    temporary_slot_bytes: int = 0
    """Size of each temporary slot: that of the largest piece that has one."""

    @property
    def copied(self) -> frozenset[int]:
        """Units whose activations are copied out."""
        return frozenset(self.left_before)

    def temporary_bytes(self, *, forward: int = -1, backward: int | None = None) -> int:
        """Bytes of temporary slots in a unit's forward or backward pass; by default in the step.

        Unit 0 ends the backward pass, and what comes between it and the step has as many.
        """
        return self.temporary_slot_bytes * sum(
            it.freed_before > forward
            and (backward is None or (it.made_in is not None and it.made_in >= backward))
            for it in self.temporary
        )


@dataclass(frozen=True, eq=False)
class StreamProblem:
    """What a plan is made for."""

    units: Sequence[StreamUnit]
    """In forward order."""
    budget_bytes: int
    """Device memory for everything: what the units and `step_peak_bytes` name, resident state and
    slots."""
    hardware: Hardware
    """Bandwidths of explicit copies and of the link, and the slowdown beside copies."""
    other_s: float = 0.0
    """Computation between the last backward pass and the step, such as gradient clipping."""
    step_peak_bytes: int = 0
    """Device memory of everything but streamed state and slots between the passes, such as weights
    and gradients, and what clipping makes. It does not count with `in_backward`."""
    update_peak_bytes: int | None = None
    """The same from the step on, when clipping is over; None if that is not known."""
    is_deferred: bool = True
    """As in :func:`umem.streaming.plan.step_timing.simulate_stream`; so are the next two."""
    in_backward: bool = False
    batches: int = 1
    holds_gradients: bool = False
    """Whether `forward_peak_bytes` of the units have the gradients of updates to come."""
    weight_slots: int = 0
    """Number of buffers for weights at home, which the budget leaves out."""
    state_share: float = 1.0
    """The most of the units' state that may be resident, as a share of its bytes."""
    most_state_bytes: int | None = None
    """The most that resident state and slots may take; None for as much as has room."""
    may_have_temporary: bool = True
    """Whether there may be temporary slots. There are none where steps are deferred or in the
    backward pass, which hides their copies, and with `most_state_bytes`, where others need what is
    left."""
    copied_gradients: int = 0
    """Number of units whose gradients are copied out, the last ones. Found by :func:`plan_stream`.
    """
    adds_at_home: bool = False
    """Whether later batches are added to those at home. Found too; so is the next one."""
    stages_operands: bool = False
    """Whether slots have room for gradients and weights at home."""
    hosts: frozenset[int] = frozenset()
    """Numbers of the units that the host updates, at home. Chosen by
    :mod:`umem.streaming.plan.host_updates`."""
    launch_s: float = 0.0
    """What the processor takes for each piece of streamed state, where the device waits for it."""
    fewest_slots: int = _SLOTS[0]
    """Slots to be content with: less where :mod:`umem.streaming.plan.overflow` makes room."""
    least_ahead: int = _FETCH_AHEAD[0]
    """The same of blocks by which activations come back early."""

    @cached_property
    def size(self) -> ByteCounts:
        """State of each unit, but of the host's, int64[N]."""
        every = [0 if i in self.hosts else unit.state_bytes for i, unit in enumerate(self.units)]
        return np.array(every, np.int64)

    @cached_property
    def staged(self) -> ByteCounts:
        """The largest part of it that is staged at a time, with its operands, int64[N]."""
        leave = self.with_copied_gradients
        staged = [
            _staged_bytes(unit, number in leave) if self.stages_operands else max(unit.pieces)
            for number, unit in enumerate(self.units)
        ]
        return np.array(staged, np.int64)

    @cached_property
    def memory(self) -> MemoryByMoment:
        """Everything but state."""
        step_bytes, update_bytes = self.step_peak_bytes, self.update_peak_bytes
        return MemoryByMoment(
            self.units,
            0 if self.in_backward else step_bytes,
            0 if self.in_backward else step_bytes if update_bytes is None else update_bytes,
            self.copied_gradients,
            self.batches,
            self.holds_gradients,
            self.hosts,
            adds_at_home=self.adds_at_home,
        )

    @cached_property
    def left_gradients(self) -> ByteCounts:
        """Gradients of each unit that are copied out, int64[N]."""
        return np.array(self.memory.gradient_bytes, np.int64)

    @cached_property
    def trained_weights(self) -> ByteCounts:
        """Weights at home that each unit's update changes, int64[N]."""
        return np.array([unit.trained_weight_bytes for unit in self.units], np.int64)

    @cached_property
    def fetched_bytes(self) -> int:
        """Weights that come to the device in a step, at least."""
        staged = [unit for unit in self.units if unit.weight_bytes]
        sizes, slots = [unit.weight_bytes for unit in staged], self.weight_slots
        # Of weights that no update changes, further buffers may keep all for the forward pass.
        is_trained = any(unit.trained_weight_bytes for unit in staged)
        in_forward = sum(sizes[slots:]) if is_trained else 0
        return self.batches * (in_forward + sum(sizes[: max(0, len(sizes) - slots)]))

    @cached_property
    def passes_s(self) -> float:
        """Computation of all passes of a step."""
        return sum(unit.forward_s + unit.backward_s for unit in self.units) * self.batches

    @cached_property
    def compute_s(self) -> float:
        """Computation of a step, with everything on the device."""
        updates = (unit.update_s for i, unit in enumerate(self.units) if i not in self.hosts)
        return self.passes_s + self.other_s + sum(updates)

    @cached_property
    def rates(self) -> tuple[float, float, float, float]:
        """Bytes per second to the device, to the host, and of both; and by how much a byte slows.

        What crosses the link in a computation's own time slows it, not what does in the added.
        """
        hardware = self.hardware
        in_rate, out_rate = hardware.copy_to_device_bytes_per_s, hardware.copy_to_host_bytes_per_s
        both_rate = min(hardware.copy_link_bytes_per_s, in_rate + out_rate)
        slowdown = hardware.copy_slowdown_s_per_byte
        return in_rate, out_rate, both_rate, slowdown / (1.0 + slowdown * both_rate)

    @cached_property
    def most_resident_bytes(self) -> int:
        """State that may be resident."""
        return int(self.state_share * int(self.size.sum()))

    @property
    def most_placed_bytes(self) -> int:
        """What resident state and slots may take."""
        return sys.maxsize if self.most_state_bytes is None else self.most_state_bytes

    @property
    def makes_temporary(self) -> bool:
        """Whether temporary slots are of use."""
        hides_copies = (self.is_deferred and self.batches == 1) or self.in_backward
        return self.may_have_temporary and not hides_copies and self.most_state_bytes is None

    @cached_property
    def with_copied_gradients(self) -> frozenset[int]:
        """Numbers of the units whose gradients are copied out."""
        count = len(self.units)
        return self.hosts.union(range(count - self.copied_gradients, count))

    @property
    def with_final_gradients(self) -> frozenset[int]:
        """Numbers of those whose gradients are in the last one of several batches only.

        They are the host's, and have room until then.
        """
        kept = range(len(self.units) - self.copied_gradients)
        return self.hosts.intersection(kept) if self.batches > 1 else frozenset()


class NoShorterStepError(PlanError):
    """No plan has a step below the limit that was given."""


def plan_stream(
    problem: StreamProblem, longest_s: float = math.inf, *, may_shorten: bool = False
) -> StreamPlan:
    """Choose resident units, slots and copied activations with the shortest predicted step.

    Resident are early units of the forward pass, whose updates are due first, and units that are
    much larger than the others where smaller slots pay for them. With `in_backward` they may also
    be spread evenly, so that the copies of the others are. Copied are the activations of
    early units, which are needed last: as few as fit, or more where the room is worth more to
    state. Where even all of them leave too little room, gradients of the last units are copied out
    too: they are the first that the backward pass makes. They are as few as make it fit, and those
    of one more unit where that gains time. They come back for later batches if there is room for
    those of a few units, and for the step as soon as there is. If fewer resident units, or copied
    ones, give the same time, fewer are.

    Parameters
    ----------
    problem
        What to plan for.
    longest_s
        A step that takes as long is of no use.
    may_shorten
        Whether the caller may shorten the step yet: only its bounds are held against `longest_s`.

    Raises
    ------
    PlanError
        If the budget, or `most_state_bytes`, is too small for two slots with all activations and
        gradients copied out. The message says how many bytes are needed.
    NoShorterStepError
        If no step is below `longest_s`. It is a PlanError.
    """
    ways = [_Way(each) for each in _problems(problem)]
    if all(way.least_s >= longest_s for way in ways):
        raise NoShorterStepError(f"no step is shorter than {longest_s} s")
    best, *further = ways
    most_s = math.inf if may_shorten else longest_s
    plan = _fastest(best, most_s)
    for way in further:
        limit_s = (1.0 - _LEAST_GAIN) * plan.predicted.step_s
        if way.least_s < limit_s:
            other = _fastest(way, min(limit_s, most_s))
            plan = other if other.predicted.step_s < limit_s else plan
    if plan.predicted.step_s >= most_s:
        raise NoShorterStepError(f"no step is shorter than {longest_s} s")
    return plan


def home_bytes(problem: StreamProblem) -> tuple[int, int]:
    """The least and the most page-locked memory that a plan takes, without weights; simulates none.

    Raises
    ------
    PlanError
        As :func:`plan_stream`.
    """
    found = []
    for way in map(_Way, _problems(problem)):
        its, memory = way.problem, way.problem.memory
        room_bytes = its.budget_bytes - least_state_bytes(its)
        fewest = memory.fewest_copied(room_bytes, its.least_ahead)
        all_bytes = int(its.size.sum())
        for _, choice in way.bounded:
            least, most = (
                all_bytes - int(its.size[choice.order[:count]].sum())
                for count in (choice.count, choice.least)
            )
            gradients_bytes = sum(memory.gradient_bytes)
            found.append(gradients_bytes + least + int(memory.left_bytes[fewest]))
            found.append(gradients_bytes + most + int(memory.left_bytes[choice.copied]))
    return min(found), max(found)


def _problems(problem: StreamProblem) -> Iterator[StreamProblem]:
    """The problem with few gradients copied out, in the ways to treat those of earlier batches.

    Autograd adds to them at home, which needs no room. Or they come back for that, which takes less
    time, and room for a few units' gradients.
    """
    most, ways = most_copied_gradients(problem), [problem]
    if most and problem.batches > 1 and not problem.adds_at_home:
        at_home = replace(problem, adds_at_home=True)
        if problem.hosts or _fewest_copied_gradients(at_home):
            least_bytes = sum(_least_bytes(replace(problem, copied_gradients=most)))
            ways = [at_home, problem] if least_bytes <= problem.budget_bytes else [at_home]
    for way in ways:
        yield from _with_few_gradients(way)


def _with_few_gradients(problem: StreamProblem) -> Iterator[StreamProblem]:
    """The problem with the fewest gradients copied out and, if there are any, with one unit's more.

    The fewest leave room for the fewest slots only. Those of one more unit make room for others.
    """
    fewest = _fewest_copied_gradients(problem)
    first = replace(problem, copied_gradients=fewest, stages_operands=True)
    # Slots for operands would push more of them out.
    yield first if _has_room(first) else replace(first, stages_operands=False)
    further = replace(first, copied_gradients=fewest + 1)
    if 0 < fewest < most_copied_gradients(problem) and _has_room(further):
        yield further


def _fewest_copied_gradients(problem: StreamProblem) -> int:
    """Number of units with which there is room; all if there is none."""

    def has_room(count: int) -> bool:
        less = replace(problem, copied_gradients=count, stages_operands=False)
        return sum(_least_bytes(less)) <= problem.budget_bytes

    return bisect_left(range(most_copied_gradients(problem)), True, key=has_room)


def most_copied_gradients(problem: StreamProblem) -> int:
    """Number of units whose gradients can be copied out."""
    # In the backward pass, gradients live for a few units only.
    leave = not problem.in_backward and any(unit.gradient_bytes for unit in problem.units)
    return len(problem.units) if leave else 0


def simulate_plan(
    units: Sequence[StreamUnit], plan: StreamPlan, *, hardware: Hardware, **options: Any
) -> StreamTiming:
    """Predict the step of a plan for these units again.

    `options` are those of :func:`umem.streaming.plan.step_timing.simulate_stream` that a plan does
    not hold.
    """
    return simulate_stream(
        units,
        plan.resident,
        plan.slots,
        hardware=hardware,
        copied=plan.left_before,
        fetch_ahead=plan.fetch_ahead,
        copied_gradients=plan.copied_gradients,
        final_gradients=plan.final_gradients,
        adds_at_home=plan.adds_at_home,
        returning_gradients=plan.returning_gradients,
        stages_operands=plan.stages_operands,
        temporary=plan.temporary,
        hosts=plan.hosts,
        **options,
    )


class _Way:
    """A problem and all choices, with the time that no step of each is below, in this order."""

    def __init__(self, problem: StreamProblem) -> None:
        self.problem = problem
        self.bounded = [(choice.lower_bound_s(), choice) for choice in _choices(problem)]
        if not self.bounded:
            raise _too_small(problem)
        self.bounded.sort(key=itemgetter(0))

    @property
    def least_s(self) -> float:
        """A time that no step is below."""
        return min(max(bound_s, choice.copies_s()) for bound_s, choice in self.bounded)


def _fastest(way: _Way, limit_s: float) -> StreamPlan:
    """The plan with the shortest predicted step; another one where no bound is below the limit."""
    problem, bounded = way.problem, way.bounded
    _, fastest = bounded[0]
    best = fastest.plan()
    # Per step: updates, copies in two directions, passes; three steps until they repeat.
    units = problem.units
    pieces = sum(len(unit.pieces) for unit in units)
    per_plan = 3 * (3 * pieces + 2 * problem.batches * len(units))
    per_plan *= 1 + (1 + len(_halvings(problem))) * problem.makes_temporary
    for bound_s, choice in bounded[1 : max(2, _MOST_TASKS // max(per_plan, 1))]:
        longest_s = best.predicted.step_s * (1.0 - _EQUAL)
        if bound_s >= min(longest_s, limit_s):
            break
        if choice.copies_s() >= longest_s:
            continue
        plan = choice.plan()
        if plan.predicted.step_s < longest_s:
            best, fastest = plan, choice
    if fastest.slots:
        best, fastest = _with_fewest(best, fastest, "count", fastest.least)
    room_bytes = problem.budget_bytes - fastest.state_bytes
    fewest = problem.memory.fewest_copied(room_bytes, problem.least_ahead)
    return _with_fewest(best, fastest, "copied", fewest)[0]


def _staged_bytes(unit: StreamUnit, gradients_leave: bool) -> int:
    """What is staged at a time of a unit for its update, at most."""
    more_bytes = unit.trained_weight_bytes + (unit.gradient_bytes if gradients_leave else 0)
    return math.ceil(max(unit.pieces) * (1 + more_bytes / max(1, unit.state_bytes)))


@dataclass(frozen=True, eq=False)
class _Choice:
    """The first units of an order are resident, the others are streamed through some slots."""

    problem: StreamProblem
    order: ByteCounts
    """Numbers of the units: always resident ones, resident ones from the most useful to the least,
    and streamed ones."""
    least: int
    """Number of units that are always resident."""
    count: int
    """Number of resident units."""
    slots: int
    copied: int
    """Number of units whose activations leave, the first that can."""

    @cached_property
    def resident(self) -> frozenset[int]:
        """Numbers of the resident units."""
        return frozenset(self.order[: self.count].tolist()) - self.problem.hosts

    @cached_property
    def streamed(self) -> ByteCounts:
        """Numbers of the others."""
        return self.order[self.count :]

    @cached_property
    def slot_bytes(self) -> int:
        """Size of a slot."""
        return int(self.problem.staged[self.streamed].max(initial=0))

    @cached_property
    def state_bytes(self) -> int:
        """Device memory for resident units, and slots."""
        resident_bytes = int(self.problem.size[self.order[: self.count]].sum())
        return resident_bytes + self.slots * self.slot_bytes

    @property
    def has_operands(self) -> bool:
        """Whether an update of a streamed unit has weights or gradients at home."""
        units, leave = self.problem.units, self.problem.with_copied_gradients
        return any(
            units[number].trained_weight_bytes or (number in leave and units[number].gradient_bytes)
            for number in self.streamed.tolist()
        )

    @cached_property
    def passes(self) -> tuple[dict[int, int], int, dict[int, int]]:
        """When activations leave and come back, and gradients come back."""
        memory, room_bytes = self.problem.memory, self.problem.budget_bytes - self.state_bytes
        fetch_ahead = memory.most_ahead(self.copied, room_bytes)
        left_before = memory.left_before(self.copied, room_bytes)
        return left_before, fetch_ahead, memory.returning(left_before, fetch_ahead, room_bytes)

    @cached_property
    def piece_bytes(self) -> list[int]:
        """What is staged of each piece of the streamed units, in the order of updates."""
        problem, units = self.problem, self.problem.units
        return [
            math.ceil(piece * problem.staged[number] / max(units[number].pieces))
            for number in self.streamed.tolist()
            for piece in units[number].pieces
        ]

    def temporary(self, most: int = sys.maxsize) -> tuple[list[TemporarySlot], int]:
        """Further slots that have room, and the size of each."""
        if not self.problem.makes_temporary or not self.slots:
            return [], 0
        planned = self.problem.memory.planned(*self.passes)
        room_bytes = self.problem.budget_bytes - self.state_bytes
        others = self.piece_bytes[self.slots :]
        most = min(most, len(others))
        found: list[TemporarySlot] = []
        while most:
            slot_bytes = max(others[:most])
            found = planned.temporary_slots(most, slot_bytes, room_bytes)
            if len(found) == most or slot_bytes == max(others[: len(found)], default=slot_bytes):
                return found, slot_bytes
            most = len(found)
        return [], 0

    def plan(self) -> StreamPlan:
        """The plan of the choice, with temporary slots if they gain time."""
        best = self._plan_with((), 0)
        longest_s = (1.0 - _LEAST_GAIN) * best.predicted.step_s
        every, _ = self.temporary()
        early = _early_count(every)
        counts = [len(every), *(early >> halvings for halvings in _halvings(self.problem))]
        for count in dict.fromkeys(counts):
            if count:
                plan = self._plan_with(*self.temporary(count))
                if plan.predicted.step_s < longest_s:
                    best, longest_s = plan, plan.predicted.step_s * (1.0 - _EQUAL)
        return best

    def _plan_with(self, temporary: Sequence[TemporarySlot], slot_bytes: int) -> StreamPlan:
        problem = self.problem
        left_before, fetch_ahead, returning = self.passes
        timing = simulate_stream(
            problem.units,
            self.resident,
            self.slots,
            hardware=problem.hardware,
            other_s=problem.other_s,
            copied=left_before,
            fetch_ahead=fetch_ahead,
            is_deferred=problem.is_deferred,
            in_backward=problem.in_backward,
            batches=problem.batches,
            copied_gradients=problem.with_copied_gradients,
            final_gradients=problem.with_final_gradients,
            adds_at_home=problem.adds_at_home,
            returning_gradients=returning,
            weight_slots=problem.weight_slots,
            stages_operands=problem.stages_operands,
            temporary=temporary,
            hosts=problem.hosts,
            launch_s=problem.launch_s,
        )
        planned_bytes = problem.memory.planned(*self.passes).bytes_with(temporary, slot_bytes)
        return StreamPlan(
            resident=self.resident,
            slots=self.slots,
            slot_bytes=self.slot_bytes,
            stages_operands=problem.stages_operands and self.slots > 0 and self.has_operands,
            left_before=left_before,
            fetch_ahead=fetch_ahead,
            copied_gradients=problem.with_copied_gradients,
            final_gradients=problem.with_final_gradients,
            adds_at_home=problem.adds_at_home,
            returning_gradients=returning,
            temporary=tuple(temporary),
            peak_bytes=self.state_bytes + planned_bytes,
            predicted=timing,
            hosts=problem.hosts,
            temporary_slot_bytes=slot_bytes,
        )

    def lower_bound_s(self) -> float:
        """A time that no step of the choice is below: most choices need no simulation."""
        problem, units = self.problem, self.problem.units
        in_rate, out_rate, both_rate, slowdown = problem.rates
        streamed = np.sort(self.streamed) if self.slots else self.streamed[:0]
        size = np.array([it for n in streamed.tolist() for it in units[n].pieces], np.float64)
        saved_bytes = problem.batches * float(problem.memory.left_bytes[self.copied])
        all_bytes = size.sum() + saved_bytes
        passes_s = problem.passes_s
        launches_s = 0.0 if problem.in_backward else problem.launch_s * len(size)
        bounds = [
            problem.compute_s + launches_s + 2.0 * all_bytes * slowdown,
            all_bytes / min(in_rate, out_rate, both_rate / 2.0),
        ]
        temporary, _ = self.temporary()
        slots = self.slots + len(temporary)
        if slots < len(size) and not problem.in_backward:
            early = self.slots + _early_count(temporary)
            ahead_bytes = size[:early].sum()
            # The last units to use each slot may still be on their way home.
            behind_bytes = size[-self.slots :].sum() + size[self.slots : slots].sum()
            # Nothing leaves before the first update of a streamed unit. Without slots that the step
            # makes, nothing comes before that has left.
            first = units[streamed[0]]
            updated_s = first.update_s * size[0] / first.state_bytes
            idle_s, left_s = updated_s, updated_s + size[0] / out_rate
            if early < slots:
                idle_s = left_s = 0.0
            copies_s = max(
                left_s + (size.sum() - ahead_bytes) / in_rate,
                updated_s + (size.sum() - behind_bytes) / out_rate,
                idle_s + (2.0 * size.sum() - ahead_bytes - behind_bytes) / both_rate,
            )
            before_s = 0.0
            if problem.is_deferred:
                before_s = sum(unit.forward_s for unit in units[: streamed[-1]])
            bounds.append(copies_s + passes_s - before_s + problem.other_s + ahead_bytes * slowdown)
        return float(max(bounds))

    def copies_s(self) -> float:
        """The same by all that copies carry: gradients and weights too."""
        problem = self.problem
        in_rate, out_rate, both_rate, slowdown = problem.rates
        state_bytes = updated_bytes = gradient_bytes = 0
        if self.slots:
            state_bytes = int(problem.size[self.streamed].sum())
            if problem.stages_operands:
                updated_bytes = int(problem.trained_weights[self.streamed].sum())
                gradient_bytes = int(problem.left_gradients[self.streamed].sum())
        both_bytes = problem.batches * int(problem.memory.left_bytes[self.copied])
        both_bytes += state_bytes + updated_bytes
        in_bytes = both_bytes + gradient_bytes + problem.fetched_bytes
        out_bytes = both_bytes + int(problem.left_gradients.sum())
        moved_bytes = in_bytes + out_bytes
        return max(
            problem.compute_s + moved_bytes * slowdown,
            in_bytes / in_rate,
            out_bytes / out_rate,
            moved_bytes / both_rate,
        )


def _halvings(problem: StreamProblem) -> range:
    """How often the number of temporary slots is halved: once where steps are deferred."""
    return range(_DEFERRED_EARLY_COUNTS if problem.is_deferred else _EARLY_COUNTS)


def _early_count(temporary: Sequence[TemporarySlot]) -> int:
    """Number of slots that are made before the step."""
    return sum(slot.made_in is not None for slot in temporary)


def _choices(problem: StreamProblem) -> Iterator[_Choice]:
    """Choices that fit the budget: those with as much resident state as it holds."""
    seen = set()
    for copied, state_bytes in _rooms(problem):
        if problem.size.sum() <= min(state_bytes, problem.most_resident_bytes):
            everything = np.arange(len(problem.size))
            yield _Choice(problem, everything, len(everything), len(everything), 0, copied)
            continue
        for slot_bytes in _slot_sizes(problem):
            for choice in _state_choices(problem, slot_bytes, state_bytes, copied):
                key = (copied, choice.slots, choice.count, choice.order.tobytes())
                if key not in seen:
                    seen.add(key)
                    yield choice


def _least_bytes(problem: StreamProblem) -> tuple[int, int]:
    """Memory that no choice is below: of all else, and of state."""
    memory = problem.memory
    return memory.most_bytes(len(memory.can_leave), problem.least_ahead), least_state_bytes(problem)


def _has_room(problem: StreamProblem) -> bool:
    """Whether there is any choice."""
    other_bytes, state_bytes = _least_bytes(problem)
    fits = other_bytes + state_bytes <= problem.budget_bytes
    return fits and state_bytes <= problem.most_placed_bytes


def _rooms(problem: StreamProblem) -> Iterator[tuple[int, int]]:
    """Numbers of copied units, and the bytes that they leave for state."""
    memory = problem.memory
    if not _has_room(problem):
        return
    room_bytes = problem.budget_bytes - least_state_bytes(problem)
    for ahead in sorted({problem.least_ahead, *_FETCH_AHEAD}):
        least_bytes = memory.most_bytes(len(memory.can_leave), ahead)
        if least_bytes > room_bytes:
            continue
        fewest, most_useful = (
            memory.fewest_copied(each, ahead) for each in (room_bytes, least_bytes)
        )
        for copied in sorted(set(np.linspace(fewest, most_useful, _COPIED_COUNTS, dtype=int))):
            state_bytes = problem.budget_bytes - memory.most_bytes(copied, ahead)
            yield int(copied), min(state_bytes, problem.most_placed_bytes)


def _state_choices(
    problem: StreamProblem, slot_bytes: int, state_bytes: int, copied: int
) -> Iterator[_Choice]:
    """For each number of slots and each order, as many units as fit beside them."""
    size = problem.size
    # Units with a larger piece do not fit a slot, units without state need none.
    can_stream = (problem.staged <= slot_bytes) & (size > 0)
    always, others = np.flatnonzero(~can_stream), np.flatnonzero(can_stream)
    orders = [others, _spread(others)] if problem.in_backward else [others]
    always_bytes = int(size[always].sum())
    tried = _FEW_SLOTS if problem.makes_temporary and problem.is_deferred else _SLOTS
    for slots in sorted({problem.fewest_slots, *tried}):
        room_bytes = state_bytes - slots * slot_bytes - always_bytes
        if room_bytes < 0:
            return
        for order in orders:
            resident, streamed = [], []
            free_bytes = min(room_bytes, problem.most_resident_bytes - always_bytes)
            for unit in order.tolist():
                if size[unit] <= free_bytes:
                    resident.append(unit)
                    free_bytes -= int(size[unit])
                else:
                    streamed.append(unit)
            every = np.concatenate((always, np.array([*resident, *streamed], np.int64)))
            yield _Choice(problem, every, len(always), len(always) + len(resident), slots, copied)


def _spread(units: ByteCounts) -> ByteCounts:
    """Units in an order of which every beginning is spread evenly over all of them.

    It is van der Corput's sequence: by the binary digits of their place, reversed.
    """
    digits = max(1, len(units) - 1).bit_length()
    key = [int(f"{place:0{digits}b}"[::-1], 2) for place in range(len(units))]
    return units[np.argsort(key)]


def _slot_sizes(problem: StreamProblem) -> list[int]:
    """Sizes of a slot to try, the largest first; one of them needs the least memory of all.

    Units that are larger than a slot are resident, which not all may be.
    """
    every = np.unique(problem.staged[problem.size > 0])[::-1]
    larger = [_larger_bytes(problem, slot_bytes) for slot_bytes in every.tolist()]
    sizes = every[np.array(larger) <= problem.most_resident_bytes]
    chosen = [int(sizes[0])]
    for slot_bytes in sizes.tolist():
        if slot_bytes <= _SLOT_STEP * chosen[-1]:
            chosen.append(slot_bytes)
    least = min(sizes.tolist(), key=lambda slot_bytes: _needed_bytes(problem, slot_bytes))
    return sorted({*chosen, least}, reverse=True)


def _needed_bytes(problem: StreamProblem, slot_bytes: int) -> int:
    """Memory for the fewest slots of a size, and for larger units."""
    return problem.fewest_slots * slot_bytes + _larger_bytes(problem, slot_bytes)


def _larger_bytes(problem: StreamProblem, slot_bytes: int) -> int:
    """State of units with pieces that are larger than a slot."""
    return int(problem.size[problem.staged > slot_bytes].sum())


def least_state_bytes(problem: StreamProblem) -> int:
    """Memory for the fewest slots and for larger units, or for all state if that is less."""
    if not problem.size.any():
        return 0
    least = min(_needed_bytes(problem, slot_bytes) for slot_bytes in _slot_sizes(problem))
    all_bytes = int(problem.size.sum())
    return min(least, all_bytes) if all_bytes <= problem.most_resident_bytes else least


def _with_fewest(
    plan: StreamPlan, choice: _Choice, what: str, least: int
) -> tuple[StreamPlan, _Choice]:
    """The plan with the lowest number of `what`, from `least` on, that gives the same time."""
    longest_s = plan.predicted.step_s * (1.0 + _EQUAL)
    low, high = least, getattr(choice, what)
    exact = max(1, high // _FEWEST_SHARE)
    tried = high - 1  # usually slower already
    while high - low >= exact:
        fewer = replace(choice, **{what: tried})
        trial = fewer.plan()
        if trial.predicted.step_s <= longest_s:
            plan, choice, high = trial, fewer, tried
        else:
            low = tried + 1
        tried = (low + high) // 2
    return plan, choice


def _too_small(problem: StreamProblem) -> PlanError:
    other_bytes, state_bytes = _least_bytes(problem)
    needed = other_bytes + state_bytes
    if state_bytes > problem.most_placed_bytes:
        return PlanError(
            f"{problem.fewest_slots} staging buffers for optimizer state and the state of larger "
            f"units take {format_bytes(state_bytes)} of device memory, and this training may have "
            f"{format_bytes(max(0, problem.most_placed_bytes))} of device_budget: others have the "
            "rest. Raise device_budget"
        )
    return PlanError(
        f"training with streamed optimizer state takes at least {format_bytes(needed)} of device "
        f"memory ({needed} bytes): {format_bytes(other_bytes)} for all else, with the activations "
        f"of {len(problem.memory.can_leave)} units and the gradients of {problem.copied_gradients} "
        f"copied out, and {format_bytes(state_bytes)} for "
        f"{problem.fewest_slots} staging buffers and the state of larger units. It may take "
        f"{format_bytes(max(0, problem.budget_bytes))}: raise device_budget by "
        f"{format_bytes(needed - problem.budget_bytes)}, or train with smaller batches"
    )
