"""Runs a program: issues hints and copies where the phases of a live training step begin."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from umem.capture.live import Block, SavedTensors
from umem.core.classes import TensorClass
from umem.executor.admission import Eviction
from umem.executor.machine import Machine
from umem.executor.optimizer.partial_step import part_label
from umem.executor.program import MODEL, GroupKey, Hints, PhaseWork, Program
from umem.executor.tensor_addresses import storage_address, whole_blocks
from umem.offload import ActivationStore
from umem.runtime.hints import Outcome
from umem.telemetry import PhaseRanges

__all__ = ["Runner", "RunnerCounts"]

_PATIENCE_S = 2.0
"""What a phase waits for pages that it needs. After it they come by fault: late, and right."""


@dataclass(slots=True)
class RunnerCounts:
    """What a runner has come across."""

    steps: int = 0
    """Steps that went through their whole program."""
    diverged_steps: int = 0
    """Steps that did not: an exception, or phases unlike the recorded ones."""
    wait_s: float = 0.0
    """Time that the training thread waited for pages."""
    wait_timeouts: int = 0
    """Waits that took longer than the runner's patience."""


@dataclass(slots=True)
class _Call:
    """A call of the model or a block that is under way."""

    key: GroupKey | None
    """None where the program has nothing to do with it."""
    is_copied: bool = False
    """The store sees what it saves."""
    is_paged: bool = False
    """Addresses of what it saves are noted."""
    has_hooks: bool = False
    """It has put the hooks for that in place."""


