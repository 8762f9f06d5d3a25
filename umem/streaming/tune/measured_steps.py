"""The figures of a measured step, and what those of several steps have in common."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from umem.capture.live import NO_BLOCK
from umem.streaming.activations.held_by_program import HeldBytes
from umem.streaming.plan.step_timing import StreamUnit
from umem.streaming.step.unit_names import is_outside

__all__ = ["AS_LARGE", "BETWEEN", "MeasuredBlock", "MeasuredStep", "MeasuredSteps"]

BETWEEN = ".between"
"""Stands for the passes of other trainings between the forward and the backward pass of a model. No
module has such a name."""

AS_LARGE = 0.97
"""A step is as large as another one from this part of its memory on."""

_UPDATE_TRAFFIC = 3.5
"""Bytes that an update reads and writes per byte of state. AdamW reads and writes its two moments
and the weight, and reads the gradient."""


@dataclass
class MeasuredBlock:
    """A block in one step. Seconds are of one batch; bytes leave out what the plan has placed."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    """With the second forward pass of a checkpoint."""
    forward_peak_bytes: int = 0
    """Most bytes of live tensors during the pass, with all activations on the device."""
    backward_peak_bytes: int = 0


@dataclass
class MeasuredStep:
    """A step."""

    blocks: dict[str, MeasuredBlock] = field(default_factory=dict)
    """By name, in the order of the forward pass. :data:`NO_BLOCK` is first: the model between its
    blocks. What comes after the model's end, such as the loss, counts for the last block, or for
    :data:`BETWEEN`, which is behind that."""
    other_s: float = 0.0
    """From the last backward pass to the optimizer's step."""
    step_peak_bytes: int = 0
    """Most bytes of live tensors outside of the passes: weights, gradients, and what clipping and
    updates make."""
    update_peak_bytes: int = 0
    """The same in the optimizer's step alone, when clipping is over."""
    batches: int = 0
    """Backward passes."""
    peak_bytes: int = 0
    """Most bytes of live tensors, with what the plan has placed and without what it copies out."""
    spilled_bytes: int = 0
    """Host memory that is held because of the budget."""
    spills: int = 0
    """Tensors that the budget has put there meanwhile."""
    is_disturbed: bool = False
    """Whether times are longer than those of the same work with all that it uses on the device."""

    @property
    def computed_s(self) -> float:
        """From the first forward pass to the optimizer's step."""
        passes_s = sum(it.forward_s + it.backward_s for it in self.blocks.values())
        return self.batches * passes_s + self.other_s

    @property
    def need_bytes(self) -> int:
        """Most bytes of live tensors, without what the plan has placed and copies out."""
        passes = (max(it.forward_peak_bytes, it.backward_peak_bytes) for it in self.blocks.values())
        return max(self.step_peak_bytes, *passes)

    def with_memory_of(self, other: MeasuredStep) -> MeasuredStep:
        """The times of this step, with the memory of another one."""
        blocks = {
            name: replace(
                other.blocks.get(name, it), forward_s=it.forward_s, backward_s=it.backward_s
            )
            for name, it in self.blocks.items()
        }
        return replace(
            other,
            blocks=blocks,
            other_s=self.other_s,
            batches=self.batches,
            spilled_bytes=self.spilled_bytes,
            spills=self.spills,
        )

    def exceeds(self, other: MeasuredStep) -> bool:
        """Whether the step has needed more memory than another one."""
        return self.need_bytes > other.need_bytes / AS_LARGE


