"""Collects the steps of a training by signature, until there are enough of one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from umem.recorder._blocks import Block
from umem.recorder._clock import Clock
from umem.recorder._memory import StepLook, StepMemory
from umem.recorder._phases import JoinedPhases, join_phases
from umem.recorder._signature import CallShapes, SignatureWatch, StepSignature

__all__ = ["MOST_LOOKS", "RecordedSteps", "StepCollector"]

MOST_LOOKS = 8
"""Steps whose memory is looked at, for a run whose batches differ in shape; the bound on what
recording costs a run that never repeats itself."""


@dataclass(eq=False)
class RecordedSteps:
    """Steps of one signature: one that was looked at, and those that were timed."""

    look: StepLook
    joined: JoinedPhases
    labels: list[str]
    """Of the phases that are followed."""
    starts: list[bool]
    """Of each of them, whether a phase of the trace begins with it."""
    pending: list[list[Any]] = field(default_factory=list)
    """Marks that the device may not have come to, where phases of the trace begin, and of the
    last one's end."""
    seconds: list[list[float]] = field(default_factory=list)


class StepCollector:
    """A listener that looks at the memory of one step of each signature, and times others.

    Parameters
    ----------
    watch
        Tells the signature of the step in flight; its step ends before this one's.
    clock
        Tells time where phases begin.
    steps
        How many of one signature are timed.
    gaps
        Labels of what lies between blocks.
    known
        Steps whose first call has these shapes are let pass.
    make_memory
        What is to follow the memory of a step.
    on_enough
        Called when the last step has been timed, though the device may not have done it.
    """

    def __init__(
        self,
        watch: SignatureWatch,
        clock: Clock,
        steps: int,
        gaps: Collection[str],
        *,
        known: Collection[CallShapes],
        make_memory: Callable[[], StepMemory],
        on_enough: Callable[[StepSignature], None],
    ) -> None:
        self.looks = 0
        self._watch = watch
        self._clock = clock
        self._steps = steps
        self._gaps = gaps
        self._known = known
        self._make_memory = make_memory
        self._on_enough = on_enough
        self._found: dict[StepSignature, RecordedSteps] = {}
        # First calls of steps whose rest was unlike any that was looked at.
        self._unlike: set[tuple[CallShapes, ...]] = set()
        # Of the step in flight.
        self._memory: StepMemory | None = None
        self._labels: list[str] = []
        self._marks: list[Any] = []
        self._is_usable = False
        self._starts: list[bool] = []

    @property
    def timed_count(self) -> int:
        """Steps of one signature that were timed."""
        return max(map(_timed, self._found.values()), default=0)

    def complete(self, *, wait: bool) -> RecordedSteps | None:
        """Steps of which there are enough.

        Parameters
        ----------
        wait
            For the device to have done them.
        """
        for found in self._found.values():
            if _timed(found) >= self._steps:
                self._read_marks(found, wait=wait)
                if len(found.seconds) >= self._steps:
                    return found
        return None

    def _read_marks(self, found: RecordedSteps, *, wait: bool) -> None:
        clock = self._clock
        if not (wait or clock.is_usable()):
            return
        while found.pending and (wait or clock.is_past(found.pending[0][-1])):
            marks = found.pending.pop(0)
            found.seconds.append(
                [clock.seconds(first, second) for first, second in pairwise(marks)]
            )
            self._release(marks)

    def _release(self, marks: Iterable[Any]) -> None:
        self._clock.release(mark for mark in marks if mark is not None)

    # ------------------------------------------------------------------ what the follower tells

    def step_begins(self) -> StepMemory | None:
        """Look at its memory, or take its time only."""
        self._release(self._marks)  # of a step that was given up
        self._labels, self._marks, self._starts = [], [], []
        self._memory = None
        first = tuple(self._watch.calls[:1])
        self._is_usable = self._clock.is_usable() and not any(map(self._known.__contains__, first))
        if not self._is_usable:
            return None
        like = [found for signature, found in self._found.items() if signature.calls[:1] == first]
        if not like and self.looks == MOST_LOOKS:
            self._is_usable = False  # nobody has looked at one like it, or will
        elif (not like or first in self._unlike) and self.looks < MOST_LOOKS:
            self.looks += 1
            self._memory = self._make_memory()
        elif len(like) == 1:
            self._starts = like[0].starts
        return self._memory

    def phase_begins(self, label: str) -> None:
        """Mark the time, unless the trace has no phase that begins here."""
        if not self._is_usable:
            return
        number = len(self._labels)
        self._labels.append(label)
        if self._memory is None:
            is_start = number >= len(self._starts) or self._starts[number]
            self._marks.append(self._clock.mark() if is_start else None)

    def block_begins(self, block: Block, is_recomputed: bool) -> None:
        """Nothing to note."""

    def block_ends(self, block: Block) -> None:
        """Nothing to note."""

    def step_ends(self, is_broken: bool) -> None:
        """Keep a step that is whole and like the one that was looked at."""
        signature = self._watch.signature
        if is_broken or not self._is_usable or signature is None:
            return
        if self._memory is not None:
            self._keep_look(signature, self._memory.end_step(self._labels))
            return
        self._marks.append(self._clock.mark())
        found = self._found.get(signature)
        if found is None or found.labels != self._labels:
            self._unlike.add(signature.calls[:1])
            return
        marks, self._marks = self._marks, []
        starts = [*found.starts, True]
        found.pending.append([m for m, is_start in zip(marks, starts, strict=True) if is_start])
        self._release(m for m, is_start in zip(marks, starts, strict=True) if not is_start)
        if _timed(found) >= self._steps:
            self._on_enough(signature)

    def _keep_look(self, signature: StepSignature, look: StepLook) -> None:
        joined = join_phases(look, self._gaps)
        starts = joined.starts.tolist()
        self._found[signature] = RecordedSteps(look, joined, list(look.labels), starts)
        self._unlike.discard(signature.calls[:1])
        self._clock.reserve((sum(starts) + 1) * self._steps)


def _timed(found: RecordedSteps) -> int:
    return len(found.pending) + len(found.seconds)
