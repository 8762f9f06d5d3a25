"""Plans streamed optimizer state: what stays on the device, and how the rest is staged.

The state of a *unit*, such as a block of the model, is either resident or streamed. Streamed state
has its home in page-locked host memory. For its update it is copied into one of a few staging
buffers, the slots, and back. A plan needs the units' sizes and durations and the machine's figures
only, so that it is made in milliseconds, before the training's first step, and without a GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from umem.core.errors import PlanError
from umem.core.units import format_bytes
from umem.hardware import Hardware

__all__ = ["StreamPlan", "StreamTiming", "StreamUnit", "plan_stream", "simulate_stream"]

_SLOTS = (2, 3, 4, 6, 8)
"""Numbers of slots to try. With one, nothing is copied in while anything is copied out; three keep
both directions and the update busy; more only hold what is fetched ahead."""

_STREAMED_FIRST = (2, 0)
"""Units to stream before the first resident one. Their updates come first and free their slots, so
that the link has work at once instead of after the updates of all resident units."""

_SLOT_STEP = 0.9
"""Sizes of a slot to try: each at most this share of the next larger one. Units that are larger
than a slot stay on the device."""

_MOST_STEPS = 64
"""Steps to simulate until they repeat, which most do after the first."""

_EQUAL = 1e-9
"""Relative difference of two equal times: their sums are rounded."""

_NEVER = float("inf")


@dataclass(frozen=True)
class StreamUnit:
    """Parameters that are updated together, such as those of a block; in forward order."""

    name: str
    state_bytes: int
    """Bytes of its optimizer state."""
    update_s: float
    """Duration of the optimizer's kernels with the state on the device."""
    forward_s: float
    """Duration of its forward pass, which begins only after its update."""


@dataclass(frozen=True)
class StreamTiming:
    """A training step with streamed state, once every step takes the same time.

    ``step_s = compute_s + slowed_s + exposed_s``
    """

    step_s: float
    compute_s: float
    """Computation with all state resident: updates, forward pass, backward pass."""
    slowed_s: float
    """Time that copies add to the computation beside them."""
    exposed_s: float
    """Time that the device computes nothing: the forward pass waits for an update, and the update
    for a copy."""
    to_device_bytes: int
    to_host_bytes: int
    to_device_busy: float
    """Share of the step in which copies to the device run."""
    to_host_busy: float
    """Share of the step in which copies to the host run."""
    update_end_s: tuple[float, ...]
    """End of each unit's update, seconds after the last gradient is clipped."""
    home_s: float
    """End of the last copy to the host, from the same time on; 0 if nothing is streamed."""


@dataclass(frozen=True)
class StreamPlan:
    """Which state stays on the device, and the slots for the rest."""

    resident: frozenset[int]
    """Units whose state stays on the device, by their number in forward order."""
    slots: int
    """Number of staging buffers; 0 if all units are resident."""
    slot_bytes: int
    """Size of each: that of the largest streamed unit."""
    predicted: StreamTiming


