"""A plan in executable form: the hints, copies and waits at the start of each phase."""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch.optim.optimizer import Optimizer

from umem.capture.live import SavedTensor, TrackedPhase
from umem.core.classes import TensorClass
from umem.core.schedule import HintOp
from umem.executor.admission import Eviction, HintRow, HintRows, plan_admission, used_tensors
from umem.executor.machine import Machine
from umem.executor.tensor_addresses import TensorAddresses, whole_blocks
from umem.planning.plan_search import PlanCandidate
from umem.runtime.hints import HintBatch
from umem.trace import Trace, phase_of_access, require_durations

__all__ = [
    "MODEL",
    "GroupKey",
    "Hints",
    "MappedBlocks",
    "PhaseWork",
    "Program",
    "build_program",
    "plan_releases",
]

MappedBlock = tuple[int, int, TensorClass]
"""Address, bytes, and the class under which hints on it are counted."""


class MappedBlocks:
    """The blocks that a plan maps on the host, for as long as it runs.

    Advice stays with memory. So it is withdrawn when the plan ends, and when the optimizer is
    collected, because its memory will be reused.

    Parameters
    ----------
    machine
        Its engine issues the advice.
    optimizer
        Owner of the state in the blocks. Only a weak reference is kept.
    """

    def __init__(self, machine: Machine, optimizer: Optimizer) -> None:
        self._machine = machine
        self._held: list[MappedBlock] = []
        end = weakref.finalize(optimizer, _bring_back, machine, self._held)
        end.atexit = False  # the memory goes with the process

    def hold(self, blocks: Sequence[MappedBlock]) -> None:
        """Map exactly these blocks. Blocks that are mapped already are left alone."""
        known, wanted = set(self._held), set(blocks)
        _bring_back(self._machine, [block for block in self._held if block not in wanted])
        for block in blocks:
            if block not in known:
                _use_in_place(self._machine, block)
        self._held[:] = blocks


def _use_in_place(machine: Machine, block: MappedBlock) -> None:
    """Evict a block to the host and map it into the device's page tables."""
    address, size_bytes, tensor_class = block
    engine, device = machine.engine, machine.index
    engine.advise(
        address,
        size_bytes,
        placement="host",
        accessed_by_device=True,
        device=device,
        tensor_class=tensor_class,
    )
    engine.submit(HintOp.EVICT, address, size_bytes, device=device, tensor_class=tensor_class)


def _bring_back(machine: Machine, blocks: Sequence[MappedBlock]) -> None:
    engine, device = machine.engine, machine.index
    for address, size_bytes, tensor_class in blocks:
        engine.advise(
            address, size_bytes, placement="device", device=device, tensor_class=tensor_class
        )
        engine.submit(
            HintOp.PREFETCH, address, size_bytes, device=device, tensor_class=tensor_class
        )


GroupKey = tuple[str, int]
"""Name of a block (empty for the model itself), and number of its forward call in the step."""

GroupPart = tuple[GroupKey, frozenset[int]]
"""Tensors of a group, by ordinal."""

_CLASSES = tuple(TensorClass)
MODEL = ""
"""Name of the group of tensors that autograd saves outside of blocks."""

_PAGE_OPS = (HintOp.PREFETCH, HintOp.EVICT)


@dataclass(frozen=True, eq=False)
class Hints:
    """Page hints that are submitted together.

    Parameters
    ----------
    batch
        The engine's batch.
    lookups
        Hints whose addresses change in each step: (number in the batch, function that looks the
        address up).
    tensors
        Tensor of each hint, by number in the trace.
    after
        The eviction that each hint waits for, or None.
    """

    batch: HintBatch
    lookups: tuple[tuple[int, Callable[[], int]], ...]
    tensors: tuple[int, ...] = ()
    after: tuple[Eviction | None, ...] = ()


