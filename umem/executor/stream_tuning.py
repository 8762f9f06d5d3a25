"""Decides what a training keeps on the device: measures its first steps, and plans from them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any, Protocol

from torch import nn

from umem.capture.live import NO_BLOCK, Block, PhaseTracker
from umem.capture.live.timing import Clock
from umem.core.errors import PlanError
from umem.core.units import format_bytes
from umem.executor.copied_activations import CopiedActivations
from umem.executor.optimizer.unit_names import is_outside
from umem.executor.phase_measurement import BlockFigures, DeviceRoom, StepFigures, StepMeter
from umem.hardware import Hardware
from umem.offload import ActivationStatistics, ActivationStore
from umem.planning.stream_plan import StreamPlan, least_slack_bytes, plan_stream
from umem.planning.stream_timing import StreamUnit
from umem.runtime.torch_hooks.modules import Guard

__all__ = ["FEWEST_SLOTS", "StreamTuner", "StreamedState", "TuningState", "TuningStatus"]

_LOG = logging.getLogger("umem")

FEWEST_SLOTS = 2
"""With one, nothing is copied in while anything is copied out."""

_MEASURED_STEPS = 2
"""Steps to measure for a plan: one may be interrupted by a copy, or be shorter than the next."""

_SETTLING_STEPS = 2
"""Steps until a plan is in force: the first one moves state."""

_MOST_PLANS = 8
"""Plans for a training. Each may have to wait twice as many steps as the one before."""

_PATIENCE_STEPS = 4
"""Steps before the second plan because of short memory."""

_AS_LARGE = 0.97
"""A step is as large as another one from this part of its memory on."""

_LONGEST_SEARCH = 16
"""Steps to measure in the search for one as large as that in which memory ran short."""

_UPDATE_TRAFFIC = 3.5
"""Bytes that an update reads and writes per byte of state. AdamW reads and writes its two moments
and the weight, and reads the gradient."""


class StreamedState(Protocol):
    """The optimizer state that a plan is about."""

    @property
    def device_bytes(self) -> int:
        """Bytes of state on the device: in slots, or for good."""

    def sizes(self) -> Mapping[str, tuple[int, ...]]:
        """Bytes of state that can be streamed, by block in the order of the forward pass.

        Those of a block are of what is staged at a time.
        """

    def set_plan(self, resident: frozenset[str], slots: int) -> None:
        """Set the blocks whose state stays on the device, and the slots for the others."""


class TuningState(StrEnum):
    """What a tuner does."""

    MEASURING = "measuring"
    """Steps run as they are, or under the plan so far, and are measured."""
    PLANNED = "planned"
    """Steps run under a plan."""
    OVERFULL = "overfull"
    """The budget is too small for a plan: all state is streamed, all activations are copied."""
    OFF = "off"
    """An error has ended measurements; the last plan stays."""


@dataclass(frozen=True)
class TuningStatus:
    """A tuner's state, and its plan."""

    state: TuningState
    budget_bytes: int
    plan: StreamPlan | None
    """The plan in force; None before the first one."""
    plans: int
    """Number of plans so far."""
    resident_bytes: int
    """Optimizer state that the plan keeps on the device."""
    copied_bytes: int
    """Activations that the plan copies out in each forward pass."""
    copied_blocks: int
    predicted_s: float | None
    """A step under the plan, by prediction."""
    measured_s: float | None
    """The last measured time from one optimizer step to the next."""
    spilled_bytes: int
    """Host memory that is held because of the budget."""
    activations: ActivationStatistics
    """Copies of activations so far."""