def plan_stream(
    units: Sequence[StreamUnit],
    *,
    spare_bytes: int,
    hardware: Hardware,
    backward_s: float,
    is_deferred: bool = True,
) -> StreamPlan:
    """Choose the resident units and the number of slots with the shortest predicted step.

    Resident are early units of the forward pass, whose updates are due first, and units that are
    much larger than the others where smaller slots pay for them. If fewer resident units give the
    same time, fewer are. With units of equal size more memory is never slower; with others a step
    may be longer by what copying one unit takes.

    Parameters
    ----------
    units
        In forward order.
    spare_bytes
        Device memory for resident state and slots together.
    hardware
        Bandwidths of explicit copies and of the link, and the slowdown beside copies.
    backward_s
        Computation between the first forward pass behind a step and the next step: the backward
        pass and gradient clipping; with accumulation, also the other passes.
    is_deferred
        As in :func:`simulate_stream`.

    Raises
    ------
    PlanError
        If the memory is too small for two slots. The message says how many bytes are needed.
    """
    problem = _Problem(
        units=units,
        size=np.array([unit.state_bytes for unit in units], np.int64),
        after_s=np.cumsum([unit.forward_s for unit in reversed(units)])[::-1] + backward_s,
        update_s=np.cumsum([unit.update_s for unit in units]),
        hardware=hardware,
        backward_s=backward_s,
        is_deferred=is_deferred,
    )
    if problem.size.sum() <= spare_bytes:
        return _simulated(problem, _Choice(np.arange(len(units)), len(units), len(units), 0))
    bounded = [
        (_lower_bound_s(problem, choice), choice)
        for slot_bytes in _slot_sizes(problem.size)
        for choice in _choices(problem.size, slot_bytes, spare_bytes)
    ]
    if not bounded:
        raise _too_small(problem, spare_bytes)
    bounded.sort(key=itemgetter(0))
    _, fastest = bounded[0]
    best = _simulated(problem, fastest)
    for bound_s, choice in bounded[1:]:
        if bound_s >= best.predicted.step_s * (1.0 - _EQUAL):
            break
        plan = _simulated(problem, choice)
        if plan.predicted.step_s < best.predicted.step_s * (1.0 - _EQUAL):
            best, fastest = plan, choice
    return _with_fewest_resident(problem, best, fastest)


def simulate_stream(
    units: Sequence[StreamUnit],
    resident: Collection[int],
    slots: int,
    *,
    hardware: Hardware,
    backward_s: float,
    is_deferred: bool = True,
) -> StreamTiming:
    """Predict a step's time for given resident units and a given number of slots.

    Three lanes work in order: copies to the device, updates, copies to the host.

    * The first units to be streamed, one for each slot, are fetched from the moment at which the
      forward pass reaches its last unit.
    * Updates begin when the last gradient is clipped, in forward order. Resident units take part
      without copies. Streamed units use the slots in turn, from the first slot on in each step. A
      copy to the device waits until the unit before it in its slot is back in its home.
    * The forward pass of each unit waits for the unit's update.
    * Both directions share the link, as in the simulator. Updates, forward and backward pass share
      the device: at each moment one of them computes, more slowly while copies run beside it. An
      update comes before the forward pass, which it interrupts: both use the same processors and
      memory, an update waits only for the end of one of the forward pass's many short kernels, and
      the next copy waits for its slot.

    Simulated are as many steps as it takes until they repeat.

    Parameters
    ----------
    units
        In forward order.
    resident
        Numbers of the units whose state stays on the device. Units without state are resident too.
    slots
        Number of staging buffers.
    hardware, backward_s
        As in :func:`plan_stream`.
    is_deferred
        False if the next forward pass waits for the updates of all units.

    Raises
    ------
    PlanError
        If units are streamed and there is no slot.
    """
    stays = set(resident)
    streamed = [i for i, unit in enumerate(units) if unit.state_bytes and i not in stays]
    if streamed and slots < 1:
        raise PlanError(
            f"{slots} slots for {len(streamed)} streamed units: give at least one, or make all "
            "units resident"
        )
    first, last, update_end_s, home_s = _run_until_repeated(
        units, streamed, slots, hardware, backward_s, is_deferred=is_deferred
    )
    steps = last.step - first.step
    step_s = (last.now_s - first.now_s) / steps
    copied_bytes = sum(units[i].state_bytes for i in streamed)
    return StreamTiming(
        step_s=step_s,
        compute_s=sum(unit.update_s + unit.forward_s for unit in units) + backward_s,
        slowed_s=(last.slowed_s - first.slowed_s) / steps,
        exposed_s=(last.idle_s - first.idle_s) / steps,
        to_device_bytes=copied_bytes,
        to_host_bytes=copied_bytes,
        to_device_busy=(last.in_s - first.in_s) / steps / step_s if streamed else 0.0,
        to_host_busy=(last.out_s - first.out_s) / steps / step_s if streamed else 0.0,
        update_end_s=update_end_s,
        home_s=home_s,
    )