@dataclass(eq=False)
class PhaseWork:
    """The work at the start of a phase, in this order.

    Parameters
    ----------
    releases
        Activations whose device memory is freed: (group, ordinals).
    sends
        Activations saved outside of blocks that are copied away: (group, ordinals). Those of a
        block leave after its forward pass.
    leaving
        Evictions.
    room
        The eviction that must be finished before the phase allocates, or None.
    coming
        Prefetches.
    needs
        The prefetches that this phase is the first to use: (phase of submission, number).
    waits
        Whether they must finish before the phase runs; otherwise missing pages come by fault.
    fetches
        Activations to bring back: (group, ordinals).
    arrives
        Tensors whose pages are on the device from this phase on.
    """

    releases: list[GroupPart] = field(default_factory=list)
    sends: list[GroupPart] = field(default_factory=list)
    leaving: Hints | None = None
    room: Eviction | None = None
    coming: Hints | None = None
    needs: tuple[tuple[int, int], ...] = ()
    waits: bool = False
    fetches: list[GroupPart] = field(default_factory=list)
    arrives: frozenset[int] = frozenset()

    @property
    def does_anything(self) -> bool:
        """Whether the phase has any work to do."""
        moving = self.releases, self.sends, self.leaving, self.coming, self.fetches
        return any(moving) or self.room is not None or (self.waits and bool(self.needs))


@dataclass(eq=False)
class Program:
    """One plan in executable form.

    Parameters
    ----------
    candidate
        The plan.
    followed
        The phases that the phase tracker reports, each with the phase of the trace it belongs to.
    work
        The work of each phase of the trace.
    copied
        Activations that are copied to the host: ordinals by group.
    paged
        Activations that move as pages: numbers in the trace by ordinal, by group.
    addresses
        Addresses of tensors that live from step to step, by number in the trace; 0 for none.
    present
        Addresses of this step's paged activations, by number in the trace.
    mapped
        Blocks that are mapped on the host.
    """

    candidate: PlanCandidate
    followed: tuple[TrackedPhase, ...]
    work: tuple[PhaseWork, ...]
    copied: Mapping[GroupKey, frozenset[int]]
    paged: Mapping[GroupKey, Mapping[int, int]]
    addresses: Mapping[int, int]
    present: dict[int, int]
    mapped: tuple[MappedBlock, ...]

    def away_after(self, other: Program, away: Iterable[int]) -> frozenset[int]:
        """Tensors that are off the device when this program replaces another one."""
        addresses = {other.addresses.get(tensor, 0) for tensor in away} - {0}
        return frozenset(
            tensor
            for tensor, address in self.addresses.items()
            if address in addresses and not self.candidate.mapped[tensor]
        )

    def away_bytes(self, away: Iterable[int]) -> dict[TensorClass, int]:
        """Bytes by class of the mapped blocks and of these tensors."""
        trace = self.candidate.trace
        total: dict[TensorClass, int] = defaultdict(int)
        for _, size_bytes, tensor_class in self.mapped:
            total[tensor_class] += size_bytes
        for tensor in away:
            size_bytes = whole_blocks(int(trace.tensor_bytes[tensor]))
            total[_CLASSES[trace.tensor_class[tensor]]] += size_bytes
        return total


