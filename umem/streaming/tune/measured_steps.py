"""What the measured steps of a training have in common: what a plan for later ones is made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from umem.capture.live import NO_BLOCK
from umem.streaming.plan.step_timing import StreamUnit
from umem.streaming.step.unit_names import is_outside
from umem.streaming.tune.measure import BlockFigures, StepFigures
from umem.streaming.tune.states import TuningEvent

__all__ = ["MeasuredSteps"]

_AS_LARGE = 0.97
"""A step is as large as another one from this part of its memory on."""

_UPDATE_TRAFFIC = 3.5
"""Bytes that an update reads and writes per byte of state. AdamW reads and writes its two moments
and the weight, and reads the gradient."""

_LONGEST_SEARCH = 16
"""Steps to measure in the search for one as large as that in which memory ran short."""


class MeasuredSteps:
    """Figures that hold for all steps that were measured, round by round."""

    def __init__(self) -> None:
        self.figures: StepFigures | None = None
        """Of all rounds; None before the first step."""
        self.saved_bytes: dict[str, int] = {}
        """The most that each block has saved for its backward pass."""
        self.occasion = TuningEvent.BEGINS
        """Why steps are measured."""
        self.has_grown = False
        """Whether a step of the present round has needed more memory than all before."""
        self.is_slow = False
        """Whether host memory was in use because of the budget in the last step, beyond what was
        there when the round began."""
        self._timed: StepFigures | None = None
        self._left = self._tried = 0
        self._least_bytes = 0.0
        self._spilled_bytes = 0

    def begin(
        self, occasion: TuningEvent, steps: int, *, peak_bytes: int = 0, spilled_bytes: int = 0
    ) -> None:
        """Begin a round.

        Parameters
        ----------
        occasion
            Why.
        steps
            Number of steps to measure.
        peak_bytes
            Live tensors of a step: one as large is searched for.
        spilled_bytes
            Host memory that is in use because of the budget.
        """
        self.occasion, self._left, self._tried = occasion, steps, 0
        self._least_bytes = _AS_LARGE * peak_bytes
        self._spilled_bytes = spilled_bytes
        self.has_grown = self.is_slow = False

    def move_into_backward(self) -> None:
        """From now on, steps need less memory, and updates share the time of the backward pass.

        The memory is measured anew. The times so far hold on.
        """
        self._timed, self.figures = self.figures, None

    def add(self, figures: StepFigures, saved_bytes: Mapping[str, int]) -> None:
        """Count a step, with what its blocks have saved."""
        self._tried += 1
        self._left -= figures.peak_bytes >= self._least_bytes
        self.is_slow = figures.spilled_bytes > self._spilled_bytes
        known = self.figures
        if known is not None:
            self.has_grown |= figures.need_bytes() > known.need_bytes() / _AS_LARGE
        self.figures = figures if known is None else _merged(known, figures)
        for name, size_bytes in saved_bytes.items():
            self.saved_bytes[name] = max(size_bytes, self.saved_bytes.get(name, 0))

    @property
    def is_complete(self) -> bool:
        """Whether the round has enough steps."""
        return self._left <= 0 or self._tried >= _LONGEST_SEARCH

    def _blocks(self) -> dict[str, BlockFigures]:
        """Figures by block, in the order of the forward pass."""
        assert self.figures is not None
        timed = {} if self._timed is None else self._timed.blocks
        return {
            name: replace(block, forward_s=time.forward_s, backward_s=time.backward_s)
            for name, block in self.figures.blocks.items()
            for time in (timed.get(name, block),)
        }

    def units(
        self,
        sizes: Mapping[str, Sequence[int]],
        gradient_bytes: Mapping[str, int],
        at_home_bytes: Mapping[str, int],
        memory_bytes_per_s: float,
    ) -> list[StreamUnit]:
        """Units for a plan, in forward order.

        Parameters
        ----------
        sizes
            By unit, bytes of state that is staged at a time.
        gradient_bytes
            Those that can be copied out.
        at_home_bytes
            Parameters in host memory that updates read and write.
        memory_bytes_per_s
            Bandwidth of the device's memory.
        """
        measured = self._blocks()
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
                state_bytes=sum(pieces),
                piece_bytes=tuple(pieces),
                update_s=_UPDATE_TRAFFIC * sum(pieces) / memory_bytes_per_s,
                forward_s=block.forward_s,
                backward_s=block.backward_s,
                saved_bytes=self.saved_bytes.get(name, 0),
                forward_peak_bytes=block.forward_peak_bytes,
                backward_peak_bytes=block.backward_peak_bytes,
                gradient_bytes=gradient_bytes.get(name, 0),
                trained_weight_bytes=at_home_bytes.get(name, 0),
            )
            for name, block in blocks.items()
            for pieces in (sizes.get(name, ()),)
        ]


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
        update_peak_bytes=max(one.update_peak_bytes, other.update_peak_bytes),
        batches=other.batches,
        peak_bytes=max(one.peak_bytes, other.peak_bytes),
        spilled_bytes=other.spilled_bytes,
    )
