"""Collects the steps of a training by the shapes of their batches, until there are enough alike."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, pairwise
from operator import not_
from typing import Any

import torch

from umem.capture.live.blocks import Block
from umem.capture.live.memory_tracker import MemoryTracker, StepMemory
from umem.capture.live.phase_tracker import StepListener
from umem.capture.live.timing import Clock
from umem.capture.live.trace_builder import JoinedPhases, join_phases
from umem.runtime.model_parts import named_tensors, plain_tensors, tensors_in
from umem.torch_compat import storage_key

__all__ = [
    "MAX_TRACKED_STEPS",
    "CallShapes",
    "RecordedSteps",
    "SignatureWatch",
    "StepCollector",
    "StepSignature",
    "call_shapes",
]

MAX_TRACKED_STEPS = 8
"""Steps whose memory is tracked, which bounds the cost of recording a run whose batches all differ
in shape."""

CallShapes = tuple[tuple[str, tuple[int, ...], str], ...]
"""Name, shape and type of each tensor that a call of the model is given."""


@dataclass(frozen=True)
class StepSignature:
    """Shapes of the model's inputs in one step."""

    calls: tuple[CallShapes, ...]
    """One entry for each call of the model with gradients, in order: a step that accumulates
    gradients over four batches has four."""

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
    """The calls of the step in progress, and the signature of the one before it."""

    def __init__(self) -> None:
        self.calls: list[CallShapes] = []
        self.last: StepSignature | None = None
        self._storages: list[weakref.ref[torch.UntypedStorage]] = []
        self._last_storages: list[weakref.ref[torch.UntypedStorage]] = []

    def add(self, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """The model is called, in the step in progress."""
        self.calls.append(call_shapes(args, kwargs))
        self._storages += [
            weakref.ref(part.untyped_storage())
            for tensor in tensors_in((args, kwargs))
            for part in plain_tensors(tensor)
        ]

    def end_step(self) -> None:
        """The optimizer has stepped."""
        self.last = StepSignature(tuple(self.calls))
        self.calls = []
        self._last_storages, self._storages = self._storages, []

    def kept_storages(self) -> frozenset[int]:
        """Addresses of the storages that were inputs of the last step and still exist."""
        storages = (reference() for reference in self._last_storages)
        return frozenset(storage_key(storage) for storage in storages if storage is not None)

    def forget_storages(self) -> None:
        """Let go of the references to inputs."""
        self._storages, self._last_storages = [], []


@dataclass(eq=False)
class RecordedSteps:
    """Steps of one signature: one whose memory was tracked, and those that were timed."""

    memory: StepMemory
    joined: JoinedPhases
    begins: tuple[bool, ...]
    """For each tracked phase whether a phase of the trace begins with it."""
    seconds: list[list[float]]
    """Of each phase of the trace, its durations in the timed steps."""
    pending: list[list[Any]] = field(default_factory=list)
    """Marks that the device may not have reached: the begins of the trace's phases, and the end of
    the step."""
    totals: list[float] = field(default_factory=list)
    """Seconds from begin to end of each timed step."""

    @property
    def timed_count(self) -> int:
        """Timed steps, though the device may not have finished them."""
        return len(self.pending) + len(self.totals)


class StepCollector(StepListener):
    """A step listener that tracks the memory of one step of each signature, and times others.

    `watch` has the calls of the step in progress; its step ends before this one's. `on_enough`
    is called when the last step has been timed, though the device may not have finished it.
    """

    def __init__(
        self,
        watch: SignatureWatch,
        clock: Clock,
        steps: int,
        root: Block,
        *,
        known: Collection[CallShapes],
        make_tracker: Callable[[], MemoryTracker],
        on_enough: Callable[[StepSignature], None],
    ) -> None:
        self.tracked_count = 0
        self._watch = watch
        self._clock = clock
        self._steps = steps
        self._gaps = (root.forward, root.backward)
        self._known = known
        self._make_tracker = make_tracker
        self._on_enough = on_enough
        self._found: dict[StepSignature, RecordedSteps] = {}
        # First calls of steps that then differed from all tracked ones.
        self._unlike: set[tuple[CallShapes, ...]] = set()
        # Of the step in progress:
        self._tracker: MemoryTracker | None = None
        self._begins: tuple[bool, ...] | None = None  # None to mark all phases
        self._labels: list[str] = []
        self._marks: list[Any] = []
        self._is_usable = False

    @property
    def timed_count(self) -> int:
        """Timed steps of the signature that has most of them."""
        return max((found.timed_count for found in self._found.values()), default=0)

    def complete(self, *, wait: bool) -> RecordedSteps | None:
        """The steps of a signature with enough of them; `wait` for the device to finish these."""
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
        while found.pending and (wait or clock.is_past(found.pending[0][-1])):
            marks = found.pending.pop(0)
            for durations, (begin, end) in zip(found.seconds, pairwise(marks), strict=True):
                durations.append(clock.seconds(begin, end))
            found.totals.append(clock.seconds(marks[0], marks[-1]))
            clock.release(marks)

    def step_begins(self) -> MemoryTracker | None:
        """Decide whether to track the step's memory or to time it."""
        self._clock.release(self._marks)  # of a step that was given up
        self._labels, self._marks = [], []
        self._tracker = self._begins = None
        first = tuple(self._watch.calls[:1])
        self._is_usable = self._clock.is_usable() and not any(map(self._known.__contains__, first))
        if not self._is_usable:
            return None
        alike = [found for signature, found in self._found.items() if signature.calls[:1] == first]
        may_track = self.tracked_count < MAX_TRACKED_STEPS
        if may_track and (not alike or first in self._unlike):
            self.tracked_count += 1
            self._tracker = self._make_tracker()
        elif not alike:
            self._is_usable = False
        elif len(alike) == 1:
            self._begins = alike[0].begins
        return self._tracker

    def phase_begins(self, label: str) -> None:
        """Mark the time, unless no phase of the trace begins here."""
        if not self._is_usable:
            return
        labels, begins = self._labels, self._begins
        if begins is None:
            is_marked = self._tracker is None
        else:
            is_marked = len(labels) < len(begins) and begins[len(labels)]
        if is_marked:
            self._marks.append(self._clock.mark())
        labels.append(label)

    def step_ends(self, is_broken: bool) -> None:
        """Keep a whole step that is like a tracked one."""
        signature = self._watch.last
        if is_broken or not self._is_usable or signature is None:
            return
        if self._tracker is not None:
            self._keep_memory(signature, self._tracker.end_step(self._labels))
            return
        self._marks.append(self._clock.mark())
        found = self._found.get(signature)
        if found is None or found.memory.labels != tuple(self._labels):
            self._unlike.add(signature.calls[:1])
            return
        marks, self._marks = self._marks, []
        if self._begins is None:
            is_wanted = [*found.begins, True]
            self._clock.release(compress(marks, map(not_, is_wanted)))
            marks = list(compress(marks, is_wanted))
        found.pending.append(marks)
        if found.timed_count >= self._steps:
            self._on_enough(signature)

    def _keep_memory(self, signature: StepSignature, memory: StepMemory) -> None:
        joined = join_phases(memory, self._gaps)
        seconds: list[list[float]] = [[] for _ in joined.labels]
        self._found[signature] = RecordedSteps(memory, joined, joined.begins, seconds)
        self._unlike.discard(signature.calls[:1])
        self._clock.reserve(self._steps * (len(seconds) + 1))
