"""Measures a training step block by block: how long passes take, and how much memory they need."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from umem.capture.live import NO_BLOCK, Block, StepListener
from umem.capture.live.phase_tracker import AFTER_BACKWARD, BACKWARD_LOSS, FORWARD_LOSS
from umem.capture.live.timing import Clock
from umem.runtime.program_waits import program_waits
from umem.streaming.stage.device_room import DeviceRoom
from umem.streaming.tune.measured_steps import BETWEEN, MeasuredBlock, MeasuredStep
from umem.trace import OPTIMIZER

__all__ = ["StepMeter"]


@dataclass(slots=True)
class _Phase:
    label: str
    mark: Any
    away_bytes: int
    """Activations that are on the host only when it begins."""
    stretch: str | None
    """The unit in which the pass is, where blocks do not tell."""
    placed_bytes: int
    """The least that plans have placed meanwhile: those of other trainings may change."""
    calls: int
    """Forward passes of all trainings when it begins."""
    end: Any = None
    """The mark at its end: the time of what is noted between two phases is of neither."""
    peak_bytes: int = 0
    home_bytes: int = 0
    """Activations that are on the host only when it is fullest."""
    waits: list[Any] = field(default_factory=list)
    """Marks at the begin and the end of each wait for umem's own copies: no time of the phase."""

    def name_in(self, blocks: Mapping[str, str]) -> str:
        """Its unit, of blocks by label."""
        return blocks[self.label] if self.stretch is None else self.stretch


