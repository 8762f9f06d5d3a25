"""Predicts a training step whose optimizer state is streamed and whose activations are copied out.

The tasks of the step, and what each waits for, are those of the executor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import itemgetter
from types import MappingProxyType
from typing import NamedTuple

from umem.core.classes import TensorClass
from umem.core.errors import PlanError
from umem.hardware import Hardware
from umem.streaming.plan.lane_simulation import (
    LaneKind,
    LaneReport,
    LaneTasks,
    Task,
    simulate_lanes,
)

__all__ = [
    "FIRST_SLOTS",
    "GRADIENTS_AHEAD",
    "UNITS_WITH_GRADIENTS",
    "StreamTiming",
    "StreamUnit",
    "TemporarySlot",
    "divide_state",
    "largest_slot_bytes",
    "simulate_stream",
]

FIRST_SLOTS = 3
"""Slots before there is a plan: for a copy in, an update and a copy out at the same time."""

_MOST_STAGED_BYTES = 256 << 20
"""Its copies take 5 ms on a PCIe link of the fifth generation: longer ones save no time."""

_LEAST_STAGED_BYTES = 16 << 20
"""With less, the calls for a copy take as long as the copy."""

_STAGED_SHARE = 64
"""A few slots are a small part of a budget."""

_SMALL_STAGED_SHARE, _SMALL_STAGED_BYTES = 32, 40 << 20
"""A larger part of a small budget, up to so many bytes. The processor takes about 0.4 ms for each
piece with weights and gradients at home, in which the link moves 20 MB. Within 1.55 GiB, steps of
0.56 billion parameters took 329 ms with at most 25 MiB staged at a time, 294 ms with 40 MiB, and
287 ms with 50 MiB. With 64 MiB, 0.36 billion in float32 did not have a plan within 2.1 GiB any more
(one H100, 2026-11-28)."""

_STATE_PASSES = 3
"""How often an update reads and writes state in place: functions over lists of tensors, torch's
default, take three passes over the moments of AdamW, and a fused one takes one."""

UNITS_WITH_GRADIENTS = 2
"""With a step in the backward pass, units whose gradients may wait for their update. With fewer the
backward pass would wait for each update at once, and each unit more keeps its gradients."""

GRADIENTS_AHEAD = 2
"""Units by which gradients are on their way back before a later batch adds to them. With fewer the
backward pass would wait for each copy, and each unit more keeps its gradients."""


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
    backward_s: float
    """Duration of its backward pass, recomputation included."""
    saved_bytes: int = 0
    """Activations that its forward pass saves for the backward pass, and that can be copied out."""
    forward_peak_bytes: int = 0
    """Device memory of everything but streamed state and slots at the fullest moment of its forward
    pass, with all activations on the device."""
    backward_peak_bytes: int = 0
    """The same of its backward pass."""
    piece_bytes: tuple[int, ...] = ()
    """State that is staged at a time, where that is not all: `state_bytes` in sum."""
    gradient_bytes: int = 0
    """Gradients that its backward pass makes, and that can be copied out."""
    weight_bytes: int = 0
    """Weights at home in host memory, which are staged for its forward and its backward pass."""
    trained_weight_bytes: int = 0
    """Weights at home, whether passes stage them or not, that its update reads and writes."""
    held: tuple[tuple[int, int], ...] = ()
    """Parts of `saved_bytes` that the program itself holds, so that copies free no memory, and the
    number of further units in whose forward passes it does."""

    @property
    def pieces(self) -> tuple[int, ...]:
        """Bytes of state that are staged at a time, in forward order."""
        return self.piece_bytes or (self.state_bytes,)


@dataclass(frozen=True)
class TemporarySlot:
    """A slot for one piece of a step, while activations leave room for it."""

    made_in: int | None
    """The unit with whose backward pass, of the last batch, it begins to exist, and to be filled;
    None for the step, after all that comes between the backward pass and the step."""
    freed_before: int
    """The moment before which the program waits until the piece is home, and frees it: for each of
    N units, its next forward pass and, from N on, backward passes in reverse."""


def largest_slot_bytes(budget_bytes: int) -> int:
    """State that is staged at a time under a budget, where a unit has more; slots are no larger."""
    small_bytes = min(budget_bytes // _SMALL_STAGED_SHARE, _SMALL_STAGED_BYTES)
    share_bytes = max(small_bytes, budget_bytes // _STAGED_SHARE)
    return min(max(_LEAST_STAGED_BYTES, share_bytes), _MOST_STAGED_BYTES)


def divide_state(sizes: Iterable[int], most_bytes: int) -> list[range]:
    """Divide a unit's parameters into runs whose state is staged together.

    Parameters
    ----------
    sizes
        Bytes of each parameter's state.
    most_bytes
        Of a run of several parameters.

    Returns
    -------
    list of range
        Numbers of parameters. There is at least one run.
    """
    runs, begin, end, run_bytes = [], 0, 0, 0
    for size_bytes in sizes:
        if run_bytes and run_bytes + size_bytes > most_bytes:
            runs.append(range(begin, end))
            begin, run_bytes = end, 0
        run_bytes += size_bytes
        end += 1
    return [*runs, range(begin, end)]


@dataclass(frozen=True)
class StreamTiming:
    """A training step with streamed state, once every step takes the same time.

    ``step_s = compute_s + slowed_s + exposed_s``
    """

    step_s: float
    compute_s: float
    """Computation with everything on the device: updates, but the host's, and passes."""
    slowed_s: float
    """Time that copies add to the computation beside them."""
    exposed_s: float
    """Time that the device computes nothing: passes wait for updates or activations, and updates
    for copies."""
    to_device_bytes: Mapping[TensorClass, int]
    """Bytes copied to the device in a step, by class."""
    to_host_bytes: Mapping[TensorClass, int]
    """Bytes copied to the host in a step, by class."""
    update_end_s: tuple[float, ...]
    """End of each unit's update, seconds from the end of the step's computation on; before it, so
    below 0, are most updates in the backward pass."""
    home_s: float
    """End of the last copy of state to the host, from the same time on; 0 if none is streamed."""