def build_program(
    candidate: PlanCandidate,
    places: TensorAddresses,
    saved: Sequence[SavedTensor],
    followed: Sequence[TrackedPhase],
    forward_labels: Mapping[str, str],
    machine: Machine,
) -> Program:
    """Turn a schedule into batches of hints and the handling of activations.

    Parameters
    ----------
    candidate
        The plan.
    places
        Addresses of its tensors.
    saved
        What autograd saves, by group.
    followed
        What the phase tracker reports of a step like the recorded one.
    forward_labels
        Label of the forward phase of each block.
    machine
        Its engine takes the batches.
    """
    trace, schedule = candidate.trace, candidate.schedule
    present: dict[int, int] = {}
    groups: dict[int, list[SavedTensor]] = defaultdict(list)
    for entry in saved:
        groups[entry.tensor].append(entry)

    leaving: list[list[HintRow]] = [[] for _ in range(trace.phase_count)]
    coming: list[list[HintRow]] = [[] for _ in range(trace.phase_count)]
    copied: dict[GroupKey, set[int]] = defaultdict(set)
    paged: dict[GroupKey, dict[int, int]] = defaultdict(dict)
    sends: list[dict[GroupKey, set[int]]] = [defaultdict(set) for _ in range(trace.phase_count)]
    fetched: list[list[int]] = [[] for _ in range(trace.phase_count)]
    hints = zip(schedule.hint_phase, schedule.hint_op, schedule.hint_tensor, strict=True)
    for phase, op, tensor in ((int(p), HintOp(o), int(t)) for p, o, t in hints):
        if op == HintOp.COPY_OUT:
            for entry in groups[tensor]:
                copied[entry.block, entry.call].add(entry.ordinal)
                if entry.block == MODEL:
                    sends[phase][entry.block, entry.call].add(entry.ordinal)
        elif op == HintOp.COPY_IN:
            fetched[phase].append(tensor)
        elif op in _PAGE_OPS:  # the allocator owns the memory of dead activations: no discard
            (leaving if op == HintOp.EVICT else coming)[phase].append((op, tensor))
            for entry in groups[tensor]:
                paged[entry.block, entry.call][entry.ordinal] = tensor

    chosen = {key: frozenset(ordinals) for key, ordinals in copied.items()}
    sent = [_parts(found) for found in sends]
    releases = plan_releases(candidate, chosen, sent, saved, followed, forward_labels, machine)
    tensors = {(entry.block, entry.call, entry.ordinal): entry.tensor for entry in saved}
    room = plan_admission(
        candidate,
        machine.policy.device_budget_bytes or machine.hardware.device_bytes,
        leaving,
        coming,
        {
            phase: {tensors[*key, ordinal] for key, ordinals in parts for ordinal in ordinals}
            for phase, parts in releases.items()
        },
        fetched,
    )
    needs = _first_uses(trace, room.coming)
    work = tuple(
        PhaseWork(
            releases=releases.get(phase, []),
            sends=sent[phase],
            leaving=_hints(leaving[phase], trace, places, present, machine),
            room=room.waits[phase],
            coming=_hints(room.coming[phase], trace, places, present, machine, room.after[phase]),
            needs=needs[phase],
            waits=schedule.waits,
            fetches=_parts_of(room.fetches[phase], groups),
            arrives=frozenset(used_tensors(trace, phase)) | {it for _, it in room.coming[phase]},
        )
        for phase in range(trace.phase_count)
    )
    mapped = tuple(
        (
            address,
            whole_blocks(int(trace.tensor_bytes[tensor])),
            _CLASSES[trace.tensor_class[tensor]],
        )
        for tensor, address in places.fixed.items()
        if candidate.mapped[tensor] and address
    )
    return Program(
        candidate, tuple(followed), work, chosen, dict(paged), places.fixed, present, mapped
    )


def _parts(groups: Mapping[GroupKey, set[int]]) -> list[GroupPart]:
    return [(key, frozenset(ordinals)) for key, ordinals in groups.items()]


def _parts_of(
    tensors: Iterable[int], groups: Mapping[int, Sequence[SavedTensor]]
) -> list[GroupPart]:
    """These tensors as parts of their groups."""
    parts: dict[GroupKey, set[int]] = defaultdict(set)
    for tensor in tensors:
        for entry in groups[tensor]:
            parts[entry.block, entry.call].add(entry.ordinal)
    return _parts(parts)


def _hints(
    row: Sequence[HintRow],
    trace: Trace,
    places: TensorAddresses,
    present: Mapping[int, int],
    machine: Machine,
    after: tuple[Eviction | None, ...] = (),
) -> Hints | None:
    if not row:
        return None
    lookups: list[tuple[int, Callable[[], int]]] = []
    for number, (_, tensor) in enumerate(row):
        if tensor in places.gradients:
            lookups.append((number, places.gradients[tensor]))
        elif not places.fixed.get(tensor):  # also tensors freed since they were recorded
            lookups.append((number, _present_address(present, tensor)))
    batch = machine.engine.batch(
        [op for op, _ in row],
        [places.fixed.get(tensor, 0) for _, tensor in row],
        [whole_blocks(int(trace.tensor_bytes[tensor])) for _, tensor in row],
        [_CLASSES[trace.tensor_class[tensor]] for _, tensor in row],
        machine.index,
    )
    return Hints(batch, tuple(lookups), tuple(tensor for _, tensor in row), after)