class StepMeter(StepListener):
    """Measures steps.

    Parameters
    ----------
    clock
        Marks moments on the device.
    room
        The device's memory.
    root
        The model, under the name :data:`NO_BLOCK`.
    blocks
        Its blocks.
    placed_bytes
        Returns the live bytes that plans have placed: resident state, slots, and weights.
    away_bytes
        Returns the bytes of activations that are on the host only.
    stretch
        Returns the unit in which a pass is that is cut by what it saves; None for the block.
    recomputed
        Returns the blocks whose second forward pass is a plan's: no time of theirs.
    calls
        Returns the number of forward passes of all trainings so far.
    """

    def __init__(
        self,
        clock: Clock,
        room: DeviceRoom,
        root: Block,
        blocks: Sequence[Block],
        placed_bytes: Callable[[], int],
        away_bytes: Callable[[], int],
        stretch: Callable[[], str | None] = lambda: None,
        recomputed: Callable[[], Collection[str]] = frozenset,
        calls: Callable[[], int] = int,
    ) -> None:
        self._clock = clock
        self._room = room
        self._placed = placed_bytes
        self._away = away_bytes
        self._stretch = stretch
        self._recomputed = recomputed
        self._calls = calls
        every = (root, *blocks)
        self._forward = {block.forward: block.name for block in every}
        self._backward = {block.backward: block.name for block in every}
        self._second = {block.recompute: block.name for block in every}
        self._backward |= self._second
        self._phases: list[_Phase] = []
        self._is_usable = False
        self._spills = 0
        """Of the room, when the step began."""
        self._found: MeasuredStep | None = None

    def take(self) -> MeasuredStep | None:
        """The figures of the last step; None if it could not be measured. Waits for the device."""
        found, self._found = self._found, None
        return found

    @property
    def is_in_step(self) -> bool:
        """Whether a step is measured now."""
        return bool(self._phases)

    def listen(self) -> None:
        """Leave waits for umem's own copies out of the times, until :meth:`stop`."""
        program_waits.listeners.add(self)

    def stop(self) -> None:
        """Listen no more."""
        program_waits.listeners.discard(self)

    def wait_begins(self) -> None:
        """The program's stream is about to wait."""
        self._mark_wait()

    def wait_ends(self) -> None:
        """What comes now comes after the wait."""
        self._mark_wait()

    def _mark_wait(self) -> None:
        if self._phases and self._is_usable and self._clock.is_usable():
            self._phases[-1].waits.append(self._clock.mark())

    def _seconds(self, phase: _Phase) -> float:
        """Of a phase, without waits. Those of another thread may be a part of one only."""
        seconds, marks = self._clock.seconds, phase.waits
        waited_s = sum(seconds(*pair) for pair in zip(marks[::2], marks[1::2], strict=False))
        return max(0.0, seconds(phase.mark, phase.end) - waited_s)

    # ------------------------------------------------------------------ the listener

    def step_begins(self) -> None:
        """A step begins."""
        self._room.find_homes()
        self._room.take_peak_bytes()
        self._phases.clear()
        self._is_usable = True
        self._spills = self._room.spills()
        self._found = None

    def phase_begins(self, label: str) -> None:
        """A phase begins, and the one before it ends."""
        self._is_usable &= self._clock.is_usable()
        if self._phases and self._is_usable:
            self._phases[-1].end = self._clock.mark()
        peak_bytes, away_bytes = self._room.take_peak_bytes(), self._away()
        placed_bytes = self._placed()
        if self._phases:
            last = self._phases[-1]
            last.peak_bytes = peak_bytes
            last.placed_bytes = min(last.placed_bytes, placed_bytes)
            # Forward, activations leave at the end of a block; backward, they come at the begin.
            is_backward = last.label in self._backward or last.label == BACKWARD_LOSS
            last.home_bytes = away_bytes if is_backward else last.away_bytes
        if self._is_usable:
            mark, stretch = self._clock.mark(), self._stretch()
            calls = self._calls()
            self._phases.append(_Phase(label, mark, away_bytes, stretch, placed_bytes, calls))

    def block_begins(self, block: Block, is_recomputed: bool) -> None:
        """Blocks are phases."""

    def block_ends(self, block: Block) -> None:
        """Blocks are phases."""

    def step_ends(self, is_broken: bool) -> None:
        """The optimizer's step is over."""
        labels = [phase.label for phase in self._phases]
        if self._is_usable and not is_broken and labels[-1:] == [OPTIMIZER]:
            self._found = self._figures() if BACKWARD_LOSS in labels else None
        marks = ((it.mark, it.end, *it.waits) for it in self._phases)
        self._clock.release([it for some in marks for it in some if it is not None])
        self._phases.clear()

    # ------------------------------------------------------------------ sums

    def _between(self) -> tuple[set[int], set[int]]:
        """Phases from the model's end to its backward pass, where others are called meanwhile.

        By number: those ahead of the backward pass that comes to the model, and those of it.
        """
        forward, backward = set[int](), set[int]()
        ended, begun = None, -1
        for number, phase in enumerate(self._phases):
            if phase.label in self._forward:
                ended = None
            elif phase.label == FORWARD_LOSS:
                ended = number
            elif phase.label == BACKWARD_LOSS:
                begun = number
            elif phase.label in self._backward and ended is not None:
                if begun > ended and phase.calls > self._phases[ended].calls:
                    forward.update(range(ended, begun))
                    backward.update(range(begun, number))
                ended = None
        return forward, backward

    def _figures(self) -> MeasuredStep:
        phases, found = self._phases, MeasuredStep()
        blocks = found.blocks
        others_forward, others_backward = self._between()
        for number, phase in enumerate(phases):
            if phase.label in self._forward:
                blocks.setdefault(phase.name_in(self._forward), MeasuredBlock())
            found.batches += phase.label == BACKWARD_LOSS and number not in others_forward
        last = next(reversed(blocks))
        if others_forward:
            blocks[BETWEEN] = MeasuredBlock()
        recomputed = self._recomputed()
        forward = {**self._forward, FORWARD_LOSS: last}
        backward = {**self._backward, BACKWARD_LOSS: last}
        forward_s: defaultdict[str, float] = defaultdict(float)
        backward_s: defaultdict[str, float] = defaultdict(float)
        before = NO_BLOCK  # memory between two blocks counts for the one that ran before
        for number, phase in enumerate(phases[:-1]):
            seconds = self._seconds(phase)
            found.peak_bytes = max(found.peak_bytes, phase.peak_bytes)
            need_bytes = phase.peak_bytes + phase.home_bytes - phase.placed_bytes
            if number in others_forward:
                block = blocks[BETWEEN]
                forward_s[BETWEEN] += seconds
                block.forward_peak_bytes = max(block.forward_peak_bytes, need_bytes)
            elif number in others_backward:
                block = blocks[BETWEEN]
                backward_s[BETWEEN] += seconds
                block.backward_peak_bytes = max(block.backward_peak_bytes, need_bytes)
            elif phase.label == AFTER_BACKWARD:
                before = NO_BLOCK
                found.other_s += seconds
                found.step_peak_bytes = max(found.step_peak_bytes, need_bytes)
            elif phase.label in forward:
                name = phase.name_in(forward)
                before = name or before
                block = blocks[before]
                forward_s[name] += seconds
                block.forward_peak_bytes = max(block.forward_peak_bytes, need_bytes)
            elif phase.label in backward:
                name = phase.name_in(backward)
                before = name or before
                block = blocks.setdefault(before, MeasuredBlock())
                if self._second.get(phase.label) not in recomputed:
                    backward_s[name] += seconds
                block.backward_peak_bytes = max(block.backward_peak_bytes, need_bytes)
        self._room.find_homes()  # the step may have made state
        step_bytes = self._room.take_peak_bytes()
        found.peak_bytes = max(found.peak_bytes, step_bytes)
        found.update_peak_bytes = step_bytes - self._placed()
        found.step_peak_bytes = max(found.step_peak_bytes, found.update_peak_bytes)
        for name, block in blocks.items():
            block.forward_s = forward_s[name] / found.batches
            block.backward_s = backward_s[name] / found.batches
        found.spilled_bytes = self._room.spilled_bytes()
        found.spills = self._room.spills() - self._spills
        return found