class _Lane(IntEnum):
    UPDATES = 0
    STATE_IN = 1
    STATE_OUT = 2
    ACTIVATIONS_IN = 3
    ACTIVATIONS_OUT = 4
    GRADIENTS_IN = 5
    WEIGHTS_IN = 6
    HOST = 7
    UPDATED_OUT = 8
    """Weights that the host updates."""
    UPDATED_IN = 9
    PASSES = 10


_KINDS = tuple(
    LaneKind.TO_DEVICE
    if lane.name.endswith("_IN")
    else LaneKind.TO_HOST
    if lane.name.endswith("_OUT")
    else LaneKind.HOST
    if lane is _Lane.HOST
    else LaneKind.COMPUTE
    for lane in _Lane
)


def simulate_stream(
    units: Sequence[StreamUnit],
    resident: Collection[int],
    slots: int,
    *,
    hardware: Hardware,
    other_s: float = 0.0,
    copied: Mapping[int, int] = MappingProxyType({}),
    fetch_ahead: int = 1,
    is_deferred: bool = True,
    in_backward: bool = False,
    batches: int = 1,
    copied_gradients: Collection[int] = (),
    final_gradients: Collection[int] = (),
    adds_at_home: bool = False,
    returning_gradients: Mapping[int, int] = MappingProxyType({}),
    weight_slots: int = 0,
    weights_ahead: int = 0,
    stages_operands: bool = True,
    temporary: Sequence[TemporarySlot] = (),
    hosts: Collection[int] = (),
    launch_s: float = 0.0,
) -> StreamTiming:
    """Predict a step's time for given resident units, slots and copied activations.

    * The program's passes run in order: forward and backward for each batch, then `other_s`.
    * The processor launches streamed updates piece by piece. Where the device waits for it, the
      program goes on only after that.
    * Updates begin when the last gradient is clipped. Resident units are updated by the program
      itself, before it goes on; streamed units beside it, in forward order. With `in_backward`,
      all units are updated beside it in reverse order, each from the end of its backward pass in
      the last batch on; the backward pass waits before the gradients of more than
      :data:`UNITS_WITH_GRADIENTS` units wait for their update.
    * The pieces of streamed units use the slots in turn, from the first slot on in each step. A
      copy to the device waits until the piece before it in its slot is back in its home. The first
      pieces, one for each slot, are fetched from the end of the first forward pass on. After these
      come those with a temporary slot, fetched from when it is made on. They go home behind all
      weights, which the next forward pass may wait for.
    * The forward pass of each unit waits for the unit's update.
    * Activations leave after their unit's forward pass, and come back before its backward pass, in
      queues of their own. Copies of the same direction share it equally.
    * Gradients leave after their unit's backward pass, in the queue of state. The backward pass
      waits for them :data:`UNITS_WITH_GRADIENTS` units later. For each later batch they come back
      :data:`GRADIENTS_AHEAD` units before the backward pass that adds to them, but for those of
      `final_gradients`, which leave in the last one only. In the last one
      those of `returning_gradients` stay; with a single batch they come back after the unit that is
      named there. The others come with the state, when the last gradient is clipped. Clipping those
      takes longer than `other_s` by what :func:`_over_the_link_s` estimates.
    * The weights at home of a streamed unit come with its gradients, and leave with its state. A
      resident unit's update reads and writes both on the host. Without `stages_operands` every
      unit's does: that takes as much of the link, and time of the device besides.
    * Weights at home come to one of `weight_slots` buffers before each pass of their unit, in a
      queue of their own, in the order of the passes. A buffer is free after the pass that used it
      last. Where the backward pass turns, the buffers' last units are there already; so are those
      of the next forward pass, but for what an update changes on the host meanwhile.
    * Units of the host have their state at home for good. Their gradients leave as all that are
      copied. When the last gradient is clipped their weights, as many bytes, leave in a queue of
      their own. The host updates them, unit by unit in forward order, and they come back for the
      unit's forward pass.
    * Both directions share the link. Updates and passes share the device: at each moment one of
      them computes, more slowly while copies run beside it. An update comes before the passes,
      which it interrupts: both use the same processors and memory, an update waits only for the end
      of one of the pass's many short kernels, and the next copy waits for its slot.

    Parameters
    ----------
    units
        In forward order.
    resident
        Numbers of the units whose state stays on the device. Units without state are resident too.
    slots
        Number of staging buffers; 0 to update streamed state in host memory.
    hardware
        Bandwidths of explicit copies, of the link with both directions at once
        (`copy_link_bytes_per_s`), and the slowdown beside copies.
    other_s
        Computation between the last backward pass and the step, such as gradient clipping.
    copied
        Numbers of the units whose activations are copied out, each with the unit before whose
        forward pass the program waits until they have left; the number of units for the backward
        pass.
    fetch_ahead
        Number of blocks before its backward pass at which a block's activations are fetched.
    is_deferred
        False if the next forward pass waits for the updates of all units.
    in_backward
        True if units are updated in the backward pass.
    batches
        Forward and backward passes in a step.
    copied_gradients
        Numbers of the units whose gradients are copied out.
    final_gradients
        Those of them whose gradients are not before the last batch.
    adds_at_home
        Whether later batches are added to gradients on the host, over the link. They leave in the
        first batch then.
    returning_gradients
        For those of them that are on the device for the step, the unit after whose backward pass
        they come back; without `adds_at_home` those of several batches stay behind their own.
    weight_slots
        Number of buffers for weights.
    weights_ahead
        Further buffers outside of the turn to the backward pass.
    stages_operands
        Whether slots have room for weights and gradients.
    temporary
        Further slots. Not with `in_backward`.
    hosts
        Numbers of the units that the host updates, whose gradients are copied out. Not with
        `in_backward`.
    launch_s
        What the processor takes for each piece of streamed state, where the device waits for it;
        0 where the processor is ahead. Of no account with `in_backward`.

    Raises
    ------
    PlanError
        If weights are streamed and there is no buffer for them.
    """
    stays = set(resident)
    stays.update(hosts)
    streamed = [i for i, unit in enumerate(units) if unit.state_bytes and i not in stays]
    with_weights = [i for i, unit in enumerate(units) if unit.weight_bytes]
    if with_weights and weight_slots < 1:
        raise PlanError(f"no buffer for the weights of {len(with_weights)} units: give one or more")
    leaving = {i: copied[i] for i in sorted(copied) if units[i].saved_bytes}
    step = _StepTasks(
        units,
        hardware,
        streamed,
        set(copied_gradients),
        set(final_gradients),
        adds_at_home,
        returning_gradients,
        sorted(hosts),
        in_backward=in_backward,
        stages_operands=stages_operands and slots > 0,
        has_slots=slots > 0,
    )
    for _ in range(batches):
        step.add_batch(leaving, fetch_ahead)
    step.add_clipping(other_s)
    launches_s = 0.0 if in_backward else launch_s * sum(len(units[i].pieces) for i in streamed)
    if launches_s:
        step.tasks.add(_Lane.PASSES, launches_s)
    step.add_gradient_copies()
    step.add_updates()
    step.add_state_copies(slots, temporary)
    step.add_updates_of_the_host()
    step.add_waits_for_updates(is_deferred=is_deferred)
    fetched_bytes = step.add_weight_copies(with_weights, weight_slots, weights_ahead)

    report = simulate_lanes(step.tasks, hardware)
    to_device_bytes, to_host_bytes = step.moved_bytes(leaving, fetched_bytes)
    return StreamTiming(
        step_s=report.step_s,
        compute_s=sum(unit.update_s for i, unit in enumerate(units) if i not in hosts)
        + batches * sum(unit.forward_s + unit.backward_s for unit in units)
        + other_s,
        slowed_s=report.slowed_s,
        exposed_s=report.idle_s + launches_s,
        to_device_bytes=to_device_bytes,
        to_host_bytes=to_host_bytes,
        update_end_s=step.update_end_s(report),
        home_s=report.end_s[_Lane.STATE_OUT][-1] if streamed and slots else 0.0,
    )


