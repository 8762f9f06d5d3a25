"""Measures steps of a training, round by round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from umem.capture.live import NO_BLOCK, Block, PhaseTracker
from umem.capture.live.timing import Clock
from umem.runtime.torch_hooks.modules import HookErrors
from umem.streaming.activations.copied_activations import CopiedActivations
from umem.streaming.stage.device_room import DeviceRoom
from umem.streaming.stage.shared_budget import SharedBudget
from umem.streaming.tune.measured_steps import AS_LARGE, MeasuredStep, MeasuredSteps
from umem.streaming.tune.states import TuningEvent
from umem.streaming.tune.step_meter import StepMeter

__all__ = ["Measuring", "Round"]

_LONGEST_SEARCH = 16
"""Steps to measure in the search for one as large as that in which memory ran short."""


@dataclass
class Round:
    """Steps that are measured for one plan."""

    occasion: TuningEvent
    """Why."""
    left: int
    """Number of steps still to measure."""
    least_bytes: int = 0
    """Live tensors of a step that is searched for: smaller ones do not count."""
    spilled_bytes: int = 0
    """Host memory that is in use because of the budget when the round begins."""
    tried: int = 0
    has_grown: bool = False
    """Whether a step has needed more memory than all before."""

    def add(self, figures: MeasuredStep, known: MeasuredStep | None) -> None:
        """Count a step, whose predecessors are known."""
        self.tried += 1
        self.left -= figures.peak_bytes >= AS_LARGE * self.least_bytes
        # What is used in host memory makes times longer. That may be cached memory, which was in
        # use for the same reason when the round began.
        figures.is_disturbed = figures.spills > 0 or figures.spilled_bytes > self.spilled_bytes
        self.has_grown |= known is not None and figures.exceeds(known)

    @property
    def is_complete(self) -> bool:
        """Whether the round has enough steps."""
        return self.left <= 0 or self.tried >= _LONGEST_SEARCH


class Measuring:
    """Measures the steps of a model, whose figures `steps` gathers."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[Block],
        steps: MeasuredSteps,
        clock: Clock,
        room: DeviceRoom,
        activations: CopiedActivations | None,
        shared: SharedBudget,
        on_error: Callable[[Exception], None],
    ) -> None:
        self.round = Round(TuningEvent.BEGINS, 0)
        """The present round."""
        self._steps, self._room, self._shared = steps, room, shared
        self._activations = activations
        root = Block(NO_BLOCK, model)
        self._meter = StepMeter(
            clock,
            room,
            root,
            blocks,
            lambda: shared.placed_bytes,
            self.away_bytes,
            self._stretch,
            frozenset if activations is None else lambda: activations.recomputed,
            lambda: shared.calls,
        )
        self._tracker = PhaseTracker(root, blocks, HookErrors(on_error), self._meter)
        if activations is not None:
            activations.on_stretch = self._tracker.begin_phase_anew
        self._takes_peak = False
        """Whether the present later call of ``step()`` counts."""

    @property
    def sees_saved(self) -> bool:
        """Whether the steps of this round show what blocks save.

        To look at that takes the processor longer than the whole step of a net of small kernels. So
        steps that are to show times alone do not.
        """
        activations, known = self._activations, self._steps.figures
        is_needed = activations is None or activations.is_cut or known is None
        return is_needed or self.round.occasion is not TuningEvent.TIMES_DISTURBED

    def away_bytes(self) -> int:
        """Bytes of activations that are on the host only."""
        return 0 if self._activations is None else self._activations.away_bytes()

    def _stretch(self) -> str | None:
        return None if self._activations is None else self._activations.stretch

    def begin(self) -> None:
        """Begin the round."""
        # Before the tracker's hooks: the stream waits for copies outside of the blocks' times.
        self._begin_step()
        self._tracker.start()
        self._meter.listen()

    def stop(self) -> None:
        """Measure no more steps for now."""
        self._tracker.stop()
        self._meter.stop()

    def _begin_step(self) -> None:
        if self._activations is not None:
            self._activations.begin_step()

    # ------------------------------------------------------------------ a step

    def step_begins(self) -> None:
        """The first call of ``step()`` in a training step begins."""
        self._tracker.optimizer_begins()

    def step_ends(self) -> MeasuredStep | None:
        """The call is over; returns the step's figures, or None if it could not be measured."""
        self._tracker.optimizer_ends()
        return self._meter.take()

    def add(self, figures: MeasuredStep | None) -> bool:
        """Count a step, if it could be measured; returns whether the round is complete."""
        # A call that was run twice to prove something took time and memory.
        is_unusual = self._activations is not None and self._activations.is_unusual
        if self._activations is not None and self._activations.has_cut:
            self._steps.forget()  # those were of other units
        self._begin_step()
        if figures is None or is_unusual:
            return False
        known = self._steps.figures
        activations = self._activations
        if known is not None and not self.sees_saved:
            figures = figures.with_memory_of(known)
        saved_bytes = {} if activations is None else activations.saved_bytes
        held_bytes = {} if activations is None else activations.held_bytes
        self.round.add(figures, known)
        self._steps.add(figures, saved_bytes, held_bytes)
        return self.round.is_complete

    def later_call_begins(self, *, counts: bool) -> None:
        """Another call of ``step()`` in the same training step begins."""
        # Amid a measured step, its phases have the peak.
        self._takes_peak = counts and not self._meter.is_in_step
        if self._takes_peak:
            self._room.take_peak_bytes()

    def later_call_ends(self) -> None:
        """That call is over: count the memory that it has needed."""
        if self._takes_peak:
            peak_bytes = self._room.take_peak_bytes()
            self._steps.add_later_call(peak_bytes - self._shared.placed_bytes)
