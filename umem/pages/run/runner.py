"""Runs a program: issues hints and copies where the phases of a live training step begin."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from umem.capture.live import Block, StepListener
from umem.core.classes import TensorClass
from umem.core.schedule import HintOp
from umem.offloading import ActivationStore
from umem.pages.run.admission import Eviction
from umem.pages.run.machine import Machine
from umem.pages.run.mapped_blocks import MappedBlock
from umem.pages.run.program import Hints, PhaseWork, Program
from umem.pages.run.step_plan import MODEL, GroupKey, PhasePlan
from umem.runtime.hints import HintOutcome
from umem.telemetry import phase_begins

__all__ = ["Runner"]

MAX_WAIT_S = 2.0
"""Longest wait of a phase for its pages, seconds. After it they come by fault, late but correct."""

_LEAST_WAIT_S = 1e-3
_BACK_OFF = 4
"""After a wait that has timed out, later ones last this many times shorter; after a step without
such a wait, longer again. A link that stays too slow does not cost two seconds in every step."""


@dataclass(slots=True)
class RunnerCounts:
    """Counts over all steps of a runner."""

    steps: int = 0
    """Steps that ran their whole program."""
    diverged_steps: int = 0
    """Steps that did not, because of an exception or of phases unlike the recorded ones."""
    diverged_in_a_row: int = 0
    """Of these, the steps since the last whole one under any program."""
    wait_s: float = 0.0
    """Time that the training thread waited for pages."""
    wait_timeouts: int = 0
    """Waits that took longer than the runner's patience."""


@dataclass(slots=True)
class _Call:
    """A call of the model or a block that has not returned yet."""

    key: GroupKey | None
    """None if the program moves nothing of this call."""
    group_depth: int
    """Groups of the store that were open before the call."""
    is_copied: bool = False
    """The activation store sees what the call saves."""
    is_sent: bool = False
    """What it has copied leaves when the call ends."""