class _Passes(NamedTuple):
    """The passes of one batch, by unit."""

    forward: list[Task]
    backward: list[Task]


@dataclass(frozen=True)
class _Staged:
    """A piece of a unit on its way through a slot."""

    state_bytes: int
    gradient_bytes: float
    """Of it, on the host."""
    weight_bytes: float
    """The same."""
    update: Task


class _StepTasks:
    """The tasks of a step, added in this order, which :func:`simulate_stream` describes."""

    def __init__(
        self,
        units: Sequence[StreamUnit],
        hardware: Hardware,
        streamed: Sequence[int],
        copied_gradients: Collection[int],
        final_gradients: Collection[int],
        adds_at_home: bool,
        returning_gradients: Mapping[int, int],
        hosts: Sequence[int],
        *,
        in_backward: bool,
        stages_operands: bool,
        has_slots: bool,
    ) -> None:
        self.tasks = LaneTasks(*_KINDS)
        self._units = units
        self._hardware = hardware
        self._streamed = streamed
        self._hosts = hosts
        self._in_slots = set(streamed) if stages_operands else set()
        """Units whose weights and gradients are staged beside their state."""
        self._at_home = set() if has_slots else set(streamed)
        """Units whose state is updated in host memory."""
        every = [unit.gradient_bytes for unit in units]
        self._leaving_bytes = [it if i in copied_gradients else 0 for i, it in enumerate(every)]
        """Gradients that are copied out, by unit."""
        self._early = [i for i in copied_gradients if i not in final_gradients]
        """Units whose gradients are before the last batch, too."""
        self._final, self._adds_at_home = final_gradients, adds_at_home
        self._returning = returning_gradients
        self._staying_bytes = [
            0 if i in returning_gradients else it for i, it in enumerate(self._leaving_bytes)
        ]
        """What of them does not come back before the step."""
        self._in_backward = in_backward
        with_state = [i for i, unit in enumerate(units) if unit.state_bytes]
        self._in_order = with_state[::-1] if in_backward else list(streamed)
        """Units that are updated beside the program, in the order of their updates."""
        # After the step before, the program updates other units in its own stream.
        beside = {*self._in_order, *hosts}
        in_line_s = sum(self._in_place_s(i) for i in range(len(units)) if i not in beside)
        self._in_line = self.tasks.add(_Lane.PASSES, in_line_s)
        self._batches: list[_Passes] = []
        self._clipped = self._in_line
        """After it, all gradients are clipped."""
        self._updates: dict[int, Task] = {}
        """The last of each unit."""
        self._staged: list[_Staged] = []
        self._with_weights_home: dict[int, int] = {}
        """Place in `_staged` of the last of each unit with trained weights at home."""
        self._done: dict[int, Task] = {}
        """As `_updates`; where weights are updated in a slot, their copy home."""

    def _in_place_s(self, number: int) -> float:
        """Time of an update whose weights and gradients on the host are used there."""
        unit, hardware = self._units[number], self._hardware
        both_ways = unit.trained_weight_bytes
        both_ways += _STATE_PASSES * unit.state_bytes * (number in self._at_home)
        return (
            unit.update_s
            + self._staying_bytes[number] / hardware.mapped_read_bytes_per_s
            + 2 * both_ways / hardware.mapped_bytes_per_s
        )

    @property
    def _stay(self) -> bool:
        """Whether gradients come back for each later batch, and some stay behind the last."""
        return len(self._batches) > 1 and not self._adds_at_home

    def add_batch(self, leaving: Mapping[int, int], fetch_ahead: int) -> None:
        """Add the passes of a batch, and the copies of the activations that leave."""
        tasks, units, count = self.tasks, self._units, len(self._units)
        forward = [tasks.add(_Lane.PASSES, unit.forward_s) for unit in units]
        durations = [unit.backward_s for unit in units]
        if self._batches and self._adds_at_home:
            rate = self._hardware.mapped_bytes_per_s
            for number in self._early:
                durations[number] += 2 * self._leaving_bytes[number] / rate
        backward = [tasks.add(_Lane.PASSES, each) for each in reversed(durations)][::-1]
        left = {}
        for number, before in leaving.items():
            saved_bytes = units[number].saved_bytes
            left[number] = tasks.add(_Lane.ACTIVATIONS_OUT, saved_bytes, forward[number])
            tasks.wait(forward[before] if before < count else backward[-1], left[number])
        for number in reversed(list(leaving)):
            at = number + fetch_ahead + 1
            begin = backward[at] if at < count else forward[-1]
            saved_bytes = units[number].saved_bytes
            back = tasks.add(_Lane.ACTIVATIONS_IN, saved_bytes, begin, left[number])
            tasks.wait(backward[number], back)
        self._batches.append(_Passes(forward, backward))

    def add_clipping(self, other_s: float) -> None:
        """Add what the program computes between the last backward pass and the step."""
        read_at_home = self._adds_at_home and len(self._batches) > 1
        clipping_s = _over_the_link_s(
            self._units,
            other_s,
            sum(self._staying_bytes[number] for number in self._early) * read_at_home,
            sum(
                it
                for i, it in enumerate(self._staying_bytes)
                if i not in self._in_slots and i not in self._hosts
            ),
            self._hardware,
        )
        self._clipped = self.tasks.add(_Lane.PASSES, other_s + clipping_s)

    def add_gradient_copies(self) -> None:
        """Add the copies of gradients out, and of those that come back before the step."""
        tasks, size_bytes = self.tasks, self._leaving_bytes
        last, count = self._batches[-1], len(size_bytes)
        left: dict[int, Task] = {}
        for batch, later in zip(self._batches, [*self._batches[1:], None], strict=True):
            backward, behind = batch.backward, later.forward[0] if later else self._clipped
            for number in reversed(range(count)):
                if not size_bytes[number] or (number in self._final and later):
                    continue
                if number in left:  # the batch adds to them
                    if self._adds_at_home:
                        continue
                    at = number + GRADIENTS_AHEAD + 1
                    begin = backward[at] if at < count else batch.forward[-1]
                    back = tasks.add(_Lane.GRADIENTS_IN, size_bytes[number], begin, left[number])
                    tasks.wait(backward[number], back)
                    if later is None and number in self._returning:
                        continue
                left[number] = tasks.add(_Lane.STATE_OUT, size_bytes[number], backward[number])
                further = number - UNITS_WITH_GRADIENTS
                tasks.wait(backward[further] if further >= 0 else behind, left[number])
        if self._stay:
            return
        for number, after in sorted(self._returning.items(), key=itemgetter(1), reverse=True):
            returned = tasks.add(_Lane.GRADIENTS_IN, size_bytes[number], last.backward[after])
            tasks.wait(self._clipped, returned)

    def add_updates(self) -> None:
        """Add the updates beside the program, piece by piece."""
        tasks, in_pieces = self.tasks, set(self._streamed)
        backward = self._batches[-1].backward
        for place, number in enumerate(self._in_order):
            unit = self._units[number]
            pieces = unit.pieces if number in in_pieces else (unit.state_bytes,)
            pieces = pieces[::-1] if self._in_backward else pieces
            update_s = unit.update_s if number in self._in_slots else self._in_place_s(number)
            added = [tasks.add(_Lane.UPDATES, update_s * it / unit.state_bytes) for it in pieces]
            tasks.wait(added[0], backward[number] if self._in_backward else self._clipped)
            self._updates[number] = added[-1]
            if number in in_pieces and number not in self._at_home:
                gradient_bytes = self._staying_bytes[number]
                shares = [it / unit.state_bytes for it in pieces]
                self._staged += [
                    _Staged(size, share * gradient_bytes, share * unit.trained_weight_bytes, update)
                    for size, share, update in zip(pieces, shares, added, strict=True)
                ]
                if unit.trained_weight_bytes:
                    self._with_weights_home[number] = len(self._staged) - 1
            if self._in_backward and place >= UNITS_WITH_GRADIENTS:
                following = backward[number - 1] if number else self._clipped
                done = self._updates[self._in_order[place - UNITS_WITH_GRADIENTS]]
                tasks.wait(following, done)

    def add_state_copies(self, slots: int, temporary: Sequence[TemporarySlot]) -> None:
        """Add the copies of pieces, in the order of their updates.

        The first ones come from the end of the forward pass on, gradients and weights when the last
        gradient is clipped.
        """
        tasks, staged = self.tasks, self._staged
        forward = self._batches[0].forward
        ahead = forward[-1] if forward else self._clipped
        first = min(slots, len(staged))
        own = range(first, min(first + len(temporary), len(staged)))
        fetched = [tasks.add(_Lane.STATE_IN, it.state_bytes) for it in staged[: own.stop]]
        home: dict[int, Task] = {}
        users: dict[int, int] = {}
        """By slot, place of the last piece in it so far."""
        for place, it in enumerate(staged):
            if place in own:
                tasks.wait(fetched[place], self._made(temporary[place - first], ahead))
            else:
                slot = (place if place < first else place - len(own)) % slots
                if place < first:
                    tasks.wait(fetched[place], ahead)
                else:
                    fetched.append(tasks.add(_Lane.STATE_IN, it.state_bytes, home[users[slot]]))
                users[slot] = place
            more_bytes = it.gradient_bytes + it.weight_bytes
            if more_bytes:
                tasks.wait(it.update, tasks.add(_Lane.STATE_IN, more_bytes, self._clipped))
            tasks.wait(it.update, fetched[place])
            left_bytes = it.weight_bytes if place in own else it.state_bytes + it.weight_bytes
            home[place] = tasks.add(_Lane.STATE_OUT, left_bytes, it.update)
        self._done = self._updates | {
            number: home[place] for number, place in self._with_weights_home.items()
        }
        for place in own:
            home[place] = tasks.add(_Lane.STATE_OUT, staged[place].state_bytes)
            before = temporary[place - first].freed_before
            moments = [*forward, *reversed(self._batches[0].backward)]
            tasks.wait(moments[before], home[place], steps_before=1)
        for slot, place in users.items():
            # It makes room for the slot's first piece of the next step.
            tasks.wait(fetched[slot], home[place], steps_before=1)

    def add_updates_of_the_host(self) -> None:
        """Add the host's updates, with the copies of weights out and in."""
        tasks = self.tasks
        for number in self._hosts:
            unit = self._units[number]
            weight_bytes = unit.gradient_bytes
            left = tasks.add(_Lane.UPDATED_OUT, weight_bytes, self._clipped)
            # A gradient is read; weights and state are read and written.
            moved_bytes = 3 * weight_bytes + 2 * unit.state_bytes
            updated = tasks.add(_Lane.HOST, moved_bytes, left)
            self._done[number] = tasks.add(_Lane.UPDATED_IN, weight_bytes, updated)

    def _made(self, slot: TemporarySlot, ahead: Task) -> Task:
        """What a temporary slot is made after; `ahead` is the end of the forward pass."""
        if slot.made_in is None:
            return self._clipped
        backward, at = self._batches[-1].backward, slot.made_in + 1
        return backward[at] if at < len(backward) else ahead

    def add_waits_for_updates(self, *, is_deferred: bool) -> None:
        """Let the next forward pass wait: each unit for its update, or the first for all."""
        forward, done = self._batches[0].forward, self._done
        if is_deferred or self._in_backward:
            for number, moment in done.items():
                self.tasks.wait(forward[number], moment, steps_before=1)
        else:
            # Updates run in order: after the last one, all are done.
            for last in (self._in_order[-1:], self._hosts[-1:]):
                for number in last:
                    self.tasks.wait(forward[0], done[number], steps_before=1)

    def add_weight_copies(self, with_weights: Sequence[int], slots: int, ahead: int) -> int:
        """Add the copies of weights to the device, and return their bytes in a step.

        They are of these units, to `slots` buffers and, in the forward pass, some more `ahead`.
        """
        tasks = self.tasks
        fetched_bytes = 0
        for batch, its in enumerate(self._batches):
            for pass_tasks, order, buffers in (
                (its.forward, with_weights, slots + ahead),
                (its.backward, with_weights[::-1], slots),
            ):
                is_first = batch == 0 and pass_tasks is its.forward
                for place, number in enumerate(order):
                    unit = self._units[number]
                    # An update changes the home: what the last pass has left there is of no use.
                    is_new = is_first and unit.trained_weight_bytes > 0
                    if place < buffers and not is_new:
                        continue
                    copied = tasks.add(_Lane.WEIGHTS_IN, unit.weight_bytes)
                    fetched_bytes += unit.weight_bytes
                    tasks.wait(pass_tasks[number], copied)
                    if place >= buffers:
                        tasks.wait(copied, pass_tasks[order[place - buffers]])
                    elif is_new:
                        # The unit itself was the last of the step before to use the buffer.
                        tasks.wait(copied, self._batches[-1].backward[number], steps_before=1)
                    if is_new:
                        # A unit that the program itself updates is done before the first pass.
                        update = self._done.get(number, self._in_line)
                        tasks.wait(copied, update, steps_before=int(update.lane != _Lane.PASSES))
        return fetched_bytes

    def moved_bytes(
        self, leaving: Iterable[int], fetched_bytes: int
    ) -> tuple[dict[TensorClass, int], dict[TensorClass, int]]:
        """Bytes that are copied to the device and to the host in a step, by class."""
        units = self._units
        saved_bytes = len(self._batches) * sum(units[i].saved_bytes for i in leaving)
        both_ways = {
            TensorClass.OPTIMIZER_STATE: sum(
                units[i].state_bytes for i in self._streamed if i not in self._at_home
            ),
            TensorClass.ACTIVATIONS: saved_bytes,
        }
        in_slots = [i for i in self._streamed if i in self._in_slots]
        updated_bytes = sum(units[i].trained_weight_bytes for i in in_slots)
        updated_bytes += sum(units[i].gradient_bytes for i in self._hosts)
        returned_bytes = sum(self._leaving_bytes[i] for i in self._returning)
        left_bytes = sum(self._leaving_bytes)
        if self._stay:
            again_bytes = sum(self._leaving_bytes[i] for i in self._early)
            again_bytes *= len(self._batches) - 1
            left_bytes += again_bytes - returned_bytes
            returned_bytes = again_bytes
        to_device = both_ways | {
            TensorClass.GRADIENTS: returned_bytes + sum(self._staying_bytes[i] for i in in_slots),
            TensorClass.WEIGHTS: fetched_bytes + updated_bytes,
        }
        to_host = both_ways | {
            TensorClass.GRADIENTS: left_bytes,
            TensorClass.WEIGHTS: updated_bytes,
        }
        return _without_zeros(to_device), _without_zeros(to_host)

    def update_end_s(self, report: LaneReport) -> tuple[float, ...]:
        """End of each unit's update, as :class:`StreamTiming` has it."""
        # What the program updates itself is part of the next step.
        in_line_end_s = report.end_s[_Lane.PASSES][self._in_line.number] + report.step_s
        updates = self._updates | {i: self._done[i] for i in self._hosts}
        return tuple(
            report.end_s[updates[i].lane][updates[i].number] if i in updates else in_line_end_s
            for i in range(len(self._units))
        )


def _without_zeros(size_bytes: Mapping[TensorClass, int]) -> dict[TensorClass, int]:
    return {name: it for name, it in size_bytes.items() if it}


_CLIPPING_PASSES = 3
"""How often clipping takes all gradients through memory: a norm reads, and a product with the
factor reads and writes."""


def _over_the_link_s(
    units: Sequence[StreamUnit],
    other_s: float,
    read_bytes: int,
    multiplied_bytes: int,
    hardware: Hardware,
) -> float:
    """Time that clipping takes longer where it reads, or multiplies, gradients on the host.

    It reads them for norms that were not known before they left, and multiplies those of which the
    update has no copy. Nobody sees what the program does. If the device had the time for clipping
    between the backward pass and the step, it clips; if it had a part of the time, it is that part.
    """
    all_bytes = sum(unit.gradient_bytes for unit in units)
    if not all_bytes:
        return 0.0
    passes = other_s * hardware.memory_bytes_per_s / all_bytes
    clipping_s = read_bytes / hardware.mapped_read_bytes_per_s
    clipping_s += 2 * multiplied_bytes / hardware.mapped_bytes_per_s
    return min(1.0, passes / _CLIPPING_PASSES) * clipping_s