class Runner:
    """A :class:`umem.capture.live.StepListener` that carries out a program.

    A runner changes no value. A step that diverges from its program runs on without it: pages that
    are missing on the device come by page fault.

    Parameters
    ----------
    machine
        Whose engine takes the hints.
    store
        Takes activations away and brings them back.
    root
        The model.
    join
        Lets the stream wait for parts of the optimizer's step that run beside the backward pass, by
        name.
    """

    def __init__(
        self,
        machine: Machine,
        store: ActivationStore,
        root: Block,
        join: Callable[[Iterable[str]], None],
    ) -> None:
        self._root = root
        self._join = join
        self.counts = RunnerCounts()
        self.watch: Callable[[], None] | None = None
        """Called before and after what is done where a phase begins."""
        self._machine = machine
        self._ranges = PhaseRanges()
        self._store = store
        self._program: Program | None = None
        self._is_on_track = False
        self._position = 0
        self._phase = -1
        self._calls: Counter[str] = Counter()
        self._saved = SavedTensors(self._on_save, _ignore)
        self._paged: list[tuple[dict[int, int], list[int]]] = []
        self._open: list[_Call] = []
        self._away: frozenset[int] = frozenset()

    @property
    def program(self) -> Program | None:
        """What is run; None for nothing."""
        return self._program

    def load(self, program: Program | None) -> None:
        """Run another program from the next step on."""
        while self._open:  # an interrupt or a failure has left them
            self._leave(self._open.pop())
        before, self._program = self._program, program
        self._is_on_track = False
        if program is None or before is None:
            self._away = frozenset()
        else:
            self._away = program.away_after(before, self._away)

    def away_bytes(self) -> dict[TensorClass, int]:
        """Bytes by class that were asked to live off the device now."""
        return {} if self._program is None else self._program.away_bytes(self._away)

    # ------------------------------------------------------------------ steps and phases

    def step_begins(self) -> None:
        """Start the program from its first phase."""
        self._is_on_track = self._program is not None
        self._position, self._phase = 0, -1
        self._calls.clear()
        if self._program is not None:
            self._away = self._away.difference(self._program.present)  # dead since
            self._program.present.clear()

    def phase_begins(self, label: str) -> None:
        """Do what the program says of this phase, if the step is still like the recorded one."""
        self._ranges.begin(label)
        program = self._program
        if program is None or not self._is_on_track:
            return
        if (
            self._position >= len(program.followed)
            or program.followed[self._position].label != label
        ):
            self._is_on_track = False
            return
        phase = program.followed[self._position].phase
        self._position += 1
        if phase > self._phase:
            # Of phases that were joined, the first one begins them all. A part of the optimizer's
            # step may have begun since.
            self._phase = phase
            self._begin_watched(program, program.work[phase])

    def needs_slices(self) -> bool:
        """Whether the optimizer's step, which has just begun, has to be done in parts."""
        program = self._program
        return (
            program is not None
            and self._is_on_track
            and any(work.does_anything for work in program.work[self._phase + 1 :])
        )

    def part_begins(self, name: str) -> None:
        """Do what the program says of a part of the optimizer's step.

        The first part of a step that follows the backward pass has begun with it.
        """
        program = self._program
        if program is None or not self._is_on_track:
            return
        names = program.choice.trace.phase_names
        label = part_label(name)
        if names[self._phase] == label:
            return
        if self._phase + 1 >= len(names) or names[self._phase + 1] != label:
            self._is_on_track = False
            return
        self._phase += 1
        self._ranges.begin(label)
        self._begin_watched(program, program.work[self._phase])

    def _begin_watched(self, program: Program, work: PhaseWork) -> None:
        watch = self.watch
        if watch is not None:
            watch()
        self._begin(program, work)
        if watch is not None:
            watch()

    def _begin(self, program: Program, work: PhaseWork) -> None:
        self._join(work.joins)
        for group, ordinals in work.releases:
            self._store.release(group, ordinals)
        for group, ordinals in work.sends:
            self._store.send(group, ordinals)
        self._away -= work.arrives
        if work.leaving is not None:
            self._away |= self._fire(work.leaving)
        if work.room is not None:
            self._wait(program.work[work.room.phase].leaving, work.room.number)
        if work.coming is not None:
            self._fire(work.coming, _tickets_before(program, work.coming))
        if work.needs:
            self._need(program, work)
        for group, ordinals in work.fetches:
            self._store.fetch(group, ordinals)

    def _fire(self, hints: Hints, after: Sequence[int] = ()) -> frozenset[int]:
        """Ask for hints, and tell whose were taken: not those of tensors without an address."""
        missing = set()
        for number, find in hints.lookups:
            address = find()
            hints.batch.set_address(number, address)
            if not address:
                missing.add(number)
        if not self._machine.engine.fire(hints.batch, self._machine.stream(), after):
            return frozenset()
        asked = [tensor for number, tensor in enumerate(hints.tensors) if number not in missing]
        return frozenset(asked[: len(hints.batch.tickets)])  # a full queue takes the first ones

    def _need(self, program: Program, work: PhaseWork) -> None:
        """Note that a phase needs its prefetches now, and wait for them."""
        tickets = [_ticket(program.work[phase].coming, number) for phase, number in work.needs]
        self._machine.engine.mark_needed(*filter(None, tickets))
        if work.waits:
            # Of each batch up to the last one that is needed: two workers bring pages in, so that
            # an earlier batch may be over after a later one is.
            for phase, number in dict(work.needs).items():
                self._wait(program.work[phase].coming, number)

    def _wait(self, hints: Hints | None, number: int) -> None:
        """Wait until a hint is over, and those that were asked for at once with it, before it."""
        last = _ticket(hints, number)
        if hints is None or last == 0:
            return
        engine, began_s = self._machine.engine, time.perf_counter()
        for ticket in range(hints.batch.tickets[0], last + 1):
            try:
                outcome = engine.wait(ticket, timeout_s=_PATIENCE_S)
            except KeyError:  # so long over that it is forgotten
                continue
            if outcome is Outcome.OPEN:
                self.counts.wait_timeouts += 1
                break
        self.counts.wait_s += time.perf_counter() - began_s

    def step_ends(self, is_broken: bool) -> None:
        """Count the step."""
        self._ranges.end()
        program = self._program
        if program is None:
            return
        was_whole = (
            self._is_on_track
            and not is_broken
            and self._position == len(program.followed)
            and not self.needs_slices()  # parts of the optimizer's step that were not done as such
        )
        self.counts.steps += was_whole
        self.counts.diverged_steps += not was_whole

    # ------------------------------------------------------------------ activations

    def block_begins(self, block: Block, is_recomputed: bool) -> None:
        """See what autograd saves in a call, where the program moves some of it."""
        call = _Call(None)
        outer = self._open[0] if self._open else None
        self._open.append(call)
        program = self._program
        if not is_recomputed:
            name = MODEL if block is self._root else block.name
            call.key = (name, self._calls[name])
            self._calls[name] += 1
        if program is None or not self._is_on_track or call.key is None:
            call.key = None
            return
        # What a block saves must not count with the model's own.
        call.is_copied = call.key in program.copied or (outer is not None and outer.is_copied)
        call.is_paged = call.key in program.paged or (outer is not None and outer.is_paged)
        if call.is_copied:
            self._store.open_group(call.key, program.copied.get(call.key, frozenset()))
        if call.is_paged:
            call.has_hooks = outer is None or not outer.has_hooks
            if call.has_hooks:
                self._saved.push()
            self._paged.append((dict(program.paged.get(call.key, {})), [0]))

    def block_ends(self, _block: Block) -> None:
        """Its results are there: what a block saved may leave."""
        if self._open:
            self._leave(self._open.pop())

    def _leave(self, call: _Call) -> None:
        program = self._program
        if program is None or call.key is None:
            return
        if call.is_copied:
            self._store.close_group()
            if call.key in program.copied and call.key[0] != MODEL:
                self._store.send(call.key)
        if call.is_paged:
            self._paged.pop()
            if call.has_hooks:
                self._saved.pop()

    def _on_save(self, tensor: torch.Tensor) -> None:
        if not self._paged or self._program is None:
            return
        numbers, count = self._paged[-1]
        number = numbers.get(count[0])
        count[0] += 1
        # A batch of other shapes has other sizes: a hint must not reach beyond a smaller block.
        if number is not None and _fills(tensor, self._program.choice.trace.tensor_bytes[number]):
            self._program.present[number] = storage_address(tensor)


def _tickets_before(program: Program, coming: Hints) -> list[int]:
    """The tickets of the evictions that prefetches come after; 0 for none."""
    tickets: dict[Eviction | None, int] = {None: 0}
    for eviction in set(coming.after):
        if eviction is not None:
            tickets[eviction] = _ticket(program.work[eviction.phase].leaving, eviction.number)
    return [tickets[eviction] for eviction in coming.after]


def _ticket(hints: Hints | None, number: int) -> int:
    """A hint's ticket of the last firing; 0 where there was none yet.

    The first step of a program begins in its middle. Without an address a hint is not asked for: a
    later one stands for it.
    """
    tickets = range(0) if hints is None else hints.batch.tickets
    return tickets[min(number, len(tickets) - 1)] if tickets else 0


def _fills(tensor: torch.Tensor, size_bytes: int) -> bool:
    """Whether a tensor's block is as large as the one that a hint was made for."""
    if tensor.layout is not torch.strided:
        return False
    return whole_blocks(tensor.untyped_storage().nbytes()) >= whole_blocks(size_bytes)


def _ignore(_tensor: torch.Tensor) -> None:
    pass