def _present_address(present: Mapping[int, int], tensor: int) -> Callable[[], int]:
    return lambda: present.get(tensor, 0)


def _first_uses(trace: Trace, coming: HintRows) -> list[tuple[tuple[int, int], ...]]:
    """For each phase, the prefetches that it is the first to use, in the order of submission.

    A later phase that uses the same tensor needs no wait.
    """
    phases: dict[int, list[int]] = defaultdict(list)
    for phase, tensor in zip(phase_of_access(trace), trace.access_tensor, strict=True):
        phases[int(tensor)].append(int(phase))
    found: list[list[tuple[int, int]]] = [[] for _ in range(trace.phase_count)]
    for asked, row in enumerate(coming):
        for number, (_, tensor) in enumerate(row):
            uses = phases[tensor]
            if uses:  # in this step, or else in the next one
                found[uses[bisect_left(uses, asked) % len(uses)]].append((asked, number))

    def asking(phase: int) -> Callable[[tuple[int, int]], tuple[int, int]]:
        """Order by submission: prefetches of later phases were submitted in the step before."""
        return lambda it: ((it[0] - phase - 1) % trace.phase_count, it[1])

    return [tuple(sorted(row, key=asking(phase))) for phase, row in enumerate(found)]


def plan_releases(
    candidate: PlanCandidate,
    copied: Mapping[GroupKey, frozenset[int]],
    sends: Sequence[Sequence[GroupPart]],
    saved: Sequence[SavedTensor],
    followed: Sequence[TrackedPhase],
    forward_labels: Mapping[str, str],
    machine: Machine,
) -> dict[int, list[GroupPart]]:
    """The activations whose copies are complete when a phase computes, by the plan's own times.

    The copies run one after the other in the order of saving. A phase that waits for room waits
    for them too, so its compute time counts and not its start.
    """
    trace, timeline = candidate.trace, candidate.predicted.timeline
    assert timeline is not None
    tensors = {((entry.block, entry.call), entry.ordinal): entry.tensor for entry in saved}
    calls: dict[str, list[int]] = defaultdict(list)
    for one in followed:
        calls[one.label].append(one.phase + 1)  # a block includes what lies before the next one
    parts = [
        (calls[forward_labels[key[0]]][key[1]], (key, ordinals))
        for key, ordinals in copied.items()
        if key[0] != MODEL
    ]
    parts += [(phase, part) for phase, sent in enumerate(sends) for part in sent]
    releases: dict[int, dict[GroupKey, set[int]]] = defaultdict(lambda: defaultdict(set))
    computes_s = np.maximum(timeline.phase_start_s, timeline.phase_end_s - require_durations(trace))
    gone_s, last = 0.0, trace.phase_count - 1
    for phase, (key, ordinals) in sorted(parts, key=lambda part: part[0]):
        gone_s = max(gone_s, float(timeline.phase_start_s[min(phase, last)]))
        # A copy that starts with a phase is released with a later one.
        later = phase + 1 if key[0] == MODEL else phase
        counted = set()
        for ordinal in sorted(ordinals):
            tensor = tensors[key, ordinal]
            if tensor not in counted:
                counted.add(tensor)
                gone_s += (
                    int(trace.tensor_bytes[tensor]) / machine.hardware.copy_to_host_bytes_per_s
                )
            gone = int(np.searchsorted(computes_s, gone_s))
            releases[min(max(gone, later), last)][key].add(ordinal)
    return {phase: _parts(groups) for phase, groups in releases.items()}