# Simulation.


class _Totals(NamedTuple):
    """Sums over all steps so far, when a step's updates may begin."""

    step: int
    now_s: float
    idle_s: float
    slowed_s: float
    in_s: float
    out_s: float


def _run_until_repeated(
    units: Sequence[StreamUnit],
    streamed: Sequence[int],
    slots: int,
    hardware: Hardware,
    backward_s: float,
    *,
    is_deferred: bool,
) -> tuple[_Totals, _Totals, tuple[float, ...], float]:
    """Simulate steps until one begins as an earlier one did.

    Returns the totals at both times, when the updates of the last step ended, and when the state of
    the last complete step was at home. Rates are constant from one event to the next, so times are
    exact.
    """
    to_device_rate = hardware.copy_to_device_bytes_per_s
    to_host_rate = hardware.copy_to_host_bytes_per_s
    link_rate, slowdown = hardware.link_bytes_per_s, hardware.copy_slowdown_s_per_byte
    count, sizes = len(streamed), [float(units[i].state_bytes) for i in streamed] or [0.0]
    ring = min(slots, count)
    # Copies to the host that each fetch waits for, and fetches that each update waits for; counted
    # from the step's first. The last unit of a slot makes room for its first one of the next step.
    rooms = [
        position - ring + 1
        if position >= ring
        else (count - 1 - position) // ring * ring + position - count + 1
        for position in range(count)
    ] or [0]
    needs = [0] * len(units)
    for position, unit in enumerate(streamed):
        needs[unit] = position + 1
    update_s = [unit.update_s for unit in units] or [0.0]
    # Forward pass before each unit; the rest of the step's computation is the backward pass.
    before_s = list(accumulate((unit.forward_s for unit in units), initial=0.0))
    work_s = before_s[-1] + backward_s

    now_s = idle_s = slowed_s = in_s = out_s = 0.0
    # Copies are counted over all steps: fetched, updated and to be written, written. The first step
    # begins with full slots, as every step does if the backward pass is long enough.
    fetched, staged, written = ring, 0, 0
    position = ring % len(sizes)
    in_left, room, out_left = sizes[position], ring - position + rooms[position], sizes[0]
    step, updated, update_left_s, worked_s = 0, 0, update_s[0], 0.0
    asked, is_asked = count, False  # fetches that the program has asked for
    end_s, home_s = [0.0] * len(units), 0.0
    history = [_Totals(0, 0.0, 0.0, 0.0, 0.0, 0.0)]
    begun = {(fetched, in_left, 0, out_left): 0}
    while True:
        # How far the program comes before it waits.
        if updated < len(units):
            goal_s = before_s[updated] if is_deferred else 0.0
        elif not is_asked:
            goal_s = before_s[-2] if units else 0.0
            if worked_s >= goal_s:
                is_asked = True
                asked += count
                continue
        else:
            goal_s = work_s
            if worked_s >= goal_s:
                step += 1
                history.append(_Totals(step, now_s, idle_s, slowed_s, in_s, out_s))
                state = (fetched - step * count, round(in_left), staged - written, round(out_left))
                earlier = begun.setdefault(state, step)
                # Of a step between both, all state is at home.
                is_complete = earlier < step and written >= count * (earlier + 1)
                if is_complete or step == _MOST_STEPS:
                    began_s = history[step - 1].now_s
                    ends_s = tuple(end - began_s for end in end_s)
                    return history[min(earlier, step - 1)], history[step], ends_s, home_s
                updated, update_left_s, worked_s, is_asked = 0, update_s[0], 0.0, False
                continue

        # What runs, and how long each of it takes at these rates.
        in_rate = to_device_rate if fetched < asked and written >= room else 0.0
        out_rate = to_host_rate if written < staged else 0.0
        if in_rate and out_rate and in_rate + out_rate > link_rate:
            share = link_rate / (in_rate + out_rate)
            in_rate *= share
            out_rate *= share
        stretch = 1.0 + slowdown * (in_rate + out_rate)
        fetch_s = in_left / in_rate if in_rate else _NEVER
        write_s = out_left / out_rate if out_rate else _NEVER
        updates = updated < len(units) and fetched >= step * count + needs[updated]
        if updates:
            compute_s = update_left_s * stretch
        elif worked_s < goal_s:
            compute_s = (goal_s - worked_s) * stretch
        else:
            compute_s = _NEVER
        seconds = min(fetch_s, write_s, compute_s)

        # What is done then. `<=`: what ends first ends exactly, whatever the rounding.
        now_s += seconds
        if updates:
            slowed_s += seconds - seconds / stretch
            update_left_s -= seconds / stretch
            if compute_s <= seconds:
                end_s[updated] = now_s
                staged += needs[updated] > 0
                updated += 1
                update_left_s = update_s[updated % len(update_s)]
        elif compute_s < _NEVER:
            slowed_s += seconds - seconds / stretch
            worked_s = goal_s if compute_s <= seconds else worked_s + seconds / stretch
        else:
            idle_s += seconds
        if in_rate:
            in_s += seconds
            in_left -= in_rate * seconds
            if fetch_s <= seconds:
                fetched += 1
                position = fetched % count
                in_left, room = sizes[position], fetched - position + rooms[position]
        if out_rate:
            out_s += seconds
            out_left -= out_rate * seconds
            if write_s <= seconds:
                written += 1
                out_left = sizes[written % count]
                if written % count == 0:
                    home_s = now_s - history[written // count - 1].now_s


# Search.


@dataclass(frozen=True, eq=False)
class _Problem:
    """What a plan is made for."""

    units: Sequence[StreamUnit]
    size: npt.NDArray[np.int64]
    """State of each unit, int64[N]."""
    after_s: npt.NDArray[np.float64]
    """Passes from each unit's forward pass to the end of the backward pass, float64[N]."""
    update_s: npt.NDArray[np.float64]
    """Updates up to the end of each unit's, float64[N]."""
    hardware: Hardware
    backward_s: float
    is_deferred: bool


@dataclass(frozen=True, eq=False)
class _Choice:
    """The first units of an order are resident, the others are streamed through some slots."""

    order: npt.NDArray[np.int64]
    """Numbers of the units: always resident ones, then resident and streamed ones, each in forward
    order."""
    least: int
    """Number of units that are always resident."""
    count: int
    """Number of resident units."""
    slots: int


def _choices(size: npt.NDArray[np.int64], slot_bytes: int, spare_bytes: int) -> Iterator[_Choice]:
    """For each number of slots, as many units as fit beside them, the earliest first."""
    # Larger units do not fit a slot, units without state need none.
    always = (size > slot_bytes) | (size == 0)
    for slots in _SLOTS:
        for streamed_first in _STREAMED_FIRST:
            free_bytes = spare_bytes - slots * slot_bytes - int(size[always].sum())
            if free_bytes < 0:
                return
            resident = always.copy()
            for unit in np.flatnonzero(~always)[streamed_first:].tolist():
                if size[unit] <= free_bytes:
                    resident[unit] = True
                    free_bytes -= int(size[unit])
            order = np.argsort(np.where(always, 0, np.where(resident, 1, 2)), kind="stable")
            yield _Choice(order, int(always.sum()), int(resident.sum()), slots)


def _slot_sizes(size: npt.NDArray[np.int64]) -> list[int]:
    """Sizes of a slot to try, the largest first; one of them needs the least memory of all."""
    sizes, counts = np.unique(size[size > 0], return_counts=True)
    sizes, sum_bytes = sizes[::-1], (sizes * counts)[::-1]
    needed_bytes = np.cumsum(sum_bytes) - sum_bytes + _SLOTS[0] * sizes
    chosen = [int(sizes[0])]
    for slot_bytes in sizes.tolist():
        if slot_bytes <= _SLOT_STEP * chosen[-1]:
            chosen.append(slot_bytes)
    return sorted({*chosen, int(sizes[np.argmin(needed_bytes)])}, reverse=True)


def _simulated(problem: _Problem, choice: _Choice) -> StreamPlan:
    resident = frozenset(choice.order[: choice.count].tolist())
    timing = simulate_stream(
        problem.units,
        resident,
        choice.slots,
        hardware=problem.hardware,
        backward_s=problem.backward_s,
        is_deferred=problem.is_deferred,
    )
    slot_bytes = int(problem.size[choice.order[choice.count :]].max(initial=0))
    return StreamPlan(resident, choice.slots, slot_bytes, timing)


def _lower_bound_s(problem: _Problem, choice: _Choice) -> float:
    """A time that no step of a choice is below: most choices need no simulation."""
    hardware, streamed = problem.hardware, np.sort(choice.order[choice.count :])
    in_rate, out_rate = hardware.copy_to_device_bytes_per_s, hardware.copy_to_host_bytes_per_s
    both_rate = min(hardware.link_bytes_per_s, in_rate + out_rate)
    # A computation is slowed by the bytes that cross the link in its own time, not in the added.
    slowdown = hardware.copy_slowdown_s_per_byte
    slowdown /= 1.0 + slowdown * both_rate
    size = problem.size[streamed].astype(np.float64)
    all_bytes, ahead_bytes = size.sum(), size[: choice.slots].sum()
    # The last units to use each slot may still be on their way home.
    behind_bytes = size[-choice.slots :].sum()
    end_s = problem.after_s[streamed[-1] if problem.is_deferred else 0]
    # Nothing leaves before the first update of a streamed unit, and nothing comes before that left.
    copies_s = problem.update_s[streamed[0]] + max(
        (all_bytes - ahead_bytes) / in_rate + size[0] / out_rate,
        (all_bytes - behind_bytes) / out_rate,
        (2.0 * all_bytes - ahead_bytes - behind_bytes) / both_rate,
    )
    bounds = (
        problem.update_s[-1] + problem.after_s[0] + 2.0 * all_bytes * slowdown,
        all_bytes / min(in_rate, out_rate, both_rate / 2.0),
        copies_s + end_s + ahead_bytes * slowdown,
    )
    return float(max(bounds))


def _with_fewest_resident(problem: _Problem, plan: StreamPlan, choice: _Choice) -> StreamPlan:
    """The plan with as few resident units as give the same time."""
    longest_s = plan.predicted.step_s * (1.0 + _EQUAL)
    low, high = choice.least, choice.count
    tried = high - 1  # usually slower already
    while low < high:
        trial = _simulated(problem, replace(choice, count=tried))
        if trial.predicted.step_s <= longest_s:
            plan, high = trial, tried
        else:
            low = tried + 1
        tried = (low + high) // 2
    return plan


def _too_small(problem: _Problem, spare_bytes: int) -> PlanError:
    needed_bytes = {
        _SLOTS[0] * slot_bytes + int(problem.size[problem.size > slot_bytes].sum()): slot_bytes
        for slot_bytes in _slot_sizes(problem.size)
    }
    needed = min(needed_bytes)
    largest = max(problem.units, key=lambda unit: unit.state_bytes)
    return PlanError(
        f"streaming optimizer state takes at least {format_bytes(needed)} of device memory "
        f"({needed} bytes): {_SLOTS[0]} staging buffers of {format_bytes(needed_bytes[needed])}, "
        f"and the state of larger units. {format_bytes(spare_bytes)} are spare: raise "
        f"device_budget by {format_bytes(needed - spare_bytes)}, or split the largest unit, "
        f"{largest.name!r} with {format_bytes(largest.state_bytes)}"
    )
