"""What makes one step like another: the shapes that its batches have."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, cycle, islice, pairwise
from operator import not_
from typing import Any

import torch

from umem.capture.live.blocks import Block
from umem.capture.live.clock import Clock, Window, find_windows
from umem.capture.live.memory_tracker import StepLook, StepMemory
from umem.capture.live.phase_tracker import JoinedPhases, join_phases
from umem.runtime.model_parts import named_tensors, plain_tensors

__all__ = [
    "MOST_LOOKS",
    "CallShapes",
    "RecordedSteps",
    "SignatureWatch",
    "StepCollector",
    "StepSignature",
    "call_shapes",
]

CallShapes = tuple[tuple[str, tuple[int, ...], str], ...]
"""Name, shape and type of each tensor that a call of the model is given."""


@dataclass(frozen=True)
class StepSignature:
    """Shapes of what the model is called with in one step.

    Parameters
    ----------
    calls
        One entry for each call that gradients are wanted of, in order: a step that accumulates
        gradients over four batches has four.
    """

    calls: tuple[CallShapes, ...]

    def __str__(self) -> str:
        return "; ".join(
            ", ".join(f"{name} {'x'.join(map(str, shape))} {kind}" for name, shape, kind in call)
            for call in self.calls
        )


def call_shapes(args: Sequence[object], kwargs: Mapping[str, object]) -> CallShapes:
    """Shapes of a call's tensors, by position or keyword."""
    return tuple(
        (name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for given in (args, kwargs)
        for name, tensor in named_tensors(given)
    )


class SignatureWatch:
    """Signatures of the step in flight, and of the one before it."""

    def __init__(self) -> None:
        self.calls: list[CallShapes] = []
        self._last: StepSignature | None = None
        self._storages: list[weakref.ref[torch.UntypedStorage]] = []
        self._last_storages: list[weakref.ref[torch.UntypedStorage]] = []

    @property
    def signature(self) -> StepSignature | None:
        """Of the step in flight as far as it has got; between two steps, of the last one."""
        return StepSignature(tuple(self.calls)) if self.calls else self._last

    def agrees(self, expected: StepSignature) -> bool:
        """Whether the step in flight can still turn out to be one of that signature."""
        if not self.calls:
            return self._last == expected
        return expected.calls[: len(self.calls)] == tuple(self.calls)

    def add(
        self, args: Sequence[object], kwargs: Mapping[str, object], *, note_storages: bool
    ) -> None:
        """The model is called, in the step in flight."""
        self.calls.append(call_shapes(args, kwargs))
        if note_storages:
            self._storages += [
                weakref.ref(part.untyped_storage())
                for _, tensor in named_tensors((args, kwargs))
                for part in plain_tensors(tensor)
            ]

    def end_step(self) -> StepSignature:
        """The optimizer has stepped."""
        self._last = StepSignature(tuple(self.calls))
        self.calls = []
        self._last_storages, self._storages = self._storages, []
        return self._last

    def kept_storages(self) -> frozenset[int]:
        """Addresses of the storages that were inputs of the last step and are there now."""
        storages = (reference() for reference in self._last_storages)
        return frozenset(storage._cdata for storage in storages if storage is not None)

    def forget_storages(self) -> None:
        """Let go of the references to inputs."""
        self._storages, self._last_storages = [], []


# Collects the steps of a training by signature, until there are enough of one.

MOST_LOOKS = 8
"""Steps whose memory is looked at, for a run whose batches differ in shape; the bound on what
recording costs a run that never repeats itself."""


@dataclass(eq=False)
class RecordedSteps:
    """Steps of one signature: one that was looked at, and those that were timed."""

    look: StepLook
    joined: JoinedPhases
    whole: Window
    """All of a step."""
    windows: tuple[Window, ...]
    """What steps time by turns."""
    seconds: list[list[float]]
    """Of each phase of the trace, how long it took in the steps that have timed it."""
    pending: list[tuple[Window, list[Any]]] = field(default_factory=list)
    """Marks that the device may not have come to, where phases of the trace begin, and of the
    step's end."""
    totals: list[float] = field(default_factory=list)
    """Seconds from begin to end of each timed step."""

    @property
    def timed_count(self) -> int:
        """Steps that were timed, though the device may not have done them."""
        return len(self.pending) + len(self.totals)

    @property
    def next_window(self) -> Window:
        """What the next step is to time."""
        return self.windows[self.timed_count % len(self.windows)]


class StepCollector:
    """A listener that looks at the memory of one step of each signature, and times others.

    Timed steps take turns at the windows of the step. Where one of them is told of other phases
    than its window has, the next ones are followed as a whole.

    Parameters
    ----------
    watch
        Tells the signature of the step in flight; its step ends before this one's.
    clock
        Tells time where phases begin.
    steps
        How many of one signature are timed.
    root, blocks
        The model, and the modules in it whose passes are phases.
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
        root: Block,
        blocks: Iterable[Block],
        *,
        known: Collection[CallShapes],
        make_memory: Callable[[], StepMemory],
        on_enough: Callable[[StepSignature], None],
    ) -> None:
        self.looks = 0
        self._watch = watch
        self._clock = clock
        self._steps = steps
        self._gaps = (root.forward, root.backward)
        self._block_names = {
            label: block.name
            for block in blocks
            for label in (block.forward, block.backward, block.recompute)
        }
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
        # None where nothing is known of the step, and all is marked.
        self._window: Window | None = None

    @property
    def timed_count(self) -> int:
        """Steps of one signature that were timed."""
        return max((found.timed_count for found in self._found.values()), default=0)

    def complete(self, *, wait: bool) -> RecordedSteps | None:
        """Steps of which there are enough.

        Parameters
        ----------
        wait
            For the device to have done them.
        """
        for found in self._found.values():
            if found.timed_count >= self._steps:
                self._read_marks(found, wait=wait)
                if len(found.totals) >= self._steps:
                    return found
        return None

    def _read_marks(self, found: RecordedSteps, *, wait: bool) -> None:
        clock = self._clock
        if not (wait or clock.is_usable()):
            return
        while found.pending and (wait or clock.is_past(found.pending[0][1][-1])):
            window, marks = found.pending.pop(0)
            numbers = [*window.marked, len(found.seconds)]
            for (first, begin), (following, end) in pairwise(zip(numbers, marks, strict=True)):
                if following == first + 1:  # otherwise others lie between them
                    found.seconds[first].append(clock.seconds(begin, end))
            found.totals.append(clock.seconds(marks[0], marks[-1]))
            clock.release(marks)

    # ------------------------------------------------------------------ what the follower tells

    def step_begins(self) -> StepMemory | Window | None:
        """Look at its memory, or take its time only."""
        self._clock.release(self._marks)  # of a step that was given up
        self._labels, self._marks = [], []
        self._memory = self._window = None
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
            self._window = like[0].next_window
        return self._memory or self._window

    def phase_begins(self, label: str) -> None:
        """Mark the time, unless the trace has no phase that begins here."""
        if not self._is_usable:
            return
        labels, window = self._labels, self._window
        if window is not None:
            begins, number = window.begins, len(labels)
            if number < len(begins) and begins[number] is not None:
                self._marks.append(self._clock.mark())
        elif self._memory is None:
            self._marks.append(self._clock.mark())
        labels.append(label)

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
        if found is None:
            self._unlike.add(signature.calls[:1])
            return
        window = self._window or found.whole
        if window.labels != tuple(self._labels):
            if window.skipped:
                # The step may be like the others all the same: followed as a whole, it shows.
                found.windows = (found.whole,)
            else:
                self._unlike.add(signature.calls[:1])
            return
        marks, self._marks = self._marks, []
        if self._window is None:
            is_wanted = [*(number is not None for number in window.begins), True]
            self._clock.release(compress(marks, map(not_, is_wanted)))
            marks = list(compress(marks, is_wanted))
        found.pending.append((window, marks))
        if found.timed_count >= self._steps:
            self._on_enough(signature)

    def _keep_look(self, signature: StepSignature, look: StepLook) -> None:
        joined = join_phases(look, self._gaps)
        begins = joined.begins
        windows = find_windows(look.labels, begins, self._block_names, self._gaps, self._steps)
        self._found[signature] = RecordedSteps(
            look,
            joined,
            Window(frozenset(), look.labels, begins),
            windows,
            seconds=[[] for _ in joined.labels],
        )
        self._unlike.discard(signature.calls[:1])
        timed = islice(cycle(windows), self._steps)
        self._clock.reserve(sum(len(window.marked) + 1 for window in timed))