class Runner(StepListener):
    """Carries out a program.

    A runner changes no value. A step that diverges from its program runs on without it: pages that
    are missing on the device come by page fault.
    """

    def __init__(self, machine: Machine, store: ActivationStore, root: Block) -> None:
        self._root = root
        self.counts = RunnerCounts()
        self._machine = machine
        self._store = store
        self._program: Program | None = None
        self._is_on_track = False
        self._position = 0
        self._phase = -1
        self._calls: Counter[str] = Counter()
        self._open: list[_Call] = []
        self._patience_s = MAX_WAIT_S
        self._has_timed_out = False
        self._away: frozenset[int] = frozenset()

    @property
    def program(self) -> Program | None:
        """The program that runs; None for none."""
        return self._program

    def load(self, program: Program | None) -> None:
        """Run another program from the next step on."""
        self._leave_all()
        before, self._program = self._program, program
        self._is_on_track = False
        if program is None:
            self._away = frozenset()
        elif before is None:
            self._away = self._evict(program)
        else:
            self._away = program.away_after(before, self._away)

    def _evict(self, program: Program) -> frozenset[int]:
        """Evict what a program has off the device when a step begins, so that its first step fits.

        Returns the tensors whose hints were accepted.
        """
        engine, device = self._machine.engine, self._machine.index
        fixed = program.addresses.fixed
        away = [it for it in program.plan.away_at_start if fixed.get(it)]
        return frozenset(
            tensor
            for tensor, (address, size_bytes, of_class) in zip(
                away, program.blocks(away), strict=True
            )
            if engine.submit(
                HintOp.EVICT, address, size_bytes, device=device, tensor_class=of_class
            )
        )

    def away_blocks(self) -> tuple[MappedBlock, ...]:
        """What the program keeps on the host now: mapped blocks, and others that have left."""
        program = self._program
        return () if program is None else (*program.mapped, *program.blocks(self._away))

    def away_bytes(self) -> dict[TensorClass, int]:
        """Bytes by class that the program keeps off the device now."""
        return {} if self._program is None else self._program.away_bytes(self._away)

    # ------------------------------------------------------------------ steps and phases

    def step_begins(self) -> None:
        """Start the program from its first phase."""
        self._is_on_track = self._program is not None
        if self._is_on_track and self._machine.is_capturing():
            self._is_on_track = False  # what a graph replays must not wait for hints
        self._position, self._phase = 0, -1
        self._calls.clear()

    def phase_begins(self, label: str) -> None:
        """Do the program's work for this phase, if the step still matches the recorded one."""
        phase_begins()
        program = self._program
        if program is None or not self._is_on_track:
            return
        followed = program.plan.followed
        if (
            self._position >= len(followed)
            or followed[self._position].label != label
            or self._machine.is_capturing()
        ):
            self._is_on_track = False
            return
        phase = followed[self._position].phase
        self._position += 1
        if phase > self._phase:
            # The first of several joined phases starts them all.
            self._phase = phase
            self._begin(program, program.work[phase])

    def _begin(self, program: Program, work: PhaseWork) -> None:
        plan = work.plan
        for group, ordinals in plan.releases:
            self._store.release(group, ordinals)
        for group, ordinals in plan.sends:
            self._store.send(group, ordinals)
        self._away -= plan.arrives
        if work.leaving is not None:
            self._away |= self._submit(work.leaving)
        if plan.room is not None:
            self._wait(program.work[plan.room.phase].leaving, plan.room.number)
        if work.coming is not None:
            self._submit(work.coming, _tickets_before(program, plan.after))
        if plan.needs:
            self._need(program, plan)
        for group, ordinals in plan.fetches:
            self._store.fetch(group, ordinals)

    def _submit(self, hints: Hints, after: Sequence[int] = ()) -> frozenset[int]:
        """Submit the hints of tensors that have an address; return the tensors accepted."""
        missing = set()
        for number, find in hints.lookups:
            address = find()
            hints.batch.set_address(number, address)
            if not address:
                missing.add(number)
        if not self._machine.engine.submit_batch(hints.batch, self._machine.stream(), after):
            return frozenset()
        asked = [tensor for number, tensor in enumerate(hints.tensors) if number not in missing]
        return frozenset(asked[: len(hints.batch.tickets)])  # a full queue takes only the first

    def _need(self, program: Program, plan: PhasePlan) -> None:
        """Mark the prefetches of a phase as needed now, and wait for them."""
        tickets = [_ticket(program.work[phase].coming, number) for phase, number in plan.needs]
        self._machine.engine.mark_needed(*filter(None, tickets))
        if plan.waits:
            # In each batch up to the last needed one: with two workers that prefetch, an earlier
            # batch may finish after a later one.
            for phase, number in dict(plan.needs).items():
                self._wait(program.work[phase].coming, number)

    def _wait(self, hints: Hints | None, number: int) -> None:
        """Wait until a hint and all earlier ones of its batch have finished."""
        last = _ticket(hints, number)
        if hints is None or last == 0:
            return
        engine, began_s = self._machine.engine, time.perf_counter()
        for ticket in range(hints.batch.tickets[0], last + 1):
            try:
                outcome = engine.wait(ticket, timeout_s=self._patience_s)
            except KeyError:  # finished so long ago that the engine has forgotten it
                continue
            if outcome is HintOutcome.OPEN:
                self.counts.wait_timeouts += 1
                self._has_timed_out = True
                self._patience_s = max(self._patience_s / _BACK_OFF, _LEAST_WAIT_S)
                break
        self.counts.wait_s += time.perf_counter() - began_s

    def step_ends(self, is_broken: bool) -> None:
        """Count the step."""
        program = self._program
        if program is None:
            return
        if not self._has_timed_out:
            self._patience_s = min(self._patience_s * _BACK_OFF, MAX_WAIT_S)
        self._has_timed_out = False
        is_whole = self._position == len(program.plan.followed)
        was_whole = self._is_on_track and not is_broken and is_whole
        self.counts.steps += was_whole
        self.counts.diverged_steps += not was_whole
        self.counts.diverged_in_a_row = 0 if was_whole else self.counts.diverged_in_a_row + 1

    # ------------------------------------------------------------------ activations

    def block_begins(self, block: Block, is_recomputed: bool) -> None:
        """Watch what autograd saves in a call, if the program moves some of it."""
        if block is self._root and not is_recomputed:
            self._leave_all()
        call = _Call(None, self._store.open_groups)
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
        plan = program.plan
        # What a block saves must not be counted as saved by the model itself.
        call.is_copied = call.key in plan.copied or (outer is not None and outer.is_copied)
        if call.is_copied:
            call.is_sent = call.key in plan.copied and call.key[0] != MODEL
            self._store.open_group(call.key, plan.copied.get(call.key, frozenset()))

    def block_ends(self, _block: Block) -> None:
        """After a block's forward pass, let its saved tensors leave."""
        if not self._open:
            return
        call = self._open[-1]
        self._leave(call)
        self._open.pop()
        if call.is_sent:
            self._store.send(call.key)

    def _leave_all(self) -> None:
        """Leave the calls that an interrupt or an error has kept from ending."""
        while self._open:
            self._leave(self._open[-1])
            self._open.pop()

    def _leave(self, call: _Call) -> None:
        """End what a call has begun. What an interrupt has cut short, another call completes."""
        if call.is_copied:
            self._store.close_groups(call.group_depth)


def _tickets_before(program: Program, after: Sequence[Eviction | None]) -> list[int]:
    """Tickets of the evictions that the prefetches wait for; 0 for none."""
    tickets: dict[Eviction | None, int] = {None: 0}
    for eviction in set(after):
        if eviction is not None:
            tickets[eviction] = _ticket(program.work[eviction.phase].leaving, eviction.number)
    return [tickets[eviction] for eviction in after]


def _ticket(hints: Hints | None, number: int) -> int:
    """The ticket of a hint when its batch was last submitted; 0 if it never was.

    The first step under a program begins in its middle. A hint without an address is not
    submitted: the ticket of a later hint stands for it.
    """
    tickets = range(0) if hints is None else hints.batch.tickets
    return tickets[min(number, len(tickets) - 1)] if tickets else 0
