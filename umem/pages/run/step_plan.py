"""What each phase of a planned step does, before tensors have addresses."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from umem.capture.live import SavedTensor, TrackedPhase
from umem.core.schedule import HintOp
from umem.hardware import Hardware
from umem.pages.plan.plan_search import PlanCandidate
from umem.pages.run.admission import Eviction, HintRow, HintRows, plan_admission, used_tensors
from umem.trace import Trace, phase_of_access, require_durations

__all__ = ["MODEL", "GroupKey", "PhasePlan", "StepPlan", "plan_releases", "plan_step"]

GroupKey = tuple[str, int]
"""Name of a block (empty for the model itself), and number of its forward call in the step."""

GroupPart = tuple[GroupKey, frozenset[int]]
"""Tensors of a group, by ordinal."""

MODEL = ""
"""Name of the group of tensors that autograd saves outside of blocks."""

_PAGE_OPS = (HintOp.PREFETCH, HintOp.EVICT)


@dataclass(eq=False)
class PhasePlan:
    """The work at the start of a phase, in this order."""

    releases: list[GroupPart] = field(default_factory=list)
    """Activations whose device memory is freed."""
    sends: list[GroupPart] = field(default_factory=list)
    """Activations saved outside of blocks that are copied away. Those of a block leave after its
    forward pass."""
    leaving: tuple[HintRow, ...] = ()
    room: Eviction | None = None
    """The eviction that must be finished before the phase allocates."""
    coming: tuple[HintRow, ...] = ()
    after: tuple[Eviction | None, ...] = ()
    """For each prefetch, the eviction that it waits for."""
    needs: tuple[tuple[int, int], ...] = ()
    """The prefetches that this phase is the first to use: (phase of submission, number)."""
    waits: bool = False
    """Whether they must finish before the phase runs; otherwise missing pages come by fault."""
    fetches: list[GroupPart] = field(default_factory=list)
    """Activations to bring back."""
    arrives: frozenset[int] = frozenset()
    """Tensors whose pages are on the device from this phase on."""


@dataclass(frozen=True, eq=False)
class StepPlan:
    """A plan by phases; it holds for any addresses."""

    candidate: PlanCandidate
    followed: tuple[TrackedPhase, ...]
    """What the phase tracker reports of a step like the recorded one."""
    phases: tuple[PhasePlan, ...]
    copied: Mapping[GroupKey, frozenset[int]]
    """Activations that are copied to the host: ordinals by group."""
    away_at_start: frozenset[int]
    """As in :class:`AdmissionPlan`."""


def plan_step(
    candidate: PlanCandidate,
    saved: Sequence[SavedTensor],
    followed: Sequence[TrackedPhase],
    forward_labels: Mapping[str, str],
    hardware: Hardware,
    budget_bytes: int,
) -> StepPlan:
    """Turn a schedule into the work of each phase, so that no more than the budget is resident.

    `saved` is what autograd saves, `followed` what the phase tracker reports, `forward_labels` the
    label of the forward phase of each block; the hardware's bandwidth says when copies are over.
    """
    trace, schedule = candidate.trace, candidate.schedule
    groups: dict[int, list[SavedTensor]] = defaultdict(list)
    for entry in saved:
        groups[entry.tensor].append(entry)

    leaving: list[list[HintRow]] = [[] for _ in range(trace.phase_count)]
    coming: list[list[HintRow]] = [[] for _ in range(trace.phase_count)]
    copied: dict[GroupKey, set[int]] = defaultdict(set)
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

    chosen = {key: frozenset(ordinals) for key, ordinals in copied.items()}
    sent = [_parts(found) for found in sends]
    releases = plan_releases(candidate, chosen, sent, saved, followed, forward_labels, hardware)
    tensors = {(entry.block, entry.call, entry.ordinal): entry.tensor for entry in saved}
    admission = plan_admission(
        candidate,
        budget_bytes,
        leaving,
        coming,
        {
            phase: {tensors[*key, ordinal] for key, ordinals in parts for ordinal in ordinals}
            for phase, parts in releases.items()
        },
        fetched,
    )
    needs = _first_uses(trace, admission.coming)
    phases = tuple(
        PhasePlan(
            releases=releases.get(phase, []),
            sends=sent[phase],
            leaving=tuple(leaving[phase]),
            room=admission.waits[phase],
            coming=admission.coming[phase],
            after=admission.after[phase],
            needs=needs[phase],
            waits=schedule.waits,
            fetches=_parts_of(admission.fetches[phase], groups),
            arrives=frozenset(used_tensors(trace, phase))
            | {tensor for _, tensor in admission.coming[phase]},
        )
        for phase in range(trace.phase_count)
    )
    return StepPlan(candidate, tuple(followed), phases, chosen, admission.away_at_start)


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
    hardware: Hardware,
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
                gone_s += int(trace.tensor_bytes[tensor]) / hardware.copy_to_host_bytes_per_s
            gone = int(np.searchsorted(computes_s, gone_s))
            releases[min(max(gone, later), last)][key].add(ordinal)
    return {phase: _parts(groups) for phase, groups in releases.items()}