class MeasuredSteps:
    """What steps have in common: the figures for a plan."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Have later steps nothing in common with those so far."""
        self.figures: MeasuredStep | None = None
        """None before the first step."""
        self._timed: MeasuredStep | None = None
        """Steps before updates moved into the backward pass, whose times hold on where they are the
        shorter ones; None before that."""
        self._saved_bytes: dict[str, int] = {}
        """The most that each block has saved for its backward pass."""
        self._held_bytes: HeldBytes = {}
        """Of these, what the program holds itself, in the latest step."""
        self._later_bytes = 0
        """The most memory that later calls of ``step()`` in a step have needed."""

    def copy(self) -> MeasuredSteps:
        """The same figures, which later steps do not change."""
        found = MeasuredSteps()
        found.take(self)
        return found

    def take(self, others: MeasuredSteps) -> None:
        """Have the figures of other steps."""
        self.figures, self._timed = copy.deepcopy((others.figures, others._timed))
        self._saved_bytes, self._later_bytes = dict(others._saved_bytes), others._later_bytes
        self._held_bytes = others._held_bytes

    def move_into_backward(self) -> None:
        """From now on, steps need less memory, and updates share the time of the backward pass.

        The memory is measured anew. The times so far hold on.
        """
        self._timed, self.figures = self.figures, None

    def distrust_times(self) -> None:
        """Have the times of the next step count, and not those so far."""
        if self.figures is not None:
            self.figures.is_disturbed = True

    def passes_s(self, again: Collection[str], left_out: Collection[str]) -> float:
        """Passes under a plan by which blocks run forward `again`, or no longer (`left_out`)."""
        figures = self.figures
        assert figures is not None
        blocks = figures.blocks
        more_s = sum(blocks[name].forward_s for name in again)
        less_s = sum(blocks[name].forward_s for name in left_out)
        return figures.computed_s + figures.batches * (more_s - less_s)

    def limit(self, step_s: float, again: Collection[str], left_out: Collection[str]) -> None:
        """Shorten all passes to those of a step that took `step_s` under such a plan.

        No step is shorter than its passes.
        """
        figures = self.figures
        assert figures is not None
        share = step_s / max(step_s, self.passes_s(again, left_out))
        if share < 1.0:
            figures.other_s *= share
            for block in figures.blocks.values():
                block.forward_s *= share
                block.backward_s *= share

    def add_later_call(self, needed_bytes: int) -> None:
        """Count the memory that a later call of ``step()`` in a step has needed."""
        self._later_bytes = max(self._later_bytes, needed_bytes)

    def add(
        self,
        figures: MeasuredStep,
        saved_bytes: Mapping[str, int],
        held_bytes: HeldBytes = MappingProxyType({}),
    ) -> None:
        """Count a step, with what its blocks have saved, and the program holds of that."""
        self._held_bytes = held_bytes
        figures.step_peak_bytes = max(figures.step_peak_bytes, self._later_bytes)
        figures.update_peak_bytes = max(figures.update_peak_bytes, self._later_bytes)
        self.figures = figures if self.figures is None else _merged(self.figures, figures)
        for name, size_bytes in saved_bytes.items():
            self._saved_bytes[name] = max(size_bytes, self._saved_bytes.get(name, 0))

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
        assert self.figures is not None
        timed = {} if self._timed is None else self._timed.blocks
        measured = {
            name: replace(
                block,
                forward_s=min(block.forward_s, time.forward_s),
                backward_s=min(block.backward_s, time.backward_s),
            )
            for name, block in self.figures.blocks.items()
            for time in (timed.get(name, block),)
        }
        rest = measured[NO_BLOCK]
        # All that is outside of blocks is due when the forward pass begins.
        due = replace(rest, forward_s=0.0, backward_s=0.0)
        parts = {name: due for name in sizes if is_outside(name) and name != NO_BLOCK}
        blocks = {**parts, **measured}
        # Nobody sees the blocks of a compiled model.
        unseen = {name: sum(pieces) for name, pieces in sizes.items() if name not in blocks}
        unseen_bytes = sum(unseen.values())
        if unseen_bytes:
            blocks[NO_BLOCK] = due
            for name, size_bytes in unseen.items():
                share = size_bytes / unseen_bytes
                blocks[name] = replace(
                    rest, forward_s=share * rest.forward_s, backward_s=share * rest.backward_s
                )
        if BETWEEN in blocks:
            blocks[BETWEEN] = blocks.pop(BETWEEN)
        order = {name: number for number, name in enumerate(blocks)}
        return [
            StreamUnit(
                name=name,
                state_bytes=sum(pieces),
                piece_bytes=tuple(pieces),
                update_s=_UPDATE_TRAFFIC * sum(pieces) / memory_bytes_per_s,
                forward_s=block.forward_s,
                backward_s=block.backward_s,
                saved_bytes=self._saved_bytes.get(name, 0),
                held=tuple(
                    (size_bytes, order.get(last or "", len(order)) - order[name])
                    for size_bytes, last in self._held_bytes.get(name, ())
                ),
                forward_peak_bytes=block.forward_peak_bytes,
                backward_peak_bytes=block.backward_peak_bytes,
                gradient_bytes=gradient_bytes.get(name, 0),
                trained_weight_bytes=at_home_bytes.get(name, 0),
            )
            for name, block in blocks.items()
            for pieces in (sizes.get(name, ()),)
        ]


def _merged(one: MeasuredStep, other: MeasuredStep) -> MeasuredStep:
    """The larger bytes of two steps. Of the times the shorter, which nothing has disturbed.

    Where a step is larger, its times count, and where only one is disturbed, those of the other.
    """
    is_larger = other.exceeds(one)
    pick: Callable[[float, float], float] = max if is_larger else min
    if one.is_disturbed and not other.is_disturbed:
        pick = _second
    elif other.is_disturbed and not (one.is_disturbed or is_larger):
        pick = _first
    blocks = {}
    for name in {**one.blocks, **other.blocks}:
        first = one.blocks.get(name) or other.blocks[name]
        second = other.blocks.get(name) or first
        blocks[name] = MeasuredBlock(
            forward_s=pick(first.forward_s, second.forward_s),
            backward_s=pick(first.backward_s, second.backward_s),
            forward_peak_bytes=max(first.forward_peak_bytes, second.forward_peak_bytes),
            backward_peak_bytes=max(first.backward_peak_bytes, second.backward_peak_bytes),
        )
    return MeasuredStep(
        blocks=blocks,
        other_s=pick(one.other_s, other.other_s),
        step_peak_bytes=max(one.step_peak_bytes, other.step_peak_bytes),
        update_peak_bytes=max(one.update_peak_bytes, other.update_peak_bytes),
        batches=other.batches,
        peak_bytes=max(one.peak_bytes, other.peak_bytes),
        spilled_bytes=other.spilled_bytes,
        is_disturbed=other.is_disturbed and (one.is_disturbed or is_larger),
    )


def _first(one: float, _: float) -> float:
    return one


def _second(_: float, other: float) -> float:
    return other