class StreamTuner:
    """Measures steps and plans; anew when memory runs short.

    Parameters
    ----------
    hardware
        The machine's figures.
    clock
        Marks moments on the device.
    room
        The device's memory.
    store
        Copies activations; None for a training whose activations stay.
    """

    def __init__(
        self,
        hardware: Hardware,
        clock: Clock,
        room: DeviceRoom,
        store: ActivationStore | None = None,
    ) -> None:
        self.plan: StreamPlan | None = None
        """The present plan; None before the first one."""
        self._hardware = hardware
        self._clock = clock
        self._room = room
        self._store = store
        self._in_backward = self._expects_backward = False
        self._state = TuningState.OFF
        self._activations: CopiedActivations | None = None
        self._tracker: PhaseTracker | None = None
        self._units: list[StreamUnit] = []
        """Those of the plan."""
        self._copied: dict[str, str | None] = {}
        self._fetch_ahead = 1
        self._sizes: dict[str, tuple[int, ...]] = {}
        self._figures: StepFigures | None = None
        self._timed: StepFigures | None = None
        """Steps before updates began to share the time of the backward pass."""
        self._saved_bytes: dict[str, int] = {}
        self._to_measure = self._tried = 0
        self._wanted_bytes = 0.0
        self._is_short = self._has_grown = self._is_disturbed = False
        self._plans = self._steps = 0
        self._slack = 1
        self._spilled_bytes = 0
        self._marks: deque[Any] = deque()
        self._measured_s: float | None = None
        self._has_warned = self._has_given_up = False

    # ------------------------------------------------------------------ for the training

    def attach(self, model: nn.Module, blocks: Sequence[Block], state: StreamedState) -> None:
        """Begin with a training.

        Parameters
        ----------
        model
            The module that the training loop calls.
        blocks
            Its blocks.
        state
            Its streamed state.
        """
        self._streamed = state
        if self._store is not None:
            self._activations = CopiedActivations(model, blocks, self._store, self._fail)
        root = Block(NO_BLOCK, model)
        self._meter = StepMeter(
            self._clock, self._room, root, blocks, lambda: state.device_bytes, self.away_bytes
        )
        self._tracker = PhaseTracker(root, blocks, Guard(self._fail), self._meter)
        self._measure(_MEASURED_STEPS)

    def step_begins(self) -> None:
        """The optimizer's step begins."""
        if self._tracker is None or self._state == TuningState.OFF:
            return
        try:
            self._time_step()
            if self._state == TuningState.MEASURING:
                self._tracker.optimizer_begins()
        except Exception as error:
            self._fail(error)

    def _time_step(self) -> None:
        if self._clock.is_usable():
            self._marks.append(self._clock.mark())
        while len(self._marks) > 2 and self._clock.is_past(self._marks[1]):
            begin = self._marks.popleft()
            self._measured_s = self._clock.seconds(begin, self._marks[0])
            self._clock.release([begin])

    def step_ends(self) -> None:
        """The optimizer's step is over, or under way beside what follows: plan for the next."""
        if self._tracker is None:
            return
        try:
            if self._state == TuningState.MEASURING:
                self._tracker.optimizer_ends()
                self._look_at(self._meter.take())
            elif self._state != TuningState.OFF:
                self._watch()
        except Exception as error:
            self._fail(error)

    def expect_backward(self) -> None:
        """Make no plan until :meth:`move_into_backward`, whose plan needs less memory."""
        self._expects_backward = True

    def move_into_backward(self) -> None:
        """Measure and plan anew: from now on, parameters are updated in the backward pass.

        It frees their gradients there, so that more state has room.
        """
        self._in_backward, self._expects_backward = True, False
        if self._tracker is None or self._state == TuningState.OFF:
            return
        self._timed = self._figures
        self._figures, self._plans, self._wanted_bytes = None, 0, 0.0
        try:
            if self._state == TuningState.MEASURING:
                self._to_measure, self._tried = _MEASURED_STEPS, 0
            else:
                self._measure(_MEASURED_STEPS)
        except Exception as error:
            self._fail(error)

    @property
    def is_measuring(self) -> bool:
        """Whether the next step is measured."""
        return self._state == TuningState.MEASURING

    @property
    def is_settled(self) -> bool:
        """Whether neither the next step nor one soon behind it is measured."""
        return not self.is_measuring and (self._state == TuningState.OFF or not self._is_disturbed)

    def status(self) -> TuningStatus:
        """The state now."""
        return TuningStatus(
            state=self._state,
            budget_bytes=self._room.budget_bytes,
            plan=self.plan,
            plans=self._plans,
            resident_bytes=self._resident_bytes(),
            copied_bytes=self._copied_bytes(),
            copied_blocks=len(self._copied),
            predicted_s=None if self.plan is None else self.plan.predicted.step_s,
            measured_s=self._measured_s,
            spilled_bytes=self._room.spilled_bytes(),
            activations=ActivationStatistics()
            if self._activations is None
            else self._activations.statistics,
        )

    def close(self) -> None:
        """Remove all hooks."""
        self._state = TuningState.OFF
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            tracker.stop()
        if self._activations is not None:
            self._activations.close()

    def _fail(self, error: Exception) -> None:
        """An error must not end the training, which goes on as it is."""
        _LOG.warning(
            "umem: this training is not measured any more, and activations stay on the device: "
            "%s: %s",
            type(error).__name__,
            str(error),
            exc_info=_LOG.isEnabledFor(logging.DEBUG),
        )
        self._state = TuningState.OFF
        self._copied = {}
        if self._tracker is not None:
            self._tracker.stop()
        if self._activations is not None:
            self._activations.set_plan({}, 1, is_measuring=False)

    # ------------------------------------------------------------------ measuring

    def _measure(self, steps: int) -> None:
        """Measure the next steps."""
        assert self._tracker is not None
        self._state = TuningState.MEASURING
        self._to_measure, self._tried = steps, 0
        # Before the tracker's hooks: the stream waits for copies outside of the blocks' times.
        self._set_activations()
        if self._activations is not None:
            self._activations.begin_step()
        self._tracker.start()

    def _set_activations(self) -> None:
        if self._activations is not None:
            is_measuring = self._state == TuningState.MEASURING
            self._activations.set_plan(self._copied, self._fetch_ahead, is_measuring=is_measuring)

    def _resident_bytes(self) -> int:
        sizes = self._streamed.sizes()
        return sum(sum(sizes.get(name, ())) for name in self._resident_names())

    def _copied_bytes(self) -> int:
        return sum(unit.saved_bytes for unit in self._units if unit.name in self._copied)

    def away_bytes(self) -> int:
        """Bytes of activations that are on the host only."""
        return 0 if self._activations is None else self._activations.away_bytes()

    def _resident_names(self) -> frozenset[str]:
        if self.plan is None:
            return frozenset()
        return frozenset(self._units[number].name for number in self.plan.resident)

    def _look_at(self, figures: StepFigures | None) -> None:
        """A step was measured, or could not be."""
        if self._activations is not None:
            self._activations.begin_step()
        if figures is None:
            return
        self._tried += 1
        if self._figures is not None:
            self._has_grown |= figures.need_bytes() > self._figures.need_bytes() / _AS_LARGE
        is_large = figures.peak_bytes >= self._wanted_bytes
        self._figures = figures if self._figures is None else _merged(self._figures, figures)
        if self._activations is not None:
            for name, size_bytes in self._activations.saved_bytes.items():
                self._saved_bytes[name] = max(size_bytes, self._saved_bytes.get(name, 0))
        self._to_measure -= is_large
        if self._expects_backward or (self._to_measure > 0 and self._tried < _LONGEST_SEARCH):
            return
        assert self._tracker is not None
        self._tracker.stop()
        if self._is_short and not self._has_grown:
            self._slack *= 2
        # What is used in host memory is slow: under a plan that has room for it, measure again.
        is_slow = figures.spilled_bytes > self._spilled_bytes
        self._is_disturbed = is_slow and not self._is_disturbed and not self._is_short
        self._is_short = self._has_grown = False
        self._make_plan()

    # ------------------------------------------------------------------ planning

    def _make_plan(self) -> None:
        assert self._figures is not None
        self._plans += 1
        self._steps = 0
        self._sizes = dict(self._streamed.sizes())
        before = self._resident_names(), None if self.plan is None else self.plan.slots
        units = self._make_units()
        budget_bytes = self._room.budget_bytes
        slack_bytes = self._slack * least_slack_bytes(budget_bytes)
        try:
            plan = plan_stream(
                units,
                budget_bytes=budget_bytes - slack_bytes,
                hardware=self._hardware,
                other_s=self._figures.other_s,
                step_peak_bytes=self._figures.step_peak_bytes,
                in_backward=self._in_backward,
                batches=self._figures.batches,
            )
        except PlanError as error:
            self._warn(error)
            self._state = TuningState.OVERFULL
            self.plan, self._units = None, units
            self._copied = {
                it.name: behind.name for it, behind in pairwise(units) if it.saved_bytes
            }
            self._fetch_ahead = 1
            slots = FEWEST_SLOTS
        else:
            self._state = TuningState.PLANNED
            self.plan, self._units = plan, units
            self._copied = {
                units[number].name: units[behind].name if behind < len(units) else None
                for number, behind in plan.left_before.items()
            }
            self._fetch_ahead = plan.fetch_ahead
            slots = plan.slots
        self._set_activations()
        if before != (self._resident_names(), slots):
            self._streamed.set_plan(self._resident_names(), slots)
        self._room.trim()
        if self.plan is not None:
            self._log(self.plan)

    def _make_units(self) -> list[StreamUnit]:
        assert self._figures is not None
        sizes = self._sizes
        measured = self._figures.blocks
        if self._timed is not None:
            measured = _with_times_of(self._timed.blocks, measured)
        rest = measured[NO_BLOCK]
        # All that is outside of blocks is due when the forward pass begins.
        due = replace(rest, forward_s=0.0, backward_s=0.0)
        parts = {name: due for name in sizes if is_outside(name) and name != NO_BLOCK}
        blocks = {**parts, **measured}
        # Nobody sees the blocks of a compiled model.
        unseen = {name: sum(pieces) for name, pieces in sizes.items() if name not in blocks}
        if sum(unseen.values()):
            blocks[NO_BLOCK] = due
            for name, size_bytes in unseen.items():
                share = size_bytes / sum(unseen.values())
                blocks[name] = replace(
                    rest, forward_s=share * rest.forward_s, backward_s=share * rest.backward_s
                )
        return [
            StreamUnit(
                name=name,
                state_bytes=sum(sizes.get(name, ())),
                piece_bytes=sizes.get(name, ()),
                update_s=_UPDATE_TRAFFIC
                * sum(sizes.get(name, ()))
                / self._hardware.memory_bytes_per_s,
                forward_s=block.forward_s,
                backward_s=block.backward_s,
                saved_bytes=self._saved_bytes.get(name, 0),
                forward_peak_bytes=block.forward_peak_bytes,
                backward_peak_bytes=block.backward_peak_bytes,
            )
            for name, block in blocks.items()
        ]

    def _warn(self, error: PlanError) -> None:
        if not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "umem: all optimizer state is streamed and all activations are copied: %s",
                str(error),  # a record keeps what it is given, and an exception its frames
            )

    def _log(self, plan: StreamPlan) -> None:
        with_state = [unit for unit in self._units if unit.state_bytes]
        resident = [unit for unit in with_state if unit.name in self._resident_names()]
        _LOG.info(
            "umem: plan %d: state of %d of %d blocks on the device (%s), %d slots of %s, "
            "activations of %d blocks copied (%s), %.3f s a step predicted, %s of %s spare",
            self._plans,
            len(resident),
            len(with_state),
            format_bytes(self._resident_bytes()),
            plan.slots,
            format_bytes(plan.slot_bytes),
            len(self._copied),
            format_bytes(self._copied_bytes()),
            plan.predicted.step_s,
            format_bytes(max(0, self._room.budget_bytes - plan.peak_bytes)),
            format_bytes(self._room.budget_bytes),
        )

    # ------------------------------------------------------------------ under a plan

    def _watch(self) -> None:
        """Look at a step that has run under the plan."""
        self._steps += 1
        peak_bytes = self._room.take_peak_bytes()
        if self._steps <= _SETTLING_STEPS:
            self._room.trim()
            self._spilled_bytes = self._room.spilled_bytes()
            return
        if self._is_disturbed:
            self._wanted_bytes = 0.0
            self._measure(1)
            return
        if self._streamed.sizes() != self._sizes:
            if self._plans < _MOST_PLANS:
                self._make_plan()
            return
        spilled_bytes = self._room.spilled_bytes()
        patience = _PATIENCE_STEPS * 2 ** (self._plans - 1)
        if spilled_bytes <= self._spilled_bytes or self._steps < patience:
            return
        if self._plans >= _MOST_PLANS:
            if self._has_given_up:
                return
            self._has_given_up = True
            _LOG.warning(
                "umem: %s of tensors are in host memory and slow, after %d plans: steps of this "
                "training differ too much for its device_budget of %s",
                format_bytes(spilled_bytes),
                self._plans,
                format_bytes(self._room.budget_bytes),
            )
            return
        self._is_short = True
        self._wanted_bytes = _AS_LARGE * peak_bytes
        self._measure(_MEASURED_STEPS)


def _with_times_of(
    timed: Mapping[str, BlockFigures], blocks: Mapping[str, BlockFigures]
) -> dict[str, BlockFigures]:
    """The blocks' bytes with the times of other steps."""
    return {
        name: replace(block, forward_s=time.forward_s, backward_s=time.backward_s)
        for name, block in blocks.items()
        for time in (timed.get(name, block),)
    }


def _merged(one: StepFigures, other: StepFigures) -> StepFigures:
    """The larger bytes of two steps. Of the times the shorter, which nothing has disturbed.

    Where a step is larger, its times count.
    """
    pick = max if other.need_bytes() > one.need_bytes() / _AS_LARGE else min
    blocks = {}
    for name in {**one.blocks, **other.blocks}:
        first = one.blocks.get(name) or other.blocks[name]
        second = other.blocks.get(name) or first
        # Between blocks the forward pass waits for updates and copies.
        pick_forward = min if name == NO_BLOCK else pick
        blocks[name] = BlockFigures(
            forward_s=pick_forward(first.forward_s, second.forward_s),
            backward_s=pick(first.backward_s, second.backward_s),
            forward_peak_bytes=max(first.forward_peak_bytes, second.forward_peak_bytes),
            backward_peak_bytes=max(first.backward_peak_bytes, second.backward_peak_bytes),
        )
    return StepFigures(
        blocks=blocks,
        other_s=pick(one.other_s, other.other_s),
        step_peak_bytes=max(one.step_peak_bytes, other.step_peak_bytes),
        batches=other.batches,
        peak_bytes=max(one.peak_bytes, other.peak_bytes),
        spilled_bytes=other.spilled_bytes,
    )
